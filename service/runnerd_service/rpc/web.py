"""What the daemon tells over HTTP: metrics, two probes, and the status page. It changes nothing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from http import HTTPStatus
from importlib.metadata import version

from runnerd_service.config import ServerConfig
from runnerd_service.frontend.frontend import Frontend
from runnerd_service.metrics import MetricsSnapshot, metrics_route
from runnerd_service.rpc.server import RpcServer
from runnerd_service.telemetry.status import StatusData, status_page
from runnerd_service.telemetry.web import Answer, Route, WebServer

logger = logging.getLogger(__name__)

_ALIVE_SECONDS = 4.0
"""A loop that does not turn for so long stands still."""


@asynccontextmanager
async def web_server(config: ServerConfig, frontend: Frontend, server: RpcServer) -> AsyncIterator[WebServer | None]:
    """Serve metrics, probes and status page meanwhile, if they are asked for.

    Raises:
        ConfigurationError: They cannot be served there.
    """
    if config.metrics_port is None:
        yield None
        return
    routes = _routes(config, frontend, server, asyncio.get_running_loop())
    # A thread: the host's name may have to be looked up.
    web = await asyncio.to_thread(WebServer, config.metrics_host or config.host, config.metrics_port, routes)
    logger.info("metrics on %s/metrics", web.url)
    if config.status_page:
        logger.info("status page on %s/", web.url)
    try:
        yield web
    finally:
        await asyncio.to_thread(web.close)


def _routes(
    config: ServerConfig, frontend: Frontend, server: RpcServer, loop: asyncio.AbstractEventLoop
) -> Mapping[str, Route]:
    def read() -> MetricsSnapshot:
        return replace(frontend.metrics(), credentials=server.credential_figures())

    routes: dict[str, Route] = {
        "/metrics": metrics_route(read),
        "/livez": lambda: _probe(_turns(loop), "the event loop turns", "the event loop stands still"),
        "/readyz": lambda: _probe(frontend.state == "serving", "serving", frontend.state),
    }
    if not config.status_page:
        return routes
    started = time.monotonic()

    def figures() -> Mapping[str, object]:
        ready = frontend.engine_ready
        return {
            "version": version("runnerd"),
            "state": frontend.state,
            "device": "" if ready is None else ready.device,
            "uptime_seconds": time.monotonic() - started,
            **asdict(read()),
        }

    return {"/": status_page, "/status.json": StatusData(figures, frontend.recent_steps, loop).answer, **routes}


def _probe(good: bool, yes: str, no: str) -> Answer:
    status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
    return Answer(f"{yes if good else no}\n".encode(), status=status)


def _turns(loop: asyncio.AbstractEventLoop) -> bool:
    turned: concurrent.futures.Future[None] = concurrent.futures.Future()
    loop.call_soon_threadsafe(turned.set_result, None)
    try:
        turned.result(_ALIVE_SECONDS)
    except concurrent.futures.TimeoutError:
        return False
    return True
