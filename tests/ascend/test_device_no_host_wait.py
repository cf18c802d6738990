"""Between the launch of a decode step and its settling the host waits for nothing: the calls that wait are counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from device_programs import SECONDS, closed_gate, count_waits
from driving import make_checkpoint, started
from runnerd_spi import Admit, BlockGrant, ModelRunner, OptionValue, Row, RunnerConfig, SamplingParams, StepPlan
from runnerd_torch.ascend.plugin import ASCEND

NUM_DECODES = 8
BLOCK_SIZE = 128
SAMPLINGS = {
    "greedy": [SamplingParams(temperature=0.0)] * 3,
    "random": [SamplingParams(temperature=0.8, seed=seed) for seed in range(3)],
    "all kinds": [
        SamplingParams(temperature=0.8, top_k=5, seed=1),
        SamplingParams(temperature=0.8, top_p=0.9, min_p=0.05, seed=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.1),
        SamplingParams(temperature=0.0, bad_words_token_ids=((4,), (1, 2, 3)), min_tokens=9, stop_token_ids=(0, 1)),
        SamplingParams(temperature=1.0, allowed_token_ids=tuple(range(100)), logit_bias={3: 1.0}, seed=3),
        SamplingParams(temperature=0.0, num_logprobs=4),
    ],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models"), "LlamaConfig")


def plans(samplings: list[SamplingParams]) -> Iterator[StepPlan]:
    """A prefill of all, then decodes of all."""
    slots = range(len(samplings))
    yield StepPlan(
        0,
        admits=tuple(Admit(slot, 1, (3, 4, 5), 3, samplings[slot]) for slot in slots),
        grants=tuple(BlockGrant(slot, 1, (slot,)) for slot in slots),
        rows=tuple(Row(slot, 1, 3, 0, True) for slot in slots),
    )
    for step in range(NUM_DECODES):
        yield StepPlan(1 + step, rows=tuple(Row(slot, 1, 1, 3 + step, True) for slot in slots))


@contextmanager
def decoding(
    model: Path, samplings: list[SamplingParams], depth: int, *, graphs: bool = False, **options: OptionValue
) -> Iterator[tuple[ModelRunner, list[StepPlan]]]:
    """Give a runner whose requests have had their first decode, and the plans of the others."""
    config = RunnerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        model=str(model),
        dtype="bfloat16",
        max_model_len=BLOCK_SIZE,
        max_in_flight=depth,
        memory_bytes=1 << 24,
        enforce_eager=not graphs,
        options=options,
    )
    runner = started(ASCEND, config, 16)
    try:
        prefill, first, *decodes = plans(samplings)
        for handle in [runner.execute_model(prefill), runner.execute_model(first)]:
            handle.result(SECONDS)
        yield runner, decodes
    finally:
        runner.close()


def waits_of(runner: ModelRunner, decodes: list[StepPlan]) -> dict[str, int]:
    """Run steps and give how often the host waited for the device, by the call that made it wait."""
    before = count_waits()
    handles = [runner.execute_model(plan) for plan in decodes]
    waits = {name: count - before[name] for name, count in count_waits().items()}
    assert all(row.token_id is not None for handle in handles for row in handle.result(SECONDS).rows)
    return waits


def are_settling_only(waits: dict[str, int], num_steps: int) -> bool:
    """Whether no step was waited for but by its own last event, once."""
    return waits.pop("synchronize_event") <= num_steps and not any(waits.values())


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("attention", ["fused", "torch"])
def test_decode_steps_wait_for_nothing_but_the_steps_before(model: Path, attention: str, name: str) -> None:
    with decoding(model, SAMPLINGS[name], 2, attention=attention) as (runner, decodes):
        assert are_settling_only(waits_of(runner, decodes), len(decodes))


def test_replayed_decode_steps_wait_for_nothing_but_the_steps_before(model: Path) -> None:
    with decoding(model, SAMPLINGS["greedy"], 2, graphs=True) as (runner, decodes):
        assert are_settling_only(waits_of(runner, decodes), len(decodes))


def with_prompt(plan: StepPlan, slot: int, params: SamplingParams) -> StepPlan:
    """Give the plan with a request that begins."""
    return replace(
        plan,
        admits=(Admit(slot, 1, (7, 8, 9, 10), 4, params),),
        grants=(BlockGrant(slot, 1, (slot,)),),
        rows=(*plan.rows, Row(slot, 1, 4, 0, True)),
    )


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("attention", ["fused", "torch"])
def test_steps_are_launched_on_a_device_that_stands_still(model: Path, attention: str, name: str) -> None:
    samplings = SAMPLINGS[name]
    with decoding(model, samplings, 4, attention=attention) as (runner, decodes), closed_gate() as opened:
        steps = [*decodes[:2], with_prompt(decodes[2], len(samplings), samplings[0])]
        before = count_waits()
        handles = [runner.execute_model(plan) for plan in steps]
        assert count_waits() == before
        assert not any(handle.done() for handle in handles)
        opened.set()
        assert all(row.token_id is not None for handle in handles for row in handle.result(SECONDS).rows)
