"""The front process's side of the engine: starts the engine process, sends requests, hands out their outputs.

A client has one life: it serves one engine process until that ends. Whoever wants another starts another client. It
knows no text and no gRPC.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from runnerd_service.config import EngineConfig
from runnerd_service.engine.channel import FrontChannel
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
)
from runnerd_service.engine.process import EXIT_ENGINE_DEAD, EXIT_START_FAILED
from runnerd_service.engine.setup import resolve
from runnerd_service.errors import ConfigurationError, EngineFailed, EngineStartFailed
from runnerd_service.guided.guide import Vocabulary
from runnerd_spi import RunnerError, load_runner

logger = logging.getLogger(__name__)

Sink = Callable[[RequestOutput], None]

HUNG = "EngineHung"
PROCESS_DIED = "EngineProcessDied"
"""Kinds of failure that are seen from here; the others are class names of what the engine reported."""

_LAST_WORDS_SECONDS = 0.5
_STACKS_SECONDS = 0.5
"""How long a process that hangs is given to write what its threads are doing."""
_TERMINATE_SECONDS = 2.0


@dataclass(slots=True)
class _Connection:
    """What there is between start and close."""

    loop: asyncio.AbstractEventLoop
    channel: FrontChannel
    child: EngineChild
    ready: asyncio.Future[EngineReady]
    exited: asyncio.Future[int]
    last_words: asyncio.Task[None] | None = None


class EngineClient:
    """One engine process and the requests on it. All methods are called in the event loop that called :meth:`start`.

    Args:
        config: The engine's configuration.
        on_failure: Called once if the process dies or reports an error after it was ready, before the live requests
            are failed. :attr:`failure` is set by then, which tells those failures from failures of a request alone.
        vocabulary: What guides are followed in, see :meth:`use_vocabulary`.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_failure: Callable[[EngineError], None] = lambda error: None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.load = Load()
        """The latest counters."""
        self.failure: EngineError | None = None
        """Why the engine is gone; None while it is there."""
        self.pid: int | None = None
        """Process id of the engine process; None before the start."""
        self.exit_code: int | None = None
        """Exit code of the process (negative: the signal) if it ended without being asked to."""
        self.num_signs_of_life = 0
        """Messages that told of a new step or of outputs; one that hangs sends none."""
        self._config = config
        self._on_failure = on_failure
        self._on_progress: Callable[[LoadProgress], None] = lambda progress: None
        self._sinks: dict[int, Sink] = {}
        self._calls: dict[int, asyncio.Future[str]] = {}
        self._call_ids = itertools.count()
        self._connection: _Connection | None = None
        self._closing = False
        self._vocabulary = vocabulary
        self._knows_vocabulary = False

    async def start(self, on_progress: Callable[[LoadProgress], None]) -> EngineReady:
        """Start the engine process and wait until it serves. Cancelled or failed, it leaves nothing behind.

        Args:
            on_progress: Called for each report of the start-up.

        Raises:
            ConfigurationError: The configuration cannot be served.
            EngineStartFailed: The runner or the model cannot be used, or the process died.
        """
        try:
            resolve(self._config, load_runner(self._config.runner))
            self._on_progress = on_progress
            connection = self._connect(asyncio.get_running_loop())
        except (RunnerError, OSError) as error:
            raise EngineStartFailed(type(error).__name__, str(error)) from error
        try:
            return await connection.ready
        except BaseException:
            self._close_at_once(connection)
            raise

    @property
    def num_requests(self) -> int:
        """Requests whose end is not known."""
        return len(self._sinks)

    def use_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Tell the engine of it before the first guided request."""
        self._vocabulary = vocabulary

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
        self._check_failure()
        channel = self._require_connection().channel
        if request.uid in self._sinks:
            raise ValueError(f"uid {request.uid} names a live request; draw a new one")
        self._sinks[request.uid] = sink
        if request.guide is not None and self._vocabulary is not None and not self._knows_vocabulary:
            self._knows_vocabulary = True
            channel.send(self._vocabulary)
        channel.send(request)

    def abort(self, uids: Iterable[int]) -> None:
        """Forget requests; their sinks are not called any more. Those that have ended already are passed over."""
        live = tuple(uid for uid in uids if self._sinks.pop(uid, None) is not None)
        if live and self.failure is None and self._connection is not None and not self._closing:
            self._connection.channel.send(AbortRequests(live))

    async def call(
        self, method: Literal["reset_prefix_cache", "check_integrity", "start_trace", "stop_trace", "recent_steps"]
    ) -> str:
        """Run a utility method in the engine and give its answer.

        Raises:
            EngineFailed: The engine is gone, or the method failed.
        """
        self._check_failure()
        connection = self._require_connection()
        call_id = next(self._call_ids)
        self._calls[call_id] = connection.loop.create_future()
        connection.channel.send(Call(call_id, method))
        try:
            return await self._calls[call_id]
        finally:
            del self._calls[call_id]

    async def give_up(self, reason: str) -> None:
        """Kill an engine that hangs; it failed then. What its threads were doing is logged.

        Args:
            reason: What was seen of it.
        """
        connection = self._connection
        if connection is None or self.failure is not None:
            return
        connection.child.dump_stacks()
        await asyncio.wait([connection.exited], timeout=_STACKS_SECONDS)
        if self._connection is connection:
            connection.child.kill()
            self._fail(EngineError("step", HUNG, reason))

    async def close(self, timeout: float = 10.0) -> None:  # noqa: ASYNC109  ends the process, does not cancel the wait
        """End the engine process and remove the socket; live requests fail. Harmless when closed or never started.

        Args:
            timeout: Seconds that the process has to end by itself before it is terminated, then killed.
        """
        connection = self._connection
        if connection is None:
            return
        self._closing = True
        try:
            self._fail_requests("the engine is shutting down")
            connection.channel.send(Shutdown())
            await asyncio.wait([connection.exited], timeout=timeout)
            if not connection.exited.done():
                logger.warning("the engine process did not end in %s seconds; it is terminated", timeout)
                connection.child.terminate()
                await asyncio.wait([connection.exited], timeout=_TERMINATE_SECONDS)
        finally:
            self._close_at_once(connection)

    def _connect(self, loop: asyncio.AbstractEventLoop) -> _Connection:
        channel = FrontChannel(loop, self._handle)
        try:
            launch = Launch(self._config, channel.address, logging.getLogger().getEffectiveLevel())
            child = EngineChild(launch, lambda code: self._exit_from_thread(loop, code))
        except BaseException:
            channel.close()
            raise
        self.pid = child.pid
        self._connection = _Connection(loop, channel, child, loop.create_future(), loop.create_future())
        return self._connection

    def _close_at_once(self, connection: _Connection) -> None:
        self._closing = True
        self._connection = None
        if connection.last_words is not None:
            connection.last_words.cancel()
        connection.child.kill()
        connection.child.close()
        connection.channel.close()

    def _handle(self, message: FromEngine) -> None:
        match message:
            case StepOutputs():
                # With requests that it cannot run the loop turns without a step; that is no life.
                self.num_signs_of_life += bool(message.outputs) or message.load.num_steps != self.load.num_steps
                self.load = message.load
                for output in message.outputs:
                    self._deliver(output)
            case Reply():
                self._take_reply(message)
            case LoadProgress():
                self._on_progress(message)
            case EngineReady():
                ready = self._require_connection().ready
                if not ready.done():  # it was cancelled
                    ready.set_result(message)
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

    def _exit_from_thread(self, loop: asyncio.AbstractEventLoop, code: int) -> None:
        try:
            loop.call_soon_threadsafe(self._exit, code)
        except RuntimeError:
            logger.debug("the event loop was closed before the engine process ended")

    def _exit(self, code: int) -> None:
        connection = self._connection
        if connection is None:
            return
        connection.exited.set_result(code)
        if not self._closing:
            self.exit_code = code
            # Its last messages may still be on their way through the socket.
            connection.last_words = connection.loop.create_task(self._hear_last_words(connection, code))

    async def _hear_last_words(self, connection: _Connection, code: int) -> None:
        connection.channel.drain()
        if code in (EXIT_START_FAILED, EXIT_ENGINE_DEAD):  # it said why before it ended
            deadline = connection.loop.time() + _LAST_WORDS_SECONDS
            while self.failure is None and not self._closing and connection.loop.time() < deadline:
                await asyncio.sleep(0.01)
                connection.channel.drain()
        stage: Literal["start", "step"] = "step" if connection.ready.done() else "start"
        tail = connection.child.tail()
        message = f"the engine process {describe_exit(code)}"
        self._fail(EngineError(stage, PROCESS_DIED, f"{message}; its last lines:\n{tail}" if tail else message))

    def _fail(self, error: EngineError) -> None:
        if self.failure is not None or self._closing:
            return
        self.failure = error
        ready = self._require_connection().ready
        if not ready.done():
            if error.kind == ConfigurationError.__name__:
                ready.set_exception(ConfigurationError(error.message))
            else:
                ready.set_exception(EngineStartFailed(error.kind, error.message))
            return
        self._on_failure(error)
        self._fail_requests(self._failure_text(error))

    def _fail_requests(self, error: str) -> None:
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineFailed(error))
        for uid in tuple(self._sinks):
            self._deliver(RequestOutput(uid, finish="failed", error=error))

    def _require_connection(self) -> _Connection:
        if self._connection is None or self._closing:
            raise EngineFailed("the engine is not started, or closed")
        return self._connection

    def _check_failure(self) -> None:
        if self.failure is not None:
            raise EngineFailed(self._failure_text(self.failure))

    @staticmethod
    def _failure_text(error: EngineError) -> str:
        # Without the process's last lines, which are for the operator.
        return f"the engine failed: {error.message.splitlines()[0].removesuffix('; its last lines:')}"
