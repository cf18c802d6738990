"""The refusals that several calls share."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ascend_sim.registry import ContractError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def need(holds: bool, message: str) -> None:
    """Refuse the call unless the rule holds.

    Raises:
        ContractError: With the message.
    """
    if not holds:
        raise ContractError(message)


def need_dtype(name: str, tensor: torch.Tensor, dtypes: Collection[torch.dtype]) -> None:
    """Refuse a tensor of another dtype."""
    expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    need(tensor.dtype in dtypes, f"{name} is {str(tensor.dtype).removeprefix('torch.')}, expected {expected}")


def need_same_dtype(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Refuse two tensors of different dtypes."""
    need(tensor.dtype == other.dtype, f"{name} is {tensor.dtype} and {other_name} is {other.dtype}, expected one dtype")


def need_contiguous(**tensors: torch.Tensor) -> None:
    """Refuse tensors with gaps or another order of their elements."""
    for name, tensor in tensors.items():
        need(tensor.is_contiguous(), f"{name} has strides {tensor.stride()}, expected a contiguous tensor")


def need_rank(name: str, tensor: torch.Tensor, ranks: Collection[int]) -> None:
    """Refuse a tensor of another number of dimensions."""
    expected = " or ".join(map(str, ranks))
    need(tensor.dim() in ranks, f"{name} has {tensor.dim()} dimensions, expected {expected}")


def need_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape."""
    need(tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
