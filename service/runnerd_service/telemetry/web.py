"""A small HTTP server with threads of its own: metrics, probes and the status page. It knows not what it serves.

Whoever starts it gives the answers; they are called from other threads.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from runnerd_service.errors import ConfigurationError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 10.0
"""A connection that sends no request for so long is closed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request gets."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


Route = Callable[[], Answer]


class WebServer:
    """Answers GET by path. Close it when done.

    Args:
        host: Address to listen on.
        port: TCP port; 0 takes a free one.
        routes: Give the answers, by path.

    Raises:
        ConfigurationError: It cannot listen there.
    """

    def __init__(self, host: str, port: int, routes: Mapping[str, Route]) -> None:
        self._host = host.strip("[]")
        self._routes = routes
        try:
            address = socket.getaddrinfo(self._host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            kind = _Server6 if address[0] == socket.AF_INET6 else _Server
            self._server: _Server = make_server(str(address[4][0]), port, self._answer, kind, _Handler)
        except OSError as error:
            raise ConfigurationError(
                f"cannot serve metrics on {self._host} port {port}: {error.strerror or error}; give another "
                "--metrics-host or --metrics-port, or --metrics-port 0 for a free one"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The TCP port; the chosen one when 0 was asked for."""
        return int(self._server.server_port)

    @property
    def url(self) -> str:
        """Where it listens, without a path."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    def close(self) -> None:
        """Stop listening. Harmless when closed."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environment: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environment.get("PATH_INFO", "/")
        if environment["REQUEST_METHOD"] not in ("GET", "HEAD"):
            answer = Answer(b"only GET is served\n", status=HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "GET"})
        elif path in self._routes:
            answer = self._routes[path]()
        else:
            known = ", ".join(sorted(self._routes))
            answer = Answer(f"there is {known}\n".encode(), status=HTTPStatus.NOT_FOUND)
        headers = {
            "Content-Type": answer.content_type,
            "Content-Length": str(len(answer.body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            **answer.headers,
        }
        start(f"{answer.status.value} {answer.status.phrase}", list(headers.items()))
        return [] if environment["REQUEST_METHOD"] == "HEAD" else [answer.body]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # Without the look-up of the host's name that the standard library makes here, which may take seconds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        # connections that break in the middle are no fault of the server's
        error = sys.exception()
        if not isinstance(error, OSError):
            logger.error("a request of %s failed", client_address, exc_info=error)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _IDLE_SECONDS

    def address_string(self) -> str:
        return str(self.client_address[0])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the standard library's name
        """Say nothing: probes come every few seconds."""
