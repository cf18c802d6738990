"""What a recording of the engine's steps holds, and how it crosses to the front process. It knows no clock, no request.

A recording keeps the last :data:`MAX_STEPS` steps. It crosses as compact JSON: the engine's loop stands still while it
is written, so what viewers want to read is made of it elsewhere.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

RECENT_STEPS = 64
"""Steps that are always kept, for whoever looks."""
MAX_STEPS = 10_000
"""Steps that a recording holds; older ones are dropped and counted."""
_SPANS_PER_STEP = 8
"""A turn of the loop has seven phases at most."""


class HostSpan(NamedTuple):
    """A phase of the host."""

    phase: str
    begin_ns: int
    end_ns: int
    step_id: int
    """The step that it was about; -1 for none."""


class StepSpan(NamedTuple):
    """A step on the device."""

    step_id: int
    num_rows: int
    num_tokens: int
    device_begin_ns: int
    device_end_ns: int
    ready_ns: int
    """When its output was readable by the host; 0 where the runner does not tell."""
    bubble_begin_ns: int
    """Since when the device waited for this step although work was there; ``device_begin_ns`` when it did not."""


class Trace(msgspec.Struct, frozen=True):
    """A recording as it crosses to the front process; times are ``time.monotonic_ns`` values of the engine process."""

    begin_ns: int = 0
    """When the recording began; spans may have begun before."""
    steps: tuple[StepSpan, ...] = ()
    host: tuple[HostSpan, ...] = ()
    num_dropped_steps: int = 0


class TraceRecording:
    """Takes spans while a trace is recorded.

    Args:
        begin_ns: Now.
        max_steps: Steps that it holds.
    """

    def __init__(self, begin_ns: int = 0, max_steps: int = MAX_STEPS) -> None:
        self._begin_ns = begin_ns
        self._steps: deque[StepSpan] = deque(maxlen=max_steps)
        # Plain tuples of a HostSpan's fields: they are made several times per step.
        self._host: deque[tuple[str, int, int, int]] = deque(maxlen=_SPANS_PER_STEP * max_steps)
        self._num_steps = 0

    def add_step(self, span: StepSpan) -> None:
        """Take a settled step; one that the device had ended before the recording began is passed over."""
        if span.device_end_ns < self._begin_ns:
            return
        self._steps.append(span)
        self._num_steps += 1

    def add_host(self, span: tuple[str, int, int, int]) -> None:
        """Take a phase that has ended: the fields of a :class:`HostSpan`."""
        self._host.append(span)

    def to_json(self) -> str:
        """Give all as JSON of :class:`Trace`."""
        fields = {
            "begin_ns": self._begin_ns,
            "steps": tuple(self._steps),
            "host": tuple(self._host),
            "num_dropped_steps": self._num_steps - len(self._steps),
        }
        return msgspec.json.encode(fields).decode()
