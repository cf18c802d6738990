"""Every sampling parameter has the effect its definition says, in the pipeline of the SPI."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerd_sim.model import EOS_TOKEN_ID, VOCAB_SIZE, SimModel, history_terms
from runnerd_spi import SamplingParams
from runnerd_spi.sampling import History, choose, is_plain_greedy, token_logprobs, uniform

GREEDY = SamplingParams(temperature=0)
MODEL = SimModel(eos_bias=0.0, script=None)
PROBABILITIES = (0.5, 0.3, 0.15, 0.05)


def history(prompt: tuple[int, ...] = (), outputs: tuple[int, ...] = ()) -> History:
    return History(np.array(prompt + outputs, dtype=np.int16), len(prompt))


def four_logits() -> np.ndarray:
    return np.log(np.array(PROBABILITIES, dtype=np.float64)).astype(np.float32)


def reachable(params: SamplingParams, past: History | None = None) -> set[int]:
    """The tokens that some uniform number leads to."""
    drawn = (choose(four_logits(), params, past or history(), u) for u in np.linspace(0, 1, 400, endpoint=False))
    return {token for token in drawn if token is not None}


def test_the_draw_follows_the_inverse_of_the_cumulative_distribution() -> None:
    picks = [choose(four_logits(), SamplingParams(), history(), u) for u in (0.0, 0.49, 0.51, 0.79, 0.81, 0.94, 0.96)]
    assert picks == [0, 0, 1, 1, 2, 2, 3]


def test_the_last_number_below_one_draws_the_last_token_that_is_kept() -> None:
    assert choose(four_logits(), SamplingParams(top_k=2), history(), np.nextafter(1.0, 0.0)) == 1


def test_temperature_sharpens_and_flattens() -> None:
    # Squared probabilities: 0.25, 0.09, 0.0225, 0.0025 of 0.365; the first takes 0.685.
    assert choose(four_logits(), SamplingParams(temperature=0.5), history(), 0.68) == 0
    assert choose(four_logits(), SamplingParams(temperature=0.5), history(), 0.69) == 1
    assert choose(four_logits(), SamplingParams(temperature=100.0), history(), 0.26) == 1


@pytest.mark.parametrize("temperature", [1e-3, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy_without_a_warning(temperature: float) -> None:
    assert reachable(SamplingParams(temperature=temperature)) == {0}


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert choose(np.array([1, 3, 3, 2], dtype=np.float32), GREEDY, history(), 0.9) == 1


@pytest.mark.parametrize(("top_k", "kept"), [(0, {0, 1, 2, 3}), (1, {0}), (2, {0, 1}), (9, {0, 1, 2, 3})])
def test_top_k_keeps_the_k_most_likely(top_k: int, kept: set[int]) -> None:
    assert reachable(SamplingParams(top_k=top_k)) == kept


def test_top_k_keeps_exactly_k_among_equals() -> None:
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    drawn = {choose(logits, SamplingParams(top_k=2), history(), u) for u in np.linspace(0, 1, 50, endpoint=False)}
    assert drawn == {0, 1}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, {0}), (0.4, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (0.99, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    assert reachable(SamplingParams(top_p=top_p)) == kept


def test_top_p_counts_what_top_k_left() -> None:
    # Of the two that are left, the first has 0.625 of the mass.
    assert reachable(SamplingParams(top_k=2, top_p=0.6)) == {0}


@pytest.mark.parametrize(("min_p", "kept"), [(0.05, {0, 1, 2, 3}), (0.2, {0, 1, 2}), (0.5, {0, 1}), (1.0, {0})])
def test_min_p_drops_what_is_much_less_likely_than_the_best(min_p: float, kept: set[int]) -> None:
    assert reachable(SamplingParams(min_p=min_p)) == kept


def test_typical_p_keeps_what_is_nearest_to_the_mean_surprisal() -> None:
    # Probabilities 0.9 and ten of 0.01: the mean surprisal is 0.56, that of the first 0.11, that of the others 4.6.
    logits = np.log(np.array([0.9, *[0.01] * 10], dtype=np.float32))
    drawn = [choose(logits, SamplingParams(typical_p=0.5), history(), u) for u in (0.0, 0.5, 0.999)]
    assert drawn == [0, 0, 0]
    # Probabilities 0.6 and forty of 0.01: the mean is 2.15, so the first, with 0.51, is nearer.
    logits = np.log(np.array([0.6, *[0.01] * 40], dtype=np.float32))
    assert choose(logits, SamplingParams(typical_p=0.4), history(), 0.999) == 0
    # Probabilities 0.4 and sixty of 0.01: the mean is 3.13, and the others are nearer than the first; all are as near.
    logits = np.log(np.array([0.4, *[0.01] * 60], dtype=np.float32))
    drawn = [choose(logits, SamplingParams(typical_p=0.1), history(), u) for u in (0.0, 0.51, 0.999)]
    assert drawn == [1, 31, 60]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_all_seen_tokens() -> None:
    logits = np.array([4.0, 3.0, -1.0, -1.5], dtype=np.float32)
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert choose(logits, params, history(), 0) == 0
    assert choose(logits, params, history(prompt=(0,)), 0) == 1
    assert choose(logits, params, history(outputs=(0, 1)), 0) == 0
    banned = SamplingParams(temperature=0, repetition_penalty=2.0, allowed_token_ids=(2, 3))
    assert choose(logits, banned, history(), 0) == 2
    assert choose(logits, banned, history(prompt=(2,)), 0) == 3


def test_presence_penalty_counts_an_output_once_and_the_prompt_never() -> None:
    logits = np.array([2.0, 1.0], dtype=np.float32)
    params = SamplingParams(temperature=0, presence_penalty=0.6)
    assert choose(logits, params, history(prompt=(0, 0)), 0) == 0
    assert choose(logits, params, history(outputs=(0, 0, 0)), 0) == 0
    assert choose(logits, SamplingParams(temperature=0, presence_penalty=1.1), history(outputs=(0,)), 0) == 1


def test_frequency_penalty_counts_each_output() -> None:
    logits = np.array([2.0, 1.0], dtype=np.float32)
    params = SamplingParams(temperature=0, frequency_penalty=0.6)
    assert choose(logits, params, history(prompt=(0, 0), outputs=(0,)), 0) == 0
    assert choose(logits, params, history(outputs=(0, 0)), 0) == 1


def test_negative_penalties_encourage() -> None:
    logits = np.array([2.0, 1.0], dtype=np.float32)
    assert choose(logits, SamplingParams(temperature=0, presence_penalty=-1.5), history(outputs=(1,)), 0) == 1


def test_logit_bias_is_added_and_allowed_ids_exclude_all_others() -> None:
    assert choose(four_logits(), SamplingParams(temperature=0, logit_bias={3: 5.0}), history(), 0) == 3
    assert reachable(SamplingParams(allowed_token_ids=(1, 3))) == {1, 3}
    assert reachable(SamplingParams(allowed_token_ids=(1, 3), logit_bias={0: 100.0})) == {1, 3}


def test_the_smallest_number_draws_the_first_token_that_is_kept() -> None:
    assert choose(four_logits(), SamplingParams(allowed_token_ids=(1, 3)), history(), 0.0) == 1


def test_a_bad_word_of_one_token_is_always_banned() -> None:
    assert reachable(SamplingParams(bad_words_token_ids=((0,), (2,)))) == {1, 3}


def test_a_longer_bad_word_is_banned_only_after_its_beginning_in_the_output() -> None:
    params = SamplingParams(bad_words_token_ids=((2, 1, 0),))
    everything = {0, 1, 2, 3}
    assert reachable(params, history(outputs=(3, 2, 1))) == {1, 2, 3}
    assert reachable(params, history(outputs=(1, 2))) == everything
    assert reachable(params, history(outputs=(1,))) == everything
    assert reachable(params, history(prompt=(2, 1))) == everything
    assert reachable(params, history(prompt=(2,), outputs=(1,))) == everything


def test_min_tokens_bans_the_stop_ids_until_enough_outputs_exist() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(0, 1))
    assert reachable(params, history(prompt=(3, 3, 3), outputs=(2,))) == {2, 3}
    assert reachable(params, history(prompt=(3,), outputs=(2, 2))) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_chosen_when_all_is_banned(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, allowed_token_ids=(1,), bad_words_token_ids=((1,),))
    assert choose(four_logits(), params, history(), 0.5) is None


def test_choosing_leaves_the_raw_logits_as_they_are() -> None:
    logits = four_logits()
    choose(logits, SamplingParams(logit_bias={0: 1.0}, bad_words_token_ids=((1,),), top_k=1), history((0,), (0,)), 0.5)
    assert np.array_equal(logits, four_logits())


def test_logprob_records_hold_raw_log_probabilities_ranks_and_the_best_tokens() -> None:
    record = token_logprobs(four_logits(), 2, 2)
    assert record.token_id == 2
    assert record.rank == 3
    assert np.exp(record.logprob) == pytest.approx(0.15, rel=1e-5)
    assert [token for token, _ in record.top] == [0, 1]
    assert np.exp([logprob for _, logprob in record.top]) == pytest.approx([0.5, 0.3], rel=1e-5)
    assert token_logprobs(four_logits(), 0, 0).top == ()


def test_ranks_are_distinct_among_equals_and_agree_with_the_order_of_the_best() -> None:
    logits = np.array([1, 2, 2, 2], dtype=np.float32)
    assert [token_logprobs(logits, token, 4).rank for token in range(4)] == [4, 1, 2, 3]
    assert [token for token, _ in token_logprobs(logits, 0, 4).top] == [1, 2, 3, 0]


@settings(deadline=None)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40))
def test_the_greedy_fast_path_and_the_full_pipeline_choose_the_same_token(token_ids: list[int]) -> None:
    ids = np.array(token_ids, dtype=np.int64)
    histories = np.cumsum(history_terms(np.arange(len(ids)), ids), dtype=np.uint64)
    logits = MODEL.logits(histories)
    for row, best in zip(logits, logits.argmax(axis=1).tolist(), strict=True):
        assert choose(row, GREEDY, history(tuple(token_ids)), 0.3) == best


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": ()},
        {"bad_words_token_ids": ((1,),)},
        {"min_tokens": 1, "stop_token_ids": (1,)},
        {"num_logprobs": 0},
    ],
    ids=str,
)
def test_whatever_can_change_a_greedy_result_leaves_the_fast_path(change: dict[str, object]) -> None:
    assert is_plain_greedy(GREEDY)
    assert not is_plain_greedy(SamplingParams(**{"temperature": 0.0} | change))  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_the_random_number_is_in_range_and_depends_on_seed_and_index(seed: int, index: int) -> None:
    number = uniform(seed, index)
    assert 0 <= number < 1
    assert number == uniform(seed, index)
    assert number != uniform(seed, index + 1)
    assert number != uniform(seed ^ 1, index)


def test_random_numbers_are_spread_evenly() -> None:
    counts = Counter(int(uniform(seed, index) * 10) for seed in range(50) for index in range(200))
    assert set(counts) == set(range(10))
    assert all(850 < count < 1150 for count in counts.values())


@settings(deadline=None)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=2, max_size=20), st.data())
def test_a_history_depends_on_every_token_and_its_place(token_ids: list[int], data: st.DataObject) -> None:
    def total(ids: list[int], first: int = 0) -> int:
        terms = history_terms(np.arange(first, first + len(ids)), np.array(ids, dtype=np.int64))
        return int(np.cumsum(terms, dtype=np.uint64)[-1])

    which = data.draw(st.integers(0, len(token_ids) - 1))
    changed = list(token_ids)
    changed[which] = (changed[which] + 1) % VOCAB_SIZE
    assert total(changed) != total(token_ids)
    assert total(token_ids, first=1) != total(token_ids)
    assert total(token_ids[:-1]) != total(token_ids)
    if token_ids != token_ids[::-1]:
        assert total(token_ids[::-1]) != total(token_ids)


def test_logits_of_a_history_are_the_same_in_any_batch() -> None:
    histories = history_terms(np.arange(300), np.zeros(300, dtype=np.int64))
    together = MODEL.logits(histories)
    assert all(np.array_equal(MODEL.logits(histories[i : i + 1])[0], together[i]) for i in range(0, 300, 37))


def test_greedy_text_is_readable_and_ends_now_and_then() -> None:
    histories = history_terms(np.arange(20_000), np.full(20_000, 7))
    counts = Counter(MODEL.logits(histories).argmax(axis=1).tolist())
    assert 30 < counts.pop(EOS_TOKEN_ID) < 130
    assert set(counts) <= set(range(32, 127))
    eager = SimModel(eos_bias=3.0, script=None)
    assert 900 < Counter(eager.logits(histories).argmax(axis=1).tolist())[EOS_TOKEN_ID] < 1700
