"""A projection in native code: ``packed_linear.cpp``, compiled on first use and called over a C interface.

The call releases the GIL. A row's result is bitwise the same whatever other rows there are and however many threads
work: with it a request's tokens do not depend on its batch. It knows nothing of models.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

import torch

from runnerd_torch.native.compile import library_of
from runnerd_torch.native.threads import parallel_region_of_torch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("packed_linear.cpp")
PANEL = 16
"""Outputs that lie side by side in the packed weight."""


class _LinearArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("inputs", "weight", "bias", "residual", "outputs")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_inputs", "num_outputs", "input_stride", "num_threads")),
        ("parallel_region", ctypes.c_void_p),
    )


class LinearKernel:
    """The compiled library.

    Args:
        share_threads: Run on PyTorch's thread pool where it can be reached; else the kernel starts threads per call.

    Raises:
        CompileError: The kernel cannot be compiled.
        OSError: The cache folder cannot be written, or the library cannot be loaded.
    """

    def __init__(self, *, share_threads: bool = True) -> None:
        self._library = ctypes.CDLL(str(library_of(SOURCE, os.environ)))
        self._parallel_region = parallel_region_of_torch() if share_threads else None

    def run(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        num_outputs: int,
    ) -> torch.Tensor:
        """Give ``inputs`` times the packed ``weight``, plus ``bias`` and ``residual``; all are float32.

        Raises:
            ValueError: A shape or dtype does not fit.
        """
        num_rows, num_inputs = inputs.shape
        if inputs.dtype != torch.float32 or num_inputs != weight.shape[1]:
            raise ValueError(
                f"inputs are {inputs.dtype} {tuple(inputs.shape)}; expected float32 [num_rows, {weight.shape[1]}]"
            )
        if residual is not None and (residual.shape != (num_rows, num_outputs) or residual.dtype != torch.float32):
            raise ValueError(
                f"residual is {residual.dtype} {tuple(residual.shape)}; expected float32 {(num_rows, num_outputs)}"
            )
        if inputs.stride(1) != 1:
            inputs = inputs.contiguous()
        if residual is not None:
            residual = residual.contiguous()
        outputs = torch.empty(num_rows, num_outputs)
        args = _LinearArgs(
            inputs.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            outputs.data_ptr(),
            num_rows,
            num_inputs,
            num_outputs,
            inputs.stride(0),
            torch.get_num_threads(),
            self._parallel_region,
        )
        self._library.runnerd_linear(ctypes.byref(args))
        return outputs


class PackedLinear:
    """A projection over a weight that is rearranged once, in float32 on the CPU.

    Args:
        kernel: The compiled library.
        weight: ``[num_outputs, num_inputs]`` float32; not kept.
        bias: ``[num_outputs]`` float32 or None.
    """

    def __init__(self, kernel: LinearKernel, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._kernel = kernel
        self._num_outputs, num_inputs = weight.shape
        num_panels = -(-self._num_outputs // PANEL)
        whole = self._num_outputs // PANEL
        # [num_panels, num_inputs, PANEL], the last panel filled up with zeros
        packed = torch.zeros(num_panels, num_inputs, PANEL)
        packed[:whole] = weight[: whole * PANEL].view(whole, PANEL, num_inputs).transpose(1, 2)
        if rest := self._num_outputs - whole * PANEL:
            packed[whole, :, :rest] = weight[whole * PANEL :].t()
        self._weight = packed
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Project ``inputs``."""
        return self._kernel.run(inputs, self._weight, self._bias, None, self._num_outputs)

    def added_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Give ``residual`` plus the projection."""
        return self._kernel.run(inputs, self._weight, self._bias, residual, self._num_outputs)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Give rows of the weight, gathered from its panels."""
        return self._weight[indices // PANEL, :, indices % PANEL]
