"""The engine process's loop without the process: a real engine on a real runner, each step's times kept.

An iteration is what the engine process does for a step: drain the inbox, step, encode and send one batch of outputs.
The socket is a real one; its other end is read between runs. It knows nothing of what is compared with what.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import zmq
from common import busy_seconds, random_prompts

from runnerd_service.config import EngineConfig
from runnerd_service.engine.messages import AddRequest, Sampling, StepOutputs
from runnerd_service.engine.process import Channel
from runnerd_service.engine.setup import resolve, start_engine
from runnerd_spi import (
    KVBudget,
    ModelInfo,
    ModelRunner,
    Progress,
    RunnerConfig,
    RunnerPlugin,
    StepHandle,
    StepOutput,
    StepPlan,
    StepTimeline,
    load_runner,
)

_MARGIN_STEPS = 16


@dataclass(slots=True)
class Calls:
    """What the engine called in the runner."""

    entered_ns: int = 0
    """When ``execute_model`` was entered last, and when it was left."""
    left_ns: int = 0
    result_ns: int = 0
    """Time in ``result`` in the current iteration."""
    pending: deque[StepHandle] = field(default_factory=deque)
    timelines: list[StepTimeline] = field(default_factory=list)

    def collect(self) -> None:
        """Take the timelines of steps that are done, and let go of their outputs."""
        while self.pending and self.pending[0].done():
            self.timelines.append(self.pending.popleft().timeline)


class TimedHandle:
    """A handle whose ``result`` is timed: it may wait for the device, which is no work of the host."""

    def __init__(self, inner: StepHandle, calls: Calls) -> None:
        self._inner = inner
        self._calls = calls

    @property
    def step_id(self) -> int:
        """That of the runner's handle."""
        return self._inner.step_id

    @property
    def timeline(self) -> StepTimeline:
        """That of the runner's handle."""
        return self._inner.timeline

    def done(self) -> bool:
        """Ask the runner's handle."""
        return self._inner.done()

    def result(self, timeout: float | None = None) -> StepOutput:
        """Ask the runner's handle."""
        begin_ns = time.perf_counter_ns()
        try:
            return self._inner.result(timeout)
        finally:
            self._calls.result_ns += time.perf_counter_ns() - begin_ns


class TimedRunner:
    """A runner that keeps the handles of another one and times its ``execute_model``."""

    def __init__(self, inner: ModelRunner, calls: Calls) -> None:
        self._inner = inner
        self._calls = calls

    def load(self, progress: Progress) -> ModelInfo:
        """Pass on."""
        return self._inner.load(progress)

    def profile(self) -> KVBudget:
        """Pass on."""
        return self._inner.profile()

    def init_kv_cache(self, num_blocks: int) -> None:
        """Pass on."""
        self._inner.init_kv_cache(num_blocks)

    def warm_up(self) -> None:
        """Pass on."""
        self._inner.warm_up()

    def execute_model(self, plan: StepPlan) -> StepHandle:
        """Pass on, and keep the handle."""
        self._calls.entered_ns = time.perf_counter_ns()
        handle = self._inner.execute_model(plan)
        self._calls.left_ns = time.perf_counter_ns()
        self._calls.pending.append(handle)
        return TimedHandle(handle, self._calls)

    def close(self) -> None:
        """Pass on."""
        self._inner.close()


@dataclass(frozen=True, slots=True)
class Iteration:
    """Nanoseconds of one iteration's phases on the host; waiting for the device is in none of them but ``wall``."""

    wall: int
    drain: int
    schedule: int
    execute: int
    """``execute_model`` up to the point where all of the step was enqueued."""
    settle: int
    send: int

    @property
    def host(self) -> int:
        """All that the host worked."""
        return self.drain + self.schedule + self.execute + self.settle + self.send


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of steady decode."""

    iterations: list[Iteration]
    timelines: list[StepTimeline]
    seconds: float
    other_busy_cores: float
    """Cores that other processes used or the machine's host took away meanwhile."""

    @property
    def tpot_ms(self) -> float:
        """Mean time of a step, which gives each request one token."""
        return 1e3 * self.seconds / len(self.iterations)

    @property
    def device_ms(self) -> float:
        """Mean time of a step on the device."""
        return statistics.fmean(one.device_end_ns - one.device_begin_ns for one in self.timelines) / 1e6

    @property
    def idle_ns(self) -> int:
        """Time between the first step's begin and the last one's end in which the device had nothing to do."""
        pairs = zip(self.timelines, self.timelines[1:], strict=False)
        return sum(max(0, after.device_begin_ns - before.device_end_ns) for before, after in pairs)

    @property
    def span_ns(self) -> int:
        """Time from the first step's begin to the last one's end on the device."""
        return self.timelines[-1].device_end_ns - self.timelines[0].device_begin_ns

    @property
    def idle_share(self) -> float:
        """Share of the span in which the device was idle, in per cent."""
        return 100 * self.idle_ns / self.span_ns

    def phase_us(self, name: str) -> float:
        """Median of a phase over the iterations."""
        return float(statistics.median(getattr(one, name) for one in self.iterations)) / 1e3

    @property
    def host_p10_us(self) -> float:
        """Tenth percentile of the host's work: what it costs when nobody gets in the way."""
        return statistics.quantiles([one.host for one in self.iterations], n=10)[0] / 1e3


