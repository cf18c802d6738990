"""Page-locked host memory through which a step's arrays go to an accelerator. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from runnerd_torch.devices.base import Array

_ALIGNMENT = 16
_SMALLEST_SLOT_BYTES = 1 << 16
_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class _Slot:
    """One buffer, and the event behind the last copy out of it."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.fence: torch.Event | None = None


class StagingRing:
    """Carries arrays to the device in one asynchronous copy, through buffers that take turns.

    A buffer is written again only when the copy out of it has run: the host waits for that copy, which does not happen
    as long as no more copies are under way than there are buffers.

    Args:
        num_slots: Number of buffers.
        device: Where the arrays go.
        new_event: Makes the events that guard the buffers.
    """

    def __init__(self, num_slots: int, device: torch.device, new_event: Callable[[], torch.Event]) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._next = 0
        self._device = device
        self._new_event = new_event

    def send(self, arrays: Sequence[Array], stream: torch.Stream) -> tuple[torch.Tensor, ...]:
        """Enqueue the copy of all ``arrays`` and give them as tensors on the device.

        Args:
            arrays: uint8, int32, int64, float32 or float64, any shapes; read before this returns.
            stream: The current stream; the copy runs on it.
        """
        flat = [np.ascontiguousarray(array) for array in arrays]
        begins, size = _places(flat)
        slot = self._free_slot(size)
        raw = slot.buffer.numpy()
        for array, begin in zip(flat, begins, strict=True):
            raw[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        packed = torch.empty(size, dtype=torch.uint8, device=self._device)
        packed.copy_(slot.buffer[:size], non_blocking=True)
        slot.fence = self._new_event()
        slot.fence.record(stream)
        return _views(packed, flat, begins)

    def _free_slot(self, size: int) -> _Slot:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.fence is not None and not slot.fence.query():
            slot.fence.synchronize()
        if slot.buffer.numel() < size:
            num_bytes = max(_SMALLEST_SLOT_BYTES, 1 << (size - 1).bit_length())
            slot.buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return slot


def _places(arrays: Sequence[Array]) -> tuple[list[int], int]:
    begins: list[int] = []
    size = 0
    for array in arrays:
        begins.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return begins, size


def _views(packed: torch.Tensor, arrays: Sequence[Array], begins: Sequence[int]) -> tuple[torch.Tensor, ...]:
    # One operation for each array, beside one for each dtype.
    typed = {dtype: packed.view(_DTYPES[dtype]) for dtype in {array.dtype for array in arrays}}
    return tuple(
        typed[array.dtype].as_strided(
            array.shape, [stride // array.itemsize for stride in array.strides], begin // array.itemsize
        )
        for array, begin in zip(arrays, begins, strict=True)
    )
