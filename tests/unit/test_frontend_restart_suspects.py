"""Who is tried alone and who is to blame when engines die; how soon they are restarted."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import msgspec
import pytest

from runnerd_service.engine.client import HUNG, PROCESS_DIED
from runnerd_service.engine.messages import (
    AddRequest,
    BubbleSeconds,
    EngineError,
    EngineReady,
    HostSeconds,
    Load,
    Logprobs,
    RequestOutput,
    Sampling,
    StepTimes,
)
from runnerd_service.errors import EngineStartFailed
from runnerd_service.frontend.ongoing import MARGIN_TOKENS, OngoingOutput, OngoingRequest
from runnerd_service.frontend.restarts import RestartBudget, cause_of, check_same_model, is_from_outside
from runnerd_service.frontend.suspects import Suspects, at_work, is_accused
from runnerd_service.frontend.totals import at_rest, with_totals

READY = EngineReady("m", "a", 10, 10, (3,), "float32", 0, 0, "cpu", 20, 16, max_in_flight=2)


def output(uid: int, owner: OngoingRequest | None = None, priority: int = 0, *, runs: bool = True) -> OngoingOutput:
    """An output that an engine has, and perhaps has given something of."""
    owner = owner or OngoingRequest(lambda error: None)
    one = OngoingOutput(owner, AddRequest(uid, (1, 2), Sampling(), 100, priority=priority), lambda message: None)
    owner.outputs[uid] = one
    one.admitted(uid)
    if runs:
        one.take(RequestOutput(uid, (1,)))
    return one


def advance(one: OngoingOutput) -> bool:
    return one.take(RequestOutput(one.request.uid, tuple(range(MARGIN_TOKENS))))


def test_after_one_crash_all_go_on_together() -> None:
    suspects, outputs = Suspects(), [output(uid) for uid in range(3)]
    suspects.note_crash(outputs, from_outside=False)

    assert suspects.to_try(outputs) == ()
    assert suspects.to_blame(outputs, engine_is_sound=True) == []


def test_who_was_there_at_two_crashes_is_tried_alone_newest_first() -> None:
    suspects, outputs = Suspects(), [output(uid) for uid in range(3)]
    suspects.note_crash(outputs[:2], from_outside=False)
    suspects.note_crash(outputs, from_outside=False)

    assert suspects.to_try(outputs) == (outputs[1].owner,)


def numbers(group: Sequence[OngoingRequest]) -> list[int]:
    return [uid for owner in group for uid in owner.outputs]


def all_advance(suspects: Suspects, group: Sequence[OngoingRequest]) -> None:
    for owner in group:
        for one in owner.outputs.values():
            advance(one)
        suspects.note_progress(owner)


@pytest.mark.parametrize(("from_outside", "expected"), [(False, [1, 2, 4, 8, 16, 32, 64, 128, 45]), (True, [150, 150])])
def test_hundreds_of_suspects_take_a_few_trials(from_outside: bool, expected: list[int]) -> None:
    suspects, outputs = Suspects(), [output(uid) for uid in range(300)]
    for _ in range(2):
        suspects.note_crash(outputs, from_outside=from_outside)

    sizes, seen = [], []
    while group := suspects.to_try(outputs):
        sizes.append(len(group))
        seen += numbers(group)
        all_advance(suspects, group)
    assert sizes == expected
    assert seen == list(range(299, -1, -1))
    assert suspects.to_blame(outputs, engine_is_sound=True) == []


@pytest.mark.parametrize("kills", [False, True], ids=["crashes", "exhausts memory"])
@pytest.mark.parametrize("poison", [{0}, {17}, {98}, {99}, {3, 60}], ids=str)
def test_an_engine_dies_a_few_times_until_a_poisonous_request_among_many_is_found(poison: set, kills: bool) -> None:
    suspects, outputs = Suspects(), [output(uid) for uid in range(100)]
    budget, left, found = RestartBudget(5, 1.0), poison, set()
    suspects.note_crash(outputs, from_outside=kills)
    assert budget.note_failure() is not None
    for _ in range(100):
        runs = suspects.to_try(outputs) or tuple(one.owner for one in outputs if not is_accused(one.owner))
        if left.isdisjoint(numbers(runs)):
            all_advance(suspects, runs)
            budget.note_progress()
        else:
            crashed = [one for one in outputs if one.owner in runs]
            suspects.note_crash(crashed, from_outside=kills)
            assert budget.note_failure() is not None, "the server gave up"
        blamed = set(numbers(suspects.to_blame(outputs, engine_is_sound=left.isdisjoint(numbers(runs)))))
        found, left = found | blamed, left - blamed
        outputs = [one for one in outputs if one.request.uid not in blamed]
    assert found == poison


def test_who_got_further_than_at_the_crash_is_cleared() -> None:
    suspects, outputs = Suspects(), [output(uid) for uid in range(2)]
    suspects.note_crash(outputs, from_outside=False)
    assert advance(outputs[1])
    suspects.note_progress(outputs[1].owner)
    suspects.note_crash(outputs, from_outside=False)

    assert suspects.to_try(outputs) == (outputs[0].owner,)
    assert outputs[1].owner.num_crashes == 1


def test_a_few_tokens_more_are_not_enough_to_be_cleared() -> None:
    one = output(1)
    one.set_mark()

    assert not one.take(RequestOutput(1, (1,) * (MARGIN_TOKENS - 1)))
    assert one.take(RequestOutput(1, (1,)))
    assert not one.take(RequestOutput(1, (1,)))  # it is told once


def test_a_finish_is_as_good_as_getting_further() -> None:
    one = output(1)
    one.set_mark()

    assert one.take(RequestOutput(1, (), finish="length"))


def test_outputs_of_a_request_are_cleared_together() -> None:
    suspects, owner = Suspects(), OngoingRequest(lambda error: None)
    outputs = [output(1, owner), output(2, owner)]
    suspects.note_crash(outputs, from_outside=False)
    advance(outputs[0])
    suspects.note_progress(owner)
    assert owner.num_crashes == 1
    advance(outputs[1])
    suspects.note_progress(owner)
    assert owner.num_crashes == 0


def tried(suspects: Suspects, outputs: list[OngoingOutput]) -> OngoingOutput:
    """The newest after two crashes with all and one alone."""
    for _ in range(2):
        suspects.note_crash(outputs, from_outside=False)
    assert suspects.to_try(outputs) == (outputs[-1].owner,)
    suspects.note_crash(outputs[-1:], from_outside=False)
    return outputs[-1]


def test_the_others_are_run_without_the_accused_and_their_progress_decides() -> None:
    suspects, outputs = Suspects(), [output(uid) for uid in range(3)]
    accused = tried(suspects, outputs)

    assert is_accused(accused.owner)
    assert suspects.to_try(outputs) == ()
    assert suspects.to_blame(outputs, engine_is_sound=False) == []
    assert suspects.to_blame(outputs, engine_is_sound=True) == [accused.owner]
    assert [one.owner.num_crashes for one in outputs] == [0, 0, 0]  # explained


def test_when_the_others_die_without_the_accused_too_the_next_are_tried() -> None:
    suspects, outputs = Suspects(), [output(uid) for uid in range(3)]
    tried(suspects, outputs)
    suspects.note_crash(outputs[:2], from_outside=False)

    assert suspects.to_try(outputs) == (outputs[1].owner, outputs[0].owner)


def test_an_accused_without_others_is_to_blame() -> None:
    suspects, outputs = Suspects(), [output(1)]
    suspects.note_crash(outputs, from_outside=False)
    assert suspects.to_blame(outputs, engine_is_sound=False) == []
    suspects.note_crash(outputs, from_outside=False)

    assert suspects.to_blame(outputs, engine_is_sound=False) == [outputs[0].owner]


def test_kills_from_outside_weigh_less() -> None:
    suspects, outputs = Suspects(), [output(1)]
    for _ in range(2):
        suspects.note_crash(outputs, from_outside=True)
        assert suspects.to_blame(outputs, engine_is_sound=False) == []
    suspects.note_crash(outputs, from_outside=True)

    assert suspects.to_blame(outputs, engine_is_sound=False) == [outputs[0].owner]


def test_at_work_are_those_heard_of_and_the_next_in_the_queue() -> None:
    running = [output(1), output(2)]
    waiting = [output(3, runs=False), output(4, runs=False), output(5, priority=-1, runs=False)]
    elsewhere = output(6)
    elsewhere.engine_uid = None

    assert at_work([*running, *waiting, elsewhere], 2) == [*running, waiting[0], waiting[2]]


def test_a_request_goes_on_after_what_came_and_does_not_ask_for_the_prompt_again() -> None:
    sampling = Sampling(seed=5, num_logprobs=1, num_prompt_logprobs=2)
    request = AddRequest(1, (1, 2), sampling, 50, (3,), (4,), priority=2, cache_salt="s")
    one = OngoingOutput(OngoingRequest(lambda error: None), request, lambda message: None)
    assert one.admitted(10) == msgspec.structs.replace(request, uid=10)
    one.take(RequestOutput(10, (), prompt_logprobs=(Logprobs(2, -1.0, 1, ()),)))
    without = msgspec.structs.replace(sampling, num_prompt_logprobs=None)
    assert one.admitted(11) == msgspec.structs.replace(request, uid=11, sampling=without)
    one.take(RequestOutput(11, (7, 8)))
    one.take(RequestOutput(11, (9,)))

    expected = msgspec.structs.replace(request, uid=12, sampling=without, output_token_ids=(7, 8, 9))
    assert one.admitted(12) == expected


def test_restarts_wait_longer_each_time_and_end() -> None:
    budget = RestartBudget(max_restarts=8, backoff_seconds=1.0)

    assert [budget.note_failure() for _ in range(9)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]


def test_progress_starts_the_count_of_restarts_again() -> None:
    budget = RestartBudget(max_restarts=1, backoff_seconds=1.0)
    assert budget.note_failure() == 0.0
    budget.note_progress()

    assert budget.note_failure() == 0.0
    assert budget.note_failure() is None


@pytest.mark.parametrize(
    ("kind", "code", "cause", "from_outside"),
    [
        (PROCESS_DIED, 70, "exit", False),
        (PROCESS_DIED, 0, "exit", True),
        (PROCESS_DIED, -signal.SIGKILL, "signal", True),
        (PROCESS_DIED, -signal.SIGTERM, "signal", True),
        (PROCESS_DIED, -signal.SIGSEGV, "signal", False),
        (PROCESS_DIED, -signal.SIGABRT, "signal", False),
        (HUNG, None, "hang", False),
        ("StepFailed", None, "error", False),
        ("StepFailed", 3, "error", False),
    ],
)
def test_failures_have_causes(kind: str, code: int | None, cause: str, from_outside: bool) -> None:
    error = EngineError("step", kind, "why")

    assert cause_of(error, code) == cause
    assert is_from_outside(error, code) is from_outside


def test_another_model_is_none_to_go_on_with() -> None:
    check_same_model(READY, msgspec.structs.replace(READY, num_blocks=5, device="other"))
    with pytest.raises(EngineStartFailed, match="vocab_size was 10 and is 11 now; restart the server"):
        check_same_model(READY, msgspec.structs.replace(READY, vocab_size=11))


def test_totals_are_added_and_what_is_there_now_is_not() -> None:
    times = StepTimes(1.0, 2.0, BubbleSeconds(inbox=1.0, other=2.0), HostSeconds(wait=3.0))
    before = Load(1, 2, 3, 10, 40, 5, 6, 7, 8, 9, 2, times, depth=2)
    now = Load(4, 5, 6, 12, 1, 1, 1, 1, 1, 1, 1, times, depth=2)

    summed = StepTimes(2.0, 4.0, BubbleSeconds(inbox=2.0, other=4.0), HostSeconds(wait=6.0))
    assert with_totals(now, before) == Load(4, 5, 6, 12, 41, 6, 7, 8, 9, 10, 1, summed, depth=2)
    assert at_rest(before, 3) == Load(0, 3, 0, 10, 40, 5, 6, 7, 8, 9, 0, times, depth=2)
