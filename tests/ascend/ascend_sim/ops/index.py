"""Reading and writing by index, and putting tensors together."""

from __future__ import annotations

import torch

from ascend_sim.registry import aclnn

Tensor = torch.Tensor


@aclnn("Gather", "tensor self, int64 dim, tensor index, tensor out")
def gather(self: Tensor, dim: int, index: Tensor, out: Tensor) -> None:
    """``out[i][j] = self[index[i][j]][j]`` for dim 0."""
    out.copy_(torch.gather(self, dim, index.long()))


@aclnn("IndexSelect", "tensor self, int64 dim, tensor index, tensor out")
def index_select(self: Tensor, dim: int, index: Tensor, out: Tensor) -> None:
    """Rows of a dimension."""
    out.copy_(torch.index_select(self, dim, index))


@aclnn("Index", "tensor self, tensors indices, tensor out")
def index(self: Tensor, indices: list[Tensor | None], out: Tensor) -> None:
    """``out = self[indices]``; an index without elements stands for a whole dimension."""
    places = [slice(None) if one is None or (one.numel() == 0 and out.numel()) else one for one in indices]
    out.copy_(self[tuple(places)])


@aclnn("Embedding", "tensor weight, tensor indices, tensor out")
def embedding(weight: Tensor, indices: Tensor, out: Tensor) -> None:
    """Rows of a table."""
    out.copy_(torch.nn.functional.embedding(indices, weight))


@aclnn("InplaceIndexCopy", "tensor self, int64 dim, tensor index, tensor source")
def index_copy(self: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    """Write rows of a dimension."""
    self.index_copy_(dim, index, source)


@aclnn("ScatterAdd", "tensor self, int64 dim, tensor index, tensor source, tensor out")
def scatter_add(self: Tensor, dim: int, index: Tensor, source: Tensor, out: Tensor) -> None:
    """Add to what the index names; out may be self."""
    out.copy_(torch.scatter_add(self, dim, index, source))


@aclnn("InplaceScatterValue", "tensor self, int64 dim, tensor index, scalar value, int64 reduction")
def scatter_value(self: Tensor, dim: int, index: Tensor, value: float, reduction: int) -> None:
    """Write a number at what the index names."""
    if reduction:
        raise NotImplementedError("a scatter with a reduction")
    self.scatter_(dim, index, value)


@aclnn("InplaceScatter", "tensor self, int64 dim, tensor index, tensor source, int64 reduction")
def scatter(self: Tensor, dim: int, index: Tensor, source: Tensor, reduction: int) -> None:
    """Write at what the index names."""
    if reduction:
        raise NotImplementedError("a scatter with a reduction")
    self.scatter_(dim, index, source)


@aclnn("Cat", "tensors tensors, int64 dim, tensor out")
def cat(tensors: list[Tensor], dim: int, out: Tensor) -> None:
    """Behind one another."""
    out.copy_(torch.cat(tensors, dim))


@aclnn("Stack", "tensors tensors, int64 dim, tensor out")
def stack(tensors: list[Tensor], dim: int, out: Tensor) -> None:
    """Along a new dimension."""
    out.copy_(torch.stack(tensors, dim))


@aclnn("Arange", "scalar start, scalar end, scalar step, tensor out")
def arange(start: float, end: float, step: float, out: Tensor) -> None:
    """Numbers from start to end, which does not belong to them."""
    out.copy_(torch.arange(start, end, step, dtype=out.dtype))


@aclnn("Roll", "tensor self, ints shifts, ints dims, tensor out")
def roll(self: Tensor, shifts: list[int], dims: list[int], out: Tensor) -> None:
    """Turn around along dimensions."""
    out.copy_(torch.roll(self, shifts, dims))


@aclnn("IndexAdd", "tensor self, int64 dim, tensor index, tensor source, scalar alpha, tensor out")
def index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float, out: Tensor) -> None:
    """Add rows of a dimension; out may be self."""
    out.copy_(torch.index_add(self, dim, index.long(), source, alpha=alpha))


@aclnn("Triu", "tensor self, int64 diagonal, tensor out")
def triu(self: Tensor, diagonal: int, out: Tensor) -> None:
    """The upper triangle."""
    out.copy_(torch.triu(self, diagonal))


@aclnn("Tril", "tensor self, int64 diagonal, tensor out")
def tril(self: Tensor, diagonal: int, out: Tensor) -> None:
    """The lower triangle."""
    out.copy_(torch.tril(self, diagonal))


@aclnn("InplaceIndexFill", "tensor self, int64 dim, tensor index, scalar value")
def index_fill(self: Tensor, dim: int, index: Tensor, value: float) -> None:
    """Write a number to rows of a dimension."""
    self.index_fill_(dim, index.long(), value)
