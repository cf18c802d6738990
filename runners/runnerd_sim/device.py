"""The simulated device: one in-order stream with a clock.

A worker thread runs the launched steps in order. How long a step takes is arithmetic, not sleep: it begins when it was
enqueued or when the step before ended, whichever is later, and ends its device time after that (later only if computing
it took longer). Its handle becomes readable when the clock gets there. A busy host thus cannot slow the device, as it
could if the worker had to wake up in time. This module knows nothing of tokens, requests or blocks.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from runnerd_sim.handle import SimStepHandle, sleep_until
from runnerd_spi import StepOutput

CRASH_EXIT_CODE = 70


@dataclass(frozen=True, slots=True)
class Launch:
    """One step for the device."""

    handle: SimStepHandle
    compute: Callable[[], StepOutput]
    """Runs on the device's thread, after that of every earlier launch."""
    device_ns: int
    copy_ns: int
    """From the end on the device until the host can read the output; overlaps the next step."""
    crash: bool = False
    """Exit the process at the end of this step."""


@dataclass(frozen=True, slots=True)
class DeviceFailure:
    """Why the device computes no more, and from when on the host can know."""

    cause: BaseException
    ready_ns: int


class SimDevice:
    """Runs launches in order until one fails; that one and all later ones fail with its cause."""

    def __init__(self) -> None:
        self._launches: queue.SimpleQueue[Launch | None] = queue.SimpleQueue()
        # Written by the worker; the reference is read by the host.
        self._failure: DeviceFailure | None = None
        self._end_ns = 0
        self._ready_ns = 0
        self._worker = threading.Thread(target=self._run, name="sim-device", daemon=True)
        self._worker.start()

    @property
    def failure(self) -> BaseException | None:
        """The root cause once the failed step's result could be read; None while all is well."""
        failure = self._failure
        return failure.cause if failure is not None and time.monotonic_ns() >= failure.ready_ns else None

    def launch(self, launch: Launch) -> None:
        """Enqueue a step and return at once."""
        launch.handle.enqueued(time.monotonic_ns())
        self._launches.put(launch)

    def close(self, timeout: float) -> None:
        """Wait for launched work, at most ``timeout`` seconds, and end the stream."""
        deadline_ns = time.monotonic_ns() + int(timeout * 1e9)
        self._launches.put(None)
        self._worker.join(timeout)
        if not self._worker.is_alive():
            sleep_until(min(self._ready_ns, deadline_ns))

    def _run(self) -> None:
        while (launch := self._launches.get()) is not None:
            self._process(launch)
            # The loop must not hold a consumed plan until the next one comes.
            del launch

    def _process(self, launch: Launch) -> None:
        begin_ns = max(launch.handle.timeline.host_end_ns, self._end_ns)
        if self._failure is not None:
            ready_ns = max(begin_ns, self._failure.ready_ns)
            launch.handle.finish(self._failure.cause, begin_ns, begin_ns, ready_ns)
            return
        outcome: StepOutput | BaseException
        try:
            outcome = launch.compute()
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in a step is that step's failure
            outcome = error
        end_ns = max(begin_ns + launch.device_ns, time.monotonic_ns())
        ready_ns = end_ns + launch.copy_ns
        if launch.crash:
            sleep_until(end_ns)
            os._exit(CRASH_EXIT_CODE)
        self._end_ns = end_ns
        self._ready_ns = ready_ns
        if not isinstance(outcome, StepOutput):
            self._failure = DeviceFailure(outcome, ready_ns)
        launch.handle.finish(outcome, begin_ns, end_ns, ready_ns)
