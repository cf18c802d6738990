"""How requests end: exact launches, no late token, aborts at every point of a step, slots and blocks given back."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runnerd_service.config import EngineConfig
from runnerd_service.engine.engine import Engine, EngineLimits
from runnerd_service.engine.messages import AddRequest, RequestOutput, Sampling
from runnerd_service.engine.setup import resolve, start_engine
from runnerd_service.errors import ConfigurationError
from runnerd_spi import KVBudget, ModelInfo, ModelRunner, Progress, StepHandle, StepPlan, load_runner

EOS = 256


class RecordingRunner:
    """A runner that keeps the plans it hands on."""

    def __init__(self, runner: ModelRunner) -> None:
        self.plans: list[StepPlan] = []
        self._runner = runner

    def load(self, progress: Progress) -> ModelInfo:
        return self._runner.load(progress)

    def profile(self) -> KVBudget:
        return self._runner.profile()

    def init_kv_cache(self, num_blocks: int) -> None:
        self._runner.init_kv_cache(num_blocks)

    def warm_up(self) -> None:
        self._runner.warm_up()

    def execute_model(self, plan: StepPlan) -> StepHandle:
        self.plans.append(plan)
        return self._runner.execute_model(plan)

    def close(self) -> None:
        self._runner.close()


@contextmanager
def recorded(
    depth: int, *, max_num_seqs: int = 4, num_blocks: int = 64, **options: str
) -> Iterator[tuple[Engine, RecordingRunner]]:
    plugin = load_runner("sim")
    options = {"kv_shadow": "true", "num_blocks": str(num_blocks), "max_model_len": "64", **options}
    config = EngineConfig(
        runner="sim",
        max_in_flight=depth,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        block_size=4,
        runner_options=options,
    )
    resolved = resolve(config, plugin)
    runner = RecordingRunner(plugin.create(resolved.runner_config))
    info = runner.load(lambda stage, done, total: None)
    runner.profile()
    runner.init_kv_cache(num_blocks)
    runner.warm_up()
    limits = EngineLimits(
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        max_in_flight=depth,
    )
    try:
        yield Engine(runner, limits), runner
    finally:
        runner.close()


def request(uid: int, max_tokens: int = 8, prompt: str = "hello", stop: tuple[int, ...] = ()) -> AddRequest:
    return AddRequest(
        uid, tuple(prompt.encode()), Sampling(temperature=0.0), max_tokens, eos_token_ids=(EOS,), stop_token_ids=stop
    )


def drain(engine: Engine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for _ in range(1000):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
    raise AssertionError("livelock")


def assert_idle(engine: Engine) -> None:
    engine.check_integrity()
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_used_blocks, load.num_unresolved_steps) == (0, 0, 0, 0)


DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3, 4])


@DEPTHS
@pytest.mark.parametrize("max_tokens", [1, 3, 4])
def test_max_tokens_n_gives_n_tokens_in_n_launched_rows_with_the_finish_on_the_last(
    depth: int, max_tokens: int
) -> None:
    with recorded(depth, script="never ending story") as (engine, runner):
        engine.add(request(1, max_tokens))
        outputs = drain(engine)
        assert [output.token_ids for output in outputs] == [(ord(sign),) for sign in "never"[:max_tokens]]
        assert [output.finish for output in outputs] == [None] * (max_tokens - 1) + ["length"]
        assert sum(len(plan.rows) for plan in runner.plans) == max_tokens
        assert_idle(engine)


@DEPTHS
def test_no_row_is_launched_past_max_model_len(depth: int) -> None:
    with recorded(depth, script="x" * 100) as (engine, runner):
        engine.add(request(1, 1000, prompt="a" * 60))
        outputs = drain(engine)
        assert sum(len(output.token_ids) for output in outputs) == 4
        assert outputs[-1].finish == "length"
        assert sum(row.sample for plan in runner.plans for row in plan.rows) == 4


@DEPTHS
def test_a_stream_ends_at_eos_and_late_rows_are_never_shown(depth: int) -> None:
    with recorded(depth, script="ab") as (engine, runner):
        engine.add(request(1, 20))
        outputs = drain(engine)
        assert [output.token_ids for output in outputs] == [(97,), (98,), (EOS,)]
        assert (outputs[-1].finish, outputs[-1].matched_token_id) == ("eos", EOS)
        late = sum(len(plan.rows) for plan in runner.plans) - 3
        assert late <= depth - 1
        assert_idle(engine)


@DEPTHS
def test_a_stop_token_ends_the_stream_and_is_named(depth: int) -> None:
    with recorded(depth, script="abc") as (engine, _):
        engine.add(request(1, 20, stop=(98,)))
        outputs = drain(engine)
        assert [output.token_ids for output in outputs] == [(97,), (98,)]
        assert (outputs[-1].finish, outputs[-1].matched_token_id) == ("stop_token", 98)


@DEPTHS
def test_the_slot_of_a_request_that_met_eos_serves_the_next_one_while_late_rows_fly(depth: int) -> None:
    with recorded(depth, max_num_seqs=1, script="ab") as (engine, _):
        for uid in range(3):
            engine.add(request(uid, 20, prompt=f"prompt {uid}"))
        outputs = drain(engine)
        for uid in range(3):
            assert [output.token_ids[0] for output in outputs if output.uid == uid] == [97, 98, EOS]
        assert_idle(engine)


@DEPTHS
def test_every_slot_that_was_taken_is_released_to_the_runner_once_idle(depth: int) -> None:
    with recorded(depth) as (engine, runner):
        for uid in range(6):
            engine.add(request(uid, 3))
        drain(engine)
        admitted = [(admit.slot, admit.epoch) for plan in runner.plans for admit in plan.admits]
        released = [(release.slot, release.epoch) for plan in runner.plans for release in plan.releases]
        assert sorted(admitted) == sorted(released)
        assert len(admitted) == 6
        assert not runner.plans[-1].rows


@DEPTHS
def test_epochs_of_a_slot_grow(depth: int) -> None:
    with recorded(depth, max_num_seqs=2) as (engine, runner):
        for uid in range(8):
            engine.add(request(uid, 2))
        drain(engine)
        for slot in (0, 1):
            epochs = [admit.epoch for plan in runner.plans for admit in plan.admits if admit.slot == slot]
            assert epochs == sorted(set(epochs))


@DEPTHS
@pytest.mark.parametrize("num_steps", range(9))
def test_an_abort_after_any_number_of_steps_ends_that_request_only(depth: int, num_steps: int) -> None:
    # 20 tokens at 16 per step: the points are waiting, mid-prefill, prefilled, decoding at several depths, finished.
    with recorded(depth, script="story") as (engine, runner):
        engine.add(request(1, 4, prompt="the prompt of twenty"))
        engine.add(request(2, 7, prompt="another"))
        before = [output for _ in range(num_steps) for output in engine.step()]
        engine.abort([1])
        for _ in range(depth + 1):
            before += [output for output in engine.step() if output.uid == 2]
        released = {release.epoch for plan in runner.plans for release in plan.releases}
        admitted = {admit.epoch for plan in runner.plans for admit in plan.admits if admit.num_prompt_tokens == 20}
        assert admitted <= released, "the slot is not back within depth + 1 steps"
        # The blocks, too: what is in use belongs to the other request (7 + 7 tokens in blocks of 4).
        assert engine.load().num_used_blocks <= 4
        outputs = before + drain(engine)
        assert [output.token_ids[0] for output in outputs if output.uid == 2] == [*b"story", EOS]
        assert_idle(engine)


@DEPTHS
def test_an_abort_of_a_preempted_request_with_tokens_in_flight_leaves_nothing_behind(depth: int) -> None:
    with recorded(depth, num_blocks=40, script="s" * 60) as (engine, _):
        for uid in range(4):
            engine.add(request(uid, 56, prompt=f"{uid}" * 8))
        outputs = []
        while engine.load().num_preemptions == 0:
            outputs += engine.step()
        engine.abort([3])  # the newest is the one that was preempted
        num_before = len(outputs)
        outputs += drain(engine)
        assert {output.uid for output in outputs if output.finish} == {0, 1, 2}
        assert 3 not in {output.uid for output in outputs[num_before:]}
        assert_idle(engine)


@DEPTHS
def test_an_aborted_uid_used_again_at_once_gets_only_its_own_tokens(depth: int) -> None:
    with recorded(depth, script="abcdef") as (engine, _):
        engine.add(request(1, 6))
        engine.step()
        engine.step()
        engine.abort([1])
        engine.add(request(1, 3, prompt="new"))
        outputs = drain(engine)
        assert [output.token_ids[0] for output in outputs] == [97, 98, 99]
        assert outputs[-1].finish == "length"


def test_aborting_unknown_and_finished_requests_is_harmless() -> None:
    with recorded(2) as (engine, _):
        engine.abort([99])
        engine.add(request(1, 1))
        drain(engine)
        engine.abort([1, 1, 2])
        assert not engine.has_work
        assert_idle(engine)


@DEPTHS
def test_after_twice_max_num_seqs_aborts_a_request_still_completes(depth: int) -> None:
    with recorded(depth, max_num_seqs=3, script="abcdefgh") as (engine, _):
        for uid in range(6):
            engine.add(request(uid, 8))
            engine.step()
            engine.step()
            engine.abort([uid])
        engine.add(request(7, 3))
        assert [output.token_ids[0] for output in drain(engine)] == [97, 98, 99]
        assert_idle(engine)


def test_a_request_that_arrives_while_another_runs_joins_the_next_step() -> None:
    with recorded(2, script="abcdefgh") as (engine, runner):
        engine.add(request(1, 8))
        engine.step()
        engine.add(request(2, 8, prompt="other"))
        engine.step()
        assert len(runner.plans[-1].rows) == 2


def test_a_live_uid_is_refused() -> None:
    with recorded(2) as (engine, _):
        engine.add(request(1))
        with pytest.raises(ValueError, match="uid 1 names a live request"):
            engine.add(request(1))


def test_start_engine_sizes_the_cache_by_the_runners_budget() -> None:
    plugin = load_runner("sim")
    config = EngineConfig(runner="sim", runner_options={"num_blocks": "7"}, block_size=8)
    stages: list[str] = []
    started = start_engine(resolve(config, plugin), plugin, lambda stage, done, total: stages.append(stage))
    try:
        assert (started.ready.num_blocks, started.ready.block_size, started.ready.max_in_flight) == (7, 8, 2)
        assert stages[-1] == "warming up"
    finally:
        started.runner.close()


def test_a_cache_smaller_than_the_models_context_shortens_what_is_served() -> None:
    plugin = load_runner("sim")
    config = EngineConfig(runner="sim", runner_options={"num_blocks": "7"}, block_size=8)
    started = start_engine(resolve(config, plugin), plugin, lambda *_: None)
    started.runner.close()
    assert started.ready.max_model_len == 7 * 8 + 1


def test_a_length_asked_for_that_the_cache_cannot_hold_is_refused() -> None:
    plugin = load_runner("sim")
    config = EngineConfig(runner="sim", runner_options={"num_blocks": "7"}, block_size=8, max_model_len=58)
    with pytest.raises(ConfigurationError, match="holds 57 tokens of one request, but --max-model-len is 58; lower it"):
        start_engine(resolve(config, plugin), plugin, lambda *_: None)


def test_when_a_request_began_is_told_once_with_what_its_first_step_gave() -> None:
    before = time.monotonic_ns()
    with recorded(2, max_num_seqs=1, script="never ending story") as (engine, _):
        engine.add(request(1, 4, prompt="a prompt of more than two chunks of 16"))
        engine.add(request(2, 4))
        outputs = drain(engine)
    began: dict[int, list[int]] = {}
    for output in outputs:
        began.setdefault(output.uid, []).append(output.began_ns)
    assert len(began[1]) == 2 + 4  # two chunks without a token
    for first, *later in began.values():
        assert before < first < time.monotonic_ns()
        assert not any(later)
    assert began[1][0] < began[2][0]
