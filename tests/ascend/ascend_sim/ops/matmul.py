"""Matrix products."""

from __future__ import annotations

import torch

from ascend_sim.registry import aclnn

Tensor = torch.Tensor


@aclnn("Matmul", "tensor self, tensor other, tensor out, int8 cube_math_type")
@aclnn("Mm", "tensor self, tensor other, tensor out, int8 cube_math_type")
@aclnn("BatchMatMul", "tensor self, tensor other, tensor out, int8 cube_math_type")
def matmul(self: Tensor, other: Tensor, out: Tensor, cube_math_type: int) -> None:
    """``out = self @ other``."""
    out.copy_(self @ other)


@aclnn(
    "Addmm",
    "tensor self, tensor first, tensor second, scalar beta, scalar alpha, tensor out, int8 cube_math_type",
)
def addmm(
    self: Tensor, first: Tensor, second: Tensor, beta: float, alpha: float, out: Tensor, cube_math_type: int
) -> None:
    """``out = beta * self + alpha * first @ second``."""
    out.copy_(torch.addmm(self, first, second, beta=beta, alpha=alpha))
