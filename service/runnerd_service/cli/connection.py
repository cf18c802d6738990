"""What the subcommands share that talk to a running server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

from runnerd_client import (
    DEFAULT_ADDRESS,
    AlreadyExistsError,
    Client,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RunnerdError,
    UnavailableError,
)
from runnerd_service.cli import exit_codes

ADDRESS_VARIABLE = "RUNNERD_ADDRESS"

_REFUSALS = (InvalidRequestError, NotFoundError, AlreadyExistsError, OverloadedError)


class CallFailed(Exception):
    """A call to the server failed; ``exit_code`` says how."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where the server is."""
    default = os.environ.get(ADDRESS_VARIABLE, DEFAULT_ADDRESS)
    parser.add_argument(
        "--address",
        default=default,
        metavar="ADDRESS",
        help=f"host:port or unix:/path of the server (default: ${ADDRESS_VARIABLE}, else {DEFAULT_ADDRESS})",
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="most time a call may take (default: none)")


@contextmanager
def connected(arguments: argparse.Namespace) -> Iterator[Client]:
    """Give a client of the server.

    Raises:
        CallFailed: A call in the block failed.
    """
    with Client(arguments.address, timeout=arguments.timeout) as client:
        try:
            yield client
        except RunnerdError as error:
            raise CallFailed(_describe(error, arguments.address), _exit_code(error)) from error


def _exit_code(error: RunnerdError) -> int:
    if isinstance(error, UnavailableError):
        return exit_codes.UNAVAILABLE
    return exit_codes.REFUSED if isinstance(error, _REFUSALS) else exit_codes.FAILURE


def _describe(error: RunnerdError, address: str) -> str:
    retry = "" if error.retry_after is None else f" (try again in {error.retry_after:g} s)"
    if isinstance(error, UnavailableError) and not error.reason:  # gRPC's own: nothing answers there
        return f"no server answers at {address}: {error}; start one with `runnerd serve`, or give another --address"
    return f"{error}{retry}"
