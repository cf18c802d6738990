"""The paged KV cache and attention over it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from ascend_sim.registry import KERNELS, aclnn

Tensor = torch.Tensor


@aclnn(
    "ScatterPaKvCache",
    "tensor key, tensor key_cache, tensor slot_mapping, tensor value, tensor value_cache, tensor compress_lens, "
    "tensor compress_offsets, tensor seq_lens, string cache_mode, string scatter_mode, ints strides, ints offsets",
)
def scatter_pa_kv_cache(
    key: Tensor, key_cache: Tensor, slot_mapping: Tensor, value: Tensor, value_cache: Tensor, *more: Any
) -> None:
    """Write each token's key and value at its slot, ``block * block_size + offset``."""
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    slots = slot_mapping.long()
    if len(slots) and not (int(slots.min()) >= 0 and int(slots.max()) < num_slots):
        raise ValueError(f"a slot is outside the cache of {num_slots}")
    if len(set(slots.tolist())) != len(slots):
        raise ValueError("two tokens have one slot")
    key_cache.view(num_slots, *key_cache.shape[2:])[slots] = key
    value_cache.view(num_slots, *value_cache.shape[2:])[slots] = value


_BEGIN = (
    "tensor query, tensors key, tensors value, tensor pse_shift, tensor atten_mask, ints actual_seq_lengths, "
    "ints actual_seq_lengths_kv, tensor dequant_scale1, tensor quant_scale1, tensor dequant_scale2, "
    "tensor quant_scale2, tensor quant_offset2, tensor antiquant_scale, tensor antiquant_offset, tensor block_table, "
    "tensor query_padding_size, tensor kv_padding_size, tensor key_antiquant_scale, tensor key_antiquant_offset, "
    "tensor value_antiquant_scale, tensor value_antiquant_offset, tensor key_shared_prefix, "
    "tensor value_shared_prefix, ints actual_shared_prefix_len, "
)
_ROPE = "tensor query_rope, tensor key_rope, tensor key_rope_antiquant_scale, "
_MIDDLE = (
    "int64 num_heads, double scale, int64 pre_tokens, int64 next_tokens, string input_layout, "
    "int64 num_key_value_heads, int64 sparse_mode, int64 inner_precise, int64 block_size, int64 antiquant_mode, "
    "bool softmax_lse_flag, int64 key_antiquant_mode, int64 value_antiquant_mode, "
)
_OUTPUTS = "tensor output, tensor softmax_lse"


def named(kernel: str, values: tuple[Any, ...]) -> dict[str, Any]:
    """Give the arguments of a call by name."""
    return dict(zip((name for _, name in KERNELS[kernel].parameters), values, strict=True))


# Each version adds to the one before; which of them torch_npu calls depends on the CANN that it finds.
VERSIONS = {
    "FusedInferAttentionScoreV2": _BEGIN + _MIDDLE + _OUTPUTS,
    "FusedInferAttentionScoreV3": _BEGIN + _ROPE + _MIDDLE + _OUTPUTS,
    "FusedInferAttentionScoreV4": _BEGIN
    + _ROPE
    + "tensor dequant_scale_query, tensor learnable_sink, "
    + _MIDDLE
    + "int64 query_quant_mode, "
    + _OUTPUTS,
}


def _register(version: str, signature: str) -> None:
    @aclnn(version, signature)
    def fused_infer_attention(*values: Any) -> None:
        _attend(named(version, values))


for _version, _signature in VERSIONS.items():
    _register(_version, _signature)


def _attend(call: dict[str, Any]) -> None:
    """The layout TND over a paged cache: the new tokens of all rows behind one another."""
    if call["input_layout"] != "TND" or call["block_table"] is None:
        raise NotImplementedError(f"layout {call['input_layout']} over a cache without blocks")
    query, output, block_table = call["query"], call["output"], call["block_table"]
    (keys,), (values,) = call["key"], call["value"]
    block_size, head_dim = call["block_size"], query.shape[2]
    num_kv_heads = call["num_key_value_heads"] or call["num_heads"]
    # each [num_blocks, block_size, num_kv_heads, head_dim]
    keys = keys.reshape(keys.shape[0], block_size, num_kv_heads, head_dim)
    values = values.reshape(values.shape[0], block_size, num_kv_heads, head_dim)
    begin = 0
    for row, (end, length) in enumerate(zip(call["actual_seq_lengths"], call["actual_seq_lengths_kv"], strict=True)):
        if end == begin:
            continue
        blocks = block_table[row, : -(-length // block_size)].long()
        if int(blocks.min()) < 0 or int(blocks.max()) >= keys.shape[0]:
            raise ValueError(f"row {row} has a block outside the cache of {keys.shape[0]}")
        key, value = (cache[blocks].flatten(0, 1)[:length] for cache in (keys, values))
        mask = None
        if call["sparse_mode"] == 3:
            mask = torch.ones(end - begin, length, dtype=torch.bool).tril(length - (end - begin))
        # heads first: [1, num_heads, tokens, head_dim]
        query_heads, key_heads, value_heads = (
            one.float().transpose(0, 1)[None] for one in (query[begin:end], key, value)
        )
        attended = F.scaled_dot_product_attention(
            query_heads,
            key_heads,
            value_heads,
            attn_mask=mask,
            scale=call["scale"],
            enable_gqa=True,
        )
        output[begin:end] = attended[0].transpose(0, 1).to(output.dtype)
        begin = end


@aclnn(
    "FlashAttentionScore",
    "tensor query, tensor key, tensor value, tensor pse, tensor drop_mask, tensor padding_mask, tensor atten_mask, "
    "ints prefix, double scale, double keep_prob, int64 pre_tokens, int64 next_tokens, int64 num_heads, "
    "string input_layout, int64 inner_precise, int64 sparse_mode, tensor softmax_max, tensor softmax_sum, "
    "tensor softmax_out, tensor output",
)
def flash_attention(*values: Any) -> None:
    """Attention over whole sequences, the layout BNSD; what the mask sets is not seen."""
    call = named("FlashAttentionScore", values)
    if call["input_layout"] != "BNSD" or call["pse"] is not None or call["keep_prob"] != 1:
        raise NotImplementedError("attention of another layout than BNSD, with a bias or with dropout")
    mask, sparse_mode = call["atten_mask"], call["sparse_mode"]
    num_queries, num_keys = call["query"].shape[2], call["key"].shape[2]
    seen = None
    if sparse_mode in (2, 3):  # causal from the upper left, or to the lower right; the mask is a triangle for all sizes
        offset = num_keys - num_queries if sparse_mode == 3 else 0
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(offset)
    elif mask is not None:
        seen = ~mask.bool()
    call["output"].copy_(
        F.scaled_dot_product_attention(
            call["query"],
            call["key"],
            call["value"],
            attn_mask=seen,
            scale=call["scale"],
            enable_gqa=call["query"].shape[1] != call["key"].shape[1],
        )
    )
