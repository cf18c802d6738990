"""What the subcommands share that talk to a running server."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from runnerd_client import (
    DEFAULT_ADDRESS,
    AlreadyExistsError,
    AsyncClient,
    Client,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RunnerdError,
    Tls,
    UnauthenticatedError,
    UnavailableError,
)
from runnerd_service.cli import exit_codes
from runnerd_service.cli.values import argument, positive_seconds
from runnerd_service.errors import ConfigurationError

ADDRESS_VARIABLE = "RUNNERD_ADDRESS"
TOKEN_VARIABLE = "RUNNERD_TOKEN"

_REFUSALS = (
    InvalidRequestError,
    NotFoundError,
    AlreadyExistsError,
    OverloadedError,
    UnauthenticatedError,
    PermissionDeniedError,
)

# gRPC has one status for all of these, and tells them apart in its text alone.
_TLS_FAILURE = re.compile(r"SSL|TLS|[Hh]andshake|certificate|[Vv]erification", re.ASCII)
_CLOSED = re.compile(r"Socket closed|Connection reset|connection attempt timed out before receiving SETTINGS")

_Client = TypeVar("_Client", Client, AsyncClient)


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
    group = parser.add_argument_group("security")
    group.add_argument("--tls", action="store_true", help="speak TLS; the server's authority is a public one")
    group.add_argument("--tls-ca", metavar="PATH", help="speak TLS; PEM file of the server's authority")
    group.add_argument("--tls-cert", metavar="PATH", help="PEM file of the certificate to show the server")
    group.add_argument("--tls-key", metavar="PATH", help="PEM file of that certificate's key")
    group.add_argument("--tls-server-name", metavar="NAME", help="name in the server's certificate, if another")
    group.add_argument(
        "--token-file",
        metavar="PATH",
        help=f"file with the bearer token alone (default: the text in ${TOKEN_VARIABLE})",
    )
    group.add_argument(
        "--plaintext-token", action="store_true", help="send the token without TLS, also to another machine"
    )
    parser.add_argument(
        "--timeout",
        type=argument(positive_seconds),
        metavar="SECONDS",
        help="most time a call may take (default: none)",
    )


@contextmanager
def connected(arguments: argparse.Namespace) -> Iterator[Client]:
    """Give a client of the server.

    Raises:
        CallFailed: A call in the block failed.
        ConfigurationError: The connection cannot be made as it was asked for.
    """
    with _client(Client, arguments) as client, calls_described(arguments):
        yield client


@asynccontextmanager
async def connected_async(arguments: argparse.Namespace) -> AsyncIterator[AsyncClient]:
    """Give an asynchronous client of the server; what its calls raise is the caller's, see :func:`calls_described`.

    Raises:
        ConfigurationError: The connection cannot be made as it was asked for.
    """
    async with _client(AsyncClient, arguments) as client:
        yield client


@contextmanager
def calls_described(arguments: argparse.Namespace) -> Iterator[None]:
    """Tell in the command's words of a call that failed.

    Raises:
        CallFailed: A call in the block failed.
    """
    try:
        yield
    except RunnerdError as error:
        raise CallFailed(_describe(error, arguments), _exit_code(error)) from error


def _client(kind: type[_Client], arguments: argparse.Namespace) -> _Client:
    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise ConfigurationError("--tls-cert and --tls-key go together; give both or neither")
    options = (arguments.tls_ca, arguments.tls_cert, arguments.tls_key, arguments.tls_server_name)
    try:
        tls = Tls(*options) if arguments.tls or any(options) else None
        return kind(
            arguments.address,
            timeout=arguments.timeout,
            tls=tls,
            token=_token(arguments.token_file),
            plaintext_token=arguments.plaintext_token,
        )
    except OSError as error:
        raise ConfigurationError(f"cannot read {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(_connection_problem(str(error), arguments)) from error


def _connection_problem(text: str, arguments: argparse.Namespace) -> str:
    """Say in the command's words what the client says in those of its arguments."""
    if "plaintext_token" in text:
        return (
            f"the token would go to {arguments.address} in the clear; give --tls or --tls-ca, or --plaintext-token "
            "where something else protects the connection"
        )
    if "a unix socket speaks no TLS" in text:
        return f"{arguments.address} is a unix socket, which speaks no TLS; leave out --tls and --tls-..."
    source = f"${TOKEN_VARIABLE}" if arguments.token_file is None else f"--token-file {arguments.token_file}"
    return f"{source}: {text}" if text.startswith("token ") else text


def _token(path: str | None) -> str | None:
    if path is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    text = Path(path).read_text(encoding="utf-8").strip()
    if not text:
        raise ConfigurationError(f"the token file {path} is empty; write the token's text into it")
    return text


def _exit_code(error: RunnerdError) -> int:
    if isinstance(error, UnavailableError):
        return exit_codes.UNAVAILABLE
    return exit_codes.REFUSED if isinstance(error, _REFUSALS) else exit_codes.FAILURE


def _describe(error: RunnerdError, arguments: argparse.Namespace) -> str:
    address, retry = arguments.address, "" if error.retry_after is None else f" (try again in {error.retry_after:g} s)"
    if isinstance(error, DeadlineError) and not error.reason and arguments.timeout is not None:
        return f"the call took longer than --timeout {arguments.timeout:g}; give more seconds, or leave --timeout out"
    if isinstance(error, PermissionDeniedError) and "administrator" in str(error):
        return (
            f'{error}; administrators have role = "admin" in the server\'s --auth-tokens file, or a certificate whose '
            "name is among its --tls-admins"
        )
    if isinstance(error, UnavailableError) and not error.reason and _TLS_FAILURE.search(str(error)):
        return (
            f"the TLS handshake with {address} failed: {error}; is --tls-ca the server's authority, does "
            "--tls-server-name fit its certificate, does it ask for --tls-cert and --tls-key, and does it speak TLS?"
        )
    if isinstance(error, UnavailableError) and not error.reason and _CLOSED.search(str(error)):
        text = str(error).partition("; perhaps")[0]  # the client's own advice, in its arguments' words
        return (
            f"{address} closed the connection: {text}; if the server speaks TLS, give --tls or --tls-ca, and "
            "--tls-cert and --tls-key where it asks for a certificate"
        )
    if isinstance(error, UnavailableError) and not error.reason:  # gRPC's own: nothing answers there
        return f"no server answers at {address}: {error}; start one with `runnerd serve`, or give another --address"
    return f"{error}{retry}"
