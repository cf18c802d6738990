"""The engine: requests in, outputs out, one step at a time. It knows no socket, no process, no text and no torch.

One loop serves every depth: schedule, launch, take what has resolved. With one step in flight that is synchronous
execution; with more, the device runs step n while the host schedules step n + 1.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from runnerd_service.engine.depth import AdaptiveDepth
from runnerd_service.engine.guided_requests import GuidedRequests, GuideEnd
from runnerd_service.engine.kv_cache import BlockManager, max_request_tokens
from runnerd_service.engine.messages import AddRequest, Load, RequestOutput
from runnerd_service.engine.request import RequestState, request_from
from runnerd_service.engine.scheduler import ScheduledStep, Scheduler
from runnerd_service.engine.settle import Settler, finish_of
from runnerd_service.engine.timeline import LaunchMark, Timeline
from runnerd_service.guided.guide import Vocabulary
from runnerd_spi import KVMemory, ModelRunner, StepFailed, StepHandle


class EngineDead(Exception):
    """The runner is unusable; the message holds the root cause, ``kind`` the class name of the error.

    Every later step would raise this again.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The sizes that are fixed once the model is loaded and the KV cache is there."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_in_flight: int
    adaptive_depth: bool = False
    """Whether only one step is in flight where overlapping would gain next to nothing."""
    prefix_caching: bool = True
    chunked_prefill: bool = True
    kv_memory: KVMemory = "blocks"
    lora: bool = False
    priority_ageing_seconds: float = 0.0
    """Waiting time that raises a request's priority by one level; 0: it stays what it is."""
    guided_decoding: bool = False
    """Whether plans may hold masks."""
    guide_cache_size: int = 64


@dataclass(frozen=True, slots=True)
class _Launched:
    step: ScheduledStep
    handle: StepHandle
    mark: LaunchMark


