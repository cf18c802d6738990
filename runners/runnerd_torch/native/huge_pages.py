"""Memory of the host in huge pages where the operating system has them: the processor then reads it faster.

What runs over many small pages waits for their addresses, and the fetching ahead ends with each page. It knows nothing
of what is kept there.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_HUGE_PAGE = 2 << 20
"""Bytes; memory smaller than this has none."""
_CHUNK = 64 << 20
_ALIGNMENT = 64


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Give a tensor of zeros; its memory is taken as it is written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    return _map(num_bytes).view(dtype).view(shape)


class Arena:
    """Gives tensors room side by side, so that small ones lie in huge pages too. Each keeps the memory around it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give a contiguous copy."""
        begin = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if begin + tensor.nbytes > len(self._chunk):
            self._chunk, begin = _map(max(tensor.nbytes, _CHUNK)), 0
        self._used = begin + tensor.nbytes
        return self._chunk[begin : self._used].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _map(num_bytes: int) -> torch.Tensor:
    """Give bytes that are zero."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
    if advice is None:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(advice)
    return torch.frombuffer(memory, dtype=torch.uint8)
