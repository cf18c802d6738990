"""The gRPC server: where it listens, which limits it has, and the services on it. Knows no command line, no signals."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from runnerd.v1 import inference_pb2, inference_pb2_grpc, server_pb2, server_pb2_grpc
from runnerd_service.config import ServerConfig
from runnerd_service.errors import ConfigurationError
from runnerd_service.frontend.frontend import Frontend
from runnerd_service.metrics import CredentialFigures
from runnerd_service.rpc import channelz, health
from runnerd_service.rpc.access import Access, AccessInterceptor
from runnerd_service.rpc.interceptor import HandlerInterceptor
from runnerd_service.rpc.servicers import InferenceServicer, ModelServicer, ServerServicer
from runnerd_service.rpc.tls import server_credentials
from runnerd_service.security.credentials import Credentials
from runnerd_service.security.exposure import check_metrics, check_tenants, exposure_warnings
from runnerd_service.telemetry.tracing import NoTracer, RequestTracer

logger = logging.getLogger(__name__)

SERVICE_NAMES = (
    *(service.full_name for service in inference_pb2.DESCRIPTOR.services_by_name.values()),
    *(service.full_name for service in server_pb2.DESCRIPTOR.services_by_name.values()),
)

_KIB = 1024
_MAX_INT = 2**31 - 1
_MORE_CALLS = 1000
_MAX_PENDING_CALLS = 100_000
_HANDSHAKE_MILLISECONDS = 20_000


def server_options(config: ServerConfig) -> Sequence[tuple[str, int]]:
    """Give gRPC's options; each is a limit that a client may meet."""
    return (
        # two servers on one port would share its connections in silence
        ("grpc.so_reuseport", 0),
        # Go clients ping every 10 s, also without a call; less than that leaves room for jitter. The C macro is called
        # MIN_RECV_PING_INTERVAL, but its text has no "recv"; a name that gRPC does not know is ignored.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # find clients that vanished without a word, so that their requests end
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # above the limit of ours, whose answer says what to do; gRPC's own RESOURCE_EXHAUSTED is the last resort
        ("grpc.max_receive_message_length", min(2 * config.max_message_bytes + 1024 * _KIB, _MAX_INT)),
        ("grpc.max_send_message_length", -1),
        # one limit: between two, gRPC refuses by chance
        ("grpc.max_metadata_size", config.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", config.max_metadata_bytes),
        # gRPC waits for ever for the message of a call that ended without one, and holds a few KiB for each
        ("grpc.max_concurrent_streams", max_calls(config)),
        # a burst of calls waits until they are taken up; above 1,000 gRPC cancels, by chance and without a word
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        # who connects and says nothing, or not what TLS wants, is let go
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MILLISECONDS),
        ("grpc.enable_channelz", int(config.channelz)),
    )


def max_calls(config: ServerConfig) -> int:
    """Give how many calls a connection may have at once: all that the server has a place for, and some questions."""
    return min(config.engine.max_num_seqs + config.max_waiting + _MORE_CALLS, _MAX_INT)


