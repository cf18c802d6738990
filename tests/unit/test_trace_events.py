"""A recording as a trace viewer reads it."""

import json

from runnerd_service.engine.trace import HostSpan, StepSpan, Trace
from runnerd_service.frontend.trace_events import trace_json

TRACE = Trace(
    begin_ns=1_000_000,
    steps=(
        StepSpan(7, 2, 130, 1_001_000, 1_005_000, 1_007_500, bubble_begin_ns=1_001_000),
        StepSpan(8, 3, 3, 1_006_000, 1_009_000, 1_012_000, bubble_begin_ns=1_005_000),
        StepSpan(9, 3, 3, 1_009_000, 1_010_000, 1_013_000, bubble_begin_ns=1_009_000),
        StepSpan(10, 3, 3, 1_013_000, 1_014_000, 0, bubble_begin_ns=1_013_000),
    ),
    host=(
        HostSpan("idle", 3, 1_000_500, -1),
        HostSpan("schedule", 1_000_500, 1_000_800, 7),
        HostSpan("inbox", 500, 900, -1),
        HostSpan("update", 1_001_000, 1_001_001, 99),
    ),
)


def tracks(trace: Trace) -> dict[str, list[tuple[str, float, float, dict[str, int]]]]:
    """Give name, begin, length and arguments of the spans by track."""
    events = json.loads(trace_json(trace))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans: dict[str, list[tuple[str, float, float, dict[str, int]]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            spans[names[event["tid"]]].append((event["name"], event["ts"], event["dur"], event["args"]))
    return spans


def test_a_step_has_a_span_on_the_device_and_says_what_it_computed() -> None:
    assert tracks(TRACE)["device steps"] == [
        ("step 7", 1.0, 4.0, {"step_id": 7, "rows": 2, "tokens": 130}),
        ("step 8", 6.0, 3.0, {"step_id": 8, "rows": 3, "tokens": 3}),
        ("step 9", 9.0, 1.0, {"step_id": 9, "rows": 3, "tokens": 3}),
        ("step 10", 13.0, 1.0, {"step_id": 10, "rows": 3, "tokens": 3}),
    ]


def test_only_idle_time_with_work_is_a_bubble() -> None:
    assert tracks(TRACE)["bubbles"] == [("bubble before step 8", 5.0, 1.0, {"step_id": 8, "rows": 3, "tokens": 3})]


def test_host_phases_are_cut_at_the_beginning_and_name_their_step() -> None:
    assert tracks(TRACE)["host phases"] == [
        ("idle", 0.0, 0.5, {}),
        ("schedule", 0.5, 0.3, {"step_id": 7, "rows": 2, "tokens": 130}),
        ("update", 1.0, 0.001, {"step_id": 99}),
    ]


def test_copies_that_overlap_have_tracks_of_their_own() -> None:
    spans = tracks(TRACE)
    assert [(name, begin, length) for name, begin, length, _ in spans["copies"]] == [
        ("copy of step 7", 5.0, 2.5),
        ("copy of step 8", 9.0, 3.0),
    ]
    assert [(name, begin, length) for name, begin, length, _ in spans["copies 2"]] == [("copy of step 9", 10.0, 3.0)]


def test_an_empty_recording_is_a_trace_too() -> None:
    document = json.loads(trace_json(Trace(num_dropped_steps=3)))
    assert document["otherData"] == {"num_steps": 0, "num_dropped_steps": 3}
    assert all(event["ph"] == "M" for event in document["traceEvents"])
    assert [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"] == [
        "runnerd engine"
    ]
