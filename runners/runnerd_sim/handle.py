"""The handle of a launched step. It knows when the simulated device is done, and nothing of what was computed."""

from __future__ import annotations

import threading
import time

from runnerd_spi import StepFailed, StepOutput, StepTimeline, StepTimeout


class SimStepHandle:
    """A launched step. The device finishes it once; any thread may ask.

    Args:
        step_id: The plan's step id.
        host_begin_ns: When ``execute_model`` was entered.
    """

    __slots__ = ("_cause", "_computed", "_output", "_step_id", "_timeline")

    def __init__(self, step_id: int, host_begin_ns: int) -> None:
        self._step_id = step_id
        self._timeline = StepTimeline(host_begin_ns=host_begin_ns)
        self._output: StepOutput | None = None
        self._cause: BaseException | None = None
        # Set when output and timeline are known. The step is done when, after that, the clock reaches ready_ns.
        self._computed = threading.Event()

    @property
    def step_id(self) -> int:
        """The plan's step id."""
        return self._step_id

    @property
    def timeline(self) -> StepTimeline:
        """Complete once ``done()``; until then only what the host did is known."""
        timeline = self._timeline
        if timeline.ready_ns and time.monotonic_ns() < timeline.ready_ns:
            return StepTimeline(timeline.host_begin_ns, timeline.host_end_ns)
        return timeline

    def done(self) -> bool:
        """Whether ``result`` returns or raises at once."""
        return self._computed.is_set() and time.monotonic_ns() >= self._timeline.ready_ns

    def result(self, timeout: float | None = None) -> StepOutput:
        """Wait for the step and give its output; the same object each time.

        Args:
            timeout: Seconds to wait at most; None waits without limit.

        Raises:
            StepTimeout: The time is over. The handle stays valid: ask again.
            StepFailed: The step failed, fatally; its cause is that of the first step that did.
        """
        if not self.wait(timeout):
            raise StepTimeout(f"step {self._step_id} is not ready after {timeout} seconds; ask again or give up on it")
        if self._output is None:
            raise StepFailed(f"step {self._step_id} failed: {self._cause}", fatal=True) from self._cause
        return self._output

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the step is done, at most ``timeout`` seconds; say whether it is."""
        deadline_ns = None if timeout is None else time.monotonic_ns() + int(timeout * 1e9)
        if not self._computed.wait(timeout):
            return False
        ready_ns = self._timeline.ready_ns
        sleep_until(ready_ns if deadline_ns is None else min(ready_ns, deadline_ns))
        return deadline_ns is None or self.done()

    def enqueued(self, host_end_ns: int) -> None:
        """Note the end of the host's part. Called before the device sees the step."""
        self._timeline = StepTimeline(self._timeline.host_begin_ns, host_end_ns)

    def finish(self, outcome: StepOutput | BaseException, begin_ns: int, end_ns: int, ready_ns: int) -> None:
        """Settle the step with its output or the root cause of its failure. Called once, by the device."""
        host = self._timeline
        self._timeline = StepTimeline(host.host_begin_ns, host.host_end_ns, begin_ns, end_ns, ready_ns)
        if isinstance(outcome, StepOutput):
            self._output = outcome
        else:
            self._cause = outcome
        self._computed.set()


def sleep_until(deadline_ns: int) -> None:
    """Sleep until the monotonic clock reads ``deadline_ns``."""
    while (remaining_ns := deadline_ns - time.monotonic_ns()) > 0:
        time.sleep(remaining_ns / 1e9)
