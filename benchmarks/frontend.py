"""What a message and a token cost the front end, beside a bare grpc.aio stream of the same messages in the same run.

The simulated runner goes flat out (zero step time) or at 50 tokens a second and stream; a client in another process
reads. The bare server sends one prepared message after the other, at the same pace: what gRPC costs by itself. Figures
are medians over the repetitions. CPU is that of the server's front process. A token is late by how much it comes behind
an even pace; what the front end adds is the difference to the bare server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import uvloop
from common import Daemon, cpu_seconds, daemon, machine, peak_mib, process_tree, save, table

from runnerd.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

PACED_SECONDS = 0.02
PACED_TOKENS = 150
PACES = {"flat out": 0.0, "50 tokens/s": PACED_SECONDS}
MAX_STREAMS = 1024
SCRIPT = "x" * 5000
BARE = re.compile(r"bare on (\S+)")
Measured = dict[str, float]


@dataclass(slots=True)
class Driven:
    """What a client saw of one round."""

    messages: int
    tokens: int
    seconds: float
    late_ms_p50: float
    late_ms_p99: float
    """Of all tokens, but without those of streams that are too short to have a pace."""


async def drive(address: str, streams: int, output_len: int) -> Driven:
    """Stream ``streams`` requests at once."""

    async def one(stub: inference_pb2_grpc.InferenceServiceStub, index: int) -> tuple[int, list[float]]:
        request = generation_pb2.GenerateRequest(
            text=f"stream {index}",
            sampling=generation_pb2.SamplingParams(temperature=0),
            stopping=generation_pb2.StoppingParams(max_tokens=output_len, ignore_eos=True),
        )
        messages, times = 0, []
        async for message in stub.StreamGenerate(request):
            messages += 1
            times += [time.perf_counter()] * len(message.output.text)  # SCRIPT has a character a token
        return messages, times

    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        await channel.channel_ready()
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        begin = time.perf_counter()
        rounds = await asyncio.gather(*(one(stub, index) for index in range(streams)))
        elapsed = time.perf_counter() - begin
    late = sorted(ms for _, times in rounds for ms in lateness(times)) or [0.0]
    messages, tokens = sum(one[0] for one in rounds), sum(len(one[1]) for one in rounds)
    return Driven(messages, tokens, elapsed, statistics.median(late), late[int(0.99 * len(late))])


def lateness(times: Sequence[float]) -> list[float]:
    """Give by how many milliseconds each token came behind an even pace through the stream's earliest token."""
    if len(times) < 10:
        return []
    pace = (times[-1] - times[0]) / (len(times) - 1)
    offsets = [at - number * pace for number, at in enumerate(times)]
    return [1e3 * (offset - min(offsets)) for offset in offsets]


class BareServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers each stream with as many equal messages of one token as it asks for; nothing is computed."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._message = inference_pb2.StreamGenerateResponse(output=inference_pb2.OutputChunk(text="x"))
        self._tick = asyncio.Event()

    async def StreamGenerate(  # noqa: N802, D102
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.StreamGenerateResponse]:
        for _ in range(request.stopping.max_tokens):
            if self._step_seconds:
                await self._tick.wait()
            yield self._message

    async def run_clock(self) -> None:
        """Wake all streams at each step."""
        at = time.monotonic()
        while True:
            at = max(at + self._step_seconds, time.monotonic())
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()


async def serve_bare(step_seconds: float) -> None:
    """Serve until the process is ended."""
    servicer, server = BareServicer(step_seconds), grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"bare on 127.0.0.1:{port}", flush=True)
    if step_seconds:
        await servicer.run_clock()
    await server.wait_for_termination()