class Engine:
    """Runs requests on a runner that is warmed up. Not thread-safe.

    Args:
        runner: Ready for ``execute_model``; the engine is its only user. The caller closes it.
        limits: The sizes that hold.
    """

    def __init__(self, runner: ModelRunner, limits: EngineLimits) -> None:
        self.timeline = Timeline()
        """Where the time goes; whoever drives the engine tells it what is done between steps: idle, inbox."""
        self._runner = runner
        self._limits = limits
        self._scheduler = Scheduler(
            BlockManager(limits.num_blocks, limits.block_size),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            prefix_caching=limits.prefix_caching,
            chunked_prefill=limits.chunked_prefill,
            grants_blocks=limits.kv_memory == "blocks",
        )
        self._settler = Settler(self._scheduler, limits.vocab_size)
        self._live: dict[int, RequestState] = {}
        self._launched: deque[_Launched] = deque()
        # Outputs of requests that ended without a step.
        self._immediate: list[RequestOutput] = []
        self._adaptive: AdaptiveDepth | None = None
        if limits.adaptive_depth:
            self._adaptive = AdaptiveDepth(limits.max_in_flight)
        self._host_ns = 0
        self._guides: GuidedRequests | None = None
        self._num_arrivals = 0
        self._ageing_ns = round(limits.priority_ageing_seconds * 1e9)
        self._num_steps = 0
        self._num_graph_steps = 0
        self._num_graph_misses = 0

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has something to do. False means idle: every counter is zero."""
        scheduler = self._scheduler
        has_steps = bool(scheduler.has_requests or self._launched or scheduler.has_releases)
        return has_steps or bool(self._immediate or self._num_compiling)

    @property
    def depth(self) -> int:
        """Steps that may be in flight now."""
        return self._limits.max_in_flight if self._adaptive is None else self._adaptive.depth

    def use_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Take what guides are followed in; guided requests may come after that."""
        self._guides = GuidedRequests(vocabulary, self._limits.guide_cache_size)

    def add(self, message: AddRequest) -> None:
        """Take a request in. One that can never be served gets its failure as output of the next step.

        Raises:
            ValueError: A live request has this uid.
        """
        if message.uid in self._live:
            raise ValueError(f"uid {message.uid} names a live request; draw a new one")
        error = self._rejection(message)
        if error:
            self._immediate.append(RequestOutput(message.uid, finish="failed", error=error))
            return
        request = request_from(message, self._num_arrivals, self._limits.max_model_len, self._ageing_ns)
        self._num_arrivals += 1
        finish = finish_of(request) if message.output_token_ids else None
        if finish is not None:
            matched = None if finish == "length" else request.token_ids[-1]
            self._immediate.append(RequestOutput(request.uid, finish=finish, matched_token_id=matched))
            return
        self._live[request.uid] = request
        if message.guide is None or self._guides is None:
            self._schedule(request)
        else:
            self._guides.start(request, message.guide)

    def abort(self, uids: Iterable[int]) -> None:
        """End these requests; nothing more of them is shown. Unknown uids have ended already and are passed over.

        Slots are given back with the next step, blocks once the launched steps of the request have settled.
        """
        gone = set(uids)
        for uid in gone:
            request = self._live.pop(uid, None)
            is_scheduled = self._guides is None or not self._guides.forget(uid)
            if request is not None and is_scheduled:
                self._scheduler.finish(request)
        self._immediate = [output for output in self._immediate if output.uid not in gone]

    def step(self) -> list[RequestOutput]:
        """Launch one step if one can be, take what has resolved, and give what is new.

        When nothing can be launched, it waits for the oldest launched step instead.

        Raises:
            EngineDead: The runner failed fatally or refused a plan.
        """
        # Processor time: where device and host share cores, elapsed time holds the waits for a core, too.
        begin_ns = time.thread_time_ns()
        outputs, self._immediate = self._immediate, []
        self.timeline.enter("schedule")
        if self._num_compiling:
            outputs += self._take_compiled()
        step = self._scheduler.schedule()
        if step is None and not self._launched and self._scheduler.has_releases:
            step = self._scheduler.schedule_releases()
        if step is not None:
            self._launch(step if self._guides is None else self._guides.masked(step))
            while self._launched and (len(self._launched) >= self.depth or self._launched[0].handle.done()):
                outputs += self._settle_oldest()
        elif self._launched:
            outputs += self._settle_oldest()
        elif self._guides is not None and self._num_compiling and not outputs:
            self._guides.wait()
        for output in outputs:
            if output.finish is not None:
                self._live.pop(output.uid, None)
                if self._guides is not None:
                    self._guides.forget(output.uid)
        self.timeline.note_work(waits=self._scheduler.has_runnable)
        self.timeline.enter("send")
        self._host_ns += time.thread_time_ns() - begin_ns
        return outputs

    def load(self) -> Load:
        """Give the counters as they are now."""
        scheduler = self._scheduler
        return Load(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + self._num_compiling,
            num_used_blocks=scheduler.blocks.num_used,
            num_blocks=scheduler.blocks.num_blocks,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            prompt_tokens=scheduler.num_prompt_tokens,
            generation_tokens=self._settler.num_generated_tokens,
            num_unresolved_steps=len(self._launched),
            times=self.timeline.times(),
            num_graph_steps=self._num_graph_steps,
            num_graph_misses=self._num_graph_misses,
            depth=self.depth,
        )

    def check_integrity(self) -> str:
        """Compare the books with each other; give the counts of what is held, as JSON.

        Raises:
            IntegrityError: They do not agree.
        """
        self._scheduler.check_integrity()
        load = self.load()
        return json.dumps(
            {
                "num_running": load.num_running,
                "num_waiting": load.num_waiting,
                "num_used_blocks": load.num_used_blocks,
                "num_unresolved_steps": load.num_unresolved_steps,
            }
        )

    def reset_prefix_cache(self) -> str:
        """Forget all cached prefixes; gives how many blocks held one, as text. Running requests keep their blocks."""
        return str(self._scheduler.reset_prefix_cache())

    def start_trace(self) -> str:
        """Record the steps from now on."""
        self.timeline.start_trace()
        return ""

    def stop_trace(self) -> str:
        """End the recording; gives JSON of :class:`runnerd_service.engine.trace.Trace`."""
        return self.timeline.stop_trace()

    @property
    def _num_compiling(self) -> int:
        return 0 if self._guides is None else self._guides.num_compiling

    def _schedule(self, request: RequestState) -> None:
        self._scheduler.add(request)
        self.timeline.note_work(waits=True)

    def _take_compiled(self) -> list[RequestOutput]:
        assert self._guides is not None
        ready, ends = self._guides.take_compiled()
        for request in ready:
            self._schedule(request)
        return [_ended(end) for end in ends]

    def _advance_guides(self, step: ScheduledStep) -> list[RequestOutput]:
        """Advance what a settled step has guided; give the ends of requests that have no next token."""
        if self._guides is None:
            return []
        ends = self._guides.advance(step)
        for end in ends:
            self._scheduler.finish(end.request)
        return [_ended(end) for end in ends]

    def _launch(self, step: ScheduledStep) -> None:
        step_id = step.plan.step_id
        mark = self.timeline.mark(step.plan)
        self.timeline.scheduled(step_id)
        self.timeline.enter("prepare", step_id)
        try:
            handle = self._runner.execute_model(step.plan)
        except Exception as error:
            raise _dead(error) from error
        self._launched.append(_Launched(step, handle, mark))
        self.timeline.enqueued(handle.timeline.host_end_ns, self._launched[0].step.plan.step_id)
        self._num_steps += bool(step.plan.rows)

    def _settle_oldest(self) -> list[RequestOutput]:
        launched = self._launched.popleft()
        self.timeline.enter("wait", launched.step.plan.step_id)
        try:
            output = launched.handle.result()
        except StepFailed as error:
            if error.fatal:
                raise _dead(error) from error
            self._begin_update(launched)
            return self._settler.fail(launched.step, str(error))
        except Exception as error:
            raise _dead(error) from error
        self._begin_update(launched)
        return [*self._settler.settle(launched.step, output), *self._advance_guides(launched.step)]

    def _begin_update(self, launched: _Launched) -> None:
        self.timeline.enter("update", launched.step.plan.step_id)
        timeline = launched.handle.timeline
        self._num_graph_steps += timeline.graph == "replayed"
        self._num_graph_misses += timeline.graph == "missed"
        self.timeline.settled(launched.mark, timeline)
        if self._adaptive is not None:
            self._adaptive.settled(self.timeline.device_busy_ns, self._host_ns)

    def _rejection(self, message: AddRequest) -> str:
        """Say why a request can never be served; empty when it can."""
        limits = self._limits
        token_ids = (*message.prompt_token_ids, *message.output_token_ids)
        num_prompt = len(message.prompt_token_ids)
        if not num_prompt or message.max_tokens < 1:
            return f"{num_prompt} prompt tokens and max_tokens {message.max_tokens}, expected at least 1 of each"
        if not 0 <= min(token_ids) <= max(token_ids) < limits.vocab_size:
            return f"token ids from {min(token_ids)} to {max(token_ids)}, expected 0 to {limits.vocab_size - 1}"
        if num_prompt >= limits.max_model_len:
            return f"{num_prompt} prompt tokens leave no room for an output in max_model_len {limits.max_model_len}"
        if message.guide is not None and (self._guides is None or not limits.guided_decoding):
            return "a guided request, but this engine knows no vocabulary, or its runner follows no guide"
        if message.adapter_id is not None and not limits.lora:
            return f"adapter {message.adapter_id!r}, but the runner serves no adapters"
        asked = min(num_prompt + message.max_tokens, limits.max_model_len)
        most = max_request_tokens(limits.num_blocks, limits.block_size)
        if asked > most:
            return (
                f"{num_prompt} prompt tokens and max_tokens {message.max_tokens} need room for {asked} tokens, "
                f"but the KV cache of {limits.num_blocks} blocks holds {most} of one request; lower max_tokens or give "
                "the cache more memory"
            )
        if len(token_ids) > asked:
            return f"{len(message.output_token_ids)} outputs given, more than max_tokens {message.max_tokens}"
        return ""


def _ended(end: GuideEnd) -> RequestOutput:
    cached = end.request.num_cached_tokens
    if end.error:
        return RequestOutput(
            end.request.uid, finish="failed", num_cached_tokens=cached, error=end.error, field=end.field
        )
    return RequestOutput(end.request.uid, finish="guide", num_cached_tokens=cached)


def _dead(error: Exception) -> EngineDead:
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    text = str(error) if root is error else f"{error} (root cause: {type(root).__name__}: {root})"
    return EngineDead(type(error).__name__, " ".join(text.split()))