class Loop:
    """An engine at one depth, and its runs.

    Args:
        depth: Steps in flight; 1 is synchronous.
        config: What else the engine gets.
    """

    def __init__(self, depth: int, config: EngineConfig) -> None:
        plugin = load_runner(config.runner)
        config = replace(config, max_in_flight=depth, async_execution="off" if depth == 1 else "required")
        self._calls = Calls()
        timed = replace(plugin, create=lambda given: self._create(plugin, given))
        self._started = start_engine(resolve(config, plugin), timed, lambda *_: None)
        self._num_uids = 0
        self._context = zmq.Context()
        self._directory = tempfile.TemporaryDirectory()
        self._sink = self._context.socket(zmq.PAIR)
        self._sink.set_hwm(0)
        address = f"ipc://{Path(self._directory.name) / 'engine'}"
        self._sink.bind(address)
        self._channel = Channel(address)

    def run(
        self, batch: int, steps: int, after_step: Callable[[], None] = lambda: None, *, warm_up_steps: int = 20
    ) -> Run:
        """Decode ``batch`` greedy requests for ``steps`` steps in which none comes or goes.

        Args:
            batch: Requests.
            steps: Steps that are measured.
            after_step: Called in each iteration; counts as sending.
            warm_up_steps: Steps before, after the prefill.
        """
        engine, calls = self._started.engine, self._calls
        uids = range(self._num_uids, self._num_uids + batch)
        self._num_uids += batch
        max_tokens = steps + warm_up_steps + _MARGIN_STEPS
        for uid, prompt in zip(uids, random_prompts(256, 32, batch, seed=uids[0]), strict=True):
            # Different lengths, so that not all requests come to the end of a block in the same step.
            engine.add(AddRequest(uid, tuple(prompt[: 16 + uid % 16]), Sampling(temperature=0, seed=uid), max_tokens))
        self._iterate(after_step)
        gc.collect()
        gc.freeze()  # as the engine process does
        for _ in range(warm_up_steps):
            self._iterate(after_step)
        first = len(calls.timelines) + len(calls.pending)
        busy, own, begin = busy_seconds(), time.process_time(), time.perf_counter()
        iterations = [self._iterate(after_step) for _ in range(steps)]
        elapsed = time.perf_counter() - begin
        other = (busy_seconds() - busy - (time.process_time() - own)) / elapsed
        gc.unfreeze()
        engine.abort(uids)
        while engine.has_work:
            engine.step()
        calls.collect()
        timelines = calls.timelines[first : first + steps]
        calls.timelines.clear()
        while self._sink.poll(0):
            self._sink.recv()
        return Run(iterations, timelines, elapsed, max(0.0, other))

    def close(self) -> None:
        """End the runner and close the socket."""
        self._started.runner.close()
        self._channel.close()
        self._sink.close(linger=0)
        self._context.term()
        self._directory.cleanup()

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _create(self, plugin: RunnerPlugin, config: RunnerConfig) -> ModelRunner:
        return TimedRunner(plugin.create(config), self._calls)

    def _iterate(self, after_step: Callable[[], None]) -> Iteration:
        engine, calls, clock = self._started.engine, self._calls, time.perf_counter_ns
        calls.result_ns = 0
        begin = clock()
        engine.timeline.enter("inbox")
        self._channel.receive()
        drained = clock()
        outputs = engine.step()
        stepped = clock()
        engine.timeline.enter("send")
        self._channel.send(StepOutputs(tuple(outputs), engine.load()))
        sent = clock()
        after_step()
        end = clock()
        # The timeline of a step that has not ended has the host's two times already.
        host = calls.pending[-1].timeline
        calls.collect()
        return Iteration(
            wall=end - begin,
            drain=drained - begin,
            schedule=calls.entered_ns - drained,
            execute=host.host_end_ns - host.host_begin_ns,
            settle=stepped - calls.left_ns - calls.result_ns,
            send=sent - stepped + end - sent,
        )