@contextmanager
def bare(step_seconds: float) -> Iterator[Daemon]:
    """Run the bare server in a process of its own until the block ends."""
    command = [sys.executable, __file__, "--bare", str(step_seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = BARE.search(process.stdout.readline())
        if found is None:
            raise SystemExit(f"the bare server ended with code {process.wait()}")
        yield Daemon(process, found[1])
    finally:
        process.terminate()
        process.wait(timeout=30)


def measure(server: Daemon, streams: int, output_len: int) -> Measured:
    """Run a client process once against ``server``."""
    pid = server.process.pid
    engines = [one for one in process_tree(pid) if one != pid]
    before = cpu_seconds(pid), sum(map(cpu_seconds, engines))
    command = [sys.executable, __file__, "--address", server.address, "--streams", str(streams)]
    output = subprocess.run(
        [*command, "--output-len", str(output_len)], check=True, capture_output=True, text=True, timeout=600
    ).stdout
    driven = Driven(**json.loads(output))
    front = cpu_seconds(pid) - before[0]
    engine = sum(map(cpu_seconds, engines)) - before[1]
    return {
        "messages_per_second": driven.messages / driven.seconds,
        "tokens_per_second": driven.tokens / driven.seconds,
        "tokens_per_message": driven.tokens / driven.messages,
        "front_cpu_us_per_token": 1e6 * front / driven.tokens,
        "front_cpu_us_per_message": 1e6 * front / driven.messages,
        "engine_cpu_us_per_token": 1e6 * engine / driven.tokens,
        "late_ms_p50": driven.late_ms_p50,
        "late_ms_p99": driven.late_ms_p99,
        "front_peak_mib": peak_mib([pid]),
    }


def compare(pace: str, arguments: argparse.Namespace) -> dict[str, dict[str, Measured]]:
    """Measure both servers at one pace, in turns; gives figures by number of streams and server."""
    step_seconds, results = PACES[pace], {}
    most = max(*arguments.streams, 512)
    options = [f"step_seconds={step_seconds}", "num_blocks=20000", f"script={SCRIPT}"]
    serve = ["--runner", "sim", "--max-num-seqs", str(most), "--max-num-batched-tokens", str(max(2048, most))]
    with (
        daemon(*serve, *(part for option in options for part in ("--runner-option", option))) as runnerd,
        bare(step_seconds) as plain,
    ):
        servers = {"runnerd": runnerd, "bare grpc.aio": plain}
        for streams in arguments.streams:
            output_len = PACED_TOKENS if step_seconds else max(16, min(4096, arguments.tokens // streams))
            if step_seconds and arguments.quick:
                output_len = 20
            runs: dict[str, list[Measured]] = {name: [] for name in servers}
            for repetition in range(arguments.repetitions + 1):
                for name, server in servers.items():
                    measured = measure(server, streams, output_len)
                    if repetition:  # the first is the warm-up
                        runs[name].append(measured)
            results[str(streams)] = {
                name: {key: statistics.median(run[key] for run in them) for key in them[0]}
                for name, them in runs.items()
            }
    return results


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 48, 256, MAX_STREAMS])
    parser.add_argument("--tokens", type=int, default=48_000, help="tokens in all per measurement that goes flat out")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few tokens at the slower pace, too")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--output-len", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bare", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare is not None:
        uvloop.run(serve_bare(arguments.bare))
        return
    if arguments.address:
        driven = uvloop.run(drive(arguments.address, arguments.streams[0], arguments.output_len))
        print(json.dumps(asdict(driven)))
        return
    result: dict[str, Any] = {"machine": machine(), "repetitions": arguments.repetitions}
    result["paces"] = {pace: compare(pace, arguments) for pace in PACES}
    header = ["streams", "server", "messages/s", "tokens/s", "tokens/message", "front us/token", "front us/message"]
    header += ["engine us/token", "late ms p50", "late ms p99", "front MiB"]
    for pace, results in result["paces"].items():
        rows = [
            [streams, name, *measured.values()] for streams, both in results.items() for name, measured in both.items()
        ]
        print(f"\n{pace}\n\n{table(header, rows)}")
        for streams, both in results.items():
            mine, other = (both[name]["front_cpu_us_per_message"] for name in ("runnerd", "bare grpc.aio"))
            print(f"{streams} streams: {mine / other if other else 0:.2f} times the CPU of a bare message")
    print(f"written to {save('frontend', result)}")


if __name__ == "__main__":
    main()
