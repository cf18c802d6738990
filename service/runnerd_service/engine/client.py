"""The front process's side of the engine: starts the engine process, sends requests, hands out their outputs.

A client has one life: it serves one engine process until that ends. Whoever wants another starts another client. It
knows no text and no gRPC.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from runnerd_service.config import EngineConfig
from runnerd_service.engine.child import EngineChild, describe_exit
from runnerd_service.engine.launch import Launch
from runnerd_service.engine.messages import (
    AbortRequests,
    AddRequest,
    Call,
    EngineError,
    EngineReady,
    FromEngine,
    Load,
    LoadProgress,
    Reply,
    RequestOutput,
    Shutdown,
    StepOutputs,
    ToEngine,
)
from runnerd_service.engine.setup import resolve
from runnerd_service.errors import ConfigurationError, EngineFailed, EngineStartFailed
from runnerd_spi import RunnerError, load_runner

logger = logging.getLogger(__name__)

Sink = Callable[[RequestOutput], None]

_MESSAGES_AT_ONCE = 32
_LAST_WORDS_SECONDS = 0.5
_TERMINATE_SECONDS = 2.0


class EngineClient:
    """One engine process and the requests on it. All methods are called in the event loop that called :meth:`start`.

    Args:
        config: The engine's configuration.
        on_failure: Called once if the process dies or reports an error after it was ready, before the live requests
            are failed. :attr:`failure` is set by then, which tells those failures from failures of a request alone.
    """

    def __init__(self, config: EngineConfig, on_failure: Callable[[EngineError], None] = lambda error: None) -> None:
        self.load = Load()
        """The latest counters."""
        self.failure: EngineError | None = None
        """Why the engine is gone; None while it is there."""
        self._config = config
        self._on_failure = on_failure
        self._on_progress: Callable[[LoadProgress], None] = lambda progress: None
        self._sinks: dict[int, Sink] = {}
        self._calls: dict[int, asyncio.Future[str]] = {}
        self._call_ids = itertools.count()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._closing = False
        self._drain_scheduled = False
        self._child: EngineChild | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._last_words: asyncio.Task[None] | None = None

    async def start(self, on_progress: Callable[[LoadProgress], None]) -> EngineReady:
        """Start the engine process and wait until it serves.

        Args:
            on_progress: Called for each report of the start-up.

        Raises:
            ConfigurationError: The configuration cannot be served.
            EngineStartFailed: The runner or the model cannot be used, or the process died; nothing is left behind.
        """
        try:
            resolve(self._config, load_runner(self._config.runner))
        except RunnerError as error:
            raise EngineStartFailed(type(error).__name__, str(error)) from error
        self._loop = asyncio.get_running_loop()
        self._on_progress = on_progress
        self._ready: asyncio.Future[EngineReady] = self._loop.create_future()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._open()
        try:
            return await self._ready
        except BaseException:
            self._close_at_once()
            raise

    @property
    def pid(self) -> int:
        """Process id of the engine process."""
        return self._require_child().pid

    def add(self, request: AddRequest, sink: Sink) -> None:
        """Send a request.

        Args:
            request: Its uid was never used before.
            sink: Called in the event loop with each output, the last of which has ``finish``; not called any more
                after that or after :meth:`abort`.

        Raises:
            EngineFailed: The engine is gone.
            ValueError: A live request has this uid.
        """
        self._check_alive()
        if request.uid in self._sinks:
            raise ValueError(f"uid {request.uid} names a live request; draw a new one")
        self._sinks[request.uid] = sink
        self._send(request)

    def abort(self, uids: Iterable[int]) -> None:
        """Forget requests; their sinks are not called any more. Those that have ended already are passed over."""
        live = tuple(uid for uid in uids if self._sinks.pop(uid, None) is not None)
        if live and self.failure is None and not self._closing:
            self._send(AbortRequests(live))

    async def call(self, method: Literal["reset_prefix_cache", "check_integrity"]) -> str:
        """Run a utility method in the engine and give its answer.

        Raises:
            EngineFailed: The engine is gone, or the method failed.
        """
        self._check_alive()
        call_id = next(self._call_ids)
        self._calls[call_id] = self._loop.create_future()
        self._send(Call(call_id, method))
        try:
            return await self._calls[call_id]
        finally:
            del self._calls[call_id]

    async def close(self, timeout: float = 10.0) -> None:  # noqa: ASYNC109  the process is killed, not the wait cancelled
        """End the engine process and remove the socket; live requests fail. Harmless when closed already.

        Args:
            timeout: Seconds that the process has to end by itself before it is terminated, then killed.
        """
        if self._socket is None:
            return
        child = self._require_child()
        self._closing = True
        self._fail_requests("the engine is shutting down")
        try:
            if child.is_alive:
                self._send(Shutdown())
            if not await self._has_exited(timeout):
                logger.warning("the engine process did not end in %s seconds; it is terminated", timeout)
                child.terminate()
                await self._has_exited(_TERMINATE_SECONDS)
        finally:
            self._close_at_once()

    def _open(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="runnerd-"))  # mode 0700
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        address = f"ipc://{self._directory}/engine"
        self._socket.bind(address)
        self._loop.add_reader(self._socket.fileno(), self._drain)
        level = logging.getLogger().getEffectiveLevel()
        self._child = EngineChild(Launch(self._config, address, level), self._exit_from_thread)

    def _close_at_once(self) -> None:
        self._closing = True
        if self._socket is None:
            return
        if self._last_words is not None:
            self._last_words.cancel()
        child = self._require_child()
        child.kill()
        child.close()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)
        self._socket = None
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _has_exited(self, seconds: float) -> bool:
        await asyncio.wait([self._exited], timeout=seconds)
        return self._exited.done()

    def _send(self, message: ToEngine) -> None:
        assert self._socket is not None
        self._socket.send(self._encoder.encode(message))
        # The descriptor announces a change once only, and sending takes note of changes too.
        self._schedule_drain()

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_scheduled = False
        for _ in range(_MESSAGES_AT_ONCE):
            if self._socket is None:  # closed by a sink
                return
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(self._decoder.decode(data))
        self._schedule_drain()

    def _handle(self, message: FromEngine) -> None:
        match message:
            case StepOutputs():
                self.load = message.load
                for output in message.outputs:
                    self._deliver(output)
            case Reply():
                self._take_reply(message)
            case LoadProgress():
                self._on_progress(message)
            case EngineReady():
                if not self._ready.done():
                    self._ready.set_result(message)
            case EngineError():
                self._fail(message)

    def _deliver(self, output: RequestOutput) -> None:
        sink = self._sinks.get(output.uid) if output.finish is None else self._sinks.pop(output.uid, None)
        if sink is None:
            return
        try:
            sink(output)
        except Exception:
            logger.exception("request %d: its sink failed; the request is dropped", output.uid)
            self.abort([output.uid])

    def _take_reply(self, reply: Reply) -> None:
        call = self._calls.get(reply.call_id)
        if call is None or call.done():
            return
        if reply.ok:
            call.set_result(reply.message)
        else:
            call.set_exception(EngineFailed(reply.message))

    def _exit_from_thread(self, code: int) -> None:
        try:
            self._loop.call_soon_threadsafe(self._exit, code)
        except RuntimeError:
            logger.debug("the event loop was closed before the engine process ended")

    def _exit(self, code: int) -> None:
        self._exited.set_result(code)
        if not self._closing:
            # Its last messages may still be on their way through the socket.
            self._last_words = self._loop.create_task(self._hear_last_words(code))

    async def _hear_last_words(self, code: int) -> None:
        deadline = self._loop.time() + _LAST_WORDS_SECONDS
        while self.failure is None and not self._closing and self._loop.time() < deadline:
            self._drain()
            await asyncio.sleep(0.01)
        stage: Literal["start", "step"] = "step" if self._ready.done() else "start"
        tail = self._require_child().tail()
        message = f"the engine process {describe_exit(code)}"
        self._fail(EngineError(stage, "EngineProcessDied", f"{message}; its last lines:\n{tail}" if tail else message))

    def _fail(self, error: EngineError) -> None:
        if self.failure is not None or self._closing:
            return
        self.failure = error
        if not self._ready.done():
            failed = error.kind == ConfigurationError.__name__
            self._ready.set_exception(
                ConfigurationError(error.message) if failed else EngineStartFailed(error.kind, error.message)
            )
            return
        self._on_failure(error)
        self._fail_requests(f"the engine failed: {error.message.splitlines()[0]}")

    def _fail_requests(self, error: str) -> None:
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineFailed(error))
        for uid in tuple(self._sinks):
            self._deliver(RequestOutput(uid, finish="failed", error=error))

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineFailed(f"the engine failed: {self.failure.message.splitlines()[0]}")
        if self._closing or self._socket is None:
            raise EngineFailed("the engine is not started, or closed")

    def _require_child(self) -> EngineChild:
        if self._child is None:
            raise EngineFailed("the engine is not started")
        return self._child
