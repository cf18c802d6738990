"""Comparisons, logic, bits, and choices by a mask."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ascend_sim.registry import aclnn

Tensor = torch.Tensor


def _comparison(name: str, compare: Callable[..., Tensor]) -> None:
    @aclnn(f"{name}Tensor", "tensor self, tensor other, tensor out")
    @aclnn(f"{name}Scalar", "tensor self, scalar other, tensor out")
    def out_of_place(self: Tensor, other: Tensor | float, out: Tensor) -> None:
        out.copy_(compare(self, other))

    @aclnn(f"Inplace{name}Tensor", "tensor self, tensor other")
    @aclnn(f"Inplace{name}Scalar", "tensor self, scalar other")
    def in_place(self: Tensor, other: Tensor | float) -> None:
        self.copy_(compare(self, other))


for _name, _compare in (
    ("Lt", torch.lt),
    ("Le", torch.le),
    ("Gt", torch.gt),
    ("Ge", torch.ge),
    ("Eq", torch.eq),
    ("Ne", torch.ne),
    ("BitwiseAnd", torch.bitwise_and),
    ("BitwiseOr", torch.bitwise_or),
    ("BitwiseXor", torch.bitwise_xor),
):
    _comparison(_name, _compare)


@aclnn("BitwiseNot", "tensor self, tensor out")
def bitwise_not(self: Tensor, out: Tensor) -> None:
    """``out = ~self``."""
    out.copy_(torch.bitwise_not(self))


@aclnn("LogicalAnd", "tensor self, tensor other, tensor out")
def logical_and(self: Tensor, other: Tensor, out: Tensor) -> None:
    """``out = self and other``."""
    out.copy_(torch.logical_and(self, other))


@aclnn("LogicalOr", "tensor self, tensor other, tensor out")
def logical_or(self: Tensor, other: Tensor, out: Tensor) -> None:
    """``out = self or other``."""
    out.copy_(torch.logical_or(self, other))


@aclnn("InplaceLogicalAnd", "tensor self, tensor other")
def inplace_logical_and(self: Tensor, other: Tensor) -> None:
    """``self = self and other``."""
    self.copy_(torch.logical_and(self, other))


@aclnn("InplaceLogicalOr", "tensor self, tensor other")
def inplace_logical_or(self: Tensor, other: Tensor) -> None:
    """``self = self or other``."""
    self.copy_(torch.logical_or(self, other))


@aclnn("LeftShift", "tensor self, tensor other, tensor out")
@aclnn("LeftShifts", "tensor self, scalar other, tensor out")
def left_shift(self: Tensor, other: Tensor | int, out: Tensor) -> None:
    """``out = self << other``."""
    out.copy_(torch.bitwise_left_shift(self, other))


@aclnn("RightShift", "tensor self, tensor other, tensor out")
def right_shift(self: Tensor, other: Tensor, out: Tensor) -> None:
    """``out = self >> other``, keeping the sign."""
    out.copy_(torch.bitwise_right_shift(self, other))


@aclnn("SWhere", "tensor condition, tensor self, tensor other, tensor out")
def where(condition: Tensor, self: Tensor, other: Tensor, out: Tensor) -> None:
    """``out = self where condition else other``."""
    out.copy_(torch.where(condition.bool(), self, other))


@aclnn("InplaceMaskedFillScalar", "tensor self, tensor mask, scalar value")
def masked_fill(self: Tensor, mask: Tensor, value: float) -> None:
    """``self = value`` where the mask is set."""
    self.masked_fill_(mask.bool(), value)


@aclnn("InplaceMaskedFillTensor", "tensor self, tensor mask, tensor value")
def masked_fill_tensor(self: Tensor, mask: Tensor, value: Tensor) -> None:
    """``self = value`` where the mask is set; value has one element."""
    self.masked_fill_(mask.bool(), value.reshape(()))