class RpcServer:
    """Serves a front end over TCP and perhaps a unix socket. Answers as soon as it is started, loaded or not.

    Args:
        config: Addresses and limits.
        frontend: Serves the generations; started and closed by whoever made it.
        tracer: Traces them; closed by whoever made it. None: nothing does.

    Raises:
        ConfigurationError: The files of certificates or tokens cannot be used.
    """

    def __init__(self, config: ServerConfig, frontend: Frontend, tracer: RequestTracer | None = None) -> None:
        check_tenants(config)
        check_metrics(config)
        self._config = config
        self._frontend = frontend
        self._credentials = Credentials(config.security)
        interceptors = [
            AccessInterceptor(Access(config.security, self._credentials.tokens), frontend.request_stats),
            HandlerInterceptor(config.max_message_bytes, config.stall_timeout_seconds),
        ]
        self._server = grpc.aio.server(interceptors=interceptors, options=server_options(config))
        self._health = health.HealthServicer(SERVICE_NAMES)
        self._port = config.port
        self._socket_path: Path | None = None
        self._tasks: list[asyncio.Task[None]] = []
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(frontend, tracer or NoTracer()), self._server
        )
        server_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(frontend), self._server)
        server_pb2_grpc.add_ServerServiceServicer_to_server(ServerServicer(frontend, config), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [*SERVICE_NAMES, health.NAME]
        if config.channelz:
            channelz.add_channelz(self._server)
            names.append(channelz.NAME)
        if config.security.reflection:
            reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)

    @property
    def port(self) -> int:
        """The TCP port; the chosen one when 0 was asked for."""
        return self._port

    @property
    def addresses(self) -> tuple[str, ...]:
        """What clients connect to."""
        tcp = f"{_bracketed(self._config.host)}:{self._port}"
        return (tcp,) if self._socket_path is None else (tcp, _unix_address(self._socket_path))

    def credential_figures(self) -> CredentialFigures:
        """Give what metrics tell of certificates and tokens; may be called from any thread."""
        return self._credentials.figures()

    async def start(self) -> None:
        """Listen and answer.

        Raises:
            ConfigurationError: An address cannot be used; the message says why and what to do.
        """
        for warning in exposure_warnings(self._config):
            logger.warning("%s", warning)
        await asyncio.to_thread(self._credentials.look)
        self._port = self._bind_tcp(self._config.host, self._config.port)
        if self._config.unix_socket is not None:
            self._bind_unix(Path(self._config.unix_socket))
        await self._server.start()
        self._tasks = [
            asyncio.create_task(self._follow_state(), name="health follows the front end"),
            asyncio.create_task(self._credentials.watch(), name="credentials follow their files"),
        ]

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Stop listening; calls that have not ended after ``grace_seconds`` are cancelled. Idempotent."""
        for task in self._tasks:
            task.cancel()
        self._health.set_serving(False)
        self._health.close()  # an open Watch would hold up the stop for the whole grace
        await self._server.stop(grace_seconds)
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)
            self._socket_path = None

    async def _follow_state(self) -> None:
        async for state in self._frontend.states():
            self._health.set_serving(state == "serving")

    def _bind_tcp(self, host: str, port: int) -> int:
        remedy = f"cannot listen on {host} port {port}: %s; give another --host or --port, or --port 0 for a free one"
        _check_tcp(host, port, remedy)
        try:
            address = f"{_bracketed(host)}:{port}"
            if self._credentials.certificates is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, server_credentials(self._credentials.certificates))
        except RuntimeError as error:
            raise ConfigurationError(remedy % error) from error

    def _bind_unix(self, path: Path) -> None:
        _check_unix(path)
        # The mode is set as the socket is made: with a chmod afterwards others could connect in between.
        umask = os.umask(0o177)
        try:
            self._server.add_insecure_port(_unix_address(path))
        except RuntimeError as error:
            raise ConfigurationError(f"cannot listen on the unix socket {path}: {error}; give another path") from error
        finally:
            os.umask(umask)
        self._socket_path = path


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _unix_address(path: Path) -> str:
    """Give the address of ``path``: a URI, which gRPC decodes at both ends."""
    return "unix:" + quote(str(path))


def _check_tcp(host: str, port: int, remedy: str) -> None:
    """Bind once before gRPC does: its own failure is a page of text on stderr.

    Raises:
        ConfigurationError: The address cannot be used.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with closing(socket.socket(family, kind, protocol)) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise ConfigurationError(remedy % (error.strerror or error)) from error


def _check_unix(path: Path) -> None:
    """Remove a socket that nobody listens on any more, and bind once before gRPC does, for the same reason.

    Raises:
        ConfigurationError: The path is in use, is something else than a socket, has no folder, or cannot be made.
    """
    problem = f"cannot listen on the unix socket {path}: %s"
    try:
        if not path.parent.is_dir():
            raise ConfigurationError(problem % f"{path.parent} is not a folder; create it")
        if path.is_symlink() or path.exists():
            _remove_stale_socket(path, problem)
        with closing(socket.socket(socket.AF_UNIX)) as probe:
            probe.bind(str(path))
        path.unlink()
    except OSError as error:
        raise ConfigurationError(problem % f"{error.strerror or error}; give another path") from error


def _remove_stale_socket(path: Path, problem: str) -> None:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigurationError(problem % "a file that is no socket is there; move it")
    with closing(socket.socket(socket.AF_UNIX)) as probe, suppress(ConnectionRefusedError):
        probe.connect(str(path))
        raise ConfigurationError(problem % "another process does; give another path")
    path.unlink()
