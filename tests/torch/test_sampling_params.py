"""Each sampling parameter against the logits processors of transformers, alone and in random combinations."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from runnerd_spi import Admit, PlanError, SamplingParams
from runnerd_torch.sampling import Sampler, SampleRow
from runnerd_torch.sampling.draw import token_weights
from runnerd_torch.sampling.processors import process_logits

VOCAB_SIZE = 40
MAX_MODEL_LEN = 32
GARBAGE = 10**12
"""What the token table may hold behind the last token of a request."""


def random_logits(seed: int) -> torch.Tensor:
    return torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def processed_and_probabilities(
    params: SamplingParams, logits: torch.Tensor, prompt: Sequence[int], outputs: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give our processed logits and the probability with which each token is drawn, both [vocab_size]."""
    slot, num_tokens = 2, len(prompt) + len(outputs)
    sampler = Sampler(4, MAX_MODEL_LEN, VOCAB_SIZE)
    sampler.admit(Admit(slot, 0, tuple(prompt), len(prompt), params))
    batch = sampler.plan([SampleRow(slot, 0, len(outputs))])
    table = torch.full((4, MAX_MODEL_LEN), GARBAGE)
    table[slot, :num_tokens] = torch.tensor([*prompt, *outputs])
    assert batch.buffer is not None
    processed = logits.clone()
    process_logits(processed, batch, batch.buffer, table)
    (draws,) = [one for one in (batch.id_order_draws, batch.top_k_draws, batch.sorted_draws) if one is not None]
    ids, weights = token_weights(processed, processed.amax(1, keepdim=True), draws, batch.buffer)
    dense = torch.zeros(1, VOCAB_SIZE, dtype=torch.float64)
    dense.scatter_(1, torch.arange(VOCAB_SIZE)[None] if ids is None else ids, weights.double())
    return processed[0], (dense / dense.sum())[0]


