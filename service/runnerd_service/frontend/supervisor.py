"""Keeps an engine there: starts it, sees it fail or hang, restarts it, and lets live requests go on where they were.

Each engine process has a client of its own; what belongs to a request outlives them. A token depends on what came
before it and on nothing else, so another engine, given prompt and outputs, goes on with the very token that the first
one would have given. This module knows no text and no gRPC.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from runnerd_service.config import ServerConfig
from runnerd_service.engine.client import EngineClient
from runnerd_service.engine.messages import AddRequest, EngineError, EngineReady, Load, LoadProgress, RequestOutput
from runnerd_service.errors import EngineFailed, EngineStartFailed, NotReady, PoisonousRequest, RowFailed, RunnerdError
from runnerd_service.frontend.ongoing import OngoingOutput, OngoingRequest
from runnerd_service.frontend.restarts import (
    CAUSES,
    RestartBudget,
    RestartCause,
    cause_of,
    check_same_model,
    is_from_outside,
)
from runnerd_service.frontend.suspects import Suspects, at_work, is_accused
from runnerd_service.frontend.totals import at_rest, with_totals
from runnerd_service.frontend.watchdog import wait_for_hang

logger = logging.getLogger(__name__)

EngineState = Literal["starting", "serving", "recovering", "failed"]

_CLOSE_SECONDS = 5.0
"""What an engine that failed is given to end by itself, so that its device is free for the next one."""
_MIN_RETRY_SECONDS = 1.0
_STARTS_AT_MOST = 3.0
"""A restart may take this many times what the first start took, and the time of a step."""


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
        self.num_poisonous = 0
        """Requests that were found to kill engines."""
        self._config = config
        self._on_state = on_state
        # Set while one is there; a client is new until it is ready and old once it has failed.
        self._client: EngineClient | None = None
        self._latest = self._new_client()
        self._outputs: dict[int, OngoingOutput] = {}
        """Outputs that have not ended, by uid: in the order of their arrival."""
        self._engine_uids = itertools.count(1)
        self._budget = RestartBudget(config.max_engine_restarts, config.engine_restart_backoff_seconds)
        self._suspects = Suspects()
        # Who is tried alone, and whether anybody may have to be, or is accused.
        self._alone: OngoingRequest | None = None
        self._on_trial = False
        self._engine_is_sound = False
        self._advances = False
        self._load_before: Load | None = None
        self._start_seconds = 0.0
        self._back_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def load(self) -> Load:
        """The counters: what there is now, and totals since the first start."""
        client = self._client
        if client is None:
            return at_rest(self._load_before or Load(), len(self._outputs))
        return client.load if self._load_before is None else with_totals(client.load, self._load_before)

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
        if self.state == "failed":
            return NotReady(f"the engine failed: {_first_line(self.last_error)}", retry_after_seconds=self._retry())
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

    def add(self, owner: OngoingRequest, request: AddRequest, sink: Callable[[RequestOutput], None]) -> None:
        """Give an output to the engine, and to those after it.

        Args:
            owner: The client's request that it belongs to.
            request: Its uid was never used before.
            sink: Called with what engines give, each token once, up to a finish that is not "failed": what becomes of
                a request that fails is told to its owner.

        Raises:
            NotReady: No engine takes requests now.
        """
        if self.state != "serving":
            raise self.not_ready()
        output = self._outputs[request.uid] = owner.outputs[request.uid] = OngoingOutput(owner, request, sink)
        self._admit(self.client, [output])

    def abort(self, uids: Iterable[int]) -> None:
        """Forget outputs; their sinks are not called any more. Those that have ended are passed over."""
        gone = [self._outputs[uid] for uid in uids if uid in self._outputs]
        for output in gone:
            self._forget(output)
        self._withdraw(gone)

    async def close(self) -> None:
        """End the engine and all attempts to have one. Harmless when closed."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._latest.close()
        self._client = None

    def _new_client(self) -> EngineClient:
        engine = self._config.engine
        if self.ready is not None:  # what was accepted has to fit, however much memory is free this time
            engine = replace(engine, max_model_len=self.ready.max_model_len)
        client = EngineClient(engine, lambda error: self._on_failure(client, error))
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
        self._advance()

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
        logger.error("the engine failed: %s: %s", error.kind, error.message)
        self._load_before = self.load
        self._client = self._alone = None
        there = at_work(self._outputs.values(), self._config.engine.max_num_seqs)
        self._suspects.note_crash(there, from_outside=is_from_outside(error, client.exit_code))
        self._on_trial, self._engine_is_sound = True, False
        for output in self._outputs.values():
            output.engine_uid = None
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
                logger.warning("the engine is there again; %d outputs go on", len(self._outputs))
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
        limit = _STARTS_AT_MOST * self._start_seconds + step_timeout if step_timeout else None
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
        error = EngineFailed(
            f"the engine failed{times}: {_first_line(self.last_error)}", retry_after_seconds=self._retry()
        )
        logger.error("%s; it is not restarted again", error)
        self._set_state("failed")
        for owner in {output.owner: None for output in self._outputs.values()}:
            self._fail(owner, error)

    def _retry(self) -> float:
        left = self._back_at - asyncio.get_running_loop().time()
        return max(left, _MIN_RETRY_SECONDS) if self.state != "failed" else max(self._start_seconds, _MIN_RETRY_SECONDS)

    def _set_state(self, state: EngineState) -> None:
        if state != self.state:
            self.state = state
            self._on_state(state)

    def _admit(self, client: EngineClient, outputs: Iterable[OngoingOutput]) -> None:
        for output in outputs:
            client.add(output.admitted(next(self._engine_uids)), partial(self._receive, client, output))

    def _withdraw(self, outputs: Iterable[OngoingOutput]) -> None:
        uids = [output.engine_uid for output in outputs if output.engine_uid is not None]
        for output in outputs:
            output.engine_uid = None
        if uids and self._client is not None:
            self._client.abort(uids)

    def _forget(self, output: OngoingOutput) -> None:
        self._outputs.pop(output.request.uid, None)
        output.owner.outputs.pop(output.request.uid, None)
        if self._on_trial:
            self._advance_soon()

    def _receive(self, client: EngineClient, output: OngoingOutput, message: RequestOutput) -> None:
        if message.finish == "failed":
            if client.failure is None and not self._closing:
                self._fail(output.owner, RowFailed(message.error))
            return
        if output.take(message):
            self._note_progress(output)
        if message.finish is not None:
            self._forget(output)
        try:
            output.sink(message)
        except Exception:
            logger.exception("a request is failed: what came of it cannot be used")
            self._fail(output.owner, RunnerdError("internal error; the server's log has the details"))

    def _note_progress(self, output: OngoingOutput) -> None:
        self._budget.note_progress()
        self._suspects.note_progress(output.owner)
        if self._on_trial:
            self._engine_is_sound = True
            self._advance_soon()

    def _fail(self, owner: OngoingRequest, error: RunnerdError) -> None:
        owner.fail(error)
        self.abort(tuple(owner.outputs))

    def _advance_soon(self) -> None:
        """Advance when the caller has ended: what it works on may change."""
        if not self._advances:
            self._advances = True
            asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        """Give the engine what it is to work on now."""
        self._advances = False
        if self._client is None or self._closing:
            return
        for owner in self._suspects.to_blame(self._outputs.values(), engine_is_sound=self._engine_is_sound):
            self._blame(owner)
        if self._alone is not None and self._alone.num_crashes and _is_at_work(self._alone):
            return  # it has not got further yet
        suspect = self._suspects.to_try_alone(self._outputs.values())
        if self._alone is not None:
            self._withdraw(tuple(self._alone.outputs.values()))
        self._alone = suspect
        if suspect is not None:
            logger.warning("a request that was there when engines died is tried alone")
            self._admit(self._client, tuple(suspect.outputs.values())[: self._config.engine.max_num_seqs])
            return
        outputs = [output for output in self._outputs.values() if output.engine_uid is None]
        self._admit(self._client, (output for output in outputs if not is_accused(output.owner)))
        self._on_trial = any(output.owner.num_crashes for output in self._outputs.values())
        self._set_state("serving")

    def _blame(self, owner: OngoingRequest) -> None:
        self.num_poisonous += 1
        logger.error("a request is failed: engines die of it")
        text = "the engine died of this request each time that it was tried, at last alone; it is not tried again"
        self._fail(owner, PoisonousRequest(text))


def _is_at_work(owner: OngoingRequest) -> bool:
    return any(output.engine_uid is not None for output in owner.outputs.values())


def _first_line(error: str) -> str:
    # Without the process's last lines, which are for the operator.
    return error.partition("\n")[0].removesuffix("; its last lines:")
