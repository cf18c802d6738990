"""``runnerd trace``: records the steps of a running server to a file for a trace viewer."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from runnerd_service.cli import exit_codes
from runnerd_service.cli.connection import add_connection, connected
from runnerd_service.errors import ConfigurationError

_EPILOG = f"""\
examples:
  runnerd trace --seconds 5 -o trace.json       then open trace.json in https://ui.perfetto.dev
  runnerd trace -o - | jq '.traceEvents | length'

{exit_codes.HELP}
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to argparse's ``commands``."""
    parser = commands.add_parser(
        "trace",
        help="record the steps of a running server",
        description="Record what host and device of a running server do, step by step, in the trace event format that "
        "Perfetto and Chrome show. Streams go on meanwhile.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_connection(parser)
    parser.add_argument("--seconds", type=float, default=2.0, metavar="N", help="how long, up to 60 (default: 2)")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="file to write; - is stdout")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Record; give the exit code.

    Raises:
        ConfigurationError: The file cannot be written.
        CallFailed: The server did not record.
    """
    if arguments.output != "-":
        _check_writable(Path(arguments.output))
    with connected(arguments) as client:
        try:
            trace = client.capture_trace(arguments.seconds)
        except (ValueError, OverflowError) as error:  # no duration
            raise ConfigurationError(f"--seconds: expected a number of seconds, got {arguments.seconds}") from error
    if arguments.output == "-":
        sys.stdout.buffer.write(trace.trace_json)
        sys.stdout.flush()
    else:
        _write(Path(arguments.output), trace.trace_json)
    print(_summary(trace.trace_json, trace.num_steps, trace.num_dropped_steps), file=sys.stderr)
    return exit_codes.OK


def _check_writable(path: Path) -> None:
    # Before the recording, which may take a minute.
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a folder" if path.is_dir() else f"{path.parent} is not a folder"
        raise ConfigurationError(f"cannot write {path}: {reason}; give another --output")


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}; give another --output") from error


def _summary(content: bytes, num_steps: int, num_dropped_steps: int) -> str:
    """Say what is in the trace, in a line."""
    if not num_steps:
        return "no step ran meanwhile: the trace has no steps"
    events = json.loads(content)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    totals = dict.fromkeys(names.values(), 0.0)
    for event in events:
        if event["ph"] == "X":
            totals[names[event["tid"]]] += event["dur"] / 1e3
    busy, bubbles = totals["device steps"], totals["bubbles"]
    dropped = f" (the last ones; {num_dropped_steps} earlier ones had no room)" if num_dropped_steps else ""
    return f"{num_steps} steps{dropped}: device busy {busy:.1f} ms, bubbles {bubbles:.1f} ms"
