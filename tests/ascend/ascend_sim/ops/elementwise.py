"""Sums, differences, products, powers and conversions, element by element."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ascend_sim.registry import aclnn

Tensor = torch.Tensor


@aclnn("Add", "tensor self, tensor other, scalar alpha, tensor out")
@aclnn("Adds", "tensor self, scalar other, scalar alpha, tensor out")
def add(self: Tensor, other: Tensor | float, alpha: float, out: Tensor) -> None:
    """``out = self + alpha * other``, in the dtype of out."""
    out.copy_(torch.add(self, other, alpha=alpha))


@aclnn("InplaceAdd", "tensor self, tensor other, scalar alpha")
@aclnn("InplaceAdds", "tensor self, scalar other, scalar alpha")
def inplace_add(self: Tensor, other: Tensor | float, alpha: float) -> None:
    """``self += alpha * other``."""
    self.copy_(torch.add(self, other, alpha=alpha))


@aclnn("Sub", "tensor self, tensor other, scalar alpha, tensor out")
@aclnn("Subs", "tensor self, scalar other, scalar alpha, tensor out")
def sub(self: Tensor, other: Tensor | float, alpha: float, out: Tensor) -> None:
    """``out = self - alpha * other``."""
    out.copy_(torch.sub(self, other, alpha=alpha))


@aclnn("InplaceSub", "tensor self, tensor other, scalar alpha")
@aclnn("InplaceSubs", "tensor self, scalar other, scalar alpha")
def inplace_sub(self: Tensor, other: Tensor | float, alpha: float) -> None:
    """``self -= alpha * other``."""
    self.copy_(torch.sub(self, other, alpha=alpha))


@aclnn("Rsubs", "tensor self, scalar other, scalar alpha, tensor out")
def rsub(self: Tensor, other: float, alpha: float, out: Tensor) -> None:
    """``out = other - alpha * self``."""
    out.copy_(torch.rsub(self, other, alpha=alpha))


@aclnn("Mul", "tensor self, tensor other, tensor out")
@aclnn("Muls", "tensor self, scalar other, tensor out")
def mul(self: Tensor, other: Tensor | float, out: Tensor) -> None:
    """``out = self * other``."""
    out.copy_(torch.mul(self, other))


@aclnn("InplaceMul", "tensor self, tensor other")
@aclnn("InplaceMuls", "tensor self, scalar other")
def inplace_mul(self: Tensor, other: Tensor | float) -> None:
    """``self *= other``."""
    self.copy_(torch.mul(self, other))


@aclnn("Div", "tensor self, tensor other, tensor out")
@aclnn("Divs", "tensor self, scalar other, tensor out")
def div(self: Tensor, other: Tensor | float, out: Tensor) -> None:
    """``out = self / other``."""
    out.copy_(torch.div(self, other))


@aclnn("InplaceDiv", "tensor self, tensor other")
@aclnn("InplaceDivs", "tensor self, scalar other")
def inplace_div(self: Tensor, other: Tensor | float) -> None:
    """``self /= other``."""
    self.copy_(torch.div(self, other))


@aclnn("FloorDivides", "tensor self, scalar other, tensor out")
@aclnn("FloorDivide", "tensor self, tensor other, tensor out")
def floor_divide(self: Tensor, other: Tensor | float, out: Tensor) -> None:
    """``out = floor(self / other)``."""
    out.copy_(torch.floor_divide(self, other))


@aclnn("RemainderTensorScalar", "tensor self, scalar other, tensor out")
def remainder(self: Tensor, other: float, out: Tensor) -> None:
    """``out = self mod other``, of other's sign."""
    out.copy_(torch.remainder(self, other))


@aclnn("PowTensorScalar", "tensor self, scalar exponent, tensor out")
def power(self: Tensor, exponent: float, out: Tensor) -> None:
    """``out = self ** exponent``."""
    out.copy_(torch.pow(self, exponent))


@aclnn("Addcmul", "tensor self, tensor first, tensor second, scalar value, tensor out")
def addcmul(self: Tensor, first: Tensor, second: Tensor, value: float, out: Tensor) -> None:
    """``out = self + value * first * second``."""
    out.copy_(torch.addcmul(self, first, second, value=value))


@aclnn("Minimum", "tensor self, tensor other, tensor out")
def minimum(self: Tensor, other: Tensor, out: Tensor) -> None:
    """``out = min(self, other)``."""
    out.copy_(torch.minimum(self, other))


@aclnn("Maximum", "tensor self, tensor other, tensor out")
def maximum(self: Tensor, other: Tensor, out: Tensor) -> None:
    """``out = max(self, other)``."""
    out.copy_(torch.maximum(self, other))


@aclnn("Clamp", "tensor self, scalar low, scalar high, tensor out")
def clamp(self: Tensor, low: float | None, high: float | None, out: Tensor) -> None:
    """``out = min(max(self, low), high)``; a bound may be missing."""
    out.copy_(torch.clamp(self, low, high))


@aclnn("ClampMin", "tensor self, scalar low, tensor out")
def clamp_min(self: Tensor, low: float, out: Tensor) -> None:
    """``out = max(self, low)``."""
    out.copy_(torch.clamp_min(self, low))


def _unary(name: str, compute: Callable[[Tensor], Tensor]) -> None:
    @aclnn(name, "tensor self, tensor out")
    def out_of_place(self: Tensor, out: Tensor) -> None:
        out.copy_(compute(self))

    @aclnn(f"Inplace{name}", "tensor self")
    def in_place(self: Tensor) -> None:
        self.copy_(compute(self))


for _name, _compute in (
    ("Neg", torch.neg),
    ("Abs", torch.abs),
    ("Exp", torch.exp),
    ("Log", torch.log),
    ("Sqrt", torch.sqrt),
    ("Rsqrt", torch.rsqrt),
    ("Reciprocal", torch.reciprocal),
    ("Sin", torch.sin),
    ("Cos", torch.cos),
    ("Tanh", torch.tanh),
    ("Ceil", torch.ceil),
    ("Floor", torch.floor),
    ("Sigmoid", torch.sigmoid),
    ("LogicalNot", torch.logical_not),
    ("Relu", torch.relu),
):
    _unary(_name, _compute)


@aclnn("Cast", "tensor self, int32 dtype, tensor out")
def cast(self: Tensor, dtype: int, out: Tensor) -> None:
    """``out = self``, in the dtype of out."""
    out.copy_(self)


@aclnn("InplaceCopy", "tensor self, tensor source")
def inplace_copy(self: Tensor, source: Tensor) -> None:
    """``self = source``, in the dtype and strides of self."""
    self.copy_(source)


@aclnn("InplaceZero", "tensor self")
def inplace_zero(self: Tensor) -> None:
    """``self = 0``."""
    self.zero_()


@aclnn("InplaceOne", "tensor self")
def inplace_one(self: Tensor) -> None:
    """``self = 1``."""
    self.fill_(1)


@aclnn("InplaceFillScalar", "tensor self, scalar value")
def inplace_fill(self: Tensor, value: float) -> None:
    """``self = value``."""
    self.fill_(value)


@aclnn("InplaceFillTensor", "tensor self, tensor value")
def inplace_fill_tensor(self: Tensor, value: Tensor) -> None:
    """``self = value``, which has one element."""
    self.copy_(value.reshape(()))
