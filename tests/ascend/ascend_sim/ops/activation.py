"""Softmax, gates and norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from ascend_sim.registry import aclnn

Tensor = torch.Tensor

_MAX_TOP_K = 1024


@aclnn("Softmax", "tensor self, int64 dim, tensor out")
def softmax(self: Tensor, dim: int, out: Tensor) -> None:
    """Probabilities along a dimension."""
    out.copy_(torch.softmax(self, dim))


@aclnn("LogSoftmax", "tensor self, int64 dim, tensor out")
def log_softmax(self: Tensor, dim: int, out: Tensor) -> None:
    """Logarithms of probabilities along a dimension."""
    out.copy_(torch.log_softmax(self, dim))


@aclnn("Silu", "tensor self, tensor out")
def silu(self: Tensor, out: Tensor) -> None:
    """``out = self * sigmoid(self)``."""
    out.copy_(F.silu(self))


@aclnn("Gelu", "tensor self, tensor out")
def gelu(self: Tensor, out: Tensor) -> None:
    """The Gaussian error linear unit."""
    out.copy_(F.gelu(self))


@aclnn("SwiGlu", "tensor x, int64 dim, tensor out")
def swiglu(x: Tensor, dim: int, out: Tensor) -> None:
    """``silu`` of the first half times the second."""
    first, second = x.chunk(2, dim)
    out.copy_(F.silu(first) * second)


@aclnn("RmsNorm", "tensor x, tensor gamma, double epsilon, tensor y, tensor rstd")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor) -> None:
    """``y = x / rms(x) * gamma`` over the dimensions of gamma, computed in float32."""
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + epsilon)
    y.copy_((wide * scale * gamma.float()).to(y.dtype))
    rstd.copy_(scale)


@aclnn("AddRmsNorm", "tensor x1, tensor x2, tensor gamma, double epsilon, tensor y, tensor rstd, tensor x")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor, x: Tensor) -> None:
    """The norm of ``x = x1 + x2``."""
    x.copy_(x1 + x2)
    rms_norm(x, gamma, epsilon, y, rstd)


@aclnn("RotaryPositionEmbedding", "tensor x, tensor cos, tensor sin, int64 mode, tensor out")
def rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: int, out: Tensor) -> None:
    """Rotate: mode 0 pairs the halves, mode 1 neighbours."""
    if mode == 0:
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    elif mode == 1:
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    else:
        raise NotImplementedError(f"rotary mode {mode}")
    out.copy_(x * cos + turned * sin)


@aclnn("RotaryPositionEmbeddingV2", "tensor x, tensor cos, tensor sin, int64 mode, tensor rotate, tensor out")
def rotary_v2(x: Tensor, cos: Tensor, sin: Tensor, mode: int, rotate: Tensor | None, out: Tensor) -> None:
    """The same, without a matrix of its own."""
    if rotate is not None:
        raise NotImplementedError("a rotation matrix")
    rotary(x, cos, sin, mode, out)


@aclnn("ApplyTopKTopP", "tensor logits, tensor p, tensor k, tensor out")
def apply_top_k_top_p(logits: Tensor, p: Tensor | None, k: Tensor | None, out: Tensor) -> None:
    """Set all logits of a row to -inf but the k largest, and of those all but the most likely that reach p."""
    ordered, places = logits.sort(dim=-1, stable=True)
    if k is not None:
        # A chip does not look; out of its range the result is undefined.
        if len(k) and not (int(k.min()) >= 1 and int(k.max()) <= min(_MAX_TOP_K, logits.shape[1])):
            raise ValueError(f"k is {k.tolist()}, expected 1 to {min(_MAX_TOP_K, logits.shape[1])}")
        threshold = ordered.gather(-1, (ordered.shape[-1] - k.long()).unsqueeze(-1))
        ordered = ordered.masked_fill(ordered < threshold, float("-inf"))
    if p is not None:
        reached = ordered.float().softmax(-1).cumsum(-1)
        drop = reached <= 1 - p.float().unsqueeze(-1)
        drop[..., -1] = False
        ordered = ordered.masked_fill(drop, float("-inf"))
    out.copy_(torch.empty_like(logits).scatter_(-1, places, ordered))
