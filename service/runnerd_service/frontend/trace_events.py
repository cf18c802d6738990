"""Writes a recording of the engine's steps in the trace event format, which Perfetto and Chrome show as tracks.

One process with a track for the host's phases, one for the steps on the device, one for the bubbles between them, and
as many for copies as overlap. Times are microseconds since the recording began. This module knows nothing of how a
recording is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from runnerd_service.engine.trace import StepSpan, Trace

_Event = dict[str, Any]

_PID = 1
_HOST, _DEVICE, _BUBBLES, _COPIES = 1, 2, 3, 4


def trace_json(trace: Trace) -> bytes:
    """Give the trace as JSON: an object whose ``traceEvents`` are metadata and complete ("X") events."""
    spans = [*_host_events(trace), *_device_events(trace), *_copy_events(trace)]
    lanes = sorted({event["tid"] for event in spans if event["tid"] > _COPIES})
    names = {
        _HOST: "host phases",
        _DEVICE: "device steps",
        _BUBBLES: "bubbles",
        _COPIES: "copies",
        **{lane: f"copies {lane - _COPIES + 1}" for lane in lanes},
    }
    metadata = [_metadata("process_name", 0, name="runnerd engine")]
    for tid, name in names.items():
        metadata += [_metadata("thread_name", tid, name=name), _metadata("thread_sort_index", tid, sort_index=tid)]
    document = {
        "traceEvents": [*metadata, *spans],
        "displayTimeUnit": "ms",
        "otherData": {"num_steps": len(trace.steps), "num_dropped_steps": trace.num_dropped_steps},
    }
    return msgspec.json.encode(document)


def _host_events(trace: Trace) -> Iterator[_Event]:
    steps = {step.step_id: step for step in trace.steps}
    for span in trace.host:
        arguments: dict[str, object] = {}
        if span.step_id >= 0:
            arguments = {"step_id": span.step_id}
            step = steps.get(span.step_id)
            if step is not None:
                arguments = _arguments(step)
        yield from _complete(trace, span.phase, _HOST, span.begin_ns, span.end_ns, arguments)


def _device_events(trace: Trace) -> Iterator[_Event]:
    for step in trace.steps:
        arguments = _arguments(step)
        name = f"step {step.step_id}"
        yield from _complete(trace, name, _DEVICE, step.device_begin_ns, step.device_end_ns, arguments)
        if step.bubble_begin_ns < step.device_begin_ns:
            bubble = f"bubble before step {step.step_id}"
            yield from _complete(trace, bubble, _BUBBLES, step.bubble_begin_ns, step.device_begin_ns, arguments)


def _copy_events(trace: Trace) -> Iterator[_Event]:
    for step, lane in _lanes(step for step in trace.steps if step.ready_ns > step.device_end_ns):
        name = f"copy of step {step.step_id}"
        yield from _complete(trace, name, _COPIES + lane, step.device_end_ns, step.ready_ns, _arguments(step))


def _lanes(steps: Iterable[StepSpan]) -> Iterator[tuple[StepSpan, int]]:
    """Give each copy the first track that is free: spans of one track may nest, but not overlap."""
    ends_ns: list[int] = []
    for step in steps:
        lane = next((lane for lane, end_ns in enumerate(ends_ns) if end_ns <= step.device_end_ns), len(ends_ns))
        ends_ns[lane : lane + 1] = [step.ready_ns]
        yield step, lane


def _arguments(step: StepSpan) -> dict[str, object]:
    return {"step_id": step.step_id, "rows": step.num_rows, "tokens": step.num_tokens}


def _complete(
    trace: Trace, name: str, tid: int, begin_ns: int, end_ns: int, arguments: dict[str, object]
) -> Iterator[_Event]:
    """Give the event of a span, cut at the recording's beginning; none when it ended before."""
    begin_ns = max(begin_ns, trace.begin_ns)
    if begin_ns <= end_ns:
        # Viewers count in microseconds; nanoseconds stay as decimals.
        times = {"ts": (begin_ns - trace.begin_ns) / 1e3, "dur": (end_ns - begin_ns) / 1e3}
        yield {"ph": "X", "name": name, "pid": _PID, "tid": tid, **times, "args": arguments}


def _metadata(kind: str, tid: int, **arguments: object) -> _Event:
    return {"ph": "M", "name": kind, "pid": _PID, "tid": tid, "args": arguments}
