"""Chooses how projections are computed."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from runnerd_spi import RunnerUnavailable
from runnerd_torch.linear.interface import DenseLinear, Linear, LinearFactory
from runnerd_torch.linear.packed import LinearKernel, PackedLinear
from runnerd_torch.native.compile import CompileError

logger = logging.getLogger(__name__)

LinearKind = Literal["auto", "torch", "native"]


def build_linear(kind: LinearKind = "auto") -> LinearFactory:
    """Give the maker of projections asked for.

    Args:
        kind: "native" compiles the kernel, which takes seconds the first time, and packs float32 weights on the CPU;
            others it leaves to torch. "torch" is plain PyTorch; "auto" is "native" where that can be had, else "torch"
            with a warning in the log: only speed differs.

    Raises:
        RunnerUnavailable: "native" was asked for and the kernel cannot be compiled or loaded.
    """
    if kind == "torch":
        return DenseLinear
    try:
        kernel = LinearKernel()
    except (CompileError, OSError) as error:
        if kind == "native":
            raise RunnerUnavailable(
                f"native projections cannot be used: {error}; or choose linear torch, which is slower"
            ) from error
        logger.warning("native projections cannot be used, falling back to torch, which is slower: %s", error)
        return DenseLinear

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        packable = weight.dtype == torch.float32 and weight.device.type == "cpu"
        return PackedLinear(kernel, weight, bias) if packable else DenseLinear(weight, bias)

    return make
