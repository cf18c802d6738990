"""The workloads that engines are compared on, and how one repetition of one is timed.

All requests of a workload arrive at once. TTFT is a request's time to its first token, TPOT its (last - first) /
(tokens - 1), ITL the time between two of its messages.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import grpc
from common import busy_seconds, peak_mib, percentiles, process_tree

from runnerd.v1 import generation_pb2, inference_pb2_grpc

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


def measure(run: Callable[[], Measured], pid: int) -> Measured:
    """Run one repetition and note how much CPU all processes of the machine took meanwhile."""
    tree = process_tree(pid)
    before, begin = busy_seconds(), time.perf_counter()
    measured = run()
    elapsed = time.perf_counter() - begin
    measured["machine_busy_cores"] = (busy_seconds() - before) / elapsed
    measured["peak_mib"] = peak_mib(tree)
    return measured


def median_of(repetitions: list[Measured]) -> Measured:
    """Median of each figure over the repetitions."""
    merged: Measured = {}
    for key, value in repetitions[0].items():
        values = [one[key] for one in repetitions]
        merged[key] = median_of(values) if isinstance(value, dict) else statistics.median(values)
    return merged
