"""The times of a device's events stand on the host's clock: in order, near the truth, also when the clocks drift."""

from __future__ import annotations

import random

import pytest

from runnerd_torch.devices.clock import REBASE_NS, DeviceClock, TimeBase

HOUR_NS = 3_600_000_000_000


class Event:
    """An event of a device whose clock runs too fast or too slow; times between events are float32 milliseconds."""

    def __init__(self, true_ns: int, parts_per_million: float) -> None:
        self.true_ns = true_ns
        self._device_ms = true_ns * (1 + parts_per_million * 1e-6) * 1e-6

    def elapsed_time(self, other: Event) -> float:
        exact = other._device_ms - self._device_ms
        # As much as a float32 keeps.
        return float(f"{exact:.7g}")


def run_steps(clock: DeviceClock, dice: random.Random, parts_per_million: float, period_ns: int, num_steps: int):
    """Give (true, told) times of each step's events: steps back to back, launched one ahead, seen a little late."""
    now_ns = 1_000_000_000
    device_free_ns = former_copied_ns = 0
    for _ in range(num_steps):
        enqueued_ns = now_ns
        begin_ns = max(enqueued_ns + dice.randrange(5_000, 20_000), device_free_ns)
        end_ns = begin_ns + dice.randrange(2_000_000, 20_000_000)
        copied_ns = end_ns + dice.randrange(10_000, 50_000)
        device_free_ns = end_ns
        events = tuple(Event(time_ns, parts_per_million) for time_ns in (begin_ns, end_ns, copied_ns))
        base = clock.base_of(events[0], enqueued_ns)
        told = clock.host_ns(base, events, enqueued_ns, copied_ns + dice.randrange(10_000, 500_000))
        yield (begin_ns, end_ns, copied_ns), told
        # As at depth two: the step before has been waited for.
        now_ns = max(now_ns + period_ns, former_copied_ns)
        former_copied_ns = copied_ns


@pytest.mark.parametrize("parts_per_million", [-80.0, 0.0, 80.0])
def test_told_times_stay_near_the_truth_for_hours(parts_per_million: float) -> None:
    dice = random.Random(1)
    steps = list(
        run_steps(DeviceClock(Event.elapsed_time), dice, parts_per_million, 500_000_000, 4 * HOUR_NS // 500_000_000)
    )
    # As near as the host sees an end, plus the drift of a second. Uncorrected, it were more than a second at the end.
    assert max(abs(true - told) for pair in steps for true, told in zip(*pair, strict=True)) < 700_000


def test_told_times_are_in_order() -> None:
    steps = run_steps(DeviceClock(Event.elapsed_time), random.Random(2), 30.0, 1_000_000, 20_000)
    former_end_ns = 0
    for _, (begin_ns, end_ns, copied_ns) in steps:
        assert begin_ns <= end_ns <= copied_ns
        # Bounds that get tighter may move a step by as much as they were apart.
        assert begin_ns >= former_end_ns - 100_000
        former_end_ns = end_ns


def test_no_step_begins_before_it_was_enqueued_or_ends_after_it_was_seen() -> None:
    clock = DeviceClock(Event.elapsed_time)
    base = clock.base_of(Event(0, 0.0), 5_000)
    assert clock.host_ns(base, (Event(0, 0.0), Event(2_000, 0.0)), 5_000, 7_500) == (5_000, 7_000)
    # This one shows that the base lies 400 ns later than was thought.
    events = (Event(10_000, 0.0), Event(11_000, 0.0))
    assert clock.base_of(events[0], 15_400) is base
    assert clock.host_ns(base, events, 15_400, 17_000) == (15_400, 16_400)


def test_bases_are_renewed_and_former_ones_let_go() -> None:
    clock = DeviceClock(Event.elapsed_time)
    bases: list[TimeBase] = []
    for number in range(6):
        now_ns = number * 2 * REBASE_NS
        event = Event(now_ns, 0.0)
        bases.append(clock.base_of(event, now_ns))
        clock.host_ns(bases[-1], (event,), now_ns, now_ns + 1_000)
    assert len({id(base) for base in bases}) == 6
    assert all(base.former is None for base in bases)
