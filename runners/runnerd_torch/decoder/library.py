"""The compiled ``decoder.cpp`` and the structures it reads. It knows nothing of transformers."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from runnerd_torch.native.compile import CompileError, library_of
from runnerd_torch.native.threads import parallel_region_of_torch

SOURCE = Path(__file__).with_name("decoder.cpp")

PHASES = ("embed", "norm", "qkv", "rotate", "attend", "output", "gate_up", "down", "head")
"""Parts of a step whose times native code adds up. ``qkv`` rotates as well, where heads have no norms."""

_OK, _BAD_LENGTHS, _BAD_BLOCK, _BAD_SLOT, _NO_MEMORY = range(5)


class ProjectionFields(ctypes.Structure):
    """``Projection`` of ``matmul.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("num_inputs", "num_outputs", "weight_type")),
    )


class LayerFields(ctypes.Structure):
    """``LayerWeights`` of ``decoder.cpp``."""

    _fields_ = (
        *((name, ProjectionFields) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm")),
        ("sliding_window", ctypes.c_int64),
    )


class ModelFields(ctypes.Structure):
    """``DecoderModel`` of ``decoder.cpp``."""

    _fields_ = (
        ("layers", ctypes.POINTER(LayerFields)),
        ("head", ProjectionFields),
        *((name, ctypes.c_void_p) for name in ("final_norm", "embedding")),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("intermediate_size", "halves_take_turns")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


class StepFields(ctypes.Structure):
    """``DecoderStep`` of ``decoder.cpp``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_ids", "slot_mapping", "logits_index", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("query_start_loc", "seq_lens", "block_tables")),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("key_caches", "value_caches")),
        *((name, ctypes.c_void_p) for name in ("workspace", "logits", "phase_ns")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_rows", "num_logits", "num_blocks", "block_size")),
        *((name, ctypes.c_int64) for name in ("max_blocks", "block_table_stride", "num_threads")),
        ("parallel_region", ctypes.c_void_p),
    )


class DecoderLibrary:
    """The compiled library.

    Raises:
        CompileError: It cannot be compiled, or the operating system does not let it use what it was compiled for.
        OSError: The cache folder cannot be written, or the library cannot be loaded.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(library_of(SOURCE, os.environ)))
        self._library.runnerd_decoder_workspace.restype = ctypes.c_int64
        self._parallel_region = parallel_region_of_torch()
        if self._library.runnerd_decoder_prepare():
            raise CompileError("the operating system does not let this process use the processor's matrix tiles")

    def workspace_bytes(self, model: ModelFields, num_tokens: int) -> int:
        """Give the size of the work space of a step."""
        size: int = self._library.runnerd_decoder_workspace(ctypes.byref(model), ctypes.c_int64(num_tokens))
        return size

    def choose(self, numbers: torch.Tensor) -> torch.Tensor:
        """Give what :data:`runnerd_torch.sampling.Choose` says.

        Args:
            numbers: ``[num_rows, size]`` float32, contiguous.

        Raises:
            MemoryError: There is no memory for another thread.
        """
        num_rows, size = numbers.shape
        choices = torch.empty((2, num_rows), dtype=torch.int64)
        status = self._library.runnerd_decoder_choose(
            ctypes.c_void_p(numbers.data_ptr()),
            ctypes.c_int64(num_rows),
            ctypes.c_int64(size),
            ctypes.c_void_p(choices.data_ptr()),
            ctypes.c_int64(torch.get_num_threads()),
            ctypes.c_void_p(self._parallel_region),
        )
        if status != _OK:
            raise MemoryError("no memory to look for the highest logits")
        return choices

    def run(self, model: ModelFields, step: StepFields) -> None:
        """Run a step; releases the GIL. Threads are those of torch.

        Raises:
            IndexError: A slot or a block lies outside the cache.
            ValueError: The lengths contradict each other.
            MemoryError: There is no memory for a thread's work space.
        """
        step.num_threads = torch.get_num_threads()
        step.parallel_region = self._parallel_region
        status = self._library.runnerd_decoder_run(ctypes.byref(model), ctypes.byref(step))
        if status == _OK:
            return
        if status == _BAD_SLOT:
            raise IndexError(f"slot_mapping holds a slot outside 0..{step.num_blocks * step.block_size - 1}")
        if status == _BAD_BLOCK:
            raise IndexError(f"block_tables hold a block outside 0..{step.num_blocks - 1}")
        if status == _BAD_LENGTHS:
            raise ValueError(
                f"the lengths of the step's {step.num_rows} rows and {step.num_tokens} tokens contradict each other"
            )
        assert status == _NO_MEMORY
        raise MemoryError("no memory for the decoder's work space")
