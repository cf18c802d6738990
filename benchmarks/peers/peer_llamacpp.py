"""llama.cpp through llama-cpp-python's C interface: the loop of its batched example, sequences of one context.

``--dtype`` names the type of the GGUF file that ``checkpoints.py`` wrote: bfloat16 or q4_1.
"""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np
import protocol

BATCH_TOKENS = 2048


def main() -> None:
    """Load the file and answer."""
    given = protocol.arguments()
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(f"{given.model}.{given.dtype}.gguf".encode(), parameters)
    if not model:
        raise SystemExit(f"cannot load {given.model}.{given.dtype}.gguf")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def job(prompts: list[list[int]], output_len: int, times: protocol.Times) -> None:
        count, prompt_len = len(prompts), len(prompts[0])
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = count * ((prompt_len + output_len + 255) // 256 * 256)
        options.n_batch, options.n_seq_max = BATCH_TOKENS, count
        options.n_threads = options.n_threads_batch = given.threads
        context = llama_cpp.llama_init_from_model(model, options)
        batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        batch.n_tokens = 0
        latest = [0] * count
        asked: list[int] = []

        def put(token: int, position: int, sequence: int, sample: bool) -> None:
            place = batch.n_tokens
            batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, position, 1
            batch.seq_id[place][0] = sequence
            batch.logits[place] = sample
            batch.n_tokens = place + 1
            if sample:
                asked.append(sequence)
            if batch.n_tokens == BATCH_TOKENS:
                compute()

        def compute() -> None:
            if batch.n_tokens and llama_cpp.llama_decode(context, batch):
                raise SystemExit("llama_decode failed")
            if asked:
                logits = llama_cpp.llama_get_logits(context)
                for sequence, token in zip(
                    asked, np.ctypeslib.as_array(logits, shape=(len(asked), vocab_size)).argmax(1), strict=True
                ):
                    latest[sequence] = int(token)
                    times.note(sequence)
            asked.clear()
            batch.n_tokens = 0

        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                put(token, position, sequence, position == prompt_len - 1)
        compute()
        for step in range(output_len - 1):
            for sequence in range(count):
                put(latest[sequence], prompt_len + step, sequence, True)
            compute()
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)

    protocol.answer(llama_cpp.__version__, job)


if __name__ == "__main__":
    main()
