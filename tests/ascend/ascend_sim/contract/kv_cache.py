"""Writes to the paged KV cache. Source: the document of npu_scatter_pa_kv_cache, its second case."""

from __future__ import annotations

from typing import Any

import torch

import ascend_sim.ops  # noqa: F401 - a check needs its kernel
from ascend_sim.contract.rules import need, need_contiguous, need_dtype, need_rank, need_same_dtype, need_shape
from ascend_sim.registry import check

Tensor = torch.Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.int16, torch.int32)


@check("ScatterPaKvCache")
def check_scatter_pa_kv_cache(
    key: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    value: Tensor,
    value_cache: Tensor,
    compress_lens: Tensor | None,
    compress_offsets: Tensor | None,
    seq_lens: Tensor | None,
    cache_mode: str | None,
    *more: Any,
) -> None:
    """Everything contiguous and of one dtype, in the layout ND. The kernel looks at the slots' values."""
    need(
        not cache_mode or cache_mode == "Norm",
        f"cache_mode is {cache_mode!r}, and the simulation has 'Norm' only",
    )
    need_dtype("key", key, _DTYPES)
    need_dtype("slot_mapping", slot_mapping, (torch.int32, torch.int64))
    need_contiguous(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        need_same_dtype(name, new, "key", key)
        need_same_dtype(f"{name}_cache", cache, "key", key)
        need_rank(name, new, (3,))
        need_rank(f"{name}_cache", cache, (4,))
        need_shape(f"{name}_cache", cache, (*key_cache.shape[:2], *new.shape[1:]))
    need_shape("value", value, (*key.shape[:2], value.shape[2]))
    need_shape("slot_mapping", slot_mapping, (key.shape[0],))
