"""What a message and a token cost the front end: the simulated runner at zero step time, a client in another process.

For each number of streams: messages and tokens a second as the client saw them, and CPU microseconds of the server's
front process and of its engine process per token and per message.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import grpc
from common import cpu_seconds, daemon, machine, process_tree, save, table

from runnerd.v1 import generation_pb2, inference_pb2_grpc


async def drive(address: str, streams: int, output_len: int) -> tuple[int, int, float]:
    """Stream ``streams`` requests at once; give messages, tokens and seconds."""

    async def one(stub: inference_pb2_grpc.InferenceServiceStub, index: int) -> tuple[int, int]:
        request = generation_pb2.GenerateRequest(
            text=f"stream {index}",
            sampling=generation_pb2.SamplingParams(temperature=0),
            stopping=generation_pb2.StoppingParams(max_tokens=output_len, ignore_eos=True),
        )
        messages = tokens = 0
        async for message in stub.StreamGenerate(request):
            messages += 1
            if message.output.HasField("finish"):
                tokens = message.output.finish.usage.completion_tokens
        return messages, tokens

    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        await channel.channel_ready()
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        begin = time.perf_counter()
        counts = await asyncio.gather(*(one(stub, index) for index in range(streams)))
        elapsed = time.perf_counter() - begin
    return sum(one[0] for one in counts), sum(one[1] for one in counts), elapsed


def client(arguments: argparse.Namespace) -> None:
    """Run one measurement in this process and print it as JSON."""
    print(json.dumps(asyncio.run(drive(arguments.address, arguments.streams[0], arguments.output_len))))


def measure(pid: int, address: str, streams: int, output_len: int) -> dict[str, float]:
    """Run a client process once against the daemon ``pid``."""
    engines = [one for one in process_tree(pid) if one != pid]
    before = cpu_seconds(pid), sum(map(cpu_seconds, engines))
    command = [sys.executable, __file__, "--address", address, "--streams", str(streams)]
    output = subprocess.run(
        [*command, "--output-len", str(output_len)], check=True, capture_output=True, text=True, timeout=600
    ).stdout
    messages, tokens, seconds = json.loads(output)
    front = cpu_seconds(pid) - before[0]
    engine = sum(map(cpu_seconds, engines)) - before[1]
    return {
        "messages_per_second": messages / seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_message": tokens / messages,
        "front_cpu_us_per_token": 1e6 * front / tokens,
        "front_cpu_us_per_message": 1e6 * front / messages,
        "engine_cpu_us_per_token": 1e6 * engine / tokens,
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 48, 256])
    parser.add_argument("--tokens", type=int, default=48_000, help="tokens in all per measurement")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--output-len", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.address:
        client(arguments)
        return
    before = machine()
    results: dict[str, Any] = {}
    with daemon("--runner", "sim", "--max-num-seqs", "256") as server:
        for streams in arguments.streams:
            output_len = max(16, min(4096, arguments.tokens // streams))
            runs = [
                measure(server.process.pid, server.address, streams, output_len)
                for _ in range(arguments.repetitions + 1)
            ][1:]  # the first is the warm-up
            results[str(streams)] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    result = {"machine": before, "repetitions": arguments.repetitions, "streams": results, "pid": os.getpid()}
    print(json.dumps(result, indent=1))
    keys = list(next(iter(results.values())))
    header = [
        "streams",
        "messages/s",
        "tokens/s",
        "tokens/message",
        "front us/token",
        "front us/message",
        "engine us/token",
    ]
    print(table(header, [[name, *(one[key] for key in keys)] for name, one in results.items()]))
    print(f"written to {save('frontend', result)}")


if __name__ == "__main__":
    main()
