"""A fatal failure takes nothing from the steps before it, wherever it shows: while enqueuing, or when a step ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from runnerd_spi import Admit, BlockGrant, Row, RunnerConfig, SamplingParams, StepFailed, StepPlan
from runnerd_torch.attention.torch_attention import TorchPagedAttention
from runnerd_torch.devices.base import Launch, T
from runnerd_torch.devices.cpu import CpuDevice
from runnerd_torch.linear import build_linear
from runnerd_torch.runner import TorchModelRunner


class BrokenLaunch:
    """Work whose failure shows when it has ended, as that of a kernel does."""

    def __init__(self, launch: Launch[T], error: Exception) -> None:
        self._launch, self._error = launch, error
        self.done, self.wait = launch.done, launch.wait

    @property
    def begin_ns(self) -> int:
        return self._launch.begin_ns

    @property
    def compute_end_ns(self) -> int:
        return self._launch.compute_end_ns

    @property
    def end_ns(self) -> int:
        return self._launch.end_ns

    def value(self) -> T:
        raise self._error


class BreakingDevice(CpuDevice):
    """The CPU; from the moment that ``error`` is set all work fails on it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.error: Exception | None = None

    def submit(self, work: Callable[[], T]) -> Launch[T]:
        launch = super().submit(work)
        return launch if self.error is None else BrokenLaunch(launch, self.error)


class BreakingAttention(TorchPagedAttention):
    """Fails when told so."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def write(self, *arguments: object) -> None:
        if self.error is not None:
            raise self.error
        super().write(*arguments)


class Broken:
    """A runner with two steps in flight, and what breaks it."""

    def __init__(self, model: Path) -> None:
        self.device, self.attention = BreakingDevice(), BreakingAttention()
        config = RunnerConfig(4, 64, 4, model=str(model), dtype="float32", max_in_flight=3)
        self.runner = TorchModelRunner(config, self.device, lambda: self.attention, partial(build_linear, "torch"), 5)
        self.runner.load(lambda stage, done, total: None)
        self.runner.profile()
        self.runner.init_kv_cache(16)
        self.runner.warm_up()


@pytest.fixture
def broken(make_checkpoint) -> Iterator[Broken]:
    one = Broken(make_checkpoint("LlamaConfig"))
    yield one
    one.runner.close()


def plan(step_id: int) -> StepPlan:
    if step_id:
        return StepPlan(step_id, rows=(Row(0, 0, 1, 2 + step_id, True),))
    return StepPlan(
        0,
        admits=(Admit(0, 0, (5, 9, 77), 3, SamplingParams(temperature=0.0)),),
        grants=(BlockGrant(0, 0, (0, 1, 2)),),
        rows=(Row(0, 0, 3, 0, True),),
    )


@pytest.mark.parametrize("where", ["device", "attention"])
def test_steps_before_a_fatal_failure_can_still_be_read(broken: Broken, where: str) -> None:
    first = broken.runner.execute_model(plan(0))
    second = broken.runner.execute_model(plan(1))
    broken.device.synchronize()
    getattr(broken, where).error = cause = torch.OutOfMemoryError("no memory")
    failed = broken.runner.execute_model(plan(2))
    with pytest.raises(StepFailed, match="step 2 failed"):
        failed.result(30)
    with pytest.raises(StepFailed, match="step 2 failed") as raised:
        broken.runner.execute_model(plan(3))
    assert raised.value.__cause__ is cause
    # Nobody has asked for these before.
    assert [handle.result(30).step_id for handle in (first, second)] == [0, 1]
    assert all(handle.result(30).rows[0].token_id is not None for handle in (first, second))


def test_a_failure_that_nobody_read_is_met_at_the_launch_that_settles_its_step(broken: Broken) -> None:
    broken.runner.execute_model(plan(0))
    broken.device.synchronize()
    broken.device.error = cause = RuntimeError("the device fell off")
    broken.runner.execute_model(plan(1))
    broken.device.synchronize()
    with pytest.raises(StepFailed, match="step 1 failed with RuntimeError: the device fell off") as raised:
        # Step 1 is settled by its own launch if the device is that quick, else by the next one.
        list(map(broken.runner.execute_model, (plan(2), plan(3))))
    assert raised.value.__cause__ is cause
