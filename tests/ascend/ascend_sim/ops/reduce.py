"""Sums, means, extremes, running sums, order and search along a dimension."""

from __future__ import annotations

import torch

from ascend_sim.registry import aclnn

Tensor = torch.Tensor


@aclnn("ReduceSum", "tensor self, ints dims, bool keep_dims, int32 dtype, tensor out")
def reduce_sum(self: Tensor, dims: list[int], keep_dims: bool, dtype: int, out: Tensor) -> None:
    """The sum over dimensions, all if none is named."""
    out.copy_(torch.sum(self, dims or None, bool(keep_dims), dtype=out.dtype))


@aclnn("Mean", "tensor self, ints dims, bool keep_dims, int32 dtype, tensor out")
def mean(self: Tensor, dims: list[int], keep_dims: bool, dtype: int, out: Tensor) -> None:
    """The mean over dimensions, all if none is named."""
    out.copy_(torch.mean(self, dims or None, bool(keep_dims), dtype=out.dtype))


@aclnn("Amax", "tensor self, ints dims, bool keep_dims, tensor out")
def amax(self: Tensor, dims: list[int], keep_dims: bool, out: Tensor) -> None:
    """The largest over dimensions."""
    out.copy_(torch.amax(self, dims, bool(keep_dims)))


@aclnn("Max", "tensor self, tensor out")
def max_of_all(self: Tensor, out: Tensor) -> None:
    """The largest of all."""
    out.copy_(self.max())


@aclnn("MaxDim", "tensor self, int64 dim, bool keep_dim, tensor out, tensor indices")
def max_along(self: Tensor, dim: int, keep_dim: bool, out: Tensor, indices: Tensor) -> None:
    """The largest along a dimension, and where it is."""
    found = torch.max(self, dim, bool(keep_dim))
    out.copy_(found.values)
    indices.copy_(found.indices)


@aclnn("ArgMax", "tensor self, int64 dim, bool keep_dim, tensor out")
def argmax(self: Tensor, dim: int, keep_dim: bool, out: Tensor) -> None:
    """Where the largest is; the first among equals."""
    out.copy_(torch.argmax(self, dim, bool(keep_dim)))


@aclnn("Any", "tensor self, ints dims, bool keep_dims, tensor out")
def any_along(self: Tensor, dims: list[int], keep_dims: bool, out: Tensor) -> None:
    """Whether one is set."""
    out.copy_(torch.any(self.bool(), dims or None, bool(keep_dims)))


@aclnn("All", "tensor self, ints dims, bool keep_dims, tensor out")
def all_along(self: Tensor, dims: list[int], keep_dims: bool, out: Tensor) -> None:
    """Whether all are set."""
    out.copy_(torch.all(self.bool(), dims or None, bool(keep_dims)))


@aclnn("Cumsum", "tensor self, int64 dim, int32 dtype, tensor out")
def cumsum(self: Tensor, dim: int, dtype: int, out: Tensor) -> None:
    """Running sums."""
    out.copy_(torch.cumsum(self, dim, dtype=out.dtype))


@aclnn("Sort", "tensor self, bool stable, int64 dim, bool descending, tensor values, tensor indices")
def sort(self: Tensor, stable: bool, dim: int, descending: bool, values: Tensor, indices: Tensor) -> None:
    """Order along a dimension."""
    found = torch.sort(self, dim=dim, descending=bool(descending), stable=bool(stable))
    values.copy_(found.values)
    indices.copy_(found.indices)


@aclnn("Topk", "tensor self, int64 k, int64 dim, bool largest, bool in_order, tensor values, tensor indices")
def topk(self: Tensor, k: int, dim: int, largest: bool, in_order: bool, values: Tensor, indices: Tensor) -> None:
    """The k largest, or smallest, along a dimension."""
    found = torch.topk(self, k, dim, bool(largest), bool(in_order))
    values.copy_(found.values)
    indices.copy_(found.indices)


@aclnn("SearchSorted", "tensor sequence, tensor self, bool int32, bool right, tensor sorter, tensor out")
def searchsorted(sequence: Tensor, self: Tensor, int32: bool, right: bool, sorter: Tensor | None, out: Tensor) -> None:
    """Where numbers belong in an ordered sequence."""
    out.copy_(torch.searchsorted(sequence.contiguous(), self.contiguous(), right=bool(right), sorter=sorter))
