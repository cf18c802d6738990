"""The simulated runner keeps the SPI: order of calls, handles, the clock, failures, close."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from runnerd_sim.plugin import CAPABILITIES, SIM
from runnerd_sim.runner import SimModelRunner
from runnerd_spi import (
    Admit,
    BlockGrant,
    InvalidOption,
    LifecycleError,
    ModelLoadError,
    ModelRunner,
    OptionValue,
    PlanError,
    Release,
    Row,
    RunnerConfig,
    RunnerError,
    SamplingParams,
    StepFailed,
    StepHandle,
    StepPlan,
    StepTimeout,
    load_runner,
)

GREEDY = SamplingParams(temperature=0)
PROMPT = tuple(b"hello")

Start = Callable[..., ModelRunner]


def create(max_in_flight: int = 2, max_num_seqs: int = 4, **options: OptionValue) -> ModelRunner:
    return SIM.create(
        RunnerConfig(max_num_seqs, 64, 16, max_model_len=64, max_in_flight=max_in_flight, options=options)
    )


def no_progress(stage: str, done: int, total: int) -> None:
    pass


ORDER: tuple[tuple[str, Callable[[ModelRunner], object]], ...] = (
    ("load", lambda runner: runner.load(no_progress)),
    ("profile", lambda runner: runner.profile()),
    ("init_kv_cache", lambda runner: runner.init_kv_cache(16)),
    ("warm_up", lambda runner: runner.warm_up()),
    ("execute_model", lambda runner: runner.execute_model(StepPlan(0)).result(10.0)),
)


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[ModelRunner] = []

    def start_runner(max_in_flight: int = 2, max_num_seqs: int = 4, **options: OptionValue) -> ModelRunner:
        runner = create(max_in_flight, max_num_seqs, **options)
        started.append(runner)
        for _, call in ORDER[:-1]:
            call(runner)
        return runner

    yield start_runner
    for runner in started:
        runner.close()


def first_plan(slots: tuple[int, ...] = (0,), prompt: tuple[int, ...] = PROMPT) -> StepPlan:
    return StepPlan(
        0,
        admits=tuple(Admit(slot, 1, prompt, len(prompt), GREEDY) for slot in slots),
        grants=tuple(BlockGrant(slot, 1, (2 * slot, 2 * slot + 1)) for slot in slots),
        rows=tuple(Row(slot, 1, len(prompt), 0, True) for slot in slots),
    )


def decode_plan(step_id: int, slots: tuple[int, ...] = (0,), prompt: tuple[int, ...] = PROMPT) -> StepPlan:
    return StepPlan(step_id, rows=tuple(Row(slot, 1, 1, len(prompt) + step_id - 1, True) for slot in slots))


def launch(runner: ModelRunner, num_steps: int) -> list[StepHandle]:
    return [runner.execute_model(decode_plan(step) if step else first_plan()) for step in range(num_steps)]


# Life cycle


@pytest.mark.parametrize("num_calls_before", range(len(ORDER)))
def test_calls_come_in_one_order_and_a_wrong_one_changes_nothing(num_calls_before: int) -> None:
    runner = create()
    for _, call in ORDER[:num_calls_before]:
        call(runner)
    for name, call in ORDER[:num_calls_before] + ORDER[num_calls_before + 1 :]:
        with pytest.raises(LifecycleError, match=rf"{name} called on a runner that is .*, expected: "):
            call(runner)
    for _, call in ORDER[num_calls_before:]:
        call(runner)
    runner.close()


@pytest.mark.parametrize("num_calls_before", range(len(ORDER) + 1))
def test_close_is_legal_in_every_state_twice_and_final(num_calls_before: int) -> None:
    num_threads = threading.active_count()
    runner = create()
    for _, call in ORDER[:num_calls_before]:
        call(runner)
    runner.close()
    runner.close()
    assert threading.active_count() == num_threads
    for _, call in ORDER:
        with pytest.raises(LifecycleError, match="closed"):
            call(runner)


def test_load_reports_progress_and_what_it_found() -> None:
    seen: list[tuple[str, int, int]] = []
    runner = create(load_seconds=0.02)
    info = runner.load(lambda stage, done, total: seen.append((stage, done, total)))
    assert (info.vocab_size, info.eos_token_ids, info.max_model_len) == (257, (256,), 64)
    assert [done for _, done, _ in seen] == list(range(seen[-1][2] + 1))


def test_a_longer_max_model_len_than_the_model_allows_is_refused_and_may_be_tried_again() -> None:
    runner = create(max_model_len=32)
    for _ in range(2):
        with pytest.raises(ModelLoadError, match=r"max_model_len 64, the simulated model takes 1 to 32"):
            runner.load(no_progress)
    runner.close()


def test_capacity_follows_from_the_option_and_from_the_memory() -> None:
    runner = create(num_blocks=10)
    runner.load(no_progress)
    budget = runner.profile()
    assert budget.max_num_blocks == 10
    assert budget.available_bytes == 10 * budget.bytes_per_block
    with pytest.raises(RunnerError, match=r"11 KV blocks, the simulated device has room for 1 to 10"):
        runner.init_kv_cache(11)
    runner.init_kv_cache(10)
    small = SIM.create(RunnerConfig(1, 1, 16, memory_bytes=512))
    small.load(no_progress)
    assert small.profile().available_bytes == 512


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RunnerConfig(4, 64, 16, max_in_flight=5), "max_in_flight 5, expected 1 to 4"),
        (RunnerConfig(4, 64, 16, max_in_flight=0), "max_in_flight 0, expected 1 to 4"),
        (RunnerConfig(4, 64, 3), "block_size 3, expected one of 1, 2, 4, 8, 16, 32, 64, 128"),
        (RunnerConfig(0, 64, 16), "max_num_seqs 0"),
        (RunnerConfig(4, 64, 16, options={"step_seconds": -1.0}), "step_seconds takes seconds, 0 or more"),
        (RunnerConfig(4, 64, 16, options={"num_blocks": 10**12}), "num_blocks takes an integer from 1 to 10000000"),
    ],
)
def test_a_configuration_outside_the_capabilities_is_refused(config: RunnerConfig, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        SIM.create(config)


def test_the_installed_entry_point_is_this_runner() -> None:
    assert load_runner("sim") is SIM
    assert SIM.capabilities is CAPABILITIES
    SIM.check()


# Steps and handles


@pytest.mark.parametrize("max_in_flight", [1, 2, 3, 4])
def test_a_step_is_settled_at_the_latest_by_the_call_that_needs_its_place(start: Start, max_in_flight: int) -> None:
    handles: list[StepHandle] = []
    runner = start(max_in_flight, step_seconds=0.02)
    for step in range(6):
        handles.append(runner.execute_model(decode_plan(step) if step else first_plan()))
        assert all(handle.done() for handle in handles[: max(step + 2 - max_in_flight, 0)])
        assert sum(not handle.done() for handle in handles) < max_in_flight


def test_a_launch_does_not_wait_for_its_own_step(start: Start) -> None:
    runner = start(2, step_seconds=0.5)
    begin = time.monotonic()
    handle = runner.execute_model(first_plan())
    assert not handle.done()
    handle.result(10.0)
    assert time.monotonic() - begin >= 0.5


def test_steps_are_done_in_order(start: Start) -> None:
    handles = launch(start(4, step_seconds=0.01), 4)
    handles[3].result(10.0)
    assert all(handle.done() for handle in handles)
    ready = [handle.timeline.ready_ns for handle in handles]
    assert ready == sorted(ready)


def test_a_result_is_the_same_object_each_time_and_in_each_thread(start: Start) -> None:
    [handle] = launch(start(step_seconds=0.05), 1)
    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(handle.result(10.0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert len(results) == 8
    assert all(result is handle.result() for result in results)


def test_a_timeout_leaves_the_handle_valid(start: Start) -> None:
    [handle] = launch(start(step_seconds=0.3), 1)
    for timeout in (0.0, 0.01):
        with pytest.raises(StepTimeout, match=rf"step 0 is not ready after {timeout} seconds"):
            handle.result(timeout)
    assert not handle.done()
    assert handle.result(10.0).step_id == 0
    assert handle.result(0.0).step_id == 0


def test_the_timeline_is_in_order_and_hides_the_future(start: Start) -> None:
    handles = launch(start(4, step_seconds=0.1, copy_seconds=0.05), 2)
    with pytest.raises(StepTimeout):
        handles[0].result(0.02)
    early = handles[0].timeline
    assert 0 < early.host_begin_ns <= early.host_end_ns
    assert (early.device_begin_ns, early.device_end_ns, early.ready_ns) == (0, 0, 0)
    handles[1].result(10.0)
    first, second = (handle.timeline for handle in handles)
    for one in (first, second):
        phases = (one.host_begin_ns, one.host_end_ns, one.device_begin_ns, one.device_end_ns, one.ready_ns)
        assert phases == tuple(sorted(phases))
        assert one.device_end_ns - one.device_begin_ns >= 100_000_000
        assert one.ready_ns - one.device_end_ns == 50_000_000
    # The stream does not wait for the copy.
    assert second.device_begin_ns == first.device_end_ns


def test_device_time_grows_with_rows_and_tokens(start: Start) -> None:
    runner = start(2, step_seconds=0.001, seconds_per_row=0.01, seconds_per_token=0.02)
    for plan, expected in ((first_plan((0, 1)), 0.221), (decode_plan(1, (0,)), 0.031)):
        handle = runner.execute_model(plan)
        handle.result(10.0)
        seconds = (handle.timeline.device_end_ns - handle.timeline.device_begin_ns) / 1e9
        assert seconds >= expected - 1e-6


def test_a_step_without_rows_takes_no_device_time(start: Start) -> None:
    runner = start(1, step_seconds=3600.0)
    assert runner.execute_model(StepPlan(0)).result(10.0).rows == ()


def test_a_stalled_step_takes_longer_and_the_next_ones_wait_for_it(start: Start) -> None:
    handles = launch(start(4, stall_at_step=1, stall_seconds=0.2), 3)
    handles[2].result(10.0)
    begins = [handle.timeline.device_begin_ns for handle in handles]
    assert begins[2] - begins[1] >= 200_000_000


def test_a_refused_plan_changes_nothing(start: Start) -> None:
    runner = start()
    runner.execute_model(first_plan())
    with pytest.raises(PlanError, match="slot 1 epoch 1"):
        runner.execute_model(StepPlan(1, releases=(Release(0, 1),), rows=(Row(1, 1, 1, 0, False),)))
    tokens = [row.token_id for row in runner.execute_model(decode_plan(1)).result(10.0).rows]
    twin = start()
    assert [row.token_id for row in launch(twin, 2)[1].result(10.0).rows] == tokens


def test_a_consumed_plan_is_not_referenced_any_more(start: Start) -> None:
    runner = start()
    plan = first_plan()
    num_references = sys.getrefcount(plan)
    handle = runner.execute_model(plan)
    handle.result(10.0)
    # The device's thread lets go right after it finished the handle.
    deadline = time.monotonic() + 10
    while sys.getrefcount(plan) > num_references and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sys.getrefcount(plan) == num_references


# Failures


def test_a_fatal_failure_is_raised_by_its_step_and_all_later_ones_with_one_cause(start: Start) -> None:
    runner = start(4, fail_at_step=1, step_seconds=0.02)
    handles = launch(runner, 3)
    assert handles[0].result(10.0).step_id == 0
    causes = []
    for handle in (handles[1], handles[2], handles[1]):
        with pytest.raises(StepFailed, match=rf"step {handle.step_id} failed: simulated device fault") as caught:
            handle.result(10.0)
        assert caught.value.fatal
        causes.append(caught.value.__cause__)
    with pytest.raises(StepFailed, match=r"step 3 is not launched.*simulated device fault") as caught:
        runner.execute_model(decode_plan(3))
    assert caught.value.fatal
    assert isinstance(causes[0], RuntimeError)
    assert all(cause is causes[0] for cause in (*causes, caught.value.__cause__))
    assert handles[0].result(0.0).step_id == 0


def test_a_failure_is_not_known_before_its_step_has_run(start: Start) -> None:
    runner = start(4, fail_at_step=0, step_seconds=0.3, copy_seconds=0.3)
    handles = [runner.execute_model(first_plan())]
    with pytest.raises(StepTimeout):
        handles[0].result(0.05)
    handles.append(runner.execute_model(decode_plan(1)))
    assert not handles[0].done()
    with pytest.raises(StepFailed):
        handles[1].result(10.0)
    assert handles[0].done()


def test_later_steps_fail_promptly_instead_of_taking_their_time(start: Start) -> None:
    runner = start(4, fail_at_step=0, stall_at_step=1, stall_seconds=60.0)
    handles = launch(runner, 2)
    with pytest.raises(StepFailed):
        handles[1].result(10.0)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_settling_a_failed_step_does_not_lose_the_handle_of_the_launched_one(start: Start, max_in_flight: int) -> None:
    runner = start(max_in_flight, fail_at_step=0, step_seconds=0.02)
    handles = launch(runner, max_in_flight)
    with pytest.raises(StepFailed):
        handles[-1].result(10.0)


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_a_row_that_fails_takes_no_other_with_it(start: Start, max_in_flight: int) -> None:
    runner = start(max_in_flight, fail_row_token="ell", script="x")
    plan = StepPlan(
        0,
        admits=(Admit(0, 1, PROMPT, 5, GREEDY), Admit(1, 1, tuple(b"world"), 5, GREEDY)),
        grants=(BlockGrant(0, 1, (0,)), BlockGrant(1, 1, (1,))),
        rows=(Row(0, 1, 5, 0, True), Row(1, 1, 5, 0, True)),
    )
    handles = [runner.execute_model(plan), runner.execute_model(decode_plan(1, (0, 1)))]
    for handle, token in zip(handles, (ord("x"), 256), strict=True):
        failed, good = handle.result(10.0).rows
        assert failed.failure is not None
        assert "contains 'ell'" in failed.failure
        assert failed.token_id is None
        assert (good.token_id, good.failure) == (token, None)


def test_a_failed_slot_serves_its_next_request(start: Start) -> None:
    runner = start(fail_row_token="ell", script="x")
    runner.execute_model(first_plan())
    plan = StepPlan(
        1, (Release(0, 1),), (Admit(0, 2, (65,), 1, GREEDY),), (BlockGrant(0, 2, (0,)),), (Row(0, 2, 1, 0, True),)
    )
    assert runner.execute_model(plan).result(10.0).rows[0].token_id == ord("x")


def test_a_text_that_comes_together_from_sampled_tokens_fails_the_row(start: Start) -> None:
    runner = start(fail_row_token="oab", script="abc")
    outputs = [handle.result(10.0).rows[0] for handle in launch(runner, 4)]
    assert [output.token_id for output in outputs[:2]] == [ord("a"), ord("b")]
    assert [output.failure is None for output in outputs] == [True, True, False, False]


def test_a_row_with_nothing_left_to_choose_fails_alone(start: Start) -> None:
    impossible = SamplingParams(allowed_token_ids=(65,), bad_words_token_ids=((65,),))
    runner = start()
    plan = first_plan((0, 1))
    plan = replace(plan, admits=(replace(plan.admits[0], sampling_params=impossible), plan.admits[1]))
    failed, good = runner.execute_model(plan).result(10.0).rows
    assert failed.failure == "no token is left to choose: all are banned or not allowed"
    assert good.token_id is not None


def test_a_crash_ends_the_process_after_the_earlier_steps_were_readable() -> None:
    code = """
