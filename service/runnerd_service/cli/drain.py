"""``runnerd drain``: lets a running server refuse new requests, and waits until it has no live one."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from runnerd.v1.server_pb2 import SERVER_STATE_DRAINING
from runnerd_client import AsyncClient, DeadlineError
from runnerd_service.cli import exit_codes
from runnerd_service.cli.connection import CallFailed, add_connection, calls_described, connected_async
from runnerd_service.cli.values import argument, seconds

_POLL_SECONDS = 0.02

_EPILOG = f"""\
There is no way back: a drained server answers questions, and serves nothing until it is started anew. Interrupted or
cut by --timeout, the command leaves a server that still drains, and ends its live requests when their time is over.

examples:
  runnerd drain                        live requests have the server's --drain-seconds to finish
  runnerd drain --drain-seconds 600    they have ten minutes
  runnerd drain --address inference:50051 --tls-ca ca.pem --token-file admin.token

{exit_codes.HELP}

`drain` ends with 0 when all live requests ended by themselves, and with 1 when some had to be ended."""


def add_parser(commands: Any) -> None:
    """Add the subcommand to argparse's ``commands``."""
    parser = commands.add_parser(
        "drain",
        help="let a running server refuse new requests and finish the live ones",
        description="Let a running server refuse new requests, and wait until its live ones have ended. Where callers "
        "are asked who they are, this is for administrators.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--drain-seconds",
        type=argument(seconds),
        metavar="SECONDS",
        help="live requests that take longer are ended (default: the server's --drain-seconds)",
    )
    add_connection(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Drain; give the exit code.

    Raises:
        CallFailed: The server did not do it, or does it still.
    """
    with calls_described(arguments):
        completed = asyncio.run(_drain(arguments))
    print("drained: all live requests ended by themselves" if completed else "drained: what took longer was ended")
    return exit_codes.OK if completed else exit_codes.FAILURE


async def _drain(arguments: argparse.Namespace) -> bool:
    """Drain, and say so once the server does it: it may refuse."""
    async with connected_async(arguments) as client:
        draining = asyncio.create_task(client.drain(arguments.drain_seconds))
        try:
            await _tell(client, draining)
            return await draining
        except DeadlineError as error:
            raise CallFailed(
                f"the server did not say in {arguments.timeout:g} s that it is drained; it drains on, and ends live "
                "requests when their time is over (give a --timeout that is longer than --drain-seconds)",
                exit_codes.FAILURE,
            ) from error
        finally:
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)


async def _tell(client: AsyncClient, draining: asyncio.Task[bool]) -> None:
    """Print what is live, as soon as the server drains; nothing where it refuses to."""
    while not draining.done() and (await client.server_info()).state != SERVER_STATE_DRAINING:
        await asyncio.wait((draining,), timeout=_POLL_SECONDS)
    if not draining.done() or draining.exception() is None:
        load = await client.load()
        print(f"draining: {load.num_running} outputs run, {load.num_waiting} wait", flush=True)
