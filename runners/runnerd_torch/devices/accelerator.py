"""An accelerator as a device: CUDA and Ascend alike, by PyTorch's device-independent streams and events.

The thread that launches enqueues the work on the device's stream and goes on. Copies to the host run on a stream of
their own, behind the computation that they wait for and beside the one after it. Nothing here waits for the device but
the calls that say so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic

import torch

from runnerd_torch.devices.base import Array, Launch, MemoryInfo, T
from runnerd_torch.devices.clock import DeviceClock, ElapsedTime, TimeBase
from runnerd_torch.devices.staging import StagingRing

NUM_STAGING_SLOTS = 5
"""One more than steps can be in flight: the oldest copy has always run when its buffer is written again."""

_SHORTEST_SLEEP_SECONDS = 20e-6
_LONGEST_SLEEP_SECONDS = 1e-3


class AcceleratorLaunch(Generic[T]):
    """Work on the stream, between a first and a last event.

    Args:
        clock: The stream's.
        new_event: Makes events with timing.
    """

    def __init__(self, clock: DeviceClock, new_event: Callable[[], torch.Event]) -> None:
        self._clock = clock
        self._begin, self._computed, self._copied = new_event(), new_event(), new_event()
        self._base: TimeBase | None = None
        self._enqueued_ns = 0
        self._lock = threading.Lock()
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._ended = False
        self._times_ns = (0, 0, 0)

    @property
    def begin_ns(self) -> int:
        """When the stream came to the work; 0 until it has ended."""
        return self._times_ns[0]

    @property
    def compute_end_ns(self) -> int:
        """When all was computed; 0 until the copies too have ended."""
        return self._times_ns[1]

    @property
    def end_ns(self) -> int:
        """When the last copy to the host had ended; 0 until then."""
        return self._times_ns[2]

    def done(self) -> bool:
        """Whether the work, its copies to the host included, has ended or failed."""
        if self._ended:
            return True
        try:
            if not self._copied.query():
                return False
        except RuntimeError as error:
            self._end(error)
            return True
        # That an event was reached says nothing of failures before it on every device; waiting for it does.
        return self.wait(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most ``timeout`` seconds, with the interpreter free for other threads."""
        if self._ended:
            return True
        if timeout is not None:
            return self._poll(time.monotonic() + timeout)
        try:
            self._copied.synchronize()
        except RuntimeError as error:
            self._end(error)
        else:
            self._end(None)
        return True

    def value(self) -> T:
        """Give what the work returned, or raise what it or the device raised."""
        if self._error is not None:
            raise self._error
        return self._value[0]

    def run(
        self, work: Callable[[], T], compute_stream: torch.Stream, copy_stream: torch.Stream, copy: Callable[[], None]
    ) -> None:
        """Enqueue the work, then ``copy``'s copies; the compute stream is the current one."""
        try:
            self._enqueued_ns = time.monotonic_ns()
            self._begin.record(compute_stream)
            self._base = self._clock.base_of(self._begin, self._enqueued_ns)
            try:
                self._value.append(work())
            except Exception as error:  # noqa: BLE001 - it is raised again where the launch is read
                self._error = error
            self._computed.record(compute_stream)
            self._computed.wait(copy_stream)
            copy()
            self._copied.record(copy_stream)
        except RuntimeError as error:  # the stream itself takes no more work
            self._end(error)

    def _poll(self, deadline: float) -> bool:
        sleep_seconds = _SHORTEST_SLEEP_SECONDS
        while not self.done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(sleep_seconds, left))
            sleep_seconds = min(2 * sleep_seconds, _LONGEST_SLEEP_SECONDS)
        return True

    def _end(self, error: BaseException | None) -> None:
        observed_ns = time.monotonic_ns()
        with self._lock:
            if self._ended:
                return
            if self._error is None:
                self._error = error
            self._times_ns = self._measure(observed_ns) if error is None else self._guess(observed_ns)
            self._ended = True

    def _measure(self, observed_ns: int) -> tuple[int, int, int]:
        assert self._base is not None
        events = (self._begin, self._computed, self._copied)
        try:
            begin, computed, copied = self._clock.host_ns(self._base, events, self._enqueued_ns, observed_ns)
        except RuntimeError:  # the base lies before a failure
            return self._guess(observed_ns)
        return begin, computed, copied

    def _guess(self, observed_ns: int) -> tuple[int, int, int]:
        self._clock.restart()
        return self._enqueued_ns, observed_ns, observed_ns


