"""A loaded GGUF model and a context with its KV memory. It knows nothing of requests and steps."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runnerd_llamacpp.library import KV_TYPES, Batch, Library, LoadProgress
from runnerd_spi import ModelLoadError, Progress, RunnerError

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

_GGUF_MAGIC = b"GGUF"
_TEXT_BYTES = 256
_NO_ROOM = 1


class DecodeError(RuntimeError):
    """llama.cpp could not compute a batch; the context is not to be used any more."""


@dataclass(frozen=True, slots=True)
class Span:
    """Positions of one sequence to compute."""

    sequence: int
    first_position: int
    # [num_tokens]
    token_ids: Int32Array
    # [num_tokens] bool: where logits are wanted
    wants_logits: npt.NDArray[np.bool_]


class Model:
    """Weights in memory, as the file has them.

    Args:
        library: llama.cpp.
        path: A GGUF file, or the first of a model that is split over several.
        progress: Told how much has been read, in percent.

    Raises:
        ModelLoadError: The file cannot be read, or holds a model that is not served.
    """

    def __init__(self, library: Library, path: Path, progress: Progress) -> None:
        _check_file(path)
        self.library = library
        self._functions = library.functions

        def report(share: float, _data: object) -> bool:
            progress("loading weights", int(share * 100), 100)
            return True

        params = self._functions.llama_model_default_params()
        params.n_gpu_layers = 0
        params.progress_callback = LoadProgress(report)
        library.take_errors()
        self.pointer = self._functions.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise ModelLoadError(f"{path}: llama.cpp cannot load it: {library.take_errors() or 'it does not say why'}")
        try:
            self._check_kind(path)
        except ModelLoadError:
            self.close()
            raise
        self.vocab = self._functions.llama_model_get_vocab(self.pointer)
        self.vocab_size: int = self._functions.llama_vocab_n_tokens(self.vocab)
        self.max_model_len: int = self._functions.llama_model_n_ctx_train(self.pointer)
        self.num_parameters: int = self._functions.llama_model_n_params(self.pointer)
        self.weights_bytes: int = self._functions.llama_model_size(self.pointer)

    def end_token_ids(self) -> tuple[int, ...]:
        """Give the tokens that end an answer, by the file's metadata and llama.cpp's knowledge of special tokens."""
        is_end = self._functions.llama_vocab_is_eog
        return tuple(token for token in range(self.vocab_size) if is_end(self.vocab, token))

    def description(self) -> str:
        """Give what llama.cpp calls the model: family, size and quantisation."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._functions.llama_model_desc(self.pointer, text, _TEXT_BYTES)
        return text.value.decode(errors="replace")

    def metadata(self, key: str) -> str | None:
        """Give a value of the file's metadata as text; None when it is not there."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        length = self._functions.llama_model_meta_val_str(self.pointer, key.encode(), text, _TEXT_BYTES)
        return None if length < 0 else text.value.decode(errors="replace")

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Give what one position takes over all layers, with keys and values of this data type."""
        functions, family = self._functions, self.metadata("general.architecture")
        width = functions.llama_model_n_embd(self.pointer) // max(functions.llama_model_n_head(self.pointer), 1)
        key = int(self.metadata(f"{family}.attention.key_length") or width)
        value = int(self.metadata(f"{family}.attention.value_length") or width)
        num_heads = functions.llama_model_n_layer(self.pointer) * functions.llama_model_n_head_kv(self.pointer)
        return int(num_heads * (key + value) * np.dtype(dtype).itemsize)

    def close(self) -> None:
        """Give the weights back."""
        pointer, self.pointer = self.pointer, None
        if pointer:
            self._functions.llama_model_free(pointer)

    def _check_kind(self, path: Path) -> None:
        functions = self._functions
        kinds = {
            "an encoder": functions.llama_model_has_encoder,
            "recurrent": functions.llama_model_is_recurrent,
            "recurrent in part": functions.llama_model_is_hybrid,
            "a diffusion model": functions.llama_model_is_diffusion,
        }
        for kind, is_it in kinds.items():
            if is_it(self.pointer):
                raise ModelLoadError(
                    f"{path} is {kind}; this runner serves decoders with attention in every layer, whose positions "
                    "can be computed once more"
                )


