"""The front end: takes generations, gives their events, and owns the engine's supervisor and the tokenizer.

Where a request lives, from the first look at it to its last event, is one ``try``/``finally`` in
:meth:`Frontend.generate`: whatever ends it (the reader leaves, a cancel, an error), the engine forgets it. Engine
requests are named by numbers that are never used twice, so a request id may be used again as soon as it is free. This
module knows no gRPC and no torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec

from runnerd_service.config import ServerConfig
from runnerd_service.engine.messages import EngineReady, Load, LoadProgress
from runnerd_service.errors import EngineFailed, NotReady, Overloaded, RequestAborted, RunnerdError
from runnerd_service.frontend.draining import Draining
from runnerd_service.frontend.effort import Effort, effort_of, effort_of_prompt
from runnerd_service.frontend.feed import OutputFeed
from runnerd_service.frontend.live import LiveRequest, LiveRequests
from runnerd_service.frontend.loading import LoadedModel, load_model
from runnerd_service.frontend.ongoing import OngoingRequest
from runnerd_service.frontend.preparation import PreparedRequest
from runnerd_service.frontend.sight import CapturedTrace, TraceCapture, metrics_snapshot
from runnerd_service.frontend.states import StateBoard
from runnerd_service.frontend.stream import RequestStream
from runnerd_service.frontend.supervisor import EngineState, EngineSupervisor
from runnerd_service.frontend.turns import Turns
from runnerd_service.frontend.types import (
    ChatPrompt,
    Event,
    Generation,
    ModelDescription,
    ServerState,
    Tokenized,
)
from runnerd_service.guided.checker import NUM_PROCESSES
from runnerd_service.metrics import MetricsSnapshot
from runnerd_service.telemetry.logs import printable, with_fields
from runnerd_service.telemetry.requests import RequestStats, RequestTimes

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)``."""

_LOADING_RETRY_SECONDS = 2.0
_QUEUE_RETRY_SECONDS = 1.0
_SHUTTING_DOWN = "the server is shutting down; ask another one, or this address when a new one listens there"
"""Without a time to try again: no time brings this server back."""


