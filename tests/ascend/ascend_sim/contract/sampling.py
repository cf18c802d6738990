"""Top-k and top-p in one kernel. Source: the document of npu_top_k_top_p."""

from __future__ import annotations

import torch

import ascend_sim.ops  # noqa: F401 - a check needs its kernel
from ascend_sim.contract.rules import FLOATS, need, need_dtype, need_rank, need_same_dtype, need_shape
from ascend_sim.registry import check

Tensor = torch.Tensor


@check("ApplyTopKTopP")
def check_top_k_top_p(logits: Tensor, p: Tensor | None, k: Tensor | None, out: Tensor) -> None:
    """A limit for each row, of the right dtype; one of both at least. The kernel looks at the values of k."""
    need_dtype("logits", logits, FLOATS)
    need_rank("logits", logits, (2,))
    need(p is not None or k is not None, "p and k are both missing, expected one of them at least")
    if p is not None:
        need_same_dtype("p", p, "logits", logits)
        need_shape("p", p, (logits.shape[0],))
    if k is not None:
        need_dtype("k", k, (torch.int32,))
        need_shape("k", k, (logits.shape[0],))
