"""``runnerd reset-prefix-cache``: lets a running server forget what it has cached of prompts."""

from __future__ import annotations

import argparse
from typing import Any

from runnerd_service.cli import exit_codes
from runnerd_service.cli.connection import add_connection, connected


def add_parser(commands: Any) -> None:
    """Add the subcommand to argparse's ``commands``."""
    parser = commands.add_parser(
        "reset-prefix-cache",
        help="let a running server forget its cached prompt beginnings",
        description="Let a running server forget its cached prompt beginnings, of all salts. Requests that run keep "
        "their KV blocks and go on; nothing that was computed before is found again.",
        epilog=f"example:\n  runnerd reset-prefix-cache\n\n{exit_codes.HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_connection(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Reset; give the exit code.

    Raises:
        CallFailed: The server did not do it.
    """
    with connected(arguments) as client:
        print(f"{client.reset_prefix_cache()} KV blocks held a cached prefix")
    return exit_codes.OK
