"""llama.cpp's C API, as far as it is used here, declared for ctypes. It knows nothing of requests and steps.

Source: ``include/llama.h`` of llama.cpp at the release that xllamacpp 2026.10.11549 is built from. The library is the
one inside that package's extension module; its Python layer has no functions for batches and sequences.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from runnerd_spi import RunnerUnavailable

logger = logging.getLogger(__name__)

KV_TYPES = {"float32": 0, "float16": 1}
"""``ggml_type`` of the keys and values."""

MAX_SEQUENCES = 256
"""``LLAMA_MAX_SEQ``: most sequences of one context."""

_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
_NUM_KEPT_LINES = 5
# It takes the whole memory for one sequence's; how long a request may be is checked elsewhere.
_FALSE_ALARM = "n_ctx_seq"

LoadProgress = ctypes.CFUNCTYPE(c_bool, c_float, c_void_p)
_LogCallback = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)


class ModelParams(ctypes.Structure):
    """``llama_model_params``."""

    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", LoadProgress),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class ContextParams(ctypes.Structure):
    """``llama_context_params``."""

    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32),
        ("attention_type", c_int32),
        ("flash_attn_type", c_int32),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class Batch(ctypes.Structure):
    """``llama_batch``: arrays of ``n_tokens``; the caller owns them."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    )


_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    # Name: result, arguments.
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (_LogCallback, c_void_p)),
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_model_n_ctx_train": (c_int32, (c_void_p,)),
    "llama_model_n_embd": (c_int32, (c_void_p,)),
    "llama_model_n_layer": (c_int32, (c_void_p,)),
    "llama_model_n_head": (c_int32, (c_void_p,)),
    "llama_model_n_head_kv": (c_int32, (c_void_p,)),
    "llama_model_size": (c_uint64, (c_void_p,)),
    "llama_model_n_params": (c_uint64, (c_void_p,)),
    "llama_model_desc": (c_int32, (c_void_p, c_char_p, c_size_t)),
    "llama_model_meta_val_str": (c_int32, (c_void_p, c_char_p, c_char_p, c_size_t)),
    "llama_model_has_encoder": (c_bool, (c_void_p,)),
    "llama_model_is_recurrent": (c_bool, (c_void_p,)),
    "llama_model_is_hybrid": (c_bool, (c_void_p,)),
    "llama_model_is_diffusion": (c_bool, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_vocab_is_eog": (c_bool, (c_void_p, c_int32)),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "llama_free": (None, (c_void_p,)),
    "llama_n_ctx": (c_uint32, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits": (POINTER(c_float), (c_void_p,)),
}


class Library:
    """The loaded library. ctypes lets other threads run while one of its functions does.

    Args:
        path: The shared object.

    Raises:
        RunnerUnavailable: It is not the library that is described here.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.functions = ctypes.CDLL(str(path))
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(self.functions, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise RunnerUnavailable(f"runner 'llamacpp' cannot be used: {path} cannot be loaded: {error}") from error
        self._lines: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        self._level = logging.DEBUG
        # The library keeps the pointer: the object must live as long.
        self._callback = _LogCallback(self._log)
        self.functions.llama_log_set(self._callback, None)
        self._check_structures(path)
        self.functions.llama_backend_init()

    def take_errors(self) -> str:
        """Give what the library has said of errors since this was called last, and forget it."""
        said = "; ".join(self._lines)
        self._lines.clear()
        return said

    def _log(self, level: int, text: bytes, _data: object) -> None:
        self._level = _LEVELS.get(level, self._level)  # 5 goes on with the line before
        line = text.decode(errors="replace").strip(" .\n")
        if not line or _FALSE_ALARM in line:
            return
        logger.log(self._level, "llama.cpp: %s", line)
        if self._level == logging.ERROR:
            self._lines.append(line)

    def _check_structures(self, path: Path) -> None:
        """See that known values lie where they should. A structure of another layout would be read as garbage."""
        context = self.functions.llama_context_default_params()
        model = self.functions.llama_model_default_params()
        found = (context.n_ctx, context.n_batch, context.type_k, context.type_v, context.op_offload, model.n_gpu_layers)
        if found != (512, 2048, 1, 1, True, -1):
            raise RunnerUnavailable(
                f"runner 'llamacpp' cannot be used: the structures of {path} are not those of the release it was "
                "written for; reinstall runnerd-llamacpp"
            )


@cache
def load_library() -> Library:
    """Give the library of the xllamacpp package; it is loaded once in a process.

    Raises:
        RunnerUnavailable: The package is not there, or holds another library.
    """
    spec = find_spec("xllamacpp")
    folders = [] if spec is None else spec.submodule_search_locations or []
    found = [path for folder in folders for path in Path(folder).glob("xllamacpp*.so")]
    if not found:
        raise RunnerUnavailable("runner 'llamacpp' cannot be used: no library in xllamacpp; reinstall xllamacpp")
    return Library(found[0])