class AcceleratorDevice:
    """One accelerator, by its in-order stream.

    Args:
        device: With its index: ``cuda:0``, ``npu:1``.
        description: For people: "NVIDIA H100".
        elapsed_ms: Gives the milliseconds between two events that have happened, and waits for nothing else.
        num_staging_slots: Steps whose arrays may be on their way at once; a further one waits.
    """

    def __init__(
        self,
        device: torch.device,
        description: str,
        elapsed_ms: ElapsedTime = torch.Event.elapsed_time,
        num_staging_slots: int = NUM_STAGING_SLOTS,
    ) -> None:
        self._device = device
        self._description = description
        # What is done outside of submitted work, such as reading weights, runs on this stream too.
        self._compute_stream = torch.accelerator.current_stream(device)
        self._copy_stream = torch.Stream(device=device)
        self._timed_event = partial(torch.Event, device, enable_timing=True)
        self._staging = StagingRing(num_staging_slots, device, partial(torch.Event, device))
        self._clock = DeviceClock(elapsed_ms)
        # (source, target) of the copies to the host that the work at hand asked for.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._last: Launch[Any] | None = None
        self._closed = False

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live."""
        return self._device

    @property
    def description(self) -> str:
        """For people."""
        return self._description

    def preferred_dtype(self, checkpoint: torch.dtype | None) -> torch.dtype:
        """Give the checkpoint's own, bfloat16 where it has none."""
        return torch.bfloat16 if checkpoint is None else checkpoint

    def memory(self) -> MemoryInfo:
        """Measure the device's memory; what other processes hold is not free."""
        free, total = torch.accelerator.get_memory_info(self._device)
        return MemoryInfo(total, free)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeros on the device."""
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def submit(self, work: Callable[[], T]) -> Launch[T]:
        """Enqueue ``work`` on the stream, on the calling thread."""
        if self._closed:
            raise RuntimeError("the device is closed")
        launch: AcceleratorLaunch[T] = AcceleratorLaunch(self._clock, self._timed_event)
        try:
            with self._compute_stream, torch.inference_mode():
                launch.run(work, self._compute_stream, self._copy_stream, self._copy)
        finally:
            self._copies = []
        self._last = launch
        return launch

    def to_device(self, arrays: Sequence[Array]) -> tuple[torch.Tensor, ...]:
        """Enqueue one copy of all ``arrays`` through page-locked memory."""
        return self._staging.send(arrays, self._compute_stream)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give page-locked memory that a copy on the copy stream fills when all of the work is computed."""
        source = tensor.contiguous()
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._copies.append((source, target))
        return target

    def peak_bytes(self, run: Callable[[], None]) -> int | None:
        """Give the most memory that ``run`` and what it submits hold at once, beyond what was held before."""
        self.synchronize()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(self._device)
        before = torch.accelerator.memory_allocated(self._device)
        run()
        self.synchronize()
        peak = torch.accelerator.max_memory_allocated(self._device) - before
        torch.accelerator.empty_cache()
        return peak

    def synchronize(self) -> None:
        """Wait until all submitted work has ended."""
        torch.accelerator.synchronize(self._device)

    def close(self, timeout: float) -> bool:
        """Wait for launched work, at most ``timeout`` seconds; what takes longer is left to end by itself."""
        self._closed = True
        if self._last is not None and not self._last.wait(timeout):
            return False
        self._last = None
        return True

    def _copy(self) -> None:
        with self._copy_stream:
            for source, target in self._copies:
                target.copy_(source, non_blocking=True)
                # The memory must not be given to later work on the compute stream before this copy has read it.
                source.record_stream(self._copy_stream)
