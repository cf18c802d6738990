"""Paged attention for PyTorch models on the CPU."""

from runnerd_torch.attention.build import AttentionKind, build_attention
from runnerd_torch.attention.interface import PagedAttention
from runnerd_torch.attention.metadata import AttentionMetadata

__all__ = ["AttentionKind", "AttentionMetadata", "PagedAttention", "build_attention"]
