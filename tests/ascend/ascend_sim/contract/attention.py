"""Attention over a paged cache. Source: the documents of npu_fused_infer_attention_score and its second version.

The documents contradict one another on the layout TND over a paged cache; here it is allowed, as it is in use.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import torch

from ascend_sim.contract.rules import (
    need,
    need_contiguous,
    need_dtype,
    need_rank,
    need_same_dtype,
    need_shape,
)
from ascend_sim.ops.attention import VERSIONS, named
from ascend_sim.registry import check

_DTYPES = (torch.float16, torch.bfloat16)
_MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)
_MASK_SIZE = 2048
_MAX_BLOCK_SIZE = 512
_MAX_ELEMENTS = 2**31
_MAX_GROUP = 64
_MAX_HEAD_DIM = 512
_MAX_HEADS = 256
_MAX_KV_WIDTH = 65535
_MAX_ROWS_TND = 4096
_SPARSE_WITH_TRIANGLE = (2, 3, 4)
_RIGHT_DOWN_CAUSAL = 3


def _checked(version: str) -> None:
    @check(version)
    def check_version(*values: Any) -> None:
        check_attention(named(version, values))


for _version in VERSIONS:
    _checked(_version)


def check_attention(call: dict[str, Any]) -> None:
    """Check a call over a paged cache; others are not simulated."""
    query = call["query"]
    need(call["block_table"] is not None, "block_table is missing, and the simulation has attention over blocks only")
    need(call["input_layout"] == "TND", f"input_layout is {call['input_layout']!r}, and the simulation has TND only")
    need(len(call["key"]) == len(call["value"]) == 1, "key and value have several tensors, expected one each")
    need_rank("query", query, (3,))
    _check_dtypes(call)
    _check_heads(call)
    query_lens = _check_lengths(call)
    _check_cache(call, max(query_lens, default=0))
    _check_mask(call)


def _check_dtypes(call: dict[str, Any]) -> None:
    query, key, value = call["query"], call["key"][0], call["value"][0]
    # A chip has no float32 here; the simulation computes in it so that tokens can be compared exactly.
    wide = (torch.float32,) if os.environ.get("ASCEND_SIM_ALLOW_FP32") == "1" else ()
    need_dtype("query", query, (*_DTYPES, *wide))
    need_same_dtype("key", key, "query", query)
    need_same_dtype("value", value, "query", query)
    need_contiguous(query=query, key=key, value=value, block_table=call["block_table"])


def _check_heads(call: dict[str, Any]) -> None:
    query, num_heads = call["query"], call["num_heads"]
    num_kv_heads = call["num_key_value_heads"] or num_heads
    head_dim = query.shape[2]
    need(query.shape[1] == num_heads, f"query has {query.shape[1]} heads, and num_heads is {num_heads}")
    need(0 < num_heads <= _MAX_HEADS, f"num_heads is {num_heads}, expected 1 to {_MAX_HEADS}")
    need(
        num_heads % num_kv_heads == 0 and num_heads // num_kv_heads <= _MAX_GROUP,
        f"num_heads is {num_heads} and num_key_value_heads {num_kv_heads}, expected a multiple up to {_MAX_GROUP}",
    )
    need(
        head_dim % 16 == 0 and 0 < head_dim <= _MAX_HEAD_DIM,
        f"query has heads of {head_dim}, expected a multiple of 16 up to {_MAX_HEAD_DIM}",
    )
    width = num_kv_heads * head_dim
    need(
        width <= _MAX_KV_WIDTH, f"num_key_value_heads times the head size is {width}, expected {_MAX_KV_WIDTH} at most"
    )
    for name in ("key", "value"):
        need_rank(name, call[name][0], (3,))
        need_shape(name, call[name][0], (call["key"][0].shape[0], call["block_size"], width))


def _check_lengths(call: dict[str, Any]) -> list[int]:
    ends, lengths = call["actual_seq_lengths"], call["actual_seq_lengths_kv"]
    num_tokens = call["query"].shape[0]
    need(bool(ends), "actual_seq_lengths is missing, and the layout is TND")
    need(bool(lengths), "actual_seq_lengths_kv is missing, and the cache is paged")
    need(
        len(ends) == len(lengths),
        f"actual_seq_lengths has {len(ends)} rows, and actual_seq_lengths_kv {len(lengths)}",
    )
    need(len(ends) <= _MAX_ROWS_TND, f"actual_seq_lengths has {len(ends)} rows, expected {_MAX_ROWS_TND} at most")
    query_lens = [end - begin for begin, end in pairwise((0, *ends))]
    need(min(query_lens) >= 0, f"actual_seq_lengths is {ends}, expected the end of each row, none before the last one")
    need(ends[-1] == num_tokens, f"actual_seq_lengths ends at {ends[-1]}, expected {num_tokens}, the tokens of query")
    need(min(lengths) >= 0, f"actual_seq_lengths_kv is {lengths}, expected no negative length")
    if call["sparse_mode"] == _RIGHT_DOWN_CAUSAL:
        for row, (query_len, length) in enumerate(zip(query_lens, lengths, strict=True)):
            need(
                query_len <= length,
                f"row {row} has {query_len} new tokens, and actual_seq_lengths_kv says {length}; expected no fewer",
            )
    return query_lens


def _check_cache(call: dict[str, Any], max_query_len: int) -> None:
    block_size, block_table = call["block_size"], call["block_table"]
    lengths = call["actual_seq_lengths_kv"]
    multiple = 128 if max_query_len > 1 else 16
    need(
        block_size % multiple == 0 and 0 < block_size <= _MAX_BLOCK_SIZE,
        f"block_size is {block_size}, expected a multiple of {multiple} up to {_MAX_BLOCK_SIZE} "
        f"for rows of {max_query_len} new tokens",
    )
    elements = call["key"][0].numel()
    need(elements < _MAX_ELEMENTS, f"key has {elements} elements, expected less than 2**31")
    need_dtype("block_table", block_table, (torch.int32,))
    need_rank("block_table", block_table, (2,))
    need(
        block_table.shape[0] == len(lengths),
        f"block_table has {block_table.shape[0]} rows, and actual_seq_lengths_kv {len(lengths)}",
    )
    need_blocks = -(-max(lengths) // block_size)
    need(
        block_table.shape[1] >= need_blocks,
        f"block_table is {block_table.shape[1]} wide, expected {need_blocks} for {max(lengths)} tokens",
    )


def _check_mask(call: dict[str, Any]) -> None:
    mask, sparse_mode = call["atten_mask"], call["sparse_mode"]
    if sparse_mode not in _SPARSE_WITH_TRIANGLE:
        need(sparse_mode == 0 and mask is None, f"sparse_mode is {sparse_mode}, and the simulation masks by triangles")
        return
    need(sparse_mode == _RIGHT_DOWN_CAUSAL, f"sparse_mode is {sparse_mode}, and the simulation has 0 and 3 only")
    need(mask is not None, f"atten_mask is missing, and sparse_mode is {sparse_mode}")
    need_dtype("atten_mask", mask, _MASK_DTYPES)
    need_contiguous(atten_mask=mask)
    need(
        tuple(mask.shape[-2:]) == (_MASK_SIZE, _MASK_SIZE) and mask.numel() == _MASK_SIZE**2,
        f"atten_mask has shape {tuple(mask.shape)}, expected {(_MASK_SIZE, _MASK_SIZE)} for sparse_mode {sparse_mode}",
    )
