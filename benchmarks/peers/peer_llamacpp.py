"""llama.cpp through its C interface: the loop of its batched example, sequences of one context.

``--dtype`` names the type of the GGUF file that ``checkpoints.py`` wrote: bfloat16, q8_0, q4_0 or q4_1. Flash attention
is on, weights are repacked for the processor where llama.cpp has a kernel for that, and each sequence has a memory of
its own, which llama.cpp's header advises where sequences share no beginning.
"""

from __future__ import annotations

import numpy as np
import protocol
from llamacpp_library import Batch, Library

BATCH_TOKENS = 2048
UBATCH_TOKENS = 512
_LOAD_MODE_NONE = 0
"""``LLAMA_LOAD_MODE_NONE``: weights are read into memory, not mapped."""


class Model:
    """Weights in memory."""

    def __init__(self, library: Library, path: str, num_threads: int) -> None:
        self.functions, self.num_threads = library.functions, num_threads
        parameters = self.functions.llama_model_default_params()
        parameters.n_gpu_layers = 0
        parameters.load_mode = _LOAD_MODE_NONE
        self.pointer = self.functions.llama_model_load_from_file(path.encode(), parameters)
        if not self.pointer:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.vocab_size: int = self.functions.llama_vocab_n_tokens(self.functions.llama_model_get_vocab(self.pointer))


class Sequences:
    """A context for so many sequences, and the tokens of the next batch."""

    def __init__(self, model: Model, count: int, length: int) -> None:
        self._model, self._functions = model, model.functions
        parameters = self._functions.llama_context_default_params()
        parameters.n_ctx = count * (-(-length // 256) * 256)
        parameters.n_batch = parameters.n_outputs_max = BATCH_TOKENS
        parameters.n_ubatch, parameters.n_seq_max = UBATCH_TOKENS, count
        parameters.n_threads = parameters.n_threads_batch = model.num_threads
        parameters.flash_attn_type = 1
        parameters.kv_unified = False
        self._pointer = self._functions.llama_init_from_model(model.pointer, parameters)
        if not self._pointer:
            raise SystemExit("llama.cpp gives no context")
        self._size = 0
        # [BATCH_TOKENS]: the arrays of a batch
        self._tokens, self._positions, self._owners, self._ones = (np.ones(BATCH_TOKENS, np.int32) for _ in range(4))
        self._wanted = np.zeros(BATCH_TOKENS, np.int8)
        # [BATCH_TOKENS] addresses of lists of one sequence
        self._lists = self._owners.ctypes.data + np.arange(BATCH_TOKENS, dtype=np.uintp) * 4

    def put(self, tokens: list[int], position: int, sequence: int, wanted: bool) -> int:
        """Add tokens as far as there is room, and give how many; the last of them may be one whose choice is wanted."""
        num_added = min(len(tokens), BATCH_TOKENS - self._size)
        part = slice(self._size, self._size + num_added)
        self._tokens[part] = tokens[:num_added]
        self._positions[part] = np.arange(position, position + num_added)
        self._owners[part] = sequence
        self._wanted[part] = 0
        if num_added == len(tokens):
            self._wanted[part.stop - 1] = wanted
        self._size = part.stop
        return num_added

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another token."""
        return self._size == BATCH_TOKENS

    def compute(self) -> list[tuple[int, int]]:
        """Compute the batch and give the sequences whose choice was wanted with the most likely token of each."""
        size, self._size = self._size, 0
        if not size:
            return []
        arrays = (self._positions, self._ones, self._lists, self._wanted)
        batch = Batch(size, self._tokens.ctypes.data, None, *(array.ctypes.data for array in arrays))
        if code := self._functions.llama_decode(self._pointer, batch):
            raise SystemExit(f"llama_decode returned {code}")
        owners = self._owners[:size][self._wanted[:size] != 0].tolist()
        if not owners:
            return []
        logits = self._functions.llama_get_logits(self._pointer)
        chosen = np.ctypeslib.as_array(logits, shape=(len(owners), self._model.vocab_size)).argmax(1)
        return list(zip(owners, chosen.tolist(), strict=True))

    def close(self) -> None:
        """Give the memory back."""
        self._functions.llama_free(self._pointer)


def main() -> None:
    """Load the file and answer."""
    given = protocol.arguments()
    library = Library()
    model = Model(library, f"{given.model}.{given.dtype}.gguf", given.threads)

    def job(prompts: list[list[int]], output_len: int, times: protocol.Times) -> None:
        prompt_len = len(prompts[0])
        latest = [0] * len(prompts)
        context = Sequences(model, len(prompts), prompt_len + output_len)

        def compute() -> None:
            for sequence, token in context.compute():
                latest[sequence] = token
                times.note(sequence)

        for sequence, prompt in enumerate(prompts):
            done = 0
            while done < prompt_len:
                done += context.put(prompt[done:], done, sequence, True)
                if context.is_full:
                    compute()
        compute()
        for step in range(output_len - 1):
            for sequence, token in enumerate(latest):
                context.put([token], prompt_len + step, sequence, True)
            compute()
        context.close()

    protocol.answer(f"{library.version} ({library.system_info()})", job)


if __name__ == "__main__":
    main()
