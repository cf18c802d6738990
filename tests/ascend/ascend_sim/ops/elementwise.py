"""Sums, differences, products and conversions, element by element."""

from __future__ import annotations

import torch

from ascend_sim.registry import aclnn


@aclnn("Add", "tensor self, tensor other, scalar alpha, tensor out")
def add(self: torch.Tensor, other: torch.Tensor, alpha: float, out: torch.Tensor) -> None:
    """``out = self + alpha * other``, in the dtype of out."""
    out.copy_(torch.add(self, other, alpha=alpha))


@aclnn("Adds", "tensor self, scalar other, scalar alpha, tensor out")
def adds(self: torch.Tensor, other: float, alpha: float, out: torch.Tensor) -> None:
    """``out = self + alpha * other``, other a number."""
    out.copy_(torch.add(self, other, alpha=alpha))


@aclnn("Cast", "tensor self, int32 dtype, tensor out")
def cast(self: torch.Tensor, dtype: int, out: torch.Tensor) -> None:
    """``out = self``, in the dtype of out."""
    out.copy_(self)


@aclnn("InplaceCopy", "tensor self, tensor source")
def inplace_copy(self: torch.Tensor, source: torch.Tensor) -> None:
    """``self = source``, in the dtype and strides of self."""
    self.copy_(source)
