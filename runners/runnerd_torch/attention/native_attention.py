"""Paged attention in native code: ``paged_attention.cpp``, compiled on first use and called over a C interface.

The calls release the GIL. The result of a row is bitwise the same whatever else is in the batch and however many
threads work; with a head dimension that is a multiple of 32 also however its tokens were cut into chunks. It knows
nothing of models.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

import torch

from runnerd_torch.attention.checks import check_cache, check_new_tokens, check_query
from runnerd_torch.attention.metadata import AttentionMetadata
from runnerd_torch.attention.torch_attention import TorchPagedAttention
from runnerd_torch.native.compile import CompileError, library_of
from runnerd_torch.native.threads import parallel_region_of_torch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("paged_attention.cpp")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_HEAD_DIM = 256

_OK, _BAD_LENGTHS, _BAD_BLOCK, _BAD_SLOT, _NO_MEMORY = range(5)


class _WriteArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("key", "value", "key_cache", "value_cache", "slot_mapping")),
        *((name, ctypes.c_int64) for name in ("key_token_stride", "key_head_stride")),
        *((name, ctypes.c_int64) for name in ("value_token_stride", "value_head_stride")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_slots", "num_kv_heads", "head_bytes", "item_bytes")),
    )


class _ForwardArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key_cache", "value_cache", "output")),
        *((name, ctypes.c_void_p) for name in ("query_start_loc", "seq_lens", "block_tables")),
        *((name, ctypes.c_int64) for name in ("query_token_stride", "query_head_stride", "block_table_stride")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_tokens", "num_blocks", "block_size", "max_blocks")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "sliding_window")),
        *((name, ctypes.c_int64) for name in ("dtype", "num_threads", "packed")),
        ("parallel_region", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class NativePagedAttention:
    """The implementation of :class:`~runnerd_torch.attention.interface.PagedAttention` in C++.

    Caches on the CPU in float32, bfloat16 or float16 with a head dimension that is a multiple of 8 up to 256 take the
    native kernel; others are served by :class:`~runnerd_torch.attention.torch_attention.TorchPagedAttention`.

    Args:
        share_threads: Run on PyTorch's thread pool where it can be reached; else the kernel starts threads per call.

    Raises:
        CompileError: It cannot be compiled, or the operating system does not let it use what it was compiled for.
        OSError: The cache folder cannot be written, or the library cannot be loaded.
    """

    def __init__(self, *, share_threads: bool = True) -> None:
        self._library = ctypes.CDLL(str(library_of(SOURCE, os.environ)))
        if self._library.runnerd_attention_prepare():
            raise CompileError("the operating system does not let this process use the processor's matrix tiles")
        self._parallel_region = parallel_region_of_torch() if share_threads else None
        self._fallback = TorchPagedAttention()

    @property
    def name(self) -> str:
        """Name for logs and metrics."""
        return "native"

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Store the step's new keys and values; see the interface."""
        if not _serves(key_cache):
            self._fallback.write(key, value, key_cache, value_cache, metadata)
            return
        check_cache(key_cache, value_cache, metadata)
        check_new_tokens("key", key, key_cache, metadata)
        check_new_tokens("value", value, key_cache, metadata)
        key, value, slot_mapping = _rows(key), _rows(value), metadata.slot_mapping.contiguous()
        num_blocks, block_size, num_kv_heads, head_dim = key_cache.shape
        args = _WriteArgs(
            key.data_ptr(),
            value.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            slot_mapping.data_ptr(),
            *key.stride()[:2],
            *value.stride()[:2],
            key.shape[0],
            num_blocks * block_size,
            num_kv_heads,
            head_dim * key.itemsize,
            key.itemsize,
        )
        _raise_for(self._library.runnerd_attention_write(ctypes.byref(args)), key_cache, metadata)

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
        """Give the attention of each new token over its sequence; see the interface."""
        if not _serves(key_cache):
            return self._fallback.forward(query, key_cache, value_cache, metadata, scale, sliding_window, softcap)
        check_cache(key_cache, value_cache, metadata)
        check_query(query, key_cache, metadata, sliding_window)
        query, block_tables = _rows(query), _rows(metadata.block_tables)
        query_start_loc, seq_lens = metadata.query_start_loc.contiguous(), metadata.seq_lens.contiguous()
        num_blocks, block_size, num_kv_heads, head_dim = key_cache.shape
        output = torch.empty(query.shape, dtype=query.dtype)
        args = _ForwardArgs(
            query.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            output.data_ptr(),
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            block_tables.data_ptr(),
            *query.stride()[:2],
            block_tables.stride(0),
            metadata.num_rows,
            query.shape[0],
            num_blocks,
            block_size,
            block_tables.shape[1],
            query.shape[1],
            num_kv_heads,
            head_dim,
            sliding_window or 0,
            DTYPES[query.dtype],
            torch.get_num_threads(),
            False,
            self._parallel_region,
            scale,
            softcap or 0.0,
        )
        _raise_for(self._library.runnerd_attention_forward(ctypes.byref(args)), key_cache, metadata)
        return output


def _serves(key_cache: torch.Tensor) -> bool:
    head_dim = key_cache.shape[-1]
    on_cpu = key_cache.device.type == "cpu"
    return on_cpu and key_cache.dtype in DTYPES and head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Give the tensor with its last dimension contiguous, which the kernel expects; mostly that is itself."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _raise_for(status: int, key_cache: torch.Tensor, metadata: AttentionMetadata) -> None:
    if status == _OK:
        return
    num_blocks = key_cache.shape[0]
    if status == _BAD_SLOT:
        raise IndexError(f"slot_mapping holds a slot outside 0..{num_blocks * metadata.block_size - 1}")
    if status == _BAD_BLOCK:
        raise IndexError(f"block_tables hold a block outside 0..{num_blocks - 1}")
    if status == _BAD_LENGTHS:
        raise ValueError(
            f"the lengths contradict each other: query_start_loc {metadata.query_start_loc.tolist()}, seq_lens "
            f"{metadata.seq_lens.tolist()}, {metadata.slot_mapping.shape[0]} new tokens, block_tables "
            f"{tuple(metadata.block_tables.shape)} of {metadata.block_size} tokens"
        )
    assert status == _NO_MEMORY
    raise MemoryError("no memory for the attention kernel's work space")
