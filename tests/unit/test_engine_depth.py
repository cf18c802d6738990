"""Adaptive depth: one step in flight where overlapping gains next to nothing, and the same tokens whatever it does."""

import time
from dataclasses import replace

import pytest

from runnerd_service.config import EngineConfig
from runnerd_service.engine.depth import AdaptiveDepth
from runnerd_service.engine.engine import Engine, EngineLimits
from runnerd_service.engine.messages import AddRequest, Sampling
from runnerd_service.engine.setup import resolve
from runnerd_service.errors import ConfigurationError
from runnerd_sim.plugin import SIM
from runnerd_spi import ModelRunner, RunnerConfig, StepHandle, StepOutput, StepPlan, StepTimeline
from runnerd_torch.plugin import CPU

WINDOW = 32


class Clock:
    """Feeds steps of a given device and host time."""

    def __init__(self, most: int) -> None:
        self.adaptive = AdaptiveDepth(most)
        self.device = self.host = 0

    def steps(self, count: int, device: int, host: int) -> int:
        for _ in range(count):
            self.device += device
            self.host += host
            self.adaptive.settled(self.device, self.host)
        return self.adaptive.depth


def test_it_overlaps_until_a_window_of_steps_says_otherwise() -> None:
    clock = Clock(3)
    assert clock.adaptive.depth == 3
    assert clock.steps(WINDOW - 1, 1000, 1) == 3
    assert clock.steps(1, 1000, 1) == 1


@pytest.mark.parametrize(("device", "host"), [(1000, 10), (10, 1000)], ids=["device-bound", "host-bound"])
def test_it_falls_to_one_where_little_can_be_hidden_and_rises_again(device: int, host: int) -> None:
    clock = Clock(2)
    assert clock.steps(WINDOW, device, host) == 1
    assert clock.steps(WINDOW, 1000, 200) == 2


def test_between_the_two_shares_it_stays_where_it_is() -> None:
    clock = Clock(2)
    assert clock.steps(5 * WINDOW, 975, 25) == 2
    clock.steps(WINDOW, 1000, 1)
    assert clock.steps(5 * WINDOW, 975, 25) == 1


def test_a_runner_that_tells_no_device_times_overlaps() -> None:
    assert Clock(2).steps(10 * WINDOW, 0, 1000) == 2


class FickleHandle:
    """A step whose device took next to no time in some stretches, and half of the host's in the others."""

    def __init__(self, handle: StepHandle, former_ns: int, is_instant: bool) -> None:
        self._handle, self._former_ns, self._is_instant = handle, former_ns, is_instant

    @property
    def step_id(self) -> int:
        return self._handle.step_id

    @property
    def timeline(self) -> StepTimeline:
        told = self._handle.timeline
        begin = told.host_begin_ns
        end = begin + (1 if self._is_instant else max(1, (begin - self._former_ns) // 2))
        return replace(told, device_begin_ns=begin, device_end_ns=end, ready_ns=end)

    def done(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> StepOutput:
        return self._handle.result(timeout)


class FickleRunner:
    """A runner whose steps tell such times."""

    def __init__(self, runner: ModelRunner) -> None:
        self.load, self.profile, self.init_kv_cache = runner.load, runner.profile, runner.init_kv_cache
        self.warm_up, self.close = runner.warm_up, runner.close
        self._runner = runner
        self._former_ns = time.monotonic_ns()

    def execute_model(self, plan: StepPlan) -> StepHandle:
        handle = self._runner.execute_model(plan)
        is_instant = plan.step_id // (2 * WINDOW) % 2 == 0
        fickle = FickleHandle(handle, self._former_ns, is_instant)
        self._former_ns = handle.timeline.host_begin_ns
        return fickle


def play(depth: int, *, adaptive: bool) -> tuple[dict[int, list[object]], set[int]]:
    """Run some long requests; give what each was shown, and the depths there were."""
    config = RunnerConfig(3, 8, 4, max_in_flight=depth, max_model_len=400, options={"num_blocks": 250})
    runner = FickleRunner(SIM.create(config))
    runner.load(lambda stage, done, total: None)
    runner.profile()
    runner.init_kv_cache(250)
    runner.warm_up()
    engine = Engine(runner, EngineLimits(257, 400, 250, 4, 3, 8, depth, adaptive_depth=adaptive))
    seen: dict[int, list[object]] = {uid: [] for uid in range(5)}
    depths = set()
    try:
        for uid in seen:
            sampling = Sampling(temperature=1.0, seed=uid, presence_penalty=0.7, num_logprobs=1)
            engine.add(AddRequest(uid, tuple(range(65, 70 + uid)), sampling, 250))
        for _ in range(5000):
            if not engine.has_work:
                break
            for output in engine.step():
                seen[output.uid] += [*output.token_ids, *output.logprobs, *filter(None, [output.finish])]
            engine.check_integrity()
            depths.add(engine.load().depth)
        assert not engine.has_work
    finally:
        runner.close()
    return seen, depths


@pytest.mark.parametrize("depth", [2, 4])
def test_a_depth_that_changes_changes_no_token(depth: int) -> None:
    adapted, depths = play(depth, adaptive=True)
    assert depths == {1, depth}
    fixed, fixed_depths = play(depth, adaptive=False)
    assert fixed_depths == {depth}
    assert adapted == fixed == play(1, adaptive=False)[0]


def test_there_must_be_something_to_adapt() -> None:
    for config in (EngineConfig("sim", max_in_flight=1), EngineConfig("sim", async_execution="off")):
        with pytest.raises(ConfigurationError, match=r"--adaptive-depth.*leave the option out"):
            resolve(replace(config, adaptive_depth=True), SIM)
    assert resolve(EngineConfig("sim", adaptive_depth=True), SIM).adaptive_depth


def test_unsaid_it_adapts_where_the_device_is_the_hosts_own_cores() -> None:
    shared = replace(SIM, capabilities=replace(SIM.capabilities, shares_host_cores=True))
    assert not resolve(EngineConfig("sim"), SIM).adaptive_depth
    assert resolve(EngineConfig("sim"), shared).adaptive_depth
    assert not resolve(EngineConfig("sim", async_execution="off"), shared).adaptive_depth
    assert not resolve(EngineConfig("sim", adaptive_depth=False), shared).adaptive_depth
    assert CPU.capabilities.shares_host_cores
