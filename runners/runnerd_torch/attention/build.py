"""Chooses the implementation of paged attention."""

from __future__ import annotations

from typing import Literal

from runnerd_torch.attention.interface import PagedAttention
from runnerd_torch.attention.torch_attention import TorchPagedAttention

AttentionKind = Literal["auto", "torch", "native"]


def build_attention(kind: AttentionKind = "auto") -> PagedAttention:
    """Give the paged attention asked for."""
    return TorchPagedAttention()