def expected_scores(
    params: SamplingParams, scores: torch.Tensor, prompt: Sequence[int], outputs: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the logits after the processors and after the warpers of transformers, both [vocab_size]."""
    history, generated = torch.tensor([[*prompt, *outputs]]), torch.tensor([list(outputs)], dtype=torch.int64)
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(history, scores.clone())
    for token, count in Counter(outputs).items():
        scores[0, token] -= params.frequency_penalty * count + params.presence_penalty
    if params.logit_bias:
        biases = [[[token], value] for token, value in params.logit_bias.items()]
        scores = SequenceBiasLogitsProcessor(biases)(history, scores)
    if params.allowed_token_ids is not None:
        banned = torch.ones(VOCAB_SIZE, dtype=torch.bool)
        banned[list(params.allowed_token_ids)] = False
        scores = scores.masked_fill(banned, -torch.inf)
    if params.bad_words_token_ids:
        words = [list(word) for word in params.bad_words_token_ids]
        scores = NoBadWordsLogitsProcessor(words)(generated, scores)
    if params.min_tokens and params.stop_token_ids:
        stop_ids = list(params.stop_token_ids)
        scores = MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, stop_ids)(history, scores)
    processed = scores[0]
    scores = TemperatureLogitsWarper(params.temperature)(history, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(history, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(history, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(history, scores)
    if params.typical_p < 1:
        scores = TypicalLogitsWarper(params.typical_p)(history, scores)
    return processed, scores[0]


def assert_agrees(
    params: SamplingParams, seed: int, prompt: Sequence[int], outputs: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = random_logits(seed)
    processed, probabilities = processed_and_probabilities(params, logits, prompt, outputs)
    expected_processed, expected = expected_scores(params, logits, prompt, outputs)
    torch.testing.assert_close(processed, expected_processed, rtol=1e-5, atol=1e-5)
    expected_probabilities = torch.softmax(expected.double(), dim=0)
    torch.testing.assert_close(probabilities, expected_probabilities, rtol=1e-4, atol=1e-8)
    # Fewer bits than the weights have: a token that unlikely may be kept with no chance, or with one.
    visible = expected_probabilities > expected_probabilities.max() * 2.0**-38
    assert ((probabilities > 0) | ~visible).all()
    assert ((probabilities == 0) | (expected > -torch.inf)).all()
    return processed, probabilities


PROMPT, OUTPUTS = [3, 5, 5, 9], [5, 7, 7, 7, 11, 2]

ALONE = {
    "none": SamplingParams(),
    "temperature below 1": SamplingParams(temperature=0.3),
    "temperature above 1": SamplingParams(temperature=3.7),
    "top_k": SamplingParams(top_k=5),
    "top_k of 1": SamplingParams(top_k=1),
    "top_k of the vocabulary": SamplingParams(top_k=VOCAB_SIZE),
    "top_p": SamplingParams(top_p=0.8),
    "tiny top_p": SamplingParams(top_p=1e-9),
    "min_p": SamplingParams(min_p=0.1),
    "min_p of 1": SamplingParams(min_p=1.0),
    "typical_p": SamplingParams(typical_p=0.6),
    "tiny typical_p": SamplingParams(typical_p=1e-9),
    "typical_p and min_p": SamplingParams(temperature=2.0, min_p=0.05, typical_p=0.7),
    "typical_p, top_k and top_p": SamplingParams(temperature=1.5, top_k=20, top_p=0.9, typical_p=0.5),
    "top_k and top_p": SamplingParams(top_k=6, top_p=0.7),
    "top_p and min_p": SamplingParams(temperature=2.0, top_p=0.9, min_p=0.2),
    "repetition_penalty": SamplingParams(repetition_penalty=1.7),
    "repetition_penalty below 1": SamplingParams(repetition_penalty=0.6),
    "presence_penalty": SamplingParams(presence_penalty=1.5),
    "frequency_penalty": SamplingParams(frequency_penalty=0.7),
    "negative penalties": SamplingParams(presence_penalty=-1.5, frequency_penalty=-0.5),
    "logit_bias": SamplingParams(logit_bias={0: 4.0, 39: -100.0, 7: 2.5}),
    "allowed_token_ids": SamplingParams(allowed_token_ids=(1, 7, 20)),
    "bad word of one token": SamplingParams(bad_words_token_ids=((8,), (7,))),
    "bad words that match and do not": SamplingParams(bad_words_token_ids=((11, 2, 30), (7, 2, 31), (2, 31), (2, 6))),
    "bad words longer than the outputs": SamplingParams(bad_words_token_ids=((9, *OUTPUTS, 30), (*OUTPUTS, 31))),
    "min_tokens not reached": SamplingParams(min_tokens=7, stop_token_ids=(4, 6)),
    "min_tokens reached": SamplingParams(min_tokens=6, stop_token_ids=(4, 6)),
}


@pytest.mark.parametrize("params", ALONE.values(), ids=ALONE.keys())
@pytest.mark.parametrize("seed", range(5))
def test_each_parameter_agrees_with_transformers(params: SamplingParams, seed: int) -> None:
    assert_agrees(params, seed, PROMPT, OUTPUTS)


TOKENS = st.integers(min_value=0, max_value=VOCAB_SIZE - 1)
# Few different tokens in history and bad words, so that repetitions and matches happen.
FEW_TOKENS = st.integers(min_value=0, max_value=3)
PENALTY = st.sampled_from([0.0, -1.5, -0.1, 0.3, 2.0])
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.4, 0.7, 1.0, 1.3, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 7, 30, VOCAB_SIZE, 500]),
    top_p=st.sampled_from([0.05, 0.5, 0.83, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.003, 0.07, 0.5]),
    typical_p=st.sampled_from([1.0, 1.0, 0.2, 0.6, 0.95]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.2, 2.0]),
    presence_penalty=PENALTY,
    frequency_penalty=PENALTY,
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, -2.0, 1.5, 5.0]), max_size=4),
    allowed_token_ids=st.none() | st.sets(TOKENS, min_size=20).map(lambda ids: tuple(sorted(ids))),
    bad_words_token_ids=st.lists(st.lists(FEW_TOKENS, min_size=1, max_size=4).map(tuple), max_size=5, unique=True).map(
        tuple
    ),
    min_tokens=st.integers(min_value=0, max_value=8),
    stop_token_ids=st.sets(TOKENS, max_size=3).map(tuple),
)


@settings(derandomize=True, deadline=None, max_examples=250)
@given(PARAMS, st.integers(0, 10**6), st.lists(FEW_TOKENS, min_size=1, max_size=6), st.lists(FEW_TOKENS, max_size=10))
def test_random_combinations_agree_with_transformers(
    params: SamplingParams, seed: int, prompt: list[int], outputs: list[int]
) -> None:
    assert_agrees(params, seed, prompt, outputs)


def test_presence_and_frequency_penalties_do_not_count_the_prompt() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=1.0)
    logits = random_logits(1)
    processed, _ = processed_and_probabilities(params, logits, [3, 3, 3], [4, 4])
    change = processed - logits[0]
    assert change[3] == 0
    assert change[4].item() == pytest.approx(-3, abs=1e-5)


def test_a_bad_word_does_not_match_across_the_end_of_the_prompt() -> None:
    params = SamplingParams(bad_words_token_ids=((3, 4, 9),))
    after_prompt, _ = processed_and_probabilities(params, random_logits(1), [1, 3], [4])
    in_outputs, _ = processed_and_probabilities(params, random_logits(1), [1], [3, 4])
    assert after_prompt[9] > -torch.inf
    assert in_outputs[9] == -torch.inf


def test_penalties_of_requests_of_different_lengths_do_not_mix() -> None:
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)
    requests = [([1, 2], [3]), ([4], [5, 5, 6, 7, 8, 9]), ([39, 38], []), ([0], [39, 39])]
    sampler = Sampler(len(requests), MAX_MODEL_LEN, VOCAB_SIZE)
    table = torch.full((len(requests), MAX_MODEL_LEN), GARBAGE)
    for slot, (prompt, outputs) in enumerate(requests):
        sampler.admit(Admit(slot, 0, tuple(prompt), len(prompt), params))
        table[slot, : len(prompt) + len(outputs)] = torch.tensor([*prompt, *outputs])
    batch = sampler.plan([SampleRow(slot, 0, len(outputs)) for slot, (_, outputs) in enumerate(requests)])
    assert batch.buffer is not None
    processed = random_logits(3).repeat(len(requests), 1)
    process_logits(processed, batch, batch.buffer, table)
    for row, (prompt, outputs) in zip(processed, requests, strict=True):
        expected, _ = expected_scores(params, random_logits(3), prompt, outputs)
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-5)


def test_penalties_read_tokens_that_reach_the_table_after_the_plan() -> None:
    sampler = Sampler(1, MAX_MODEL_LEN, VOCAB_SIZE)
    sampler.admit(Admit(0, 0, (1,), 1, SamplingParams(temperature=0, frequency_penalty=2.0)))
    table = torch.full((1, MAX_MODEL_LEN), GARBAGE)
    table[0, 0] = 1
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 8] = 1.0
    batches = [sampler.plan([SampleRow(0, 0, index)]) for index in range(3)]
    chosen = []
    for index, batch in enumerate(batches):
        token = sampler.sample(logits, batch, table).token_ids
        table[0, 1 + index : 2 + index] = token
        chosen.append(token.item())
    assert chosen == [8, 0, 1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias={VOCAB_SIZE: 1.0}),
        SamplingParams(allowed_token_ids=(-1,)),
        SamplingParams(bad_words_token_ids=((1, VOCAB_SIZE),)),
        SamplingParams(bad_words_token_ids=((),)),
        SamplingParams(stop_token_ids=(VOCAB_SIZE + 5,)),
    ],
)
def test_an_id_outside_the_vocabulary_is_refused_and_changes_nothing(params: SamplingParams) -> None:
    sampler = Sampler(1, MAX_MODEL_LEN, VOCAB_SIZE)
    admit = Admit(0, 5, (1,), 1, params)
    with pytest.raises(PlanError, match="slot 0"):
        sampler.admit(admit)
    with pytest.raises(PlanError, match="slot 0 epoch 5, but the slot is empty"):
        sampler.plan([SampleRow(0, 5, 0)])
