"""How long a request would wait at least, from how fast others began."""

from __future__ import annotations

from runnerd_service.frontend.begin_rate import BeginRate


def noted(*times: float) -> BeginRate:
    rate = BeginRate()
    for time in times:
        rate.note(time, others_wait=True)
    return rate


def test_nothing_is_expected_while_little_is_known() -> None:
    assert BeginRate().least_wait_seconds(1000, 0.0) == 0
    assert noted(*range(7)).least_wait_seconds(1000, 7.0) == 0


def test_a_wait_is_half_of_what_those_before_took() -> None:
    assert noted(*range(11)).least_wait_seconds(20, 10.0) == 10.0  # one a second
    assert noted(*range(11)).least_wait_seconds(0, 10.0) == 0


def test_a_standstill_makes_the_wait_longer() -> None:
    rate = noted(*range(11))
    assert rate.least_wait_seconds(20, 30.0) == 30.0


def test_begins_without_a_queue_tell_nothing() -> None:
    rate = noted(*range(11))
    rate.note(11.0, others_wait=False)
    assert rate.least_wait_seconds(20, 12.0) == 0


def test_begins_long_ago_are_forgotten() -> None:
    rate = noted(*(100.0 * number for number in range(50)), *(5000.0 + number for number in range(64)))
    assert rate.least_wait_seconds(63, 5063.0) == 31.5


def test_many_that_begin_at_once_are_no_reason_to_refuse() -> None:
    assert noted(*[5.0] * 64).least_wait_seconds(100, 5.0) == 0
