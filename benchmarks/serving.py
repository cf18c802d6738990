"""runnerd through gRPC beside transformers.generate: the same weights, dtype, threads and prompts, in one run.

Greedy, EOS ignored, random prompts. Both engines are started once and take turns, workload by workload and repetition
by repetition, while the other one idles. Figures are medians over the repetitions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from typing import Any

import grpc
from checkpoints import embedded_model
from common import Daemon, daemon, machine, random_prompts, save, table
from peer_engines import PEERS, Launched, launch_peer
from workloads import WORKLOADS, Measured, measure, median_of, run_runnerd

from runnerd.v1 import server_pb2, server_pb2_grpc


def compare(arguments: argparse.Namespace, server: Daemon, peer: Launched, vocab_size: int) -> dict[str, Any]:
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
            theirs = measure(lambda p=prompts, n=output_len: peer.run(p, n), peer.pid)
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
    arguments = parser.parse_args()
    before = machine()
    serve = [*([arguments.model] if arguments.model else []), "--dtype", arguments.dtype]
    serve += ["--runner-option", f"num_threads={arguments.threads}", *arguments.serve_argument]
    transformers = launch_peer(
        PEERS["transformers"], sys.executable, arguments.model or embedded_model(), arguments.dtype, arguments.threads
    )
    with daemon(*serve) as server, transformers as peer:
        with grpc.insecure_channel(server.address) as channel:
            model = server_pb2_grpc.ModelServiceStub(channel).GetModelInfo(server_pb2.GetModelInfoRequest())
        results = compare(arguments, server, peer, min(model.vocab_size, 49152))
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
