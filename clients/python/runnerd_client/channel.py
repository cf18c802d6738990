"""What the synchronous and the asynchronous client share about the connection: options, TLS, credentials."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import TypedDict

import grpc

from runnerd_client.retries import SERVICE_CONFIG

DEFAULT_ADDRESS = "127.0.0.1:50051"
"""Where ``runnerd serve`` listens. A unix socket is ``unix:/path/of/the.sock``."""

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.service_config", SERVICE_CONFIG),
    # an answer with log-probabilities of a long prompt exceeds gRPC's default of 4 MiB
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # notice a server that vanished while a stream waits for its next token
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


_METADATA_KEY = re.compile(r"[0-9a-z_.-]+")
MOST_SECONDS = 1e9
"""Beyond, gRPC's own sums overflow, and a call would end at once."""


class CallTerms(TypedDict):
    """What each call is given beside its request."""

    timeout: float | None
    metadata: tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to a server. ``Tls()`` trusts the authorities that gRPC brings; paths are of PEM files.

    A unix socket needs none: it is the same machine, and its owner's alone.
    """

    ca: str | PathLike[str] | None = None
    """Who signs the server's certificate; None: a public authority."""
    cert: str | PathLike[str] | None = None
    """This client's certificate, where the server asks for one; with ``key``."""
    key: str | PathLike[str] | None = None
    server_name: str | None = None
    """Name in the server's certificate, where it is not that of the address."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together; give both or neither")

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            OSError: One cannot be read.
        """
        return grpc.ssl_channel_credentials(
            root_certificates=_content(self.ca), private_key=_content(self.key), certificate_chain=_content(self.cert)
        )


@dataclass(frozen=True, slots=True)
class Connection:
    """Where a server is, and what each call to it brings.

    Args:
        address: ``host:port`` or ``unix:/path``.
        tls: None: no TLS.
        token: Bearer token, or what gives it at each call; None: none.
        metadata: Further metadata of each call; bytes where the key ends in ``-bin``.
        plaintext_token: Send the token without TLS to another machine, where something else protects the connection.

    Raises:
        ValueError: They do not go together.
    """

    address: str
    tls: Tls | None = None
    token: str | Callable[[], str] | None = None
    metadata: Mapping[str, str | bytes] | None = None
    plaintext_token: bool = False

    def __post_init__(self) -> None:
        if self.tls is not None and _is_unix(self.address):
            raise ValueError("a unix socket speaks no TLS; leave tls out")
        if self.token is not None and self.tls is None and not (self.plaintext_token or _is_local(self.address)):
            raise ValueError(
                f"the token would go to {self.address} in the clear; set tls, or plaintext_token=True where something "
                "else protects the connection"
            )
        if isinstance(self.token, str):
            _check_token(self.token)
        for key, value in (self.metadata or {}).items():
            _check_metadata(key, value)

    @property
    def options(self) -> list[tuple[str, int | str]]:
        """Options of the channel."""
        named = [] if self.tls is None or self.tls.server_name is None else [self.tls.server_name]
        return [*CHANNEL_OPTIONS, *(("grpc.ssl_target_name_override", name) for name in named)]

    @property
    def if_closed(self) -> str:
        """What to try where the server closes each connection at once; for the end of an error's text."""
        if self.tls is None:
            return "; perhaps the server wants tls"
        if self.tls.cert is None:
            return "; perhaps the server wants a client's certificate: give Tls its cert and key"
        return "; perhaps the server does not trust this client's certificate"

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Give the channel's credentials; None without TLS.

        Raises:
            OSError: A file cannot be read.
        """
        return None if self.tls is None else self.tls.credentials()

    def call_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Give the metadata of the next call.

        Raises:
            ValueError: What gives the token gave one that gRPC does not carry.
        """
        entries = tuple((self.metadata or {}).items())
        if self.token is None:
            return entries
        text = self.token if isinstance(self.token, str) else _check_token(self.token())
        return (*entries, ("authorization", f"Bearer {text}"))


def checked_seconds(name: str, seconds: float) -> float:
    """Give ``seconds``, of the argument ``name``.

    Raises:
        TypeError: They are no number.
        ValueError: They are infinite, nan, or above MOST_SECONDS.
    """
    if not _is_number(seconds):
        raise TypeError(f"{name} is {seconds!r}, expected a number of seconds")
    if not abs(seconds) <= MOST_SECONDS:
        raise ValueError(f"{name} is {seconds!r}, expected a number of seconds, at most {MOST_SECONDS:.0f}")
    return seconds


def _is_number(value: object) -> bool:
    return isinstance(value, Real)  # those of numpy, too


def checked_timeout(seconds: float | None) -> float | None:
    """Give a timeout; None waits without limit. Raises as :func:`checked_seconds`."""
    return None if seconds is None else checked_seconds("timeout", seconds)


def _check_token(token: str) -> str:
    if not _is_carried(token):  # the text itself is a secret
        raise ValueError(
            "token is no text of printable ASCII, which is what gRPC carries; where it was read from a file, strip the "
            "end of the line"
        )
    return token


def _check_metadata(key: str, value: str | bytes) -> None:
    if not _METADATA_KEY.fullmatch(key):
        raise ValueError(f"metadata {key!r} is no key that gRPC carries; expected small letters, digits, '_', '-', '.'")
    if key.endswith("-bin"):
        if not isinstance(value, bytes):
            raise ValueError(f"metadata {key!r} is {value!r}; a key that ends in -bin takes bytes")
    elif not _is_carried(value):
        raise ValueError(f"metadata {key!r} has characters that gRPC does not carry; expected printable ASCII")


def _is_carried(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isprintable()


def _content(path: str | PathLike[str] | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def _is_unix(address: str) -> bool:
    return address.startswith(("unix:", "unix-abstract:"))


def _is_local(address: str) -> bool:
    if _is_unix(address):
        return True
    host = address.rpartition(":")[0].removeprefix("ipv4:").removeprefix("ipv6:").removeprefix("dns:").strip("/[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
