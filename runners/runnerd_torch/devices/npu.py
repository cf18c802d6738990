"""What an Ascend NPU needs beside PyTorch's device-independent streams and events."""

from __future__ import annotations

import ctypes

import torch


class NpuElapsedTime:
    """Gives the milliseconds between two events that have both happened, without waiting for anything.

    torch_npu's own ``elapsed_time`` first waits until all that was enqueued since has been handed to the device, and
    keeps the interpreter's lock meanwhile: with steps in flight that would stop the host in each of them.

    Raises:
        OSError: CANN's runtime is not loaded.
    """

    def __init__(self) -> None:
        self._function = ctypes.CDLL("libascendcl.so").aclrtEventElapsedTime
        self._function.argtypes = (ctypes.POINTER(ctypes.c_float), ctypes.c_void_p, ctypes.c_void_p)
        self._function.restype = ctypes.c_int

    def __call__(self, begin: torch.Event, end: torch.Event) -> float:
        """Give the time from ``begin`` to ``end``.

        Raises:
            RuntimeError: CANN refuses, for instance after a failure of the device.
        """
        milliseconds = ctypes.c_float()
        code = self._function(ctypes.byref(milliseconds), begin.event_id, end.event_id)
        if code:
            raise RuntimeError(f"aclrtEventElapsedTime gave error {code}")
        return milliseconds.value
