"""Matrix products."""

from __future__ import annotations

import torch

from ascend_sim.registry import aclnn


@aclnn("Matmul", "tensor self, tensor other, tensor out, int8 cube_math_type")
def matmul(self: torch.Tensor, other: torch.Tensor, out: torch.Tensor, cube_math_type: int) -> None:
    out.copy_(self @ other)
