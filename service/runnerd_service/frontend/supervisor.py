"""Keeps an engine there: starts it, sees it fail or hang, and restarts it; the live requests go on on the next one.

Each engine process has a client of its own; what belongs to a request outlives them, in the dispatcher. This module
knows no text and no gRPC.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any, Literal

from runnerd_service.config import ServerConfig
from runnerd_service.engine.client import EngineClient
from runnerd_service.engine.messages import AddRequest, EngineError, EngineReady, Load, LoadProgress, RequestOutput
from runnerd_service.errors import EngineFailed, EngineStartFailed, NotReady
from runnerd_service.frontend.dispatcher import Dispatcher
from runnerd_service.frontend.ongoing import OngoingRequest
from runnerd_service.frontend.restarts import (
    CAUSES,
    RestartBudget,
    RestartCause,
    cause_of,
    check_same_model,
    is_from_outside,
)
from runnerd_service.frontend.totals import at_rest, with_totals
from runnerd_service.frontend.watchdog import wait_for_hang
from runnerd_service.guided.guide import Vocabulary

logger = logging.getLogger(__name__)

EngineState = Literal["starting", "serving", "recovering", "failed"]

_CLOSE_SECONDS = 5.0
"""What an engine that failed is given to end by itself, so that its device is free for the next one."""
_MIN_RETRY_SECONDS = 1.0
_DETAILS = "the server's log says how"
_STARTS_AT_MOST = 3.0
_START_SECONDS_AT_LEAST = 60.0
"""A restart may take so many times what the first start took and the time of a step, and never less than a minute."""


class EngineSupervisor:
    """The engine, whichever process it is. All methods are called in one event loop.

    Args:
        config: The engine's configuration, and how its failures are met.
        on_state: Called with each change of :attr:`state` after the start.
    """

    def __init__(self, config: ServerConfig, on_state: Callable[[EngineState], None]) -> None:
        self.state: EngineState = "starting"
        self.ready: EngineReady | None = None
        """What the latest engine told when it was ready; None before the first was."""
        self.last_error = ""
        """How the latest failure came; empty if there was none."""
        self.num_restarts: dict[str, int] = dict.fromkeys(CAUSES, 0)
        self._config = config
        self._on_state = on_state
        # None while there is no engine that could be given requests.
        self._client: EngineClient | None = None
        self._vocabulary: Vocabulary | None = None
        # The latest that was made: it may be starting, or have failed.
        self._latest = self._new_client()
        self._budget = RestartBudget(config.max_engine_restarts, config.engine_restart_backoff_seconds)
        self._dispatcher = Dispatcher(
            config.engine.max_num_seqs, self._budget.note_progress, lambda: self._set_state("serving")
        )
        self._load_before: Load | None = None
        self._start_seconds = 0.0
        self._back_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._retired = False
        self._closing = False

    @property
    def load(self) -> Load:
        """The counters: what there is now, and totals since the first start."""
        client = self._client
        if client is None:
            return at_rest(self._load_before or Load(), len(self._dispatcher))
        return client.load if self._load_before is None else with_totals(client.load, self._load_before)

    @property
    def num_waiting(self) -> int:
        """Outputs that wait for a place in the present engine, as it last told."""
        return 0 if self._client is None else self._client.load.num_waiting

    @property
    def num_poisonous(self) -> int:
        """Requests that were found to kill engines."""
        return self._dispatcher.num_poisonous

    @property
    def client(self) -> EngineClient:
        """The present engine's client.

        Raises:
            NotReady: There is none.
        """
        if self._client is None:
            raise self.not_ready()
        return self._client

    @property
    def pid(self) -> int | None:
        """Process id of the present engine."""
        return None if self._client is None else self._client.pid

    def not_ready(self) -> NotReady:
        """Give the error that says why requests are not taken now, and when to try again."""
        if self._retired:
            return NotReady("the server is drained, and its engine has ended")
        if self.state == "failed":
            return NotReady(f"the engine failed; {_DETAILS}", retry_after_seconds=self._retry())
        return NotReady("the engine failed and is being restarted", retry_after_seconds=self._retry())

    async def start(self, on_progress: Callable[[LoadProgress], None]) -> EngineReady:
        """Start the first engine. Failed or cancelled, it leaves nothing behind.

        Raises:
            ConfigurationError: The configuration cannot be served.
            EngineStartFailed: The runner or the model cannot be used, or the process died.
        """
        began = asyncio.get_running_loop().time()
        ready = await self._started(self._latest, on_progress)
        self._start_seconds = asyncio.get_running_loop().time() - began
        self._install(self._latest, ready)
        return ready

    def use_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Let guided requests be followed in it, on this engine and those after it."""
        self._vocabulary = vocabulary
        self._latest.use_vocabulary(vocabulary)

    def add_accepted(self, owner: OngoingRequest, request: AddRequest, sink: Callable[[RequestOutput], None]) -> None:
        """Give an output to the engine, and to those after it; see :meth:`Dispatcher.add`.

        One that was accepted earlier may come while there is no engine, or while a request is tried alone: it waits.
        """
        self._dispatcher.add(owner, request, sink, waits=self.state != "serving")

    def abort(self, uids: Iterable[int]) -> None:
        """Forget outputs; their sinks are not called any more. Those that have ended are passed over."""
        self._dispatcher.abort(uids)

    def retire(self) -> None:
        """Start no engine any more: no request is left, and none will come. The present one stays until the close."""
        self._retired = True
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """End the engine and all attempts to have one. Harmless when closed."""
        self._closing = True
        self._dispatcher.detach()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._latest.close()
        self._client = None

    def _new_client(self) -> EngineClient:
        engine = self._config.engine
        if self.ready is not None:  # what was accepted has to fit, however much memory is free this time
            engine = replace(engine, max_model_len=self.ready.max_model_len)
        client = EngineClient(engine, lambda error: self._on_failure(client, error), self._vocabulary)
        return client

    async def _started(self, client: EngineClient, on_progress: Callable[[LoadProgress], None]) -> EngineReady:
        ready = await client.start(on_progress)
        if client.failure is not None:  # just now
            raise EngineStartFailed(client.failure.kind, client.failure.message)
        return ready

    def _install(self, client: EngineClient, ready: EngineReady) -> None:
        self._client, self.ready = client, ready
        if self._config.step_timeout_seconds:
            self._spawn(self._watch(client))
        self._dispatcher.attach(client)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, client: EngineClient) -> None:
        timeout = self._config.step_timeout_seconds
        if await wait_for_hang(client, timeout):
            await client.give_up(f"requests were waiting, and no step ended in {timeout:g} s")

    def _on_failure(self, client: EngineClient, error: EngineError) -> None:
        if client is not self._client or self._closing:  # not ready yet: its start fails
            return
        self._load_before = self.load
        self._client = None
        if self._retired:  # by a signal to the whole process group, perhaps
            logger.info("the engine ended after the drain, and is not restarted: %s", error.message)
            return
        logger.error("the engine failed: %s: %s", error.kind, error.message)
        self._dispatcher.note_failure(from_outside=is_from_outside(error, client.exit_code))
        delay = self._note_failure(error)
        if delay is not None:
            self._set_state("recovering")
            self._spawn(self._recover(cause_of(error, client.exit_code), delay))

    def _note_failure(self, error: EngineError) -> float | None:
        """Give the seconds until the next attempt; None when that was the last, and all is told."""
        self.last_error = f"{error.kind}: {error.message}"
        delay = self._budget.note_failure()
        if delay is None:
            self._give_up()
        else:
            self._back_at = asyncio.get_running_loop().time() + delay + self._start_seconds
        return delay

    async def _recover(self, cause: RestartCause, delay: float | None) -> None:
        while delay is not None:
            await self._latest.close(_CLOSE_SECONDS)
            logger.warning("restart %d of the engine in a row, in %g s", self._budget.num_failures, delay)
            self.num_restarts[cause] += 1
            await asyncio.sleep(delay)
            self._latest = self._new_client()
            try:
                ready = await self._restarted(self._latest)
            except Exception as error:  # noqa: BLE001 # of whatever kind: it is one more failure, which is bounded
                logger.error("the engine did not start again: %s", error)  # noqa: TRY400 # it is the process's
                kind = error.kind if isinstance(error, EngineStartFailed) else type(error).__name__
                cause, delay = "start", self._note_failure(EngineError("start", kind, str(error)))
            else:
                logger.warning("the engine is there again; %d outputs go on", len(self._dispatcher))
                self._install(self._latest, ready)
                return

    async def _restarted(self, client: EngineClient) -> EngineReady:
        """Give what the engine told when it was ready.

        Raises:
            RunnerdError: It did not become ready, or serves another model.
            TimeoutError: It takes far longer than the first one did.
        """
        assert self.ready is not None
        step_timeout = self._config.step_timeout_seconds
        limit = None
        if step_timeout:
            limit = max(_STARTS_AT_MOST * self._start_seconds + step_timeout, _START_SECONDS_AT_LEAST)
        try:
            async with asyncio.timeout(limit):
                ready = await self._started(client, lambda progress: None)
        except TimeoutError:
            raise TimeoutError(f"it was not ready in {limit:g} s") from None
        check_same_model(self.ready, ready)
        return ready

    def _give_up(self) -> None:
        num_failures = self._budget.num_failures
        times = f", {num_failures} times in a row" if num_failures > 1 else ""
        logger.error("the engine failed%s: %s; it is not restarted again", times, self.last_error)
        # Not how: that may name files, and what others asked for.
        error = EngineFailed(f"the engine failed{times}; {_DETAILS}", retry_after_seconds=self._retry())
        self._set_state("failed")
        self._dispatcher.fail_all(error)

    def _retry(self) -> float:
        left = self._back_at - asyncio.get_running_loop().time()
        return max(left, _MIN_RETRY_SECONDS) if self.state != "failed" else max(self._start_seconds, _MIN_RETRY_SECONDS)

    def _set_state(self, state: EngineState) -> None:
        if state != self.state:
            self.state = state
            self._on_state(state)
