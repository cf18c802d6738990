"""Sight into overlapped execution: how long the device computed, how long it stood idle for want of the host, and why.

The loop says which phase the host is in, each settled step says when the device had it. The *bubble* is the time
between two steps in which the device was idle although a request could have run; it is shared out among the host's
phases in that time. All times are ``time.monotonic_ns`` values. This module decides nothing and knows no request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from runnerd_service.engine.messages import BubbleSeconds, HostSeconds, StepTimes
from runnerd_service.engine.trace import RECENT_STEPS, StepSpan, TraceRecording
from runnerd_spi import StepPlan, StepTimeline

Phase = Literal["idle", "inbox", "schedule", "prepare", "wait", "update", "send"]
"""What the host does: ``idle`` waits for requests, ``wait`` for a step; the others are work of a turn of the loop."""

# In the order of the fields of HostSeconds and BubbleSeconds.
_PHASES: tuple[Phase, ...] = ("inbox", "schedule", "prepare", "update", "send", "wait")
_CAUSES = ("inbox", "schedule", "prepare", "update", "send", "copy", "other")

_MAX_RECENT_SPANS = 512
"""Far above what lies between a step's launch and its settling; holds for a runner that tells no device times too."""


class LaunchMark(NamedTuple):
    """What is to be remembered of a step from its launch to its settling."""

    plan: StepPlan
    work_since_ns: int | None
    """Since when, without a break, a request could have run; None when none could: a step without rows."""