from runnerd_sim.plugin import SIM
from runnerd_spi import *
config = RunnerConfig(4, 64, 16, max_in_flight=4, options={"crash_at_step": 1, "step_seconds": 0.05})
runner = SIM.create(config)
runner.load(lambda *_: None); runner.profile(); runner.init_kv_cache(16); runner.warm_up()
plan = StepPlan(0, (), (Admit(0, 1, (65,), 1, SamplingParams()),), (BlockGrant(0, 1, (0,)),), (Row(0, 1, 1, 0, True),))
handles = [runner.execute_model(plan), runner.execute_model(StepPlan(1, rows=(Row(0, 1, 1, 1, True),)))]
print(handles[0].result(10.0).step_id, flush=True)
handles[1].result(10.0)
print("survived")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 70
    assert done.stdout.split() == ["0"]


# Close


def test_close_waits_for_launched_work_and_leaves_the_handles_readable(start: Start) -> None:
    runner = start(4, step_seconds=0.05)
    handles = launch(runner, 3)
    runner.close()
    assert all(handle.done() for handle in handles)
    assert [handle.result(0.0).step_id for handle in handles] == [0, 1, 2]


def test_close_gives_a_stalled_device_up() -> None:
    options = {"stall_at_step": 0, "stall_seconds": 3600.0}
    runner = SimModelRunner(RunnerConfig(4, 64, 16, max_in_flight=2, options=options), CAPABILITIES, close_seconds=0.1)
    for _, call in ORDER[:-1]:
        call(runner)
    [handle] = launch(runner, 1)
    runner.close()
    with pytest.raises(StepTimeout):
        handle.result(0.0)


def test_close_after_a_fatal_failure_leaves_the_failure_readable(start: Start) -> None:
    runner = start(2, fail_at_step=0)
    [handle] = launch(runner, 1)
    runner.close()
    with pytest.raises(StepFailed, match="simulated device fault"):
        handle.result(0.0)
