"""What the runner needs of a chip: an in-order stream, copies in both directions, memory figures.

The runner is composed with a :class:`Device`; a new chip is a new device, never a new runner. This module knows nothing
of models, plans or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """The device's memory as this process may use it."""

    total_bytes: int
    free_bytes: int
    default_kv_bytes: int | None = None
    """Most a KV cache takes when the operator named no size; None for no limit of the device's own."""


class Launch(Protocol[T_co]):
    """Work that was put on the stream. Safe to use from several threads."""

    @property
    def begin_ns(self) -> int:
        """When the device began the work (``time.monotonic_ns``); 0 until it has ended."""
        ...

    @property
    def compute_end_ns(self) -> int:
        """When the device had done the work but for its copies to the host; 0 until ``end_ns`` is known."""
        ...

    @property
    def end_ns(self) -> int:
        """When the device had done the work, its copies to the host included; 0 until then."""
        ...

    def done(self) -> bool:
        """Whether the work, its copies to the host included, has ended or failed."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most ``timeout`` seconds; give whether it was reached."""
        ...

    def value(self) -> T_co:
        """Give what the work returned, or raise what it raised. Call it when ``done``."""
        ...


class Device(Protocol):
    """A chip with one in-order stream. All calls but those on a :class:`Launch` come from one thread."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live."""
        ...

    @property
    def description(self) -> str:
        """For people: "cpu (2 threads)"."""
        ...

    def preferred_dtype(self, checkpoint: torch.dtype | None) -> torch.dtype:
        """The dtype for ``--dtype auto``, given the checkpoint's own; None where it has none (quantized)."""
        ...

    def memory(self) -> MemoryInfo:
        """Measure the memory now."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor of zeros that lives long: the KV cache, the token table."""
        ...

    def submit(self, work: Callable[[], T]) -> Launch[T]:
        """Run ``work`` on the stream, after all work submitted before; does not wait for it.

        It runs in inference mode, on a thread of the device's choice; the stream is the current one inside.
        """
        ...

    def to_device(self, arrays: Sequence[Array]) -> tuple[torch.Tensor, ...]:
        """Put a step's own arrays on the device, in one copy and in stream order; for use inside submitted work.

        The arrays must not change afterwards.
        """
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to host memory as soon as the work is computed; for use inside submitted work.

        The result may be read once the launch of that work is done. The work must not change the tensor afterwards.
        """
        ...

    def peak_bytes(self, run: Callable[[], None]) -> int | None:
        """Call ``run``, which submits work and waits for it, and give the most memory that this held at once.

        What was held before does not count. None when the device cannot tell; ``run`` is then not called.
        """
        ...

    def synchronize(self) -> None:
        """Wait until all submitted work has ended."""
        ...

    def close(self, timeout: float) -> bool:
        """Wait for launched work, at most ``timeout`` seconds, and end; idempotent. Gives whether all had ended."""
        ...