class Context:
    """A KV memory that all sequences share, position by position, and what computes batches over it.

    Args:
        model: Loaded; it must outlive the context.
        num_positions: Positions of all sequences together.
        num_sequences: Sequences, numbered from 0.
        max_batch: Most tokens of one batch; each of them may want logits.
        max_ubatch: Most tokens that are computed at once.
        num_threads: Threads of a batch.
        kv_dtype: Data type of keys and values.

    Raises:
        RunnerError: The memory cannot be had.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_positions: int,
        num_sequences: int,
        max_batch: int,
        max_ubatch: int,
        num_threads: int,
        kv_dtype: str,
    ) -> None:
        self._library = model.library
        self._functions = functions = model.library.functions
        self._vocab_size = model.vocab_size
        params = functions.llama_context_default_params()
        params.n_ctx = num_positions
        params.n_seq_max = num_sequences
        params.n_batch = params.n_outputs_max = params.n_outputs_max_per_seq = max_batch
        params.n_ubatch = min(max_ubatch, max_batch)
        params.n_threads = params.n_threads_batch = num_threads
        params.type_k = params.type_v = KV_TYPES[kv_dtype]
        # Flash attention would compute in float16 whatever the keys and values are.
        params.flash_attn_type = int(kv_dtype == "float16")
        params.kv_unified = True
        # Without it a model with a sliding window forgets positions, and none of them could be computed once more.
        params.swa_full = True
        self._library.take_errors()
        self._pointer = functions.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            raise RunnerError(f"llama.cpp gives no context: {self._library.take_errors() or 'it does not say why'}")
        self._memory = functions.llama_get_memory(self._pointer)
        # [max_batch]: the arrays of a batch
        self._tokens = np.zeros(max_batch, dtype=np.int32)
        self._positions = np.zeros(max_batch, dtype=np.int32)
        self._sequences = np.zeros(max_batch, dtype=np.int32)
        self._wants_logits = np.zeros(max_batch, dtype=np.int8)
        self._num_sequences = np.ones(max_batch, dtype=np.int32)
        # [max_batch] addresses: each token belongs to the one sequence that stands at its place in _sequences
        self._sequence_lists = self._sequences.ctypes.data + np.arange(max_batch, dtype=np.uintp) * 4

    def compute(self, spans: Sequence[Span]) -> Float32Array:
        """Compute positions of several sequences in one batch.

        Returns:
            ``[num_wanted, vocab_size]`` logits of the wanted positions in order; valid until the next call.

        Raises:
            DecodeError: llama.cpp could not.
        """
        size = 0
        for span in spans:
            part = slice(size, size + len(span.token_ids))
            self._tokens[part] = span.token_ids
            self._positions[part] = np.arange(span.first_position, span.first_position + len(span.token_ids))
            self._sequences[part] = span.sequence
            self._wants_logits[part] = span.wants_logits
            size = part.stop
        batch = Batch(
            size,
            self._tokens.ctypes.data,
            None,
            self._positions.ctypes.data,
            self._num_sequences.ctypes.data,
            self._sequence_lists.ctypes.data,
            self._wants_logits.ctypes.data,
        )
        self._library.take_errors()
        code = self._functions.llama_decode(self._pointer, batch)
        if code:
            why = "its KV memory has no room" if code == _NO_ROOM else self._library.take_errors() or "no reason given"
            raise DecodeError(f"llama_decode returned {code} for {size} tokens: {why}")
        num_wanted = int(self._wants_logits[:size].sum())
        if not num_wanted:
            return np.zeros((0, self._vocab_size), dtype=np.float32)
        return np.ctypeslib.as_array(self._functions.llama_get_logits(self._pointer), (num_wanted, self._vocab_size))

    def forget(self, sequence: int, first_position: int = 0) -> None:
        """Take a sequence's positions from ``first_position`` out of the memory.

        Raises:
            DecodeError: llama.cpp could not.
        """
        if not self._functions.llama_memory_seq_rm(self._memory, sequence, first_position, -1):
            raise DecodeError(f"llama.cpp keeps the positions of sequence {sequence} from {first_position}")

    def clear(self) -> None:
        """Take everything out of the memory."""
        self._functions.llama_memory_clear(self._memory, True)

    def close(self) -> None:
        """Give the memory back. The context is not to be used any more."""
        pointer, self._pointer = self._pointer, None
        if pointer:
            self._functions.llama_free(pointer)


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}; give a GGUF file") from error
    if magic != _GGUF_MAGIC:
        raise ModelLoadError(f"{path} is no GGUF file; convert the model with llama.cpp's convert_hf_to_gguf.py")
