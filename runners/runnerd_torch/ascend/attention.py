"""Paged attention by Ascend's fused kernel: one call serves prefill, chunked prefill and decode alike.

The lengths of a step go in as lists of the host, so nothing is read back. Sources: the documentation of
``npu_fused_infer_attention_score`` and ``npu_scatter_pa_kv_cache`` that torch_npu carries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runnerd_torch.attention import AttentionMetadata
from runnerd_torch.attention.checks import check_cache, check_new_tokens, check_query
from runnerd_torch.models import LayerSpec

BLOCK_SIZES = (128, 256, 384, 512)
"""A step with more than one query token in a row needs a multiple of 128, at most 512."""

_MASK_SIZE = 2048
_MAX_HEADS = 256
_MAX_GROUP = 64
_MAX_HEAD_DIM = 512
_HEAD_DIM_MULTIPLE = 16
_MAX_KV_WIDTH = 65535
_MAX_ROWS = 4096
_RIGHT_DOWN_CAUSAL = 3


def unserved_reason(
    layers: Sequence[LayerSpec], dtype: torch.dtype, max_num_seqs: int, *, allow_float32: bool = False
) -> str:
    """Say why the kernel cannot serve a model; empty when it can.

    Args:
        layers: The model's attention layers.
        dtype: The model's.
        max_num_seqs: Most rows of a step.
        allow_float32: Let float32 pass, which no chip takes.
    """
    if dtype not in (torch.bfloat16, torch.float16) and not (allow_float32 and dtype == torch.float32):
        return f"it takes bfloat16 and float16, and the model is {str(dtype).removeprefix('torch.')}"
    if max_num_seqs > _MAX_ROWS:
        return f"it takes {_MAX_ROWS} rows at most, and --max-num-seqs is {max_num_seqs}"
    for index, layer in enumerate(layers):
        if reason := _layer_reason(layer):
            return f"layer {index} has {reason}"
    return ""


def _layer_reason(layer: LayerSpec) -> str:
    if layer.sliding_window is not None:
        return f"a sliding window of {layer.sliding_window} tokens"
    if layer.softcap is not None:
        return f"soft-capped scores ({layer.softcap})"
    if layer.head_dim % _HEAD_DIM_MULTIPLE or layer.head_dim > _MAX_HEAD_DIM:
        return f"heads of {layer.head_dim}, expected a multiple of {_HEAD_DIM_MULTIPLE} up to {_MAX_HEAD_DIM}"
    if layer.num_heads > _MAX_HEADS:
        return f"{layer.num_heads} heads, expected {_MAX_HEADS} at most"
    if layer.num_heads // layer.num_kv_heads > _MAX_GROUP:
        return f"{layer.num_heads} heads over {layer.num_kv_heads} KV heads, expected {_MAX_GROUP} to one at most"
    if layer.num_kv_heads * layer.head_dim > _MAX_KV_WIDTH:
        return f"{layer.num_kv_heads} KV heads of {layer.head_dim}, expected {_MAX_KV_WIDTH} numbers at most"
    return ""


class FusedInferAttention:
    """The implementation of :class:`~runnerd_torch.attention.interface.PagedAttention` on Ascend.

    Args:
        device: Where the cache lies.
    """

    def __init__(self, device: torch.device) -> None:
        # Ones are masked. One triangle serves all lengths: the kernel lays it against each row's last token.
        self._mask = torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.int8).triu_(1).to(device)

    @property
    def name(self) -> str:
        """Name for logs and metrics."""
        return "fused"

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Store the step's new keys and values; see the interface. Places are not checked: the host would wait."""
        check_cache(key_cache, value_cache, metadata)
        check_new_tokens("key", key, key_cache, metadata)
        check_new_tokens("value", value, key_cache, metadata)
        torch.ops.npu.npu_scatter_pa_kv_cache(
            key.contiguous(), value.contiguous(), key_cache, value_cache, metadata.slot_mapping, cache_mode="Norm"
        )

    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Give the attention of each new token over its sequence; see the interface.

        Raises:
            ValueError: Shapes or dtypes do not fit, or there is a window or a softcap.
        """
        check_cache(key_cache, value_cache, metadata)
        check_query(query, key_cache, metadata, sliding_window)
        if sliding_window is not None or softcap is not None:
            raise ValueError("the fused attention of Ascend has neither windows nor soft caps; choose attention torch")
        output, _ = torch.ops.npu.npu_fused_infer_attention_score(
            query.contiguous(),
            # [num_blocks, block_size, num_kv_heads * head_dim]
            key_cache.flatten(2),
            value_cache.flatten(2),
            atten_mask=self._mask,
            actual_seq_lengths=metadata.query_start_loc_cpu[1:].tolist(),
            actual_seq_lengths_kv=metadata.seq_lens_cpu.tolist(),
            block_table=metadata.block_tables,
            num_heads=query.shape[1],
            num_key_value_heads=key_cache.shape[2],
            scale=scale,
            input_layout="TND",
            block_size=metadata.block_size,
            sparse_mode=_RIGHT_DOWN_CAUSAL,
        )
        attended: torch.Tensor = output
        return attended
