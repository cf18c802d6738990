"""Where a step's time goes: hand-made timelines, then the engine on the simulated runner."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd_service.config import EngineConfig
from runnerd_service.engine.engine import Engine
from runnerd_service.engine.messages import AddRequest, BubbleSeconds, Load, Sampling, StepTimes
from runnerd_service.engine.setup import resolve, start_engine
from runnerd_service.engine.timeline import LaunchMark, Timeline
from runnerd_service.engine.trace import MAX_STEPS, RECENT_STEPS, Trace
from runnerd_spi import Row, StepPlan, StepTimeline, load_runner

MS = 1_000_000
"""Nanoseconds."""


class Loop:
    """A host and a device whose times, in milliseconds, are written by hand."""

    def __init__(self) -> None:
        self.now = 0
        self.timeline = Timeline(lambda: self.now * MS)
        self.num_steps = 0

    def at(self, now: int, phase: str) -> None:
        """Enter a phase."""
        self.now = now
        self.timeline.enter(phase)

    def work(self, now: int, *, waits: bool) -> None:
        self.now = now
        self.timeline.note_work(waits=waits)

    def launch(self, begin: int, host_end: int, returned: int) -> LaunchMark:
        """Launch a step that is enqueued at ``host_end``; the call waits for an older one until ``returned``."""
        self.at(begin, "prepare")
        mark = self.timeline.mark(StepPlan(self.num_steps, rows=(Row(0, 0, 3, 0, True), Row(1, 0, 1, 5, True))))
        self.num_steps += 1
        self.now = returned
        self.timeline.enqueued(host_end * MS, 0)
        return mark

    def settle(self, mark: LaunchMark, device_begin: int, device_end: int, ready: int) -> None:
        self.timeline.settled(mark, StepTimeline(1, 1, device_begin * MS, device_end * MS, ready * MS))

    def seconds(self) -> StepTimes:
        return self.timeline.times()

    def bubble_ms(self) -> dict[str, int]:
        """The bubble by cause, causes without any left out."""
        return {
            name: round(value * 1e3) for name, value in msgspec.structs.asdict(self.seconds().bubble).items() if value
        }


def synchronous_turn(loop: Loop) -> None:
    """Two steps one after the other: the device ends the first at 20 and begins the second at 34."""
    loop.work(0, waits=True)
    loop.at(0, "schedule")
    first = loop.launch(1, host_end=3, returned=23)
    loop.at(24, "update")
    loop.settle(first, device_begin=3, device_end=20, ready=22)
    loop.at(27, "send")
    loop.at(28, "inbox")
    loop.at(30, "schedule")
    second = loop.launch(31, host_end=34, returned=50)
    loop.at(51, "update")
    loop.settle(second, device_begin=34, device_end=48, ready=49)


def test_a_bubble_is_split_among_what_the_host_did_meanwhile() -> None:
    loop = Loop()
    synchronous_turn(loop)
    # Before the first step: scheduled from 0 to 1, prepared from 1 to 3. Between the steps, from 20 to 34: the copy
    # until 22, then the host woke up (until 24), updated until 27, sent until 28, read the inbox until 30, scheduled
    # until 31, prepared until 34.
    assert loop.bubble_ms() == {
        "copy": 2,
        "other": 2,
        "update": 3,
        "send": 1,
        "inbox": 2,
        "schedule": 1 + 1,
        "prepare": 2 + 3,
    }
    assert loop.seconds().device_busy == pytest.approx(0.017 + 0.014)
    assert loop.seconds().device_idle == 0


def test_host_seconds_are_those_of_the_ended_phases_without_the_idle_ones() -> None:
    loop = Loop()
    loop.at(100, "inbox")  # idle until then
    loop.at(101, "schedule")
    loop.launch(103, host_end=106, returned=116)
    loop.at(116, "update")
    loop.at(120, "send")
    loop.at(121, "idle")
    loop.at(200, "inbox")
    host = {name: round(value * 1e3) for name, value in msgspec.structs.asdict(loop.seconds().host).items()}
    assert host == {"inbox": 1, "schedule": 2, "prepare": 3, "wait": 10, "update": 4, "send": 1}


def test_overlapped_steps_have_no_bubble() -> None:
    loop = Loop()
    loop.work(0, waits=True)
    marks = [loop.launch(0, host_end=0, returned=0)]
    for number in range(1, 5):
        end = 10 * number
        marks.append(loop.launch(end - 8, host_end=end - 7, returned=end))
        loop.at(end, "update")
        loop.settle(marks[number - 1], device_begin=max(end - 10, 1), device_end=end, ready=end)
    assert loop.bubble_ms() == {"other": 1}  # before the first step, which the device began one millisecond late
    assert loop.seconds().device_busy == pytest.approx(0.039)


def test_idle_time_in_which_nothing_could_run_is_no_bubble() -> None:
    loop = Loop()
    synchronous_turn(loop)
    before = loop.bubble_ms()
    loop.work(52, waits=False)
    loop.at(53, "idle")
    loop.at(1000, "inbox")
    loop.work(1002, waits=True)
    loop.at(1003, "schedule")
    mark = loop.launch(1004, host_end=1006, returned=1016)
    loop.at(1016, "update")
    loop.settle(mark, device_begin=1006, device_end=1016, ready=1016)
    after = loop.bubble_ms()
    # The request was in the inbox when that was opened, at 1000; the device idle from 48 until then for want of work.
    assert {cause: after[cause] - before[cause] for cause in after if after[cause] != before[cause]} == {
        "inbox": 3,
        "schedule": 1,
        "prepare": 2,
    }
    assert loop.seconds().device_idle == pytest.approx(0.952)


def test_a_step_without_rows_ends_no_bubble() -> None:
    loop = Loop()
    loop.work(0, waits=True)
    loop.at(5, "prepare")
    mark = loop.timeline.mark(StepPlan(0))
    loop.settle(mark, 10, 10, 10)
    assert loop.bubble_ms() == {}


def test_a_runner_that_tells_no_device_times_is_not_counted() -> None:
    loop = Loop()
    loop.work(0, waits=True)
    mark = loop.launch(5, host_end=0, returned=10)
    loop.at(20, "update")
    loop.timeline.settled(mark, StepTimeline())
    assert loop.seconds().bubble == BubbleSeconds()
    assert loop.seconds().device_busy == 0
    assert loop.seconds().host.prepare == pytest.approx(0.015)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 3), st.integers(0, 9)), max_size=30))
def test_busy_bubble_and_idle_time_add_up_to_all_time(steps: list[tuple[int, int, int, int]]) -> None:
    loop = Loop()
    now = begin_of_all = 1
    end_of_all = 0
    for pause, device, copy, update in steps:
        loop.work(now, waits=pause % 2 == 0)
        now += pause
        loop.at(now, "inbox")
        loop.work(now, waits=True)
        mark = loop.launch(now, host_end=now + 1, returned=now + 1 + device + copy)
        begin_of_all = begin_of_all if end_of_all else now + 1
        end_of_all = now + 1 + device
        now = end_of_all + copy
        loop.at(now, "update")
        loop.settle(mark, end_of_all - device, end_of_all, now)
        now += update
    seconds = loop.seconds()
    bubble = sum(msgspec.structs.astuple(seconds.bubble))
    first_bubble = 0 if not steps else (1 + (steps[0][0] if steps[0][0] % 2 == 0 else 0)) * 1e-3
    total = seconds.device_busy + bubble + seconds.device_idle
    assert total == pytest.approx(max(end_of_all - begin_of_all, 0) * 1e-3 + first_bubble)
    assert all(value >= 0 for value in msgspec.structs.astuple(seconds.bubble))


def test_a_recording_holds_the_last_steps_and_counts_those_it_dropped() -> None:
    loop = Loop()
    loop.timeline.start_trace()
    for number in range(MAX_STEPS + 5):
        mark = loop.launch(10 * number, host_end=10 * number + 1, returned=10 * number + 1)
        loop.settle(mark, 10 * number + 1, 10 * number + 2, 10 * number + 3)
    trace = msgspec.json.decode(loop.timeline.stop_trace(), type=Trace)
    assert len(trace.steps) == MAX_STEPS
    assert trace.num_dropped_steps == 5
    last = trace.steps[-1]
    assert (last.step_id, last.num_rows, last.num_tokens) == (MAX_STEPS + 4, 2, 4)
    assert msgspec.json.decode(loop.timeline.stop_trace(), type=Trace) == Trace()


@contextmanager
def engine(depth: int, **options: str) -> Iterator[Engine]:
    plugin = load_runner("sim")
    config = EngineConfig(runner="sim", max_in_flight=depth, runner_options=options)
    started = start_engine(resolve(config, plugin), plugin, lambda stage, done, total: None)
    try:
        yield started.engine
    finally:
        started.runner.close()


def run(one: Engine, uid: int = 0, num_requests: int = 1, max_tokens: int = 20) -> Load:
    for number in range(num_requests):
        one.add(AddRequest(uid + number, (1, 2, 3), Sampling(seed=number), max_tokens))
    while one.has_work:
        one.step()
    return one.load()


def test_synchronous_execution_leaves_bubbles_under_the_hosts_phases() -> None:
    with engine(1, step_seconds="0.005", copy_seconds="0.001") as one:
        load = run(one)
    bubble = load.times.bubble
    assert load.num_steps == 20
    assert load.times.device_busy >= 20 * 0.005
    assert bubble.copy >= 19 * 0.001 * 0.99
    assert min(bubble.schedule, bubble.prepare, bubble.update) > 0


def test_overlapped_execution_starts_each_step_when_the_one_before_ends() -> None:
    with engine(2, step_seconds="0.005") as one:
        one.start_trace()
        run(one)
        trace = msgspec.json.decode(one.stop_trace(), type=Trace)
    steps = [step for step in trace.steps if step.num_rows]
    gaps = [after.device_begin_ns - before.device_end_ns for before, after in pairwise(steps)]
    # How many is not said: a loaded machine may come late to some.
    assert len(steps) == 20
    assert all(gap >= 0 for gap in gaps)
    assert 0 in gaps


@pytest.mark.parametrize("depth", [1, 2])
def test_busy_bubble_and_idle_time_add_up_on_the_simulated_device(depth: int) -> None:
    with engine(depth, step_seconds="0.002") as one:
        begin = time.monotonic()
        one.start_trace()
        run(one, uid=0, num_requests=3)
        time.sleep(0.05)  # no request: idle, no bubble
        before = one.load().times
        load = run(one, uid=10, num_requests=2)
        wall = time.monotonic() - begin
        steps = msgspec.json.decode(one.stop_trace(), type=Trace).steps
    times = load.times
    bubble = sum(msgspec.structs.astuple(times.bubble))
    assert times.device_idle - before.device_idle >= 0.05 * 0.99
    total = times.device_busy + bubble + times.device_idle
    assert total == pytest.approx((steps[-1].device_end_ns - steps[0].bubble_begin_ns) * 1e-9)
    assert total <= wall


def test_a_request_whose_last_token_is_launched_does_not_count_as_waiting_work() -> None:
    with engine(2, step_seconds="0.001") as one:
        one.add(AddRequest(0, (1, 2, 3), Sampling(), 1))
        one.step()
        time.sleep(0.05)  # the only step has ended on the device, and the engine has not heard of it
        load = run(one, uid=1, max_tokens=1)
    assert load.num_steps == 2
    assert load.times.device_idle >= 0.045


def test_counters_survive_the_socket() -> None:
    with engine(2) as one:
        load = run(one)
    assert load.times.device_busy > 0
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(load), type=Load) == load


def test_the_last_steps_are_there_without_a_recording() -> None:
    loop = Loop()
    assert msgspec.json.decode(loop.timeline.recent_steps(), type=Trace).steps == ()
    synchronous_turn(loop)
    recent = msgspec.json.decode(loop.timeline.recent_steps(), type=Trace)
    spans = [(one.step_id, one.num_rows, one.num_tokens, one.device_begin_ns // MS) for one in recent.steps]
    assert spans == [(0, 2, 4, 3), (1, 2, 4, 34)]
    assert {"schedule", "prepare", "update", "send", "inbox"} <= {one.phase for one in recent.host}
    assert recent == msgspec.json.decode(loop.timeline.recent_steps(), type=Trace)


def test_only_the_last_steps_are_kept() -> None:
    loop = Loop()
    for index in range(RECENT_STEPS + 5):
        loop.settle(loop.launch(10 * index + 1, 10 * index + 2, 10 * index + 9), 10 * index + 2, 10 * index + 8, 0)
    recent = msgspec.json.decode(loop.timeline.recent_steps(), type=Trace)
    assert [one.step_id for one in recent.steps] == list(range(5, RECENT_STEPS + 5))
