"""The seam between a model's attention layers and the paged KV cache. It knows no implementation."""

from __future__ import annotations

from typing import Protocol

import torch

from runnerd_torch.attention.metadata import AttentionMetadata


class PagedAttention(Protocol):
    """Causal attention over a KV cache that is cut into blocks.

    One object serves all layers of a model. The cache of a layer is a pair ``key_cache``, ``value_cache``, each
    ``[num_blocks, block_size, num_kv_heads, head_dim]``, contiguous, in the model's dtype.
    """

    @property
    def name(self) -> str:
        """Name for logs and metrics: "torch" or "native"."""

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Store the step's new keys and values at ``metadata.slot_mapping``; other slots stay as they are.

        Args:
            key: ``[num_tokens, num_kv_heads, head_dim]``, any strides.
            value: Like ``key``.
            key_cache: The layer's keys.
            value_cache: The layer's values.
            metadata: The step's layout.

        Raises:
            ValueError: Shapes or dtypes do not fit.
            IndexError: A slot lies outside the cache; nothing was written.
        """

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
        """Give the attention of each new token over its sequence, with the step's keys and values already written.

        The i-th new token of row r has position ``p = seq_lens[r] - query_len[r] + i`` and sees positions 0 to p, or
        ``p - sliding_window + 1`` to p. Query head h reads KV head ``h // (num_heads / num_kv_heads)``.

        Args:
            query: ``[num_tokens, num_heads, head_dim]``, any strides.
            key_cache: The layer's keys.
            value_cache: The layer's values.
            metadata: The step's layout.
            scale: Factor of the scores, mostly ``head_dim ** -0.5``.
            sliding_window: Number of positions a token sees, itself included; None for all.
            softcap: Scores become ``tanh(score / softcap) * softcap`` before the mask; None for none.

        Returns:
            ``[num_tokens, num_heads, head_dim]``, contiguous, in the dtype of ``query``.

        Raises:
            ValueError: Shapes or dtypes do not fit.
            IndexError: A block lies outside the cache.
        """
