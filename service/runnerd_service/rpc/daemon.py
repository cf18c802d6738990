"""The life of the daemon: listen, load, serve, drain on a signal, stop. Prints nothing; tells its owner by hooks."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from runnerd_service.config import ServerConfig
from runnerd_service.errors import EngineFailed
from runnerd_service.frontend.frontend import Frontend
from runnerd_service.frontend.loading import check_configuration
from runnerd_service.rpc.garbage import collect_seldom
from runnerd_service.rpc.server import RpcServer
from runnerd_service.rpc.web import web_server
from runnerd_service.telemetry.tracing import open_tracer

logger = logging.getLogger(__name__)

_GRACE_AT_ONCE_SECONDS = 0.25
"""For the last words to readers when the server stops at once; it ends sooner when all are said."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What is served, and where."""

    model_name: str
    addresses: tuple[str, ...]
    runner: str
    device: str
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the owner wants to be told."""

    on_listening: Callable[[tuple[str, ...]], None]
    """Clients can connect to these addresses; the model is not loaded yet."""
    on_progress: Callable[[str, int, int], None]
    """Start-up goes on: stage, done, total."""
    on_ready: Callable[[Ready], None]
    """Generations are served."""
    on_draining: Callable[[float], object]
    """Live requests have so many seconds to finish, then the daemon ends."""


@dataclass(slots=True)
class Signals:
    """SIGTERM and SIGINT: the first asks for a drain, the second for a stop at once. SIGHUP asks for a drain alone."""

    first: asyncio.Event = field(default_factory=asyncio.Event)
    second: asyncio.Event = field(default_factory=asyncio.Event)

    def received(self) -> None:
        """Count a signal."""
        (self.second if self.first.is_set() else self.first).set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Receive the signals of this process until the block ends.

        SIGHUP is left alone where it is ignored (nohup).
        """
        loop = asyncio.get_running_loop()
        handlers: dict[int, Callable[[], None]] = {signal.SIGTERM: self.received, signal.SIGINT: self.received}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            # A terminal that closes may send it twice, by its shell and by the kernel: that is no wish to stop at once.
            handlers[signal.SIGHUP] = self.first.set
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)


async def serve(config: ServerConfig, hooks: Hooks, signals: Signals) -> bool:
    """Run the daemon until a signal; give whether it stopped in order (False: a second signal cut it short).

    Raises:
        ConfigurationError: It cannot listen, or the engine cannot start as configured.
        EngineStartFailed: The engine failed while it started.
        EngineFailed: It failed later, and was restarted in vain as often as it may be.
    """
    check_configuration(config)
    frontend = Frontend(config)
    tracer = open_tracer(config.otlp_traces_endpoint)
    server = RpcServer(config, frontend, tracer)
    try:
        await server.start()
        async with web_server(config, frontend, server):
            hooks.on_listening(server.addresses)
            return await _load_and_serve(config, frontend, server, hooks, signals)
    finally:
        frontend.end_requests()  # their readers are told why, which a cancel by the server's stop would not do
        await server.stop(grace_seconds=1.0 if not signals.second.is_set() else _GRACE_AT_ONCE_SECONDS)
        await frontend.close()
        await asyncio.to_thread(tracer.close)


async def _load_and_serve(
    config: ServerConfig, frontend: Frontend, server: RpcServer, hooks: Hooks, signals: Signals
) -> bool:
    if not await _unless(signals.first, frontend.start(hooks.on_progress)):
        logger.info("stopped while the model was loading")
        return True
    collect_seldom()
    if frontend.state == "draining":
        logger.warning("the model is loaded, and nothing is served: the server was drained meanwhile")
    else:
        hooks.on_ready(_ready(config, frontend, server))
    if not await _unless(signals.first, _failure(frontend)):
        hooks.on_draining(config.drain_seconds)
        return await _drain(config, frontend, signals)
    # Nothing in here can repair it; whoever runs the process can start another, perhaps elsewhere.
    raise EngineFailed(f"the engine failed and is not restarted again: {frontend.last_error}")


def _ready(config: ServerConfig, frontend: Frontend, server: RpcServer) -> Ready:
    ready = frontend.engine_ready
    assert ready is not None  # it has started
    return Ready(
        model_name=frontend.describe_model().name,
        addresses=server.addresses,
        runner=config.engine.runner,
        device=ready.device,
        max_in_flight=ready.max_in_flight,
    )


async def _failure(frontend: Frontend) -> None:
    """Wait until there is no hope for the engine."""
    async with aclosing(frontend.states()) as states:
        async for state in states:
            if state == "failed":
                return


async def _drain(config: ServerConfig, frontend: Frontend, signals: Signals) -> bool:
    logger.info("draining: live requests have %g s to finish; a second signal stops at once", config.drain_seconds)
    drained = await _unless(signals.second, frontend.drain(config.drain_seconds))
    logger.info("drained" if drained else "stopping at once")
    return drained


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Run ``work``, or cancel it as soon as ``event`` is set; give whether it ended by itself."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
            return True
        return False
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
