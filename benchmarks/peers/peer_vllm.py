"""vLLM's CPU build, its engine stepped from here; compute threads on all cores (its default leaves one out)."""

from __future__ import annotations

import glob
import itertools
import os
import sys

import protocol


def prepare(threads: int) -> None:
    """Start anew with the allocator and the OpenMP library that vLLM advises: both must be there from the beginning."""
    if os.environ.get("RUNNERD_BENCH_PEER") == "ready":
        return
    libraries = glob.glob("/usr/lib/*/libtcmalloc_minimal.so.4")[:1] + glob.glob(f"{sys.prefix}/lib/libiomp5.so")
    os.environ |= {
        "RUNNERD_BENCH_PEER": "ready",
        "LD_PRELOAD": ":".join(libraries),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.execv(sys.executable, [sys.executable, *sys.argv])


def main() -> None:
    """Load the model and answer."""
    given = protocol.arguments()
    prepare(given.threads)
    # The engine's processes write to standard output, too: the answers get a file descriptor of their own.
    answers = os.dup(1)
    os.dup2(2, 1)
    import vllm
    from vllm.sampling_params import RequestOutputKind

    engine = vllm.LLM(
        model=given.model,
        dtype=given.dtype,
        max_model_len=4096,
        enable_prefix_caching=False,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        seed=0,
    ).llm_engine
    sys.stdout = os.fdopen(answers, "w")
    numbers = itertools.count()

    def job(prompts: list[list[int]], output_len: int, times: protocol.Times) -> None:
        sampling = vllm.SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=output_len,
            min_tokens=output_len,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        names = [f"r{next(numbers)}" for _ in prompts]
        indices = {name: index for index, name in enumerate(names)}
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                times.note(indices[output.request_id], len(output.outputs[0].token_ids))

    protocol.answer(vllm.__version__, job)


if __name__ == "__main__":
    main()
