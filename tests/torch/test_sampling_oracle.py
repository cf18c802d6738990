"""Whole generations on a runner against an exact reference: every token that sampling chose, and how often.

The reference is plain numpy over the model's own forward: float64 softmax, sums of Python integers. It shares no code
with the sampler.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from runnerd_spi import SamplingParams

VOCAB_SIZE = 160
MASK = 2**64 - 1


def mix(value: int) -> int:
    """The finalizer of SplitMix64, as published."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int) -> float:
    return (mix((mix(seed) + (index + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11) / 2**53


def distribution(logits: np.ndarray, params: SamplingParams) -> tuple[list[int], np.ndarray]:
    """Give token ids in the order of their parts of [0, 1), and their probabilities, of processed logits."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    ids = list(range(len(weights)))
    # A top-k of the whole vocabulary limits nothing: the order stays that of the ids.
    if 0 < params.top_k < len(weights) or params.top_p < 1:
        ids.sort(key=lambda token: (-logits[token], token))
    kept = weights[ids]
    if params.top_k:
        kept[params.top_k :] = 0
    if params.top_p < 1:
        before = np.concatenate(([0.0], np.cumsum(kept)[:-1]))
        kept[before >= params.top_p * kept.sum()] = 0
    kept[kept < params.min_p] = 0
    kept /= kept.sum()
    if params.typical_p < 1:
        surprisals = -np.log(kept, where=kept > 0, out=np.full_like(kept, -np.inf))
        distances = np.abs(surprisals - kept[kept > 0] @ surprisals[kept > 0])
        nearest = np.argsort(distances, kind="stable")
        last = nearest[int((np.cumsum(kept[nearest]) < params.typical_p).sum())]
        kept[distances > distances[last]] = 0
    return ids, kept / kept.sum()


def expected_token(logits: np.ndarray, params: SamplingParams, index: int) -> int | None:
    """Give the token the seed draws; None: the draw is nearer to a boundary than float32 logits can tell."""
    if params.temperature == 0:
        best, second = np.sort(logits)[::-1][:2]
        return int(logits.argmax()) if best - second > 1e-3 else None
    ids, probabilities = distribution(logits, params)
    sums = np.cumsum(probabilities)
    drawn = uniform(params.seed, index)
    # What top-p and min-p keep may turn on rounding, too: then a slightly different limit gives another answer.
    if np.abs(sums - drawn).min() < 1e-4:
        return None
    return ids[int(np.searchsorted(sums, drawn, side="right"))]


def processed(raw: np.ndarray, params: SamplingParams, prompt: list[int], outputs: list[int]) -> np.ndarray:
    scores = torch.from_numpy(raw.copy())[None]
    history = torch.tensor([[*prompt, *outputs]])
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(history, scores)[0].numpy()
    for token in set(outputs):
        scores[token] -= params.presence_penalty + params.frequency_penalty * outputs.count(token)
    for token, value in params.logit_bias.items():
        scores[token] += value
    return scores


@pytest.fixture(scope="module")
def llama(make_checkpoint):
    return make_checkpoint("LlamaConfig")


@pytest.fixture(scope="module")
def oracle(llama):
    return transformers.AutoModelForCausalLM.from_pretrained(llama).eval()


@pytest.fixture
def drivers(llama, open_runner):
    return {depth: open_runner(llama, max_in_flight=depth) for depth in (1, 2)}


def raw_logits(oracle, request) -> np.ndarray:
    """Give the model's logits before each output, [num_outputs, vocab_size] float64."""
    with torch.inference_mode():
        logits = oracle(torch.tensor([request.prompt + request.token_ids])).logits[0]
    return logits[len(request.prompt) - 1 : -1].double().numpy()


def run(driver, request_type, prompt: list[int], params: SamplingParams, max_tokens: int = 10):
    request = request_type(prompt, max_tokens, params)
    driver.admit(request)
    driver.run([request], chunk=4)
    driver.release(request)
    driver.launch().result(60)
    return request


def assert_follows_the_reference(driver, request_type, oracle, prompt: list[int], params: SamplingParams) -> int:
    """Check each token given those before it; give how many could be told."""
    request = run(driver, request_type, prompt, params)
    told = 0
    for index, (output, raw) in enumerate(zip(request.outputs, raw_logits(oracle, request), strict=True)):
        token = output.token_id
        expected = expected_token(processed(raw, params, prompt, request.token_ids[:index]), params, index)
        if expected is not None:
            assert token == expected, f"output {index}"
            told += 1
        logprobs = raw - raw.max() - math.log(np.exp(raw - raw.max()).sum())
        assert output.logprobs.logprob == pytest.approx(logprobs[token], abs=1e-4)
        assert (logprobs > logprobs[token] + 1e-4).sum() < output.logprobs.rank
        assert output.logprobs.rank <= (logprobs > logprobs[token] - 1e-4).sum()
        for alternative, logprob in output.logprobs.top:
            assert logprob == pytest.approx(logprobs[alternative], abs=1e-4)
        assert [logprob for _, logprob in output.logprobs.top] == pytest.approx(
            sorted(logprobs, reverse=True)[:3], abs=1e-4
        )
    return told


ALONE = {
    "greedy": {"temperature": 0.0},
    "seed": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 8},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.6},
    "repetition_penalty": {"temperature": 0.0, "repetition_penalty": 1.8},
    "presence_penalty": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency_penalty": {"temperature": 0.0, "frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {5: 3.0, 9: -50.0}},
}
PROMPT = [5, 9, 77, 31, 12, 9, 100]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ALONE)
def test_each_parameter_gives_the_tokens_of_the_reference(name, depth, drivers, request_type, oracle) -> None:
    params = SamplingParams(**({"seed": 2**63 + 5, "num_logprobs": 3} | ALONE[name]))
    assert assert_follows_the_reference(drivers[depth], request_type, oracle, PROMPT, params) >= 8


