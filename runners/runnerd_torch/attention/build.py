"""Chooses the implementation of paged attention."""

from __future__ import annotations

import logging
from typing import Literal

from runnerd_spi.errors import RunnerUnavailable
from runnerd_torch.attention.interface import PagedAttention
from runnerd_torch.attention.native_attention import NativePagedAttention
from runnerd_torch.attention.torch_attention import TorchPagedAttention
from runnerd_torch.native.compile import CompileError

logger = logging.getLogger(__name__)

AttentionKind = Literal["auto", "torch", "native"]


def build_attention(kind: AttentionKind = "auto") -> PagedAttention:
    """Give the paged attention asked for.

    Args:
        kind: "native" compiles the kernel, which takes seconds the first time; "torch" is plain PyTorch; "auto" is
            "native" where that can be had, else "torch" with a warning in the log: only speed differs.

    Raises:
        RunnerUnavailable: "native" was asked for and the kernel cannot be compiled or loaded.
        ValueError: The kind is none of the three.
    """
    if kind not in ("auto", "torch", "native"):
        raise ValueError(f"unknown attention {kind!r}; expected auto, torch or native")
    if kind == "torch":
        return TorchPagedAttention()
    try:
        return NativePagedAttention()
    except (CompileError, OSError) as error:
        if kind == "native":
            raise RunnerUnavailable(
                f"native attention cannot be used: {error}; or choose attention torch, which is slower"
            ) from error
        logger.warning("native attention cannot be used, falling back to torch, which is slower: %s", error)
        return TorchPagedAttention()
