"""Order of calls, refused plans, failures, time-outs and the overlap itself."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from runnerd_spi import (
    Admit,
    BlockGrant,
    LifecycleError,
    ModelLoadError,
    PlanError,
    Release,
    Row,
    RunnerConfig,
    SamplingParams,
    StepFailed,
    StepPlan,
    StepTimeout,
)
from runnerd_torch.attention import PagedAttention, build_attention
from runnerd_torch.devices.cpu import CpuDevice
from runnerd_torch.linear import DenseLinear
from runnerd_torch.plugin import CPU, MAX_LOGPROBS
from runnerd_torch.runner import TorchModelRunner

GREEDY = SamplingParams(temperature=0.0)


class GatedAttention:
    """The torch kernel behind a gate: closed, the device waits in its first layer; ``error`` is raised there."""

    name = "gated"

    def __init__(self) -> None:
        self._kernel: PagedAttention = build_attention("torch")
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def write(self, *arguments: object) -> None:
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        self._kernel.write(*arguments)

    def forward(self, *arguments: object) -> torch.Tensor:
        return self._kernel.forward(*arguments)


@pytest.fixture(scope="module")
def llama(make_checkpoint):
    return make_checkpoint("LlamaConfig")


def config_of(path, **settings) -> RunnerConfig:
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 4, "max_in_flight": 2}
    return RunnerConfig(model=str(path), **(defaults | settings))


def ignore(stage: str, done: int, total: int) -> None:
    pass


@pytest.fixture
def gated(llama):
    """A ready runner, two steps in flight, and the gate in its attention."""
    attention = GatedAttention()
    runner = TorchModelRunner(config_of(llama), CpuDevice(1), lambda: attention, lambda: DenseLinear, MAX_LOGPROBS)
    runner.load(ignore)
    runner.profile()
    runner.init_kv_cache(16)
    runner.warm_up()
    yield runner, attention
    attention.gate.set()
    runner.close()


def first_plan(prompt=(5, 9, 77), params=GREEDY) -> StepPlan:
    return StepPlan(
        0,
        admits=(Admit(0, 0, prompt, len(prompt), params),),
        grants=(BlockGrant(0, 0, (0, 1, 2)),),
        rows=(Row(0, 0, len(prompt), 0, True),),
    )


def decode_plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, rows=(Row(0, 0, 1, 2 + step_id, True),))


CALLS = {
    "load": lambda runner: runner.load(ignore),
    "profile": lambda runner: runner.profile(),
    "init_kv_cache": lambda runner: runner.init_kv_cache(8),
    "warm_up": lambda runner: runner.warm_up(),
    "execute_model": lambda runner: runner.execute_model(StepPlan(0)),
}


def test_calls_out_of_order_are_refused_and_change_nothing(llama):
    runner = CPU.create(config_of(llama, options={"num_threads": 1}))
    for done in range(len(CALLS)):
        for name, call in CALLS.items():
            if name != list(CALLS)[done]:
                with pytest.raises(LifecycleError, match=name):
                    call(runner)
        list(CALLS.values())[done](runner)
    runner.close()
    runner.close()
    for call in CALLS.values():
        with pytest.raises(LifecycleError, match="closed"):
            call(runner)


def test_close_is_legal_before_anything_else(llama):
    runner = CPU.create(config_of(llama))
    runner.close()
    runner.close()


def test_a_failed_load_can_be_tried_again(tmp_path):
    runner = CPU.create(config_of(tmp_path / "absent"))
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="no such file"):
            runner.load(ignore)
    runner.close()


def test_a_kv_cache_without_blocks_is_refused(llama):
    runner = CPU.create(config_of(llama))
    runner.load(ignore)
    runner.profile()
    with pytest.raises(ValueError, match="at least 1"):
        runner.init_kv_cache(0)
    runner.init_kv_cache(1)
    runner.close()


def test_warm_up_leaves_no_trace(gated):
    runner, _ = gated
    handle = runner.execute_model(first_plan())
    assert handle.step_id == 0
    assert handle.result(30).rows[0].token_id is not None


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(7), "step_id 7"),
        (StepPlan(1, rows=(Row(0, 1, 1, 3, True),)), "epoch"),
        (StepPlan(1, rows=(Row(0, 0, 1, 9, True),)), "positions"),
        (StepPlan(1, releases=(Release(3, 0),)), "slot 3"),
        (StepPlan(1, admits=(Admit(1, 0, (999,), 1, GREEDY),)), "token id 999"),
        (StepPlan(1, admits=(Admit(1, 0, (5,), 1, GREEDY, adapter_id="a"),)), "adapter"),
        (StepPlan(1, admits=(Admit(1, 0, (5,), 1, SamplingParams(num_logprobs=21)),)), "num_logprobs 21"),
        (StepPlan(1, admits=(Admit(1, 0, (5,), 1, SamplingParams(num_prompt_logprobs=-1)),)), "num_prompt_logprobs"),
        (StepPlan(1, admits=(Admit(1, 0, (5,), 1, SamplingParams(stop_token_ids=(999,))),)), "stop_token_ids"),
    ],
)
def test_a_plan_that_breaks_the_contract_changes_nothing(plan, message, gated):
    runner, _ = gated
    runner.execute_model(first_plan()).result(30)
    with pytest.raises(PlanError, match=message):
        runner.execute_model(plan)
    assert runner.execute_model(decode_plan(1)).result(30).rows[0].token_id is not None


def test_a_plan_without_rows_gives_an_empty_output(gated):
    runner, _ = gated
    assert runner.execute_model(StepPlan(0)).result(30).rows == ()


def test_a_launch_returns_while_the_device_is_still_at_work(gated):
    runner, attention = gated
    attention.gate.clear()
    handle = runner.execute_model(first_plan())
    assert not handle.done()
    assert handle.timeline.ready_ns == 0
    attention.gate.set()
    assert handle.result(30).step_id == 0
    timeline = handle.timeline
    assert 0 < timeline.host_begin_ns <= timeline.host_end_ns
    assert 0 < timeline.device_begin_ns <= timeline.device_end_ns <= timeline.ready_ns


def test_the_launch_that_needs_the_place_settles_the_oldest_step(gated):
    runner, attention = gated
    attention.gate.clear()
    first = runner.execute_model(first_plan())
    opener = threading.Timer(0.2, attention.gate.set)
    opener.start()
    second = runner.execute_model(decode_plan(1))
    assert first.done()
    third = runner.execute_model(decode_plan(2))
    assert second.done()
    assert third.result(30).step_id == 2
    opener.join()


def test_depth_one_is_synchronous(llama, open_runner, request_type):
    driver = open_runner(llama, max_in_flight=1)
    request = request_type([5, 9, 77], 1)
    driver.admit(request)
    handle, _ = driver.step([request])
    assert handle.done()


def test_a_time_out_leaves_the_handle_valid(gated):
    runner, attention = gated
    attention.gate.clear()
    handle = runner.execute_model(first_plan())
    with pytest.raises(StepTimeout, match="step 0"):
        handle.result(0.01)
    attention.gate.set()
    assert handle.result(30).rows[0].token_id is not None


def test_a_result_is_the_same_object_each_time(gated):
    runner, _ = gated
    handle = runner.execute_model(first_plan())
    assert handle.result(30) is handle.result(30)


def test_a_result_may_be_read_by_another_thread(gated):
    runner, attention = gated
    attention.gate.clear()
    handle = runner.execute_model(first_plan())
    found = []
    reader = threading.Thread(target=lambda: found.append(handle.result(30)))
    reader.start()
    attention.gate.set()
    reader.join(30)
    assert found == [handle.result(30)]


def test_a_failed_step_fails_all_later_ones_with_the_same_cause(gated):
    runner, attention = gated
    runner.execute_model(first_plan()).result(30)
    attention.error = RuntimeError("the device fell off")
    attention.gate.clear()
    opener = threading.Timer(0.2, attention.gate.set)
    opener.start()
    handles = [runner.execute_model(decode_plan(1)), runner.execute_model(decode_plan(2))]
    begin = time.monotonic()
    for handle in handles:
        with pytest.raises(StepFailed, match="the device fell off") as raised:
            handle.result(30)
        assert raised.value.fatal
        assert raised.value.__cause__ is attention.error
    with pytest.raises(StepFailed, match="step 1 failed") as raised:
        runner.execute_model(decode_plan(3))
    assert raised.value.__cause__ is attention.error
    assert time.monotonic() - begin < 20
    opener.join()


def test_close_waits_for_launched_work_and_leaves_its_result(gated):
    runner, attention = gated
    attention.gate.clear()
    handle = runner.execute_model(first_plan())
    opener = threading.Timer(0.2, attention.gate.set)
    opener.start()
    runner.close()
    assert handle.done()
    assert handle.result(0).rows[0].token_id is not None
    opener.join()
