"""What the synchronous and the asynchronous client share about the connection: options, TLS, credentials."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
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


class CallTerms(TypedDict):
    """What each call is given beside its request."""

    timeout: float | None
    metadata: tuple[tuple[str, str], ...]


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
        metadata: Further metadata of each call.
        plaintext_token: Send the token without TLS to another machine, where something else protects the connection.

    Raises:
        ValueError: They do not go together.
    """

    address: str
    tls: Tls | None = None
    token: str | Callable[[], str] | None = None
    metadata: Mapping[str, str] | None = None
    plaintext_token: bool = False

    def __post_init__(self) -> None:
        if self.tls is not None and _is_unix(self.address):
            raise ValueError("a unix socket speaks no TLS; leave tls out")
        if self.token is not None and self.tls is None and not (self.plaintext_token or _is_local(self.address)):
            raise ValueError(
                f"the token would go to {self.address} in the clear; set tls, or plaintext_token=True where something "
                "else protects the connection"
            )
        for key, value in (self.metadata or {}).items():
            if not key.endswith("-bin") and not (value.isascii() and value.isprintable()):
                raise ValueError(f"metadata {key!r} has characters that gRPC does not carry; expected printable ASCII")

    @property
    def options(self) -> list[tuple[str, int | str]]:
        """Options of the channel."""
        named = [] if self.tls is None or self.tls.server_name is None else [self.tls.server_name]
        return [*CHANNEL_OPTIONS, *(("grpc.ssl_target_name_override", name) for name in named)]

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Give the channel's credentials; None without TLS.

        Raises:
            OSError: A file cannot be read.
        """
        return None if self.tls is None else self.tls.credentials()

    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """Give the metadata of the next call."""
        entries = tuple((self.metadata or {}).items())
        if self.token is None:
            return entries
        text = self.token if isinstance(self.token, str) else self.token()
        return (*entries, ("authorization", f"Bearer {text}"))


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
