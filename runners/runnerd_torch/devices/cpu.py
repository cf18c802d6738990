"""The CPU as a device: one worker thread is the stream, and a launch is a closure on its queue.

The thread that launches does not wait, so the scheduling of the next step overlaps with this one as on an accelerator.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic

import torch

from runnerd_torch.devices import host
from runnerd_torch.devices.base import Array, Launch, MemoryInfo, T
from runnerd_torch.native import huge_pages

_GIB = 1 << 30

DEFAULT_KV_BYTES = 4 * _GIB
"""A KV cache of this size serves a small model well; more of the machine is taken only when asked for."""


class CpuLaunch(Generic[T]):
    """A closure on the worker thread's queue."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._ended = threading.Event()
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._begin_ns = 0
        self._end_ns = 0

    @property
    def begin_ns(self) -> int:
        """When the thread began."""
        return self._begin_ns

    @property
    def compute_end_ns(self) -> int:
        """The same as ``end_ns``: there is nothing to copy."""
        return self._end_ns

    @property
    def end_ns(self) -> int:
        """When the thread had done the work; 0 until then."""
        return self._end_ns

    def done(self) -> bool:
        """Whether the work has ended or failed."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most ``timeout`` seconds."""
        return self._ended.wait(timeout)

    def value(self) -> T:
        """Give what the work returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._value[0]

    def run(self) -> None:
        """Do the work, on the calling thread."""
        work, self._work = self._work, None  # the closure holds the step's arrays; let go of them when it has run
        if work is None:
            return
        self._begin_ns = time.monotonic_ns()
        try:
            self._value.append(work())
        except BaseException as error:  # noqa: BLE001 - it is raised again where the launch is read
            self._error = error
        self._end_ns = time.monotonic_ns()
        self._ended.set()


class CpuDevice:
    """Torch on the host's cores.

    Args:
        num_threads: Threads of one operation; None takes the cores this process may use.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or host.usable_cores()
        self._queue: SimpleQueue[CpuLaunch[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def torch_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def description(self) -> str:
        """For people."""
        return f"cpu ({self._num_threads} thread{'s' if self._num_threads > 1 else ''})"

    def preferred_dtype(self, checkpoint: torch.dtype | None) -> torch.dtype:
        """Half precision where the CPU multiplies it itself, else float32: emulated it is slower and no better."""
        wanted = torch.bfloat16 if checkpoint is None else checkpoint
        native = {torch.bfloat16: host.has_native_bfloat16, torch.float16: host.has_native_float16}
        return wanted if wanted in native and native[wanted]() else torch.float32

    def memory(self) -> MemoryInfo:
        """Measure the host's memory, bounded by the cgroup."""
        total, free = host.memory_bytes()
        return MemoryInfo(total, free, DEFAULT_KV_BYTES)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeros that cost nothing until they are written: torch would touch each page of a large cache now."""
        return huge_pages.zeros(shape, dtype)

    def submit(self, work: Callable[[], T]) -> Launch[T]:
        """Queue ``work`` for the worker thread."""
        if self._closed:
            raise RuntimeError("the device is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="runnerd-cpu-stream", daemon=True)
            self._thread.start()
        launch = CpuLaunch(work)
        self._queue.put(launch)
        return launch

    def to_device(self, arrays: Sequence[Array]) -> tuple[torch.Tensor, ...]:
        """Give tensors over the arrays' own memory."""
        return tuple(map(torch.from_numpy, arrays))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the tensor itself."""
        return tensor

    def peak_bytes(self, run: Callable[[], None]) -> int | None:
        """Give None: torch does not count what it holds on the host."""
        return None

    def synchronize(self) -> None:
        """Wait until all submitted work has ended."""
        self.submit(lambda: None).wait()

    def close(self, timeout: float) -> bool:
        """End the worker thread after the queued work; a thread that takes longer is left to end by itself."""
        self._closed = True
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(timeout)
        ended = not self._thread.is_alive()
        if ended:
            self._thread = None
        return ended

    def _serve(self) -> None:
        torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            while (launch := self._queue.get()) is not None:
                launch.run()
                del launch  # or it would keep the step's tensors while the queue is empty
