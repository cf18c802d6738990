"""Lays the arrays of a step behind one another, for one copy to the device. Knows nothing of what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 8
_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.uint8): torch.uint8,
}


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """Where an array lies in a packed buffer."""

    dtype: torch.dtype
    begin: int
    end: int
    """Bytes ``begin`` to ``end`` of the buffer."""
    shape: tuple[int, ...]

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Give the array as a view of ``buffer`` (the host's or its copy on a device)."""
        return buffer[self.begin : self.end].view(self.dtype).view(self.shape)


class ArrayPacker:
    """Collects arrays, then lays them behind one another."""

    def __init__(self) -> None:
        self._arrays: list[tuple[ArrayRef, npt.NDArray[Any]]] = []
        self._size = 0

    def put(self, array: npt.NDArray[Any]) -> ArrayRef:
        """Reserve a place for ``array`` (int64, float32, float64 or uint8); its values are read by :meth:`pack`."""
        begin = -(-self._size // _ALIGNMENT) * _ALIGNMENT
        self._size = begin + array.nbytes
        ref = ArrayRef(_DTYPES[array.dtype], begin, self._size, array.shape)
        self._arrays.append((ref, array))
        return ref

    def pack(self) -> npt.NDArray[np.uint8]:
        """Give the buffer, [size] uint8."""
        buffer = np.empty(self._size, np.uint8)
        for ref, array in self._arrays:
            buffer[ref.begin : ref.end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return buffer
