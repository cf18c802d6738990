"""How a token is chosen: distribution, determinism, independence of the batch, masks, failures."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerd_spi import Admit, PlanError, RowOutput, SamplingParams
from runnerd_torch.sampling import Sampler, SampleRow, SamplingBatch, row_outputs
from runnerd_torch.sampling.draw import most_likely_ids
from runnerd_torch.sampling.planner import MAX_TOP_K_CANDIDATES

MAX_MODEL_LEN = 16
NEAR_ONE = 1 - 2.0**-53


def sampler_of(all_params: Sequence[SamplingParams], vocab_size: int, prompt: tuple[int, ...] = (1, 2)) -> Sampler:
    """Give a sampler with one request in each slot."""
    sampler = Sampler(len(all_params), MAX_MODEL_LEN, vocab_size)
    for slot, params in enumerate(all_params):
        sampler.admit(Admit(slot, 0, prompt, len(prompt), params))
    return sampler


def token_table(num_slots: int) -> torch.Tensor:
    return (torch.arange(num_slots * MAX_MODEL_LEN).view(num_slots, MAX_MODEL_LEN) * 7 + 1) % 5


def choose(params: SamplingParams, logits: Sequence[float], output_index: int = 0) -> RowOutput:
    sampler = sampler_of([params], len(logits))
    batch = sampler.plan([SampleRow(0, 0, output_index)])
    return row_outputs(batch, sampler.sample(torch.tensor([logits]), batch, token_table(1)))[0]


def with_uniform(batch: SamplingBatch, uniform: float) -> SamplingBatch:
    """Give the batch with this number for each row that draws."""
    assert batch.buffer is not None
    buffer = batch.buffer.clone()
    for draws in (batch.id_order_draws, batch.top_k_draws, batch.sorted_draws):
        if draws is not None:
            draws.uniforms.of(buffer).fill_(uniform)
    return dataclasses.replace(batch, buffer=buffer)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(seed=5), 5),
        (SamplingParams(seed=5, temperature=0.6), 5),
        (SamplingParams(seed=5, top_k=3), 3),
        (SamplingParams(seed=5, top_p=0.9), 4),
        (SamplingParams(seed=5, top_k=4, min_p=0.3), 3),
    ],
)
def test_draws_at_many_output_indices_follow_the_distribution(params: SamplingParams, kept: int) -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.15, 0.3], dtype=torch.float64)
    weights = probabilities ** (1 / params.temperature)
    weights[weights.argsort()[: 5 - kept]] = 0
    expected = weights / weights.sum()
    count = 4000
    sampler = Sampler(count, MAX_MODEL_LEN, 5)
    for slot in range(count):
        sampler.admit(Admit(slot, 0, (1,), 1, params))
    batch = sampler.plan([SampleRow(slot, 0, slot) for slot in range(count)])
    logits = probabilities.log().float().expand(count, 5)
    token_ids = sampler.sample(logits, batch, torch.zeros(count, MAX_MODEL_LEN, dtype=torch.int64)).token_ids
    observed = torch.bincount(token_ids, minlength=5).double()
    assert (observed[expected == 0] == 0).all()
    likely = expected > 0
    chi_square = ((observed - count * expected)[likely] ** 2 / (count * expected[likely])).sum().item()
    assert chi_square < 24  # 4 degrees of freedom: exceeded by chance once in 10,000


EVERY_KIND = [
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, min_p=0.01),
    SamplingParams(seed=3, top_k=4),
    SamplingParams(seed=4, top_k=60, top_p=0.9),
    SamplingParams(seed=5, top_p=0.95),
    SamplingParams(seed=6, top_k=MAX_TOP_K_CANDIDATES + 20, temperature=2.0),
    SamplingParams(seed=7, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(temperature=0, presence_penalty=-1.0, num_logprobs=3),
    SamplingParams(seed=8, logit_bias={5: 3.0}, num_logprobs=0),
    SamplingParams(seed=9, allowed_token_ids=tuple(range(0, 1500, 7))),
    SamplingParams(seed=10, bad_words_token_ids=((3,), (1, 3, 8), (3, 0)), top_p=0.5),
    SamplingParams(seed=11, min_tokens=9, stop_token_ids=(4, 5), temperature=0.2, num_logprobs=7),
]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.permutations(range(len(EVERY_KIND))), st.integers(1, len(EVERY_KIND)), st.integers(0, 10**6))
def test_a_row_gives_the_same_in_any_batch_as_alone(order: list[int], num_rows: int, seed: int) -> None:
    vocab_size = 1500
    # As from a bfloat16 model: many logits are equal.
    logits = torch.randn(len(EVERY_KIND), vocab_size, generator=torch.Generator().manual_seed(seed)).mul(3)
    logits = logits.bfloat16().float()
    sampler, table = sampler_of(EVERY_KIND, vocab_size), token_table(len(EVERY_KIND))

    def outputs(slots: Sequence[int]) -> list[RowOutput]:
        batch = sampler.plan([SampleRow(slot, 0, 6 + slot % 3) for slot in slots])
        return row_outputs(batch, sampler.sample(logits[list(slots)], batch, table))

    chosen = order[:num_rows]
    assert outputs(chosen) == [outputs([slot])[0] for slot in chosen]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 1e-300, 0.25, 0.5, NEAR_ONE]), st.sampled_from([0.1, 1.0, 50.0]))
def test_a_masked_token_is_never_chosen_whatever_the_uniform_number(
    seed: int, uniform: float, temperature: float
) -> None:
    vocab_size, generator = 3000, torch.Generator().manual_seed(seed)
    allowed = tuple(sorted(torch.randperm(vocab_size, generator=generator)[:50].tolist()))
    base = SamplingParams(temperature=temperature, allowed_token_ids=allowed)
    kinds = [base, *(dataclasses.replace(base, **more) for more in ({"top_k": 30}, {"top_p": 0.99}, {"min_p": 1e-4}))]
    sampler = sampler_of(kinds, vocab_size)
    batch = with_uniform(sampler.plan([SampleRow(slot, 0, 0) for slot in range(len(kinds))]), uniform)
    logits = torch.randn(len(kinds), vocab_size, generator=generator) * 20
    chosen = sampler.sample(logits, batch, token_table(len(kinds))).token_ids.tolist()
    assert set(chosen) <= set(allowed)


@pytest.mark.parametrize("seed", range(5))
def test_sums_of_more_bits_than_float64_holds_do_not_reach_a_masked_token(seed: int) -> None:
    # 60,000 weights of about 2**40 make a sum of about 2**56.
    vocab_size = 60_000
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed)) * 0.01
    sampler = sampler_of([SamplingParams(bad_words_token_ids=((vocab_size - 1,),))], vocab_size)
    batch = with_uniform(sampler.plan([SampleRow(0, 0, 0)]), NEAR_ONE)
    assert sampler.sample(logits, batch, token_table(1)).token_ids.tolist() == [vocab_size - 2]


@pytest.mark.parametrize("params", [SamplingParams(top_k=3), SamplingParams(top_k=3, top_p=0.999), SamplingParams()])
def test_the_greatest_uniform_number_chooses_the_last_kept_token(params: SamplingParams) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0, 0.5]])
    sampler = sampler_of([params], 5)
    batch = with_uniform(sampler.plan([SampleRow(0, 0, 0)]), NEAR_ONE)
    last = 2 if params.top_k else 4
    assert sampler.sample(logits, batch, token_table(1)).token_ids.tolist() == [last]


def test_rows_without_top_k_and_top_p_accumulate_in_token_id_order() -> None:
    sampler = sampler_of([SamplingParams()], 4)
    plan = sampler.plan([SampleRow(0, 0, 0)])
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    chosen = [
        sampler.sample(logits, with_uniform(plan, uniform), token_table(1)).token_ids.item()
        for uniform in (0.0, 0.09, 0.11, 0.29, 0.31, 0.59, 0.61)
    ]
    assert chosen == [0, 0, 1, 1, 2, 2, 3]


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    logits = torch.zeros(500).tolist()

    def stream(seed: int) -> list[int | None]:
        return [choose(SamplingParams(seed=seed), logits, index).token_id for index in range(30)]

    assert stream(3) == stream(3)
    assert stream(3) != stream(4)
    assert len(set(stream(3))) > 20


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0), SamplingParams(temperature=0, top_k=3, top_p=0.1), SamplingParams(top_k=1)],
)
def test_among_equal_logits_the_lowest_token_id_is_the_greedy_choice(params: SamplingParams) -> None:
    for size in (5, 64, 1000, 40_000):
        logits = torch.zeros(size)
        logits[size // 2 :] = 2.5
        assert choose(params, logits.tolist()).token_id == size // 2


def test_plus_and_minus_zero_are_equal_logits() -> None:
    assert most_likely_ids(torch.tensor([[-1.0, -0.0, 0.0, -0.0, 1.0]]), 4).tolist() == [[4, 1, 2, 3]]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=30), st.data())
def test_most_likely_ids_are_those_of_a_stable_sort(values: list[int], data: st.DataObject) -> None:
    num_ids = data.draw(st.integers(1, len(values)))
    logits = torch.tensor([values], dtype=torch.float32) / 3
    logits[logits == 1] = -torch.inf
    expected = sorted(range(len(values)), key=lambda one: -logits[0, one].item())[:num_ids]
    assert most_likely_ids(logits, num_ids)[0].tolist() == expected


def test_a_vanishing_temperature_is_the_greedy_choice() -> None:
    for temperature in (1e-6, 1e-38, 1e-60):
        assert choose(SamplingParams(temperature=temperature), [1.0, 1.0001, -3e38]).token_id == 1


def test_logits_of_any_float_type_are_taken_and_left_as_they_are() -> None:
    sampler = sampler_of([SamplingParams(temperature=0, logit_bias={1: 5.0}, num_logprobs=1)], 3)
    batch = sampler.plan([SampleRow(0, 0, 0)])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        logits = torch.tensor([[1.0, 0.0, 2.0]], dtype=dtype)
        before = logits.clone()
        assert sampler.sample(logits, batch, token_table(1)).token_ids.tolist() == [1]
        assert torch.equal(logits, before)


NO_TOKEN = [
    SamplingParams(temperature=0, allowed_token_ids=()),
    SamplingParams(allowed_token_ids=(1, 2), bad_words_token_ids=((1,), (2,))),
    SamplingParams(top_k=2, allowed_token_ids=(3,), min_tokens=1, stop_token_ids=(3,)),
    SamplingParams(top_p=0.5, bad_words_token_ids=tuple((token,) for token in range(6)), num_logprobs=2),
]


def test_a_row_without_any_allowed_token_fails_and_others_go_on() -> None:
    sampler = sampler_of([*NO_TOKEN, SamplingParams(temperature=0)], 6)
    slots = range(len(NO_TOKEN) + 1)
    batch = sampler.plan([SampleRow(slot, 0, 0) for slot in slots])
    sampled = sampler.sample(torch.arange(6.0).expand(len(slots), 6), batch, token_table(len(slots)))
    *failed, good = row_outputs(batch, sampled)
    assert good == RowOutput(token_id=5)
    for output in failed:
        assert output.token_id is None
        assert output.logprobs is None
        assert output.failure is not None
        assert output.failure.startswith("no token is allowed")
    assert ((sampled.token_ids >= 0) & (sampled.token_ids < 6)).all()


@pytest.mark.parametrize("broken", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.5)]
)
def test_logits_that_are_not_numbers_fail_the_row(params: SamplingParams, broken: float) -> None:
    output = choose(params, [0.0, broken, 1.0, -1.0])
    assert output.token_id is None
    assert output.failure is not None
    assert "NaN" in output.failure


def test_a_planned_batch_outlives_the_release_of_its_slots() -> None:
    sampler = sampler_of([SamplingParams(temperature=0, logit_bias={2: 9.0})], 4)
    batch = sampler.plan([SampleRow(0, 0, 0)])
    sampler.release(0)
    sampler.admit(Admit(0, 1, (1,), 1, SamplingParams(temperature=0, logit_bias={3: 9.0})))
    assert sampler.sample(torch.zeros(1, 4), batch, token_table(1)).token_ids.tolist() == [2]


def test_a_row_of_another_epoch_is_refused() -> None:
    sampler = sampler_of([SamplingParams()], 4)
    with pytest.raises(PlanError, match="slot 0 epoch 3, but the slot is epoch 0"):
        sampler.plan([SampleRow(0, 3, 0)])
    sampler.release(0)
    with pytest.raises(PlanError, match="slot 0 epoch 0, but the slot is empty"):
        sampler.plan([SampleRow(0, 0, 0)])


def test_a_batch_without_rows_gives_no_outputs() -> None:
    sampler = sampler_of([SamplingParams()], 4)
    batch = sampler.plan([])
    assert row_outputs(batch, sampler.sample(torch.empty(0, 4), batch, token_table(1))) == []


def test_shapes_that_do_not_fit_are_refused() -> None:
    sampler = sampler_of([SamplingParams()], 4)
    batch = sampler.plan([SampleRow(0, 0, 0)])
    with pytest.raises(ValueError, match=r"logits have shape \(1, 5\), expected \(1, 4\)"):
        sampler.sample(torch.zeros(1, 5), batch, token_table(1))
    with pytest.raises(ValueError, match="token_table has shape"):
        sampler.sample(torch.zeros(1, 4), batch, token_table(2))