COMBINATIONS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.6]),
    top_k=st.sampled_from([0, 1, 5, 60, VOCAB_SIZE]),
    top_p=st.sampled_from([0.4, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    typical_p=st.sampled_from([1.0, 1.0, 0.3, 0.8]),
    seed=st.integers(0, MASK),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.5]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 1.2]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-20.0, 2.0]), max_size=3),
    num_logprobs=st.just(3),
)
PROMPTS = st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=12)
BOUNDED = {"derandomize": True, "deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(max_examples=12, **BOUNDED)
@given(COMBINATIONS, PROMPTS, st.sampled_from([1, 2]))
def test_combinations_give_the_tokens_of_the_reference(drivers, request_type, oracle, params, prompt, depth) -> None:
    assert_follows_the_reference(drivers[depth], request_type, oracle, prompt, params)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=300, **BOUNDED)
@given(COMBINATIONS, PROMPTS, st.sampled_from([1, 2]))
def test_many_combinations_give_the_tokens_of_the_reference(
    drivers, request_type, oracle, params, prompt, depth
) -> None:
    assert_follows_the_reference(drivers[depth], request_type, oracle, prompt, params)


@pytest.mark.parametrize(
    ("asked", "of_generate"),
    [
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"min_tokens": 9, "stop_token_ids": (7, 55)}, {"min_new_tokens": 9, "eos_token_id": [7, 55]}),
        ({"logit_bias": {20: 4.0, 9: -9.0}}, {"sequence_bias": [[[20], 4.0], [[9], -9.0]]}),
    ],
    ids=["repetition_penalty", "min_tokens", "logit_bias"],
)
def test_greedy_generations_are_those_of_generate(asked, of_generate, drivers, request_type, oracle) -> None:
    request = run(drivers[2], request_type, PROMPT, SamplingParams(temperature=0.0, **asked), 9)
    options = {"eos_token_id": -1, "pad_token_id": 0, "do_sample": False, "max_new_tokens": 9} | of_generate
    ids = torch.tensor([PROMPT])
    output = oracle.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(PROMPT) :].tolist()
    assert request.token_ids[: len(output)] == output


def test_bad_words_are_those_of_generate(drivers, request_type, oracle) -> None:
    free = run(drivers[1], request_type, PROMPT, SamplingParams(temperature=0.0), 9).token_ids
    words = ((free[0],), tuple(free[3:5]))
    request = run(drivers[2], request_type, PROMPT, SamplingParams(temperature=0.0, bad_words_token_ids=words), 9)
    ids = torch.tensor([PROMPT])
    options = {"bad_words_ids": [list(word) for word in words], "eos_token_id": -1, "pad_token_id": 0}
    output = oracle.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9, **options)
    assert request.token_ids == output[0, len(PROMPT) :].tolist()
    assert request.token_ids != free


# Each parameter at one depth, and plain draws at every depth; `-m slow` has the others.
DRAWS = [
    pytest.param(asked, depth, id=f"{asked}-{depth}", marks=() if depth == 2 or not asked else pytest.mark.slow)
    for asked in ({}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}, {"typical_p": 0.7})
    for depth in (1, 2, 3, 4)
]


@pytest.mark.parametrize(("asked", "depth"), DRAWS)
def test_first_and_second_tokens_follow_the_exact_probabilities(
    asked, depth, make_checkpoint, open_runner, request_type
) -> None:
    path = make_checkpoint("LlamaConfig", vocab_size=8, num_hidden_layers=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    count, prompt = 1536, [3, 5, 6]
    driver = open_runner(path, max_in_flight=depth, max_num_seqs=128, max_num_batched_tokens=512, num_blocks=300)
    observed: dict[tuple[int, ...], int] = {}
    for first in range(0, count, 128):
        requests = [request_type(prompt, 2, SamplingParams(**asked, seed=first + i)) for i in range(128)]
        for one in requests:
            driver.admit(one)
        for tokens in driver.run(requests):
            observed[tuple(tokens)] = observed.get(tuple(tokens), 0) + 1
        for one in requests:
            driver.release(one)
    expected: dict[tuple[int, ...], float] = {}
    params = SamplingParams(**asked)

    def following(ids: list[int]) -> list[tuple[int, float]]:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1].double().numpy()
        return [(token, float(one)) for token, one in zip(*distribution(logits, params), strict=True) if one > 0]

    for token, probability in following(prompt):
        for second, given_first in following([*prompt, token]):
            expected[token, second] = count * probability * given_first
    assert set(observed) <= set(expected)
    # The test holds for five expected counts or more; rarer pairs are taken together.
    rare = [pair for pair, mean in expected.items() if mean < 5]
    cells = [(observed.get(pair, 0), mean) for pair, mean in expected.items() if mean >= 5]
    if sum(expected[pair] for pair in rare) >= 5:
        cells.append((sum(observed.get(pair, 0) for pair in rare), sum(expected[pair] for pair in rare)))
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    freedom = len(cells) - 1
    assert freedom >= 2
    # Wilson and Hilferty's approximation of the chi-square quantile that chance exceeds once in ten thousand.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit
