"""``runnerd runners`` and ``runnerd info``: what is installed here, and what a running server does."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from runnerd_client import UnavailableError, to_dict
from runnerd_service.cli import exit_codes
from runnerd_service.cli.connection import add_connection, connected
from runnerd_service.rpc.runners import RunnerDescription, describe_runners


def add_parsers(commands: Any) -> None:
    """Add the subcommands to argparse's ``commands``."""
    runners = commands.add_parser(
        "runners",
        help="list the installed runners",
        description="List the installed runners: what each serves, its options, and why one cannot be used here.",
        epilog=f"examples:\n  runnerd runners\n  runnerd runners --json | jq '.[].name'\n\n{exit_codes.HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    runners.add_argument("--json", action="store_true", help="print JSON")
    runners.set_defaults(run=run_runners)
    info = commands.add_parser(
        "info",
        help="describe a running server",
        description="Describe a running server: its model, its configuration, its load.",
        epilog=f"examples:\n  runnerd info\n  runnerd info --json | jq .load.num_running\n\n{exit_codes.HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_connection(info)
    info.add_argument("--json", action="store_true", help="print JSON")
    info.set_defaults(run=run_info)


def run_runners(arguments: argparse.Namespace) -> int:
    """Print the installed runners; give the exit code."""
    described = describe_runners()
    if arguments.json:
        print(json.dumps([asdict(runner) for runner in described], indent=2))
    else:
        print("\n\n".join(map(_runner_text, described)) or "no runner is installed")
    return exit_codes.OK


def run_info(arguments: argparse.Namespace) -> int:
    """Print what the server says of itself; give the exit code."""
    with connected(arguments) as client:
        parts: dict[str, dict[str, object] | None] = {"server": to_dict(client.server_info())}
        parts["load"] = to_dict(client.load())
        try:
            parts["model"] = to_dict(client.model_info())
        except UnavailableError:  # it loads, or failed: the server's state says so
            parts["model"] = None
    if arguments.json:
        print(json.dumps(parts, indent=2, ensure_ascii=False))
    else:
        for title, values in parts.items():
            print(title)
            for name, value in ({"": "not loaded"} if values is None else values).items():
                print(f"  {name:24}{_value_text(value)}".rstrip())
    return exit_codes.OK


def _runner_text(runner: RunnerDescription) -> str:
    lines = [f"{runner.name}: {runner.description or 'not usable'} ({runner.distribution} {runner.version})"]
    if runner.unavailable_reason:
        lines.append(f"  cannot be used here: {runner.unavailable_reason}")
    for support, label in (("device", "serves"), ("host_sync", "serves with a host wait"), ("no", "does not serve")):
        names = [name for name, value in runner.capabilities.items() if value == support]
        if names:
            lines.append(f"  {label}: {', '.join(names)}")
    if runner.max_in_flight:
        lines.append(f"  most steps in flight: {runner.max_in_flight}")
    lines += [f"  --runner-option {one.name}={one.default or one.type.upper()}  {one.help}" for one in runner.options]
    return "\n".join(lines)


def _value_text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {one}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
