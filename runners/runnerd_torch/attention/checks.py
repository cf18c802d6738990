"""Shape checks that both implementations share, so that a wrong call fails the same way in each."""

from __future__ import annotations

import torch

from runnerd_torch.attention.metadata import AttentionMetadata


def check_cache(key_cache: torch.Tensor, value_cache: torch.Tensor, metadata: AttentionMetadata) -> None:
    """Check a layer's cache.

    Raises:
        ValueError: It is not ``[num_blocks, block_size, num_kv_heads, head_dim]``, or not contiguous.
    """
    shape = key_cache.shape
    if len(shape) != 4 or shape[1] != metadata.block_size:
        raise ValueError(
            f"key_cache has shape {tuple(shape)}; expected [num_blocks, {metadata.block_size}, num_kv_heads, head_dim]"
        )
    if value_cache.shape != shape or value_cache.dtype != key_cache.dtype:
        raise ValueError(
            f"value_cache is {value_cache.dtype} {tuple(value_cache.shape)}; "
            f"expected {key_cache.dtype} {tuple(shape)}, as key_cache"
        )
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("key_cache and value_cache must be contiguous; allocate each as one tensor per layer")


def check_new_tokens(name: str, tensor: torch.Tensor, key_cache: torch.Tensor, metadata: AttentionMetadata) -> None:
    """Check new keys or values against the cache.

    Raises:
        ValueError: The tensor is not ``[num_tokens, num_kv_heads, head_dim]`` in the cache's dtype.
    """
    expected = (metadata.slot_mapping.shape[0], key_cache.shape[2], key_cache.shape[3])
    if tensor.shape != expected or tensor.dtype != key_cache.dtype:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected {key_cache.dtype} {expected}, as the cache"
        )


def check_query(
    query: torch.Tensor, key_cache: torch.Tensor, metadata: AttentionMetadata, sliding_window: int | None
) -> None:
    """Check the query against the cache.

    Raises:
        ValueError: Its shape or dtype does not fit, the heads cannot be grouped, or the window is empty.
    """
    num_tokens, num_kv_heads, head_dim = metadata.slot_mapping.shape[0], key_cache.shape[2], key_cache.shape[3]
    if query.dim() != 3 or query.shape[0] != num_tokens or query.shape[2] != head_dim or query.dtype != key_cache.dtype:
        raise ValueError(
            f"query is {query.dtype} {tuple(query.shape)}; "
            f"expected {key_cache.dtype} [{num_tokens}, num_heads, {head_dim}], as the cache"
        )
    if query.shape[1] % num_kv_heads:
        raise ValueError(f"{query.shape[1]} query heads; expected a multiple of the {num_kv_heads} KV heads")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; expected at least 1, or None for no window")