class Timeline:
    """Sums up a loop's phases and the device's steps. Costs a few microseconds per step.

    Args:
        clock: Gives nanoseconds; the clock of the runner's :class:`~runnerd_spi.StepTimeline`.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._host_ns: dict[Phase, int] = dict.fromkeys(_PHASES, 0) | {"idle": 0}
        self._bubble_ns = dict.fromkeys(_CAUSES, 0)
        self._device_busy_ns = 0
        self._device_idle_ns = 0
        # The phase the host is in.
        self._phase: Phase = "idle"
        self._phase_begin_ns = clock()
        self._phase_step_id = -1
        # Ended phases that may reach into a bubble that is not known yet.
        self._recent: deque[tuple[Phase, int, int, int]] = deque(maxlen=_MAX_RECENT_SPANS)
        # When the device ended the last settled step, and when that was readable; 0 before the first.
        self._device_end_ns = 0
        self._ready_ns = 0
        self._work_since_ns: int | None = None
        self._recording: TraceRecording | None = None
        # The last steps and phases, recording or not.
        self._last_steps: deque[tuple[StepPlan, int, int, int, int]] = deque(maxlen=RECENT_STEPS)
        self._last_phases: deque[tuple[Phase, int, int, int]] = deque(maxlen=len(_PHASES) * RECENT_STEPS)

    def enter(self, phase: Phase, step_id: int = -1) -> None:
        """Begin a phase, which ends the one before.

        Args:
            phase: What the host does from now on.
            step_id: The step that it is about; -1 for none.
        """
        if phase != self._phase or step_id != self._phase_step_id:
            self._switch(self._clock(), phase, step_id)

    def scheduled(self, step_id: int) -> None:
        """Say which step the present phase was about, which is known at its end only."""
        self._phase_step_id = step_id

    def enqueued(self, host_end_ns: int, awaited_step_id: int) -> None:
        """End ``prepare`` at the time that the runner gave; since then it waited for an older step.

        Args:
            host_end_ns: The step's; 0 when the runner does not tell, then all counts as ``prepare``.
            awaited_step_id: The step that was waited for.
        """
        if self._phase_begin_ns <= host_end_ns <= self._clock():
            self._switch(host_end_ns, "wait", awaited_step_id)

    def note_work(self, *, waits: bool) -> None:
        """Say whether a request could run now, if the device and the host were free."""
        if not waits:
            self._work_since_ns = None
        elif self._work_since_ns is None:
            # A message that the inbox gives now was there when the inbox was opened.
            self._work_since_ns = self._phase_begin_ns if self._phase == "inbox" else self._clock()

    def mark(self, plan: StepPlan) -> LaunchMark:
        """Give what :meth:`settled` is to be given when this plan's step has settled."""
        return LaunchMark(plan, self._work_since_ns if plan.rows else None)

    def settled(self, mark: LaunchMark, timeline: StepTimeline) -> None:
        """Count a step that has settled, well or not. Steps come in the order of their launch."""
        begin_ns, end_ns = timeline.device_begin_ns, timeline.device_end_ns
        if not 0 < begin_ns <= end_ns:  # the runner does not tell
            return
        former_end_ns = self._device_end_ns
        # Clocks of devices are read with some error: what overlaps by it is counted once.
        begin_ns = max(begin_ns, former_end_ns)
        end_ns = max(end_ns, begin_ns)
        self._device_busy_ns += end_ns - begin_ns
        bubble_begin_ns = begin_ns
        if mark.work_since_ns is not None:
            bubble_begin_ns = min(max(former_end_ns, mark.work_since_ns), begin_ns)
        if former_end_ns:
            self._device_idle_ns += bubble_begin_ns - former_end_ns
        if bubble_begin_ns < begin_ns:
            self._attribute(bubble_begin_ns, begin_ns)
        self._device_end_ns, self._ready_ns = end_ns, timeline.ready_ns
        recent = self._recent
        while recent and recent[0][2] <= end_ns:
            recent.popleft()
        step = mark.plan, begin_ns, end_ns, timeline.ready_ns, bubble_begin_ns
        self._last_steps.append(step)
        if self._recording is not None:
            self._recording.add_step(_span_of(*step))

    def times(self) -> StepTimes:
        """Give the sums since the start, as of the last settled step and the last ended phase."""
        host, bubble = self._host_ns, self._bubble_ns
        return StepTimes(
            self._device_busy_ns * 1e-9,
            self._device_idle_ns * 1e-9,
            BubbleSeconds(*[bubble[cause] * 1e-9 for cause in _CAUSES]),
            HostSeconds(*[host[phase] * 1e-9 for phase in _PHASES]),
        )

    @property
    def device_busy_ns(self) -> int:
        """How long the device has computed since the start."""
        return self._device_busy_ns

    def start_trace(self) -> None:
        """Record from now on; a recording that goes on is dropped."""
        self._recording = TraceRecording(self._clock())

    def stop_trace(self) -> str:
        """End the recording and give it as JSON of :class:`~runnerd_service.engine.trace.Trace`; empty without one."""
        recording, self._recording = self._recording, None
        return (recording or TraceRecording()).to_json()

    def recent_steps(self) -> str:
        """Give the last steps, as JSON of :class:`~runnerd_service.engine.trace.Trace`; nothing ends by that."""
        recent = TraceRecording(max_steps=RECENT_STEPS)
        for step in self._last_steps:
            recent.add_step(_span_of(*step))
        for phase in self._last_phases:
            recent.add_host(phase)
        return recent.to_json()

    def _switch(self, now_ns: int, phase: Phase, step_id: int) -> None:
        former, begin_ns = self._phase, self._phase_begin_ns
        self._host_ns[former] += now_ns - begin_ns
        span = (former, begin_ns, now_ns, self._phase_step_id)
        self._recent.append(span)
        self._last_phases.append(span)
        if self._recording is not None:
            self._recording.add_host(span)
        self._phase, self._phase_begin_ns, self._phase_step_id = phase, now_ns, step_id

    def _attribute(self, begin_ns: int, end_ns: int) -> None:
        """Share out a bubble among what the host did meanwhile."""
        unknown_ns = end_ns - begin_ns
        present = (self._phase, self._phase_begin_ns, end_ns, self._phase_step_id)
        for phase, phase_begin_ns, phase_end_ns, _ in (*self._recent, present):
            # While the host waits, its step's output is on the way for as long as the copy takes.
            is_wait = phase == "wait"
            last_ns = min(end_ns, phase_end_ns, self._ready_ns) if is_wait else min(end_ns, phase_end_ns)
            shared_ns = last_ns - max(begin_ns, phase_begin_ns)
            if shared_ns > 0 and phase != "idle":
                self._bubble_ns["copy" if is_wait else phase] += shared_ns
                unknown_ns -= shared_ns
        self._bubble_ns["other"] += unknown_ns


def _span_of(plan: StepPlan, begin_ns: int, end_ns: int, ready_ns: int, bubble_begin_ns: int) -> StepSpan:
    num_tokens = sum(row.num_new_tokens for row in plan.rows)
    return StepSpan(plan.step_id, len(plan.rows), num_tokens, begin_ns, end_ns, ready_ns, bubble_begin_ns)
