"""llama.cpp's shared libraries through ctypes, and its quantisation as a command. Runs in the peer's environment.

The libraries are those of node-llama-cpp's package: it has a backend for each kind of processor, and llama.cpp loads
the best one for this machine (AVX-512, VNNI, AMX). The wheels that hold llama.cpp are built for AVX2 alone.
Source of the structures: ``include/llama.h`` of llama.cpp v0.5.0, which is what the package is built from.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_void_p
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "runners"), str(ROOT / "runners" / "runnerd-llamacpp")]

from runnerd_llamacpp.library import Batch, ContextParams, ModelParams  # noqa: E402

FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7, "bfloat16": 32}
"""``llama_ftype`` by the name that ``--dtype`` has."""

_LogCallback = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)


class ContextParameters(ctypes.Structure):
    """``llama_context_params`` of v0.5.0: one field less than the release that the runner uses."""

    _fields_ = tuple(field for field in ContextParams._fields_ if field[0] != "moe_cache_size")


class QuantizeParameters(ctypes.Structure):
    """The beginning of ``llama_model_quantize_params``, and more than enough room for its end."""

    _fields_ = (
        ("nthread", c_int32),
        ("ftype", c_int32),
        ("output_tensor_type", c_int32),
        ("token_embedding_type", c_int32),
        ("allow_requantize", c_bool),
        ("quantize_output_tensor", c_bool),
        ("only_copy", c_bool),
        ("pure", c_bool),
        ("rest", c_void_p * 16),
    )


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    # Name: result, arguments.
    "llama_log_set": (None, (_LogCallback, c_void_p)),
    "llama_backend_init": (None, ()),
    "llama_print_system_info": (c_char_p, ()),
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParameters, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParameters)),
    "llama_free": (None, (c_void_p,)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits": (POINTER(c_float), (c_void_p,)),
    "llama_model_quantize_default_params": (QuantizeParameters, ()),
    "llama_model_quantize": (c_int32, (c_char_p, c_char_p, POINTER(QuantizeParameters))),
}


class Library:
    """The loaded library, with the backend for this processor. It logs nothing."""

    def __init__(self) -> None:
        folders = Path(sys.prefix, "node_modules", "@node-llama-cpp").glob("*/bins/*")
        found = [path for folder in folders for path in folder.glob("libllama.v*.so")]
        if not found:
            raise SystemExit(f"no llama.cpp in {sys.prefix}/node_modules")
        self.version = found[0].name.removeprefix("libllama.").removesuffix(".so")
        (ggml,) = found[0].parent.glob("libggml.v*.so")
        self._ggml = ctypes.CDLL(str(ggml))
        self.functions = ctypes.CDLL(str(found[0]))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, arguments
        # The library keeps the pointer: the object must live as long.
        self._silent = _LogCallback(lambda level, text, data: None)
        self.functions.llama_log_set(self._silent, None)
        self._check_structures(found[0])
        self._ggml.ggml_backend_load_all_from_path(str(found[0].parent).encode())
        self.functions.llama_backend_init()

    def system_info(self) -> str:
        """Give the processor's features that the loaded backend was built for."""
        said: bytes = self.functions.llama_print_system_info()
        features = [one.split(" = ") for one in said.decode().replace("CPU :", "").split("|") if " = " in one]
        return " ".join(name.strip() for name, value in features if value.strip() == "1")

    def _check_structures(self, path: Path) -> None:
        """See that known values lie where they should: a structure of another layout would be read as garbage."""
        context, model = self.functions.llama_context_default_params(), self.functions.llama_model_default_params()
        quantize = self.functions.llama_model_quantize_default_params()
        found = (context.n_batch, context.type_k, context.type_v, context.op_offload, context.ctx_other)
        found += (model.n_gpu_layers, model.use_extra_bufts, quantize.quantize_output_tensor, quantize.only_copy)
        if found != (2048, 1, 1, True, None, -1, True, True, False):
            raise SystemExit(f"the structures of {path} are not those of llama.cpp v0.5.0: {found}")


def main() -> None:
    """Quantise a GGUF file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("file_type", choices=list(FILE_TYPES))
    given = parser.parse_args()
    library = Library()
    functions = library.functions
    parameters = functions.llama_model_quantize_default_params()
    parameters.ftype, parameters.allow_requantize = FILE_TYPES[given.file_type], True
    parameters.pure = given.file_type == "bfloat16"
    code = functions.llama_model_quantize(given.source.encode(), given.target.encode(), ctypes.byref(parameters))
    if code:
        raise SystemExit(f"llama_model_quantize returned {code} for {given.source}")


if __name__ == "__main__":
    main()
