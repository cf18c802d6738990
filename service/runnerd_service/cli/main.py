"""The command ``runnerd``: parses arguments, runs a subcommand, turns errors into exit codes."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from runnerd_service.cli import (
    bench,
    check_runner,
    drain,
    exit_codes,
    generate,
    inspect,
    reset_prefix_cache,
    serve,
    trace,
)
from runnerd_service.cli.connection import CallFailed
from runnerd_service.errors import ConfigurationError, EngineStartFailed, RunnerdError
from runnerd_service.telemetry.logs import logs_json
from runnerd_spi import (
    InvalidOption,
    ModelLoadError,
    RunnerConflict,
    RunnerNotFound,
    RunnerUnavailable,
    SpiVersionMismatch,
)

logger = logging.getLogger(__name__)

_EPILOG = f"""\
examples:
  runnerd serve                            serve the embedded demo model on 127.0.0.1:50051
  runnerd serve --runner sim --port 0      simulated device, no model; a free port
  runnerd generate "Why is the sky blue?"  stream an answer from the running server
  runnerd runners                          what is installed, and what it can do
  runnerd info                             model, set-up and load of the running server
  runnerd bench --request-rate 4           latencies and throughput of the running server under load
  runnerd drain                            let the running server finish its requests, and take no more
  runnerd trace -o trace.json              record the steps of the running server
  runnerd check-runner sim                 does a runner keep the contract of the SPI?

{exit_codes.HELP}
"""


_CONFIGURATION_KINDS = frozenset(
    kind.__name__
    for kind in (
        InvalidOption,
        ModelLoadError,
        RunnerConflict,
        RunnerNotFound,
        RunnerUnavailable,
        SpiVersionMismatch,
    )
)


def build_parser() -> argparse.ArgumentParser:
    """Give the parser of all subcommands; each sets ``run``."""
    parser = argparse.ArgumentParser(
        prog="runnerd",
        description="A gRPC daemon for LLM inference.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"runnerd {version('runnerd')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (serve, generate):
        command.add_parser(commands)
    inspect.add_parsers(commands)
    trace.add_parser(commands)
    bench.add_parser(commands)
    drain.add_parser(commands)
    reset_prefix_cache.add_parser(commands)
    check_runner.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and give its exit code.

    Args:
        argv: Arguments after the program's name; None takes the process's.
    """
    try:
        arguments = build_parser().parse_args(argv)
        return int(arguments.run(arguments))
    except ConfigurationError as error:
        return _fail(error, exit_codes.CONFIGURATION)
    except EngineStartFailed as error:
        return _fail(error, exit_codes.CONFIGURATION if error.kind in _CONFIGURATION_KINDS else exit_codes.FAILURE)
    except RunnerdError as error:
        return _fail(error, exit_codes.FAILURE)
    except CallFailed as error:
        return _fail(error, error.exit_code)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        # whoever read our output has left; keep the interpreter from failing on the flush at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.FAILURE


def _fail(error: Exception, code: int) -> int:
    if logs_json():
        logger.critical("%s", error)
    else:
        print(f"runnerd: {error}", file=sys.stderr)
    return code