class Frontend:
    """Serves generations by one engine, which is restarted when it fails.

    Args:
        config: The server's configuration.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._engine = EngineSupervisor(config, self._on_engine_state)
        self._states = StateBoard("loading")
        self._model: LoadedModel | None = None
        self._live = LiveRequests(config)
        self._turns = Turns()
        # Few, so that slow templates of clients hold up each other and nobody else.
        self._template_threads = ThreadPoolExecutor(2, thread_name_prefix="chat-template")
        self._guide_threads = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="guide")
        self._huge_text_thread = ThreadPoolExecutor(1, thread_name_prefix="huge-text")
        self._traces = TraceCapture()
        self.request_stats = RequestStats()
        """How requests went; whoever calls :meth:`generate` tells it of their ends."""
        self._start_error = ""
        self._draining = Draining(self._live, self._end_live, self._engine.retire)

    @property
    def state(self) -> ServerState:
        """What the server does now."""
        return self._states.state

    def states(self) -> AsyncGenerator[ServerState, None]:
        """Give the present state, then each change, until the front end is closed."""
        return self._states.follow()

    @property
    def load(self) -> Load:
        """The latest counters; without an engine, all live outputs wait."""
        load, num_held = self._engine.load, self._live.num_held
        return msgspec.structs.replace(load, num_waiting=load.num_waiting + num_held) if num_held else load

    @property
    def engine_ready(self) -> EngineReady | None:
        """What the latest engine told when it was ready; None before the first was."""
        return None if self._model is None else self._engine.ready

    @property
    def model_name(self) -> str | None:
        """The model, as requests name it; None until that is known."""
        return self._config.served_model_name if self._model is None else self._model.served.name

    @property
    def last_error(self) -> str:
        """The engine's last error; empty if there was none."""
        return self._start_error or self._engine.last_error

    @property
    def num_engine_restarts(self) -> int:
        """Restarts of the engine, those that failed included."""
        return sum(self._engine.num_restarts.values())

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine; None while there is none."""
        return self._engine.pid

    @property
    def num_live(self) -> int:
        """Requests whose readers have not left."""
        return len(self._live)

    async def start(self, on_progress: Progress = lambda stage, done, total: None) -> None:
        """Load the tokenizer and start the engine, both at once; then serve.

        Raises:
            ConfigurationError: Something cannot be served as configured.
            EngineStartFailed: The runner or the model cannot be used.
        """

        def report(progress: LoadProgress) -> None:
            on_progress(progress.stage, progress.done, progress.total)

        try:
            self._model = await load_model(self._config, self._engine.start(report))
        except BaseException as error:
            self._start_error = str(error)
            self._states.set("failed")
            await self._engine.close()
            raise
        if self._model.vocabulary is not None:
            self._engine.use_vocabulary(self._model.vocabulary)
        if self.state == "loading":
            self._states.set("serving")
            self._on_engine_state(self._engine.state)  # it may have failed before the tokenizer was loaded

    async def generate(self, generation: Generation, times: RequestTimes | None = None) -> AsyncGenerator[Event, None]:
        """Give the events of a generation; close the generator (``contextlib.aclosing``) to end it early.

        Args:
            generation: What is asked for.
            times: Takes what becomes known of the request; None: nobody wants to know.

        Raises:
            RunnerdError: What :meth:`open` raises.
        """
        async with self.open(generation, times) as stream:
            while (event := await stream.next_event()) is not None:
                yield event

    @asynccontextmanager
    async def open(
        self, generation: Generation, times: RequestTimes | None = None
    ) -> AsyncGenerator[RequestStream, None]:
        """Begin a generation and give its events to come; whatever ends the block ends the generation.

        Args:
            generation: What is asked for.
            times: Takes what becomes known of the request; None: nobody wants to know.

        Raises:
            InvalidRequest: Fields are wrong or not served.
            ModelNotFound: It names another model.
            DuplicateRequest: Its id is that of a live request.
            NotReady: The model loads, the server drains, or the engine is being restarted.
            Overloaded: Too many requests wait, or its deadline passes before it can begin.

        :meth:`RequestStream.next_event` raises what comes later.
        """
        loop = asyncio.get_running_loop()
        arrival = loop.time()
        model = self._require_model(accepts_work=True)
        # before any work is done for it
        self._live.check_room(generation.tenant, 1, self._engine.load.num_waiting)
        live = self._live.begin(generation.request_id, generation.tenant)
        if times is not None:
            live.times = times
        timers: list[asyncio.TimerHandle] = []
        try:
            request = await self._run(effort_of(generation), lambda: model.preparer.prepare(generation))
            if self._config.deadline_check and generation.deadline_seconds is not None:
                left = arrival + generation.deadline_seconds - loop.time()
                self._live.check_deadline(generation.tenant, request.priority, left)
            stream = self._submit(model, live, request)
            if request.time_limit_seconds is not None:
                timers.append(loop.call_at(arrival + request.time_limit_seconds, stream.end_by_time))
            if self._config.queue_timeout_seconds:
                timers.append(loop.call_at(arrival + self._config.queue_timeout_seconds, self._end_waiting, live))
            yield stream
        finally:
            for timer in timers:
                timer.cancel()
            self._forget(live.uids)
            self._live.end(live)

    def abort(self, request_id: str, tenant: str | None = None) -> bool:
        """End a live request: its reader gets RequestAborted. Give whether there was something to end.

        Args:
            request_id: As it was given or drawn.
            tenant: Whose it is; None: anybody's, and of all that have this id.
        """
        found = self._live.find(request_id, tenant)
        ended = [self._fail(live, RequestAborted(f"request {request_id!r} was aborted")) for live in found]
        return any(ended)

    async def tokenize(self, prompt: str | ChatPrompt, add_special_tokens: bool | None = None) -> Tokenized:
        """Give the token ids that :meth:`generate` would see.

        Raises:
            InvalidRequest: The prompt is wrong.
            NotReady: The model loads or is gone.
        """
        preparer = self._require_model(accepts_work=False).preparer
        add = add_special_tokens is not False
        return await self._run(effort_of_prompt(prompt), lambda: preparer.tokenize(prompt, add_special_tokens=add))

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool | None = None) -> str:
        """Give the text of token ids; invalid UTF-8 shows as U+FFFD.

        Raises:
            InvalidRequest: Ids outside the vocabulary.
            NotReady: The model loads or is gone.
        """
        preparer = self._require_model(accepts_work=False).preparer
        skip = skip_special_tokens is not False
        return await self._run(
            effort_of_prompt(token_ids), lambda: preparer.detokenize(token_ids, skip_special_tokens=skip)
        )

    def describe_model(self) -> ModelDescription:
        """Describe the served model.

        Raises:
            NotReady: The model loads or is gone.
        """
        return self._require_model(accepts_work=False).describe()

    def metrics(self) -> MetricsSnapshot:
        """Give the figures as they are now; may be called from any thread."""
        engine = self._engine
        return metrics_snapshot(
            self.load,
            self.engine_ready,
            engine_restarts=engine.num_restarts,
            num_poisonous=engine.num_poisonous,
            tenants=self._live.tenant_figures(),
            model_name=self.model_name,
            requests=self.request_stats,
        )

    async def capture_trace(self, seconds: float) -> CapturedTrace:
        """Record the engine's steps for ``seconds``, which are at most 60.

        Raises:
            InvalidRequest: ``seconds`` is out of range.
            Overloaded: Another caller records.
            NotReady: The model loads or is gone, or the engine is being restarted.
            EngineFailed: The engine failed meanwhile.
        """
        self._require_model(accepts_work=False)
        return await self._traces.capture(self._engine.client, seconds)

    async def recent_steps(self) -> str:
        """Give JSON of :class:`~runnerd_service.engine.trace.Trace`: the engine's last steps; empty without one."""
        if self._model is None:
            return ""
        try:
            return str(await self._engine.client.call("recent_steps"))
        except (NotReady, EngineFailed):
            return ""

    async def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; gives how many KV blocks held one. Live requests go on with the blocks they have.

        Raises:
            NotReady: The model loads or is gone, or the engine is being restarted.
            EngineFailed: The engine failed meanwhile; the next one starts with an empty cache.
        """
        self._require_model(accepts_work=False)
        num_blocks = int(await self._engine.client.call("reset_prefix_cache"))
        logger.info("the prefix cache was reset: %d blocks held a prefix", num_blocks)
        return num_blocks

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the live ones; give whether all ended by themselves.

        A cancel ends the wait; the server drains on, and the limit holds.

        Args:
            seconds: After which those still live are ended; their readers get NotReady. Of several calls the first
                limit to pass counts.
        """
        self._refuse_new()
        return await self._draining.wait(seconds)

    def end_requests(self) -> None:
        """Refuse new requests and end the live ones at once: their readers get NotReady."""
        self._refuse_new()
        self._draining.end_all()

    async def close(self) -> None:
        """End all requests and the engine process. Harmless when closed already."""
        self.end_requests()
        self._draining.close()
        await self._engine.close()
        self._template_threads.shutdown(wait=False, cancel_futures=True)
        self._guide_threads.shutdown(wait=False, cancel_futures=True)
        self._huge_text_thread.shutdown(wait=False, cancel_futures=True)
        if self._model is not None and self._model.guides is not None:
            self._model.guides.close()
        self._states.close()

    def _require_model(self, *, accepts_work: bool) -> LoadedModel:
        if self.state == "failed":
            if self._start_error:
                raise NotReady(f"the engine failed: {self._start_error}")
            raise self._engine.not_ready()
        if accepts_work and self.state == "draining":
            raise NotReady(_SHUTTING_DOWN)
        if self._model is None:
            raise NotReady("the model is loading", retry_after_seconds=_LOADING_RETRY_SECONDS)
        if accepts_work and self._engine.state != "serving":
            raise self._engine.not_ready()
        return self._model

    async def _run(self, effort: Effort, work: Callable[[], _Result]) -> _Result:
        """Do the work where it holds up nobody: the tokenizer leaves the interpreter to other threads."""
        if effort == "small":
            return work()
        threads = {
            "foreign": self._template_threads,
            "guided": self._guide_threads,
            "huge": self._huge_text_thread,
        }.get(effort)
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def _submit(self, model: LoadedModel, live: LiveRequest, request: PreparedRequest) -> RequestStream:
        """Give the request to the engine. Nothing in here waits, so no cancel can fall between its parts."""
        if live.error is not None:
            raise live.error
        self._require_model(accepts_work=True)  # it may have changed while a long prompt was prepared
        num_prompt_tokens = len(request.prompt_token_ids)
        if (live.tenant or "\0" in request.cache_salt) and not self._config.security.share_prefixes:
            # What others have cached shows in times and counts. No tenant's name has this character.
            request = replace(request, cache_salt=f"{live.tenant}\0{request.cache_salt}")
        self._live.check_room(live.tenant, request.n, self._engine.load.num_waiting, num_prompt_tokens)
        stream = RequestStream(
            live.request_id, request, model.tokenizer, self._turns, lambda index: self._forget((live.uids[index],))
        )
        live.stream = stream
        name = printable(live.request_id)
        ongoing = OngoingRequest(lambda error: self._fail(live, error), name)
        for buffer in stream.outputs:
            uid = self._live.open_output(live, num_prompt_tokens)
            added = request.add_request(uid, buffer.index, time.monotonic_ns())
            meter = self.request_stats.meter(live.times)
            feed = OutputFeed(uid, stream, buffer, meter, self._live, self._engine)
            start = partial(self._engine.add_accepted, ongoing, added, feed)
            self._live.start_output(uid, request.priority, num_prompt_tokens + request.max_tokens, start)
        live.times.num_prompt_tokens = num_prompt_tokens
        logger.debug("request %s: %d prompt tokens", name, num_prompt_tokens, extra=with_fields(request_id=name))
        return stream

    def _end_waiting(self, live: LiveRequest) -> None:
        """End a request that has waited for a place as long as it may."""
        if not self._live.has_begun(live):
            timeout, limit = self._config.queue_timeout_seconds, self._live.held_by(live)
            of_whom = f"of tenant {live.tenant} (limit --{limit.replace('_', '-')}) " if limit else ""
            text = f"no place {of_whom}became free in {timeout:g} s (--queue-timeout); try later, or elsewhere"
            subject = limit or "queue_timeout"
            self._fail(live, Overloaded(text, subject=subject, retry_after_seconds=_QUEUE_RETRY_SECONDS))

    def _fail(self, live: LiveRequest, error: RunnerdError) -> bool:
        failed = live.fail(error)
        if failed:
            self._forget(live.uids)
        return failed

    def _refuse_new(self) -> None:
        if self.state in ("loading", "serving", "recovering"):
            self._states.set("draining")

    def _end_live(self) -> None:
        self._fail_all(NotReady(_SHUTTING_DOWN))

    def _fail_all(self, error: RunnerdError) -> None:
        for live in self._live:
            self._fail(live, error)

    def _forget(self, uids: Sequence[int]) -> None:
        self._engine.abort(uids)
        self._live.close_outputs(uids)  # which may start others of the tenant

    def _on_engine_state(self, state: EngineState) -> None:
        if state == "failed" and self._model is not None:
            self._states.set("failed")
            # Those that an engine had are failed by the supervisor, with the reason; these are held back from it.
            asyncio.get_running_loop().call_soon(self._fail_all, self._engine.not_ready())
        elif state in ("serving", "recovering") and self.state in ("serving", "recovering"):
            self._states.set(state)
