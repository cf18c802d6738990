"""The plan checker refuses what breaks the contract, and a refused plan changes nothing."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerd_spi import Admit, BlockGrant, PlanChecker, PlanError, Release, Row, SamplingParams, StepPlan

PARAMS = SamplingParams()


def make_checker() -> PlanChecker:
    return PlanChecker(
        max_num_seqs=3, max_num_batched_tokens=8, max_model_len=12, block_size=4, num_blocks=6, vocab_size=10
    )


def make_token_checker() -> PlanChecker:
    return PlanChecker(
        max_num_seqs=3,
        max_num_batched_tokens=8,
        max_model_len=12,
        block_size=1,
        num_blocks=9,
        vocab_size=10,
        kv_memory="tokens",
    )


def snapshot(checker: PlanChecker) -> object:
    slots = {slot: (s.admit, s.num_tokens, tuple(s.block_ids)) for slot, s in checker.slots.items()}
    return slots, checker.next_step_id


def admit(slot: int = 0, epoch: int = 1, token_ids: tuple[int, ...] = (1, 2, 3), num_prompt_tokens: int = 3) -> Admit:
    return Admit(slot, epoch, token_ids, num_prompt_tokens, PARAMS)


FIRST = StepPlan(0, admits=(admit(),), grants=(BlockGrant(0, 1, (0,)),), rows=(Row(0, 1, 3, 0, True),))
DECODE = StepPlan(1, rows=(Row(0, 1, 1, 3, True),))


@pytest.fixture
def checker() -> PlanChecker:
    """One request of three prompt tokens and one sampled token in slot 0, epoch 1, with block 0."""
    checker = make_checker()
    checker.apply(FIRST)
    return checker


def test_a_sampled_token_counts_before_it_is_settled(checker: PlanChecker) -> None:
    assert checker.slots[0].num_tokens == 4
    checker.apply(DECODE)
    assert checker.slots[0].num_tokens == 5
    assert checker.next_step_id == 2


def test_a_row_that_only_fills_the_cache_adds_no_token() -> None:
    checker = make_checker()
    checker.apply(replace(FIRST, rows=(Row(0, 1, 2, 0, False),)))
    assert checker.slots[0].num_tokens == 3


def test_a_slot_is_released_and_reused_in_one_plan(checker: PlanChecker) -> None:
    checker.apply(StepPlan(1, (Release(0, 1),), (admit(epoch=2),), (BlockGrant(0, 2, (5,)),), (Row(0, 2, 3, 0, True),)))
    assert checker.slots[0].admit.epoch == 2
    assert checker.slots[0].block_ids == [5]


def test_grants_of_one_request_are_appended_in_order(checker: PlanChecker) -> None:
    checker.apply(StepPlan(1, grants=(BlockGrant(0, 1, (3, 1)), BlockGrant(0, 1, (2,)))))
    assert checker.slots[0].block_ids == [0, 3, 1, 2]


def test_a_plan_of_deltas_alone_is_valid(checker: PlanChecker) -> None:
    checker.apply(StepPlan(1, releases=(Release(0, 1),)))
    assert checker.slots == {}


LONG = admit(1, 1, (1,) * 12, 12)
BAD_PLANS = {
    "step id repeated": (replace(DECODE, step_id=0), r"step_id 0, expected 1"),
    "step id skipped": (replace(DECODE, step_id=2), r"step_id 2, expected 1"),
    "release of an empty slot": (StepPlan(1, releases=(Release(2, 1),)), r"release: slot 2 epoch 1.* empty"),
    "release of an old epoch": (StepPlan(1, releases=(Release(0, 0),)), r"release: slot 0 epoch 0.* epoch 1"),
    "release twice": (StepPlan(1, releases=(Release(0, 1), Release(0, 1))), r"release: slot 0 epoch 1.* empty"),
    "admit to a slot in use": (StepPlan(1, admits=(admit(epoch=2),)), r"slot 0 is in use by epoch 1"),
    "admit beyond the slots": (StepPlan(1, admits=(admit(slot=3),)), r"slot 3, expected 0 to 2"),
    "admit with an epoch again": (
        StepPlan(1, releases=(Release(0, 1),), admits=(admit(epoch=1),)),
        r"slot 0 epoch 1, expected one above the last, 1",
    ),
    "admit without tokens": (StepPlan(1, admits=(admit(1, 1, (), 0),)), r"slot 1 has 0 tokens"),
    "admit without prompt": (StepPlan(1, admits=(admit(1, 1, (1,), 0),)), r"1 tokens, 0 prompt"),
    "admit with too long a prompt": (StepPlan(1, admits=(admit(1, 1, (1,) * 13, 13),)), r"13 tokens.* <= 12"),
    "admit of an unknown token": (StepPlan(1, admits=(admit(1, 1, (1, 10, 2)),)), r"token id 10, expected 0 to 9"),
    "admit of a sentinel token": (StepPlan(1, admits=(admit(1, 1, (1, -1, 2)),)), r"token id -1, expected 0 to 9"),
    "grant to an empty slot": (StepPlan(1, grants=(BlockGrant(1, 1, (1,)),)), r"grant: slot 1 epoch 1.* empty"),
    "grant of an unknown block": (StepPlan(1, grants=(BlockGrant(0, 1, (6,)),)), r"block id 6, expected 0 to 5"),
    "row of an old epoch": (StepPlan(1, rows=(Row(0, 0, 1, 3, True),)), r"row: slot 0 epoch 0"),
    "row after its release": (
        StepPlan(1, releases=(Release(0, 1),), rows=(Row(0, 1, 1, 3, True),)),
        r"row: slot 0 epoch 1.* empty",
    ),
    "two rows of one request": (
        StepPlan(1, rows=(Row(0, 1, 1, 2, False), Row(0, 1, 1, 3, True))),
        r"slot 0 has two rows in step 1",
    ),
    "row of no token": (StepPlan(1, rows=(Row(0, 1, 0, 3, False),)), r"positions 3 to 2"),
    "row before the first token": (StepPlan(1, rows=(Row(0, 1, 1, -1, False),)), r"positions -1 to -1"),
    "row past the last token": (StepPlan(1, rows=(Row(0, 1, 2, 3, True),)), r"inside the 4 tokens"),
    "bad row beside good deltas": (
        StepPlan(1, admits=(LONG,), grants=(BlockGrant(0, 1, (1,)),), rows=(Row(0, 1, 2, 3, True),)),
        r"inside the 4 tokens",
    ),
    "row outside its blocks": (
        StepPlan(1, admits=(LONG,), grants=(BlockGrant(1, 1, (1,)),), rows=(Row(1, 1, 5, 0, False),)),
        r"ends at 5, but its blocks hold 4 tokens",
    ),
    "sample before the last token": (StepPlan(1, rows=(Row(0, 1, 1, 2, True),)), r"samples after position 2 of 4"),
    "sample past max_model_len": (
        StepPlan(1, admits=(LONG,), grants=(BlockGrant(1, 1, (1, 2, 3)),), rows=(Row(1, 1, 4, 8, True),)),
        r"samples past max_model_len 12",
    ),
    "too many tokens": (
        StepPlan(1, admits=(LONG,), grants=(BlockGrant(1, 1, (1, 2, 3)),), rows=(Row(1, 1, 9, 0, False),)),
        r"9 tokens in one step, at most 8",
    ),
}


@pytest.mark.parametrize("what", BAD_PLANS)
def test_a_plan_that_breaks_the_contract_is_named_and_changes_nothing(checker: PlanChecker, what: str) -> None:
    plan, message = BAD_PLANS[what]
    before = snapshot(checker)
    with pytest.raises(PlanError, match=message):
        checker.apply(plan)
    assert snapshot(checker) == before
    checker.apply(DECODE)


small = st.integers(0, 4)
tokens = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple)
corruptions = st.one_of(
    st.builds(lambda n: {"step_id": n}, st.integers(0, 99)),
    st.builds(lambda *args: {"releases": (Release(*args),)}, small, small),
    st.builds(lambda slot, epoch, ids: {"admits": (admit(slot, epoch, ids, 1),)}, small, small, tokens),
    st.builds(lambda slot, epoch, block: {"grants": (BlockGrant(slot, epoch, (block,)),)}, small, small, small),
    st.builds(lambda *args: {"rows": (Row(*args),)}, small, small, small, small, st.booleans()),
)


def draw_good_plan(data: st.DataObject, checker: PlanChecker, next_epoch: int) -> StepPlan:
    """A plan the checker must accept: each slot leaves, enters, or goes on, with one block granted at most."""
    releases, admits, grants, rows = [], [], [], []
    for slot in range(3):
        state = checker.slots.get(slot)
        action = data.draw(st.sampled_from(("leave", "go on", "go on", "nothing")))
        if action == "nothing":
            continue
        if state is None:
            token_ids = data.draw(tokens)
            admits.append(admit(slot, next_epoch, token_ids, 1))
            grants.append(BlockGrant(slot, next_epoch, (slot, slot + 3)))
            rows.append(Row(slot, next_epoch, min(len(token_ids), 2), 0, len(token_ids) <= 2))
        elif action == "leave":
            releases.append(Release(slot, state.admit.epoch))
        elif state.num_tokens <= 4 * len(state.block_ids) and state.num_tokens < 12:
            rows.append(Row(slot, state.admit.epoch, 1, state.num_tokens - 1, sample=True))
    return StepPlan(checker.next_step_id, tuple(releases), tuple(admits), tuple(grants), tuple(rows))


def test_a_plan_may_be_exactly_as_large_as_the_limits(checker: PlanChecker) -> None:
    # Seven tokens and one are the eight a step may have; position 11 is the last of twelve.
    almost = admit(1, 1, (1,) * 11, 11)
    blocks = BlockGrant(1, 1, (1, 2, 3))
    checker.apply(StepPlan(1, admits=(almost,), grants=(blocks,), rows=(Row(0, 1, 1, 3, True), Row(1, 1, 7, 0, False))))
    checker.apply(StepPlan(2, rows=(Row(1, 1, 4, 7, True),)))
    assert checker.slots[1].num_tokens == 12


@settings(deadline=None)
@given(st.data())
def test_random_plans_either_apply_or_change_nothing(data: st.DataObject) -> None:
    checker, twin = make_checker(), make_checker()
    for next_epoch in range(5, 5 + data.draw(st.integers(1, 12))):
        good = draw_good_plan(data, checker, next_epoch)
        bad = replace(good, **data.draw(corruptions))
        before = snapshot(checker)
        if not accepts(checker, bad):
            assert snapshot(checker) == before
            bad = good
            checker.apply(good)
        # The twin never sees a refused plan, and must know the same, the epochs used so far included.
        twin.apply(bad)
        assert snapshot(twin) == snapshot(checker)
    for slot in range(3):
        probe = StepPlan(checker.next_step_id, admits=(admit(slot, 1),))
        assert accepts(twin, probe) == accepts(checker, probe)


def accepts(checker: PlanChecker, plan: StepPlan) -> bool:
    try:
        checker.apply(plan)
    except PlanError:
        return False
    return True


def test_where_the_runner_places_its_memory_the_positions_of_all_requests_are_counted() -> None:
    checker = make_token_checker()
    prompt = (1, 2, 3, 4)
    both = (admit(0, 1, prompt, 4), admit(1, 1, prompt, 4))
    checker.apply(StepPlan(0, admits=both, rows=(Row(0, 1, 4, 0, True), Row(1, 1, 4, 0, True))))
    before = snapshot(checker)
    with pytest.raises(PlanError, match="take 10 positions, but the KV memory holds 9"):
        checker.apply(StepPlan(1, rows=(Row(0, 1, 1, 4, True), Row(1, 1, 1, 4, True))))
    assert snapshot(checker) == before
    checker.apply(StepPlan(1, rows=(Row(0, 1, 1, 4, True),)))
    checker.apply(StepPlan(2, releases=(Release(0, 1),), rows=(Row(1, 1, 1, 4, True),)))


def test_where_the_runner_places_its_memory_nothing_is_granted_and_no_position_left_out() -> None:
    checker = make_token_checker()
    with pytest.raises(PlanError, match="it takes none"):
        checker.apply(StepPlan(0, admits=(admit(),), grants=(BlockGrant(0, 1, (0,)),)))
    checker.apply(StepPlan(0, admits=(admit(),), rows=(Row(0, 1, 1, 0, False),)))
    with pytest.raises(PlanError, match="row begins at 2, but 1 positions are computed"):
        checker.apply(StepPlan(1, rows=(Row(0, 1, 1, 2, True),)))
    # A position may be computed once more.
    checker.apply(StepPlan(1, rows=(Row(0, 1, 2, 0, False),)))
