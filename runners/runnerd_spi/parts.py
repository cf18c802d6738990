"""Small parts a runner may be composed of: the order of its calls, and handles for steps. None of them is required.

Together with :class:`~runnerd_spi.state.PlanChecker` they are the bookkeeping that is the same in every runner. They
know nothing of models or devices.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

from runnerd_spi.errors import InvalidOption, LifecycleError, StepFailed, StepTimeout
from runnerd_spi.plan import StepOutput
from runnerd_spi.runner import RunnerCapabilities, RunnerConfig, StepTimeline

_ORDER = ("load", "profile", "init_kv_cache", "warm_up", "execute_model")


def check_config(name: str, config: RunnerConfig, capabilities: RunnerCapabilities) -> None:
    """Refuse a configuration outside the capabilities, for a runner that is not created by the service.

    Args:
        name: The runner's.
        config: What it was configured with.
        capabilities: What it declares.

    Raises:
        InvalidOption: The depth or the block size is not among those declared. (``load`` checks the data type: what
            a model can be computed in is not known before.)
    """
    low, high = capabilities.min_in_flight, capabilities.max_in_flight
    if not low <= config.max_in_flight <= high:
        raise InvalidOption(f"runner {name!r}: max_in_flight {config.max_in_flight}, expected {low} to {high}")
    if config.block_size not in capabilities.block_sizes:
        sizes = ", ".join(map(str, sorted(capabilities.block_sizes)))
        raise InvalidOption(f"runner {name!r}: block_size {config.block_size}, expected one of {sizes}")


class Lifecycle:
    """Follows the calls of a runner. ``expect`` begins each of them, ``done`` ends the ones that happen once."""

    def __init__(self) -> None:
        self.closed = False
        self._next = 0

    def expect(self, call: str) -> None:
        """Refuse a call that does not come next.

        Raises:
            LifecycleError: Another call was expected, or the runner is closed.
        """
        if self.closed:
            raise LifecycleError(f"{call} was called on a closed runner; create a new one")
        if call != _ORDER[self._next]:
            raise LifecycleError(f"{call} was called, expected {_ORDER[self._next]}; the order is {', '.join(_ORDER)}")

    def done(self) -> None:
        """Note that the expected call has succeeded; ``execute_model`` stays the expected one."""
        self._next = min(self._next + 1, len(_ORDER) - 1)

    def close(self) -> bool:
        """Note the end; say whether it had not come before."""
        was_open, self.closed = not self.closed, True
        return was_open


class DoneStep:
    """The handle of a step that was computed before its launch returned: all a synchronous runner needs.

    Args:
        output: What the step gave.
        timeline: All of its times.
    """

    def __init__(self, output: StepOutput, timeline: StepTimeline) -> None:
        self.step_id = output.step_id
        self.timeline = timeline
        self._output = output

    def done(self) -> bool:
        """Whether ``result`` returns at once: it does."""
        return True

    def result(self, timeout: float | None = None) -> StepOutput:
        """Give the output; nothing is waited for."""
        return self._output


class FutureStep:
    """The handle of a step that runs elsewhere, for example on a thread that stands for the device's stream.

    Args:
        step_id: The plan's step id.
        future: Gives the output and the times of the step, or raises what went wrong. A failure is taken as fatal:
            let the steps after it raise the same exception object, and ``result`` names it as their cause.
        host_begin_ns: When ``execute_model`` was entered.
    """

    def __init__(self, step_id: int, future: Future[tuple[StepOutput, StepTimeline]], host_begin_ns: int) -> None:
        self.step_id = step_id
        self._future = future
        self._host_begin_ns = host_begin_ns
        self._lock = threading.Lock()
        self._failure: StepFailed | None = None

    @property
    def timeline(self) -> StepTimeline:
        """Complete once ``done()``; until then, and of a failed step, only the beginning is known."""
        if self._future.done() and self._future.exception() is None:
            return self._future.result()[1]
        return StepTimeline(host_begin_ns=self._host_begin_ns)

    def done(self) -> bool:
        """Whether ``result`` returns or raises at once."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until the step is done, whatever its outcome."""
        self._future.exception()

    def result(self, timeout: float | None = None) -> StepOutput:
        """Wait for the step and give its output; the same object each time.

        Raises:
            StepTimeout: The time is over; ask again.
            StepFailed: The step failed, fatally.
        """
        try:
            cause = self._future.exception(timeout)
        except TimeoutError:
            raise StepTimeout(f"step {self.step_id} is not ready after {timeout} seconds; ask again") from None
        if cause is None:
            return self._future.result()[0]
        with self._lock:
            if self._failure is None:
                self._failure = StepFailed(f"step {self.step_id} failed: {cause}", fatal=True)
        raise self._failure from cause
