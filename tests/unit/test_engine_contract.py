"""The engine lives on when a row, a request or a runner is wrong, and says what was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from runnerd_service.config import EngineConfig
from runnerd_service.engine.engine import Engine, EngineDead, EngineLimits
from runnerd_service.engine.messages import AddRequest, RequestOutput, Sampling
from runnerd_service.engine.setup import resolve
from runnerd_spi import (
    ModelRunner,
    RowOutput,
    RunnerConfig,
    StepFailed,
    StepHandle,
    StepOutput,
    StepPlan,
    StepTimeline,
    load_runner,
)

Spoil = Callable[[StepPlan, StepOutput], StepOutput]


class SpoiledHandle:
    """A handle whose output was tampered with."""

    def __init__(self, plan: StepPlan, handle: StepHandle, spoil: Spoil) -> None:
        self._plan, self._handle, self._spoil = plan, handle, spoil

    @property
    def step_id(self) -> int:
        return self._handle.step_id

    @property
    def timeline(self) -> StepTimeline:
        return self._handle.timeline

    def done(self) -> bool:
        return self._handle.done()

    def result(self, timeout: float | None = None) -> StepOutput:
        return self._spoil(self._plan, self._handle.result(timeout))


class SpoilingRunner:
    """The simulated runner with a defect in what it answers."""

    def __init__(self, runner: ModelRunner, spoil: Spoil) -> None:
        self.load, self.profile, self.init_kv_cache = runner.load, runner.profile, runner.init_kv_cache
        self.warm_up, self.close = runner.warm_up, runner.close
        self._runner, self._spoil = runner, spoil

    def execute_model(self, plan: StepPlan) -> StepHandle:
        return SpoiledHandle(plan, self._runner.execute_model(plan), self._spoil)


@contextmanager
def spoiled(spoil: Spoil = lambda plan, output: output, depth: int = 2, **options: str) -> Iterator[Engine]:
    plugin = load_runner("sim")
    options = {"num_blocks": "8", "max_model_len": "64", "script": "abcdefgh", **options}
    config = EngineConfig(
        runner="sim",
        max_in_flight=depth,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        block_size=4,
        runner_options=options,
    )
    runner_config: RunnerConfig = resolve(config, plugin).runner_config
    runner = SpoilingRunner(plugin.create(runner_config), spoil)
    info = runner.load(lambda stage, done, total: None)
    runner.profile()
    runner.init_kv_cache(8)
    runner.warm_up()
    limits = EngineLimits(
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        num_blocks=8,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_in_flight=depth,
    )
    try:
        yield Engine(runner, limits)
    finally:
        runner.close()


def request(uid: int, prompt: str = "hi", max_tokens: int = 4, **sampling: int) -> AddRequest:
    return AddRequest(uid, tuple(prompt.encode()), Sampling(**sampling), max_tokens)  # type: ignore[arg-type]


def drain(engine: Engine) -> dict[int, list[RequestOutput]]:
    outputs: dict[int, list[RequestOutput]] = {}
    for _ in range(200):
        if not engine.has_work:
            engine.check_integrity()
            assert engine.load().num_used_blocks == 0
            return outputs
        for output in engine.step():
            outputs.setdefault(output.uid, []).append(output)
    raise AssertionError("livelock")


def change_row(slot: int, step_id: int, **change: object) -> Spoil:
    """Change the row of ``slot`` in one step."""

    def spoil(plan: StepPlan, output: StepOutput) -> StepOutput:
        if plan.step_id != step_id:
            return output
        rows = [
            result._replace(**change) if row.slot == slot else result  # type: ignore[arg-type]
            for row, result in zip(plan.rows, output.rows, strict=True)
        ]
        return StepOutput(output.step_id, tuple(rows))

    return spoil


DEPTHS = pytest.mark.parametrize("depth", [1, 2, 4])


@DEPTHS
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"token_id": None}, "contract violation: no token for a row that samples one"),
        ({"token_id": -1}, "contract violation: token -1, expected 0 to 256"),
        ({"token_id": 257}, "contract violation: token 257, expected 0 to 256"),
        ({"failure": "NaN in the logits"}, "NaN in the logits"),
    ],
)
def test_a_broken_row_ends_its_request_only(depth: int, change: dict[str, object], error: str) -> None:
    with spoiled(change_row(slot=0, step_id=1, **change), depth) as engine:
        engine.add(request(1))
        engine.add(request(2))
        outputs = drain(engine)
        assert [output.token_ids for output in outputs[1]] == [(97,), ()]
        assert (outputs[1][-1].finish, outputs[1][-1].error) == ("failed", error)
        assert [output.token_ids[0] for output in outputs[2]] == [97, 98, 99, 100]
        engine.add(request(3))
        assert len(drain(engine)[3]) == 4


@DEPTHS
def test_a_token_for_a_row_that_samples_none_is_a_violation(depth: int) -> None:
    with spoiled(change_row(slot=0, step_id=0, token_id=0), depth) as engine:
        engine.add(request(1, "a prompt of two steps"[:12]))
        outputs = drain(engine)
        assert [output.error for output in outputs[1]] == ["contract violation: token 0 for a row that samples none"]


@DEPTHS
def test_missing_logprobs_are_a_violation(depth: int) -> None:
    with spoiled(change_row(slot=0, step_id=1, logprobs=None), depth) as engine:
        engine.add(request(1, num_logprobs=1))
        assert drain(engine)[1][-1].error == "contract violation: no logprobs for token 98, which the request asks for"


@DEPTHS
def test_missing_prompt_logprobs_are_a_violation(depth: int) -> None:
    with spoiled(change_row(slot=0, step_id=0, prompt_logprobs=()), depth) as engine:
        engine.add(request(1, "hello", num_prompt_logprobs=1))
        assert drain(engine)[1][-1].error == "contract violation: 0 records of prompt tokens, expected 4"


@DEPTHS
def test_a_step_with_too_few_rows_fails_its_requests_and_the_engine_lives(depth: int) -> None:
    def spoil(plan: StepPlan, output: StepOutput) -> StepOutput:
        return StepOutput(output.step_id, output.rows[1:]) if plan.step_id == 1 else output

    with spoiled(spoil, depth) as engine:
        engine.add(request(1))
        engine.add(request(2))
        outputs = drain(engine)
        for uid in (1, 2):
            assert outputs[uid][-1].error == (
                "contract violation: the runner answered step 1 of 2 rows with step 1 of 1 rows"
            )
        engine.add(request(3))
        assert len(drain(engine)[3]) == 4


@DEPTHS
def test_a_step_that_fails_without_being_fatal_fails_its_requests_and_the_engine_lives(depth: int) -> None:
    def spoil(plan: StepPlan, output: StepOutput) -> StepOutput:
        if plan.step_id == 1:
            raise StepFailed("step 1: one kernel was refused", fatal=False)
        return output

    with spoiled(spoil, depth) as engine:
        engine.add(request(1))
        assert drain(engine)[1][-1].error == "step 1: one kernel was refused"
        engine.add(request(2))
        assert len(drain(engine)[2]) == 4


@DEPTHS
def test_a_row_failure_of_the_simulated_runner_ends_its_request_only(depth: int) -> None:
    with spoiled(depth=depth, fail_row_token="#") as engine:
        engine.add(request(1, "a#b"))
        engine.add(request(2))
        outputs = drain(engine)
        assert outputs[1][-1].finish == "failed"
        assert outputs[1][-1].error
        assert outputs[2][-1].finish == "length"


@DEPTHS
def test_a_fatal_step_names_its_root_cause_each_time(depth: int) -> None:
    with spoiled(depth=depth, fail_at_step="2") as engine:
        engine.add(request(1))
        with pytest.raises(EngineDead, match="simulated device fault at step 2") as caught:
            drain(engine)
        assert caught.value.kind == "StepFailed"
        engine.add(request(2))
        with pytest.raises(EngineDead, match="simulated device fault at step 2"):
            drain(engine)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (AddRequest(1, (), Sampling(), 1), "0 prompt tokens and max_tokens 1, expected at least 1 of each"),
        (request(1, max_tokens=0), "2 prompt tokens and max_tokens 0, expected at least 1 of each"),
        (AddRequest(1, (3, 257), Sampling(), 1), "token ids from 3 to 257, expected 0 to 256"),
        (AddRequest(1, (-1, 3), Sampling(), 1), "token ids from -1 to 3, expected 0 to 256"),
        (request(1, "x" * 64), "64 prompt tokens leave no room for an output in max_model_len 64"),
        (AddRequest(1, (3,), Sampling(), 1, adapter_id="de"), "adapter 'de', but the runner serves no adapters"),
        (
            AddRequest(1, (3,), Sampling(), 1, output_token_ids=(4, 5)),
            "2 outputs given, more than max_tokens 1",
        ),
        (
            request(1, "x" * 30, max_tokens=4),
            "30 prompt tokens and max_tokens 4 need room for 34 tokens, but the KV cache of 8 blocks holds 33 of one "
            "request; lower max_tokens or give the cache more memory",
        ),
    ],
)
def test_a_request_that_can_never_be_served_fails_cleanly(message: AddRequest, error: str) -> None:
    with spoiled() as engine:
        engine.add(message)
        engine.add(request(2))
        outputs = drain(engine)
        assert [(output.finish, output.error) for output in outputs[1]] == [("failed", error)]
        assert outputs[2][-1].finish == "length"


@DEPTHS
def test_a_request_that_fills_the_whole_cache_is_served(depth: int) -> None:
    with spoiled(depth=depth) as engine:
        engine.add(request(1, "x" * 29, max_tokens=4))
        engine.add(request(2, "y" * 29, max_tokens=4))
        outputs = drain(engine)
        assert [sum(len(one.token_ids) for one in outputs[uid]) for uid in (1, 2)] == [4, 4]


def test_a_rejected_request_that_is_aborted_says_nothing() -> None:
    with spoiled() as engine:
        engine.add(AddRequest(1, (), Sampling(), 1))
        engine.abort([1])
        assert drain(engine) == {}


def test_a_row_output_stands_for_nothing_by_default() -> None:
    assert RowOutput() == RowOutput(None, None, (), None)
