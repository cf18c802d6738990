"""Norms, rotation and gate. Sources: the documents of npu_rms_norm, npu_rotary_mul and npu_swiglu."""

from __future__ import annotations

import torch

import ascend_sim.ops  # noqa: F401 - a check needs its kernel
from ascend_sim.contract.rules import FLOATS, need, need_dtype, need_rank, need_same_dtype, need_shape
from ascend_sim.registry import check

Tensor = torch.Tensor

_MAX_ROTARY_DIM = 896
_MAX_ROTARY_HEADS = 1000


@check("RmsNorm")
def check_rms_norm(x: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor) -> None:
    """Gamma has the last dimensions of x, and its dtype."""
    need_dtype("x", x, FLOATS)
    need_same_dtype("gamma", gamma, "x", x)
    need(gamma.dim() <= x.dim(), f"gamma has {gamma.dim()} dimensions, expected at most {x.dim()}, those of x")
    need_shape("gamma", gamma, tuple(x.shape[x.dim() - gamma.dim() :]))


@check("AddRmsNorm")
def check_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor, x: Tensor
) -> None:
    """The summands have one shape and dtype; gamma as for the norm alone."""
    need_same_dtype("x2", x2, "x1", x1)
    need_shape("x2", x2, tuple(x1.shape))
    check_rms_norm(x1, gamma, epsilon, y, rstd)


@check("RotaryPositionEmbedding")
def check_rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: int, out: Tensor) -> None:
    """Four dimensions; an even head size below 896; cos and sin alike, with 1 or the size of x in each dimension."""
    need_dtype("x", x, FLOATS)
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        need_rank(name, tensor, (4,))
        need_same_dtype(name, tensor, "x", x)
    head_dim = x.shape[3]
    need(
        head_dim % 2 == 0 and head_dim < _MAX_ROTARY_DIM,
        f"x has heads of {head_dim}, expected an even number below {_MAX_ROTARY_DIM}",
    )
    need(x.shape[0] < _MAX_ROTARY_HEADS, f"x has a batch of {x.shape[0]}, expected less than {_MAX_ROTARY_HEADS}")
    need_shape("sin", sin, tuple(cos.shape))
    need(
        cos.shape[3] == head_dim and all(one in (1, of_x) for one, of_x in zip(cos.shape, x.shape, strict=True)),
        f"cos has shape {tuple(cos.shape)}, expected one that spreads over {tuple(x.shape)}",
    )


@check("RotaryPositionEmbeddingV2")
def check_rotary_v2(x: Tensor, cos: Tensor, sin: Tensor, mode: int, rotate: Tensor | None, out: Tensor) -> None:
    """The same."""
    check_rotary(x, cos, sin, mode, out)


@check("SwiGlu")
def check_swiglu(x: Tensor, dim: int, out: Tensor) -> None:
    """The dimension that is split is even."""
    need_dtype("x", x, FLOATS)
    need_rank("x", x, range(1, 9))
    need(x.shape[dim] % 2 == 0, f"x has {x.shape[dim]} elements in dimension {dim}, expected an even number")
