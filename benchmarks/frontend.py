"""What a message and a token cost the front end, beside a bare grpc.aio stream of the same messages in the same run.

The simulated runner goes flat out (zero step time) or at 50 tokens a second and stream; a client in another process
reads. The bare server sends one prepared message after the other, at the same pace: what gRPC costs by itself. Figures
are medians over the repetitions. Rates and costs are those of a time in which all streams run; what it takes to begin a
request is told apart. CPU is that of the server's front process, all its threads. A token is late by how much it comes
behind an even pace; what the front end adds is the difference to the bare server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
import uvloop
from common import Daemon, daemon, machine, peak_mib, process_tree, save, table

from runnerd.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

PACED_SECONDS = 0.02
MAX_TOKENS = 30_000
"""Of a stream; none should get so far."""
BEGIN_SECONDS = 180.0
"""In which all streams have to begin."""
PACES = {"flat out": 0.0, "50 tokens/s": PACED_SECONDS}
MAX_STREAMS = 1024
SCRIPT = "x" * 5000
BARE = re.compile(r"bare on (\S+)")
Measured = dict[str, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """What a client has taken and what the server has used, at one moment."""

    seconds: float
    messages: int
    tokens: int
    front_ns: int
    engine_ns: int
    client_ns: int


@dataclass(frozen=True, slots=True)
class Driven:
    """What a client saw of one round."""

    start: Sample
    """Before the first request."""
    begin: Sample
    """Each stream has a token."""
    end: Sample
    late_ms_p50: float
    late_ms_p99: float
    """Of all tokens, but without those of streams that are too short to have a pace."""


def cpu_ns(pids: Sequence[int]) -> int:
    """CPU time, user and system, that processes have used, of all their threads."""
    return sum(time.clock_gettime_ns(~pid << 3 | 2) for pid in pids)  # Linux names a process's clock so


class Client:
    """Streams requests, all at once.

    Args:
        front: The server's process.
        engines: Its children.
    """

    def __init__(self, front: int, engines: Sequence[int]) -> None:
        self._front = front
        self._engines = engines
        self._num_messages = self._num_tokens = self._num_running = 0

    async def drive(self, address: str, streams: int, seconds: float) -> Driven:
        """Let ``streams`` requests run for so long after each has a token, then leave.

        Raises:
            SystemExit: There was no time in which all ran.
        """
        times: list[list[float]] = [[] for _ in range(streams)]
        all_run, one_ended = asyncio.Event(), asyncio.Event()

        async def one(stub: inference_pb2_grpc.InferenceServiceStub, index: int) -> None:
            request = generation_pb2.GenerateRequest(
                text=f"stream {index}",
                sampling=generation_pb2.SamplingParams(temperature=0),
                stopping=generation_pb2.StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
            )
            mine = times[index]
            async for message in stub.StreamGenerate(request):
                new = len(message.output.text)  # SCRIPT has a character a token
                self._num_messages += 1
                self._num_tokens += new
                if new and not mine:
                    self._num_running += 1
                    if self._num_running == streams:
                        all_run.set()
                mine += [time.perf_counter()] * new
            one_ended.set()

        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            await channel.channel_ready()
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            start = self._sample()
            calls = [asyncio.create_task(one(stub, index)) for index in range(streams)]
            try:
                await asyncio.wait_for(all_run.wait(), BEGIN_SECONDS)
            except TimeoutError:
                raise SystemExit(
                    f"{self._num_running} of {streams} streams had begun after {BEGIN_SECONDS:g} s"
                ) from None
            begin = self._sample()
            if one_ended.is_set():
                raise SystemExit(f"the first of {streams} streams ended before the last had begun")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(one_ended.wait(), seconds)
            end = self._sample()
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
        late = sorted(ms for one in times for ms in lateness(one)) or [0.0]
        return Driven(start, begin, end, statistics.median(late), late[int(0.99 * len(late))])

    def _sample(self) -> Sample:
        used = cpu_ns([self._front]), cpu_ns(self._engines), time.process_time_ns()
        return Sample(time.perf_counter(), self._num_messages, self._num_tokens, *used)


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


@contextlib.contextmanager
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


def measure(server: Daemon, streams: int, seconds: float) -> Measured:
    """Run a client process once against ``server``.

    Raises:
        CalledProcessError: There was no time in which all streams ran; the client has told.
    """
    pid = server.process.pid
    engines = [one for one in process_tree(pid) if one != pid]
    command = [sys.executable, __file__, "--address", server.address, "--streams", str(streams)]
    command += ["--seconds", str(seconds), "--pids", str(pid), *map(str, engines)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout
    driven = msgspec.json.decode(output, type=Driven)
    start, begin, end = driven.start, driven.begin, driven.end
    messages, tokens, seconds = end.messages - begin.messages, end.tokens - begin.tokens, end.seconds - begin.seconds
    front_ns = end.front_ns - begin.front_ns
    begun_ns = begin.front_ns - start.front_ns - begin.messages * front_ns / messages
    return {
        "messages_per_second": messages / seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_message": tokens / messages,
        "front_cpu_us_per_token": 1e-3 * front_ns / tokens,
        "front_cpu_us_per_message": 1e-3 * front_ns / messages,
        "front_cpu_us_per_request": 1e-3 * max(0.0, begun_ns) / streams,
        "engine_cpu_us_per_token": 1e-3 * (end.engine_ns - begin.engine_ns) / tokens,
        "client_cpu_us_per_message": 1e-3 * (end.client_ns - begin.client_ns) / messages,
        "late_ms_p50": driven.late_ms_p50,
        "late_ms_p99": driven.late_ms_p99,
        "front_peak_mib": peak_mib([pid]),
    }


def compare(pace: str, arguments: argparse.Namespace) -> dict[str, dict[str, Measured]]:
    """Measure both servers at one pace, in turns; gives figures by number of streams and server."""
    step_seconds, results = PACES[pace], {}
    most = max(*arguments.streams, 512)
    options = [f"step_seconds={step_seconds}", "num_blocks=60000", "max_model_len=32768", f"script={SCRIPT}"]
    serve = ["--runner", "sim", "--max-num-seqs", str(most), "--max-num-batched-tokens", str(max(2048, most))]
    serve += ["--block-size", "128"]  # so that there is room for all that comes while the last streams begin
    with (
        daemon(*serve, *(part for option in options for part in ("--runner-option", option))) as runnerd,
        bare(step_seconds) as plain,
    ):
        servers = {"runnerd": runnerd, "bare grpc.aio": plain}
        for streams in arguments.streams:
            print(f"{pace}, {streams} streams", file=sys.stderr, flush=True)
            runs: dict[str, list[Measured]] = {name: [] for name in servers}
            try:
                for repetition in range(arguments.repetitions + 1):
                    for name, server in servers.items():
                        measured = measure(server, streams, arguments.seconds)
                        if repetition:  # the first is the warm-up
                            runs[name].append(measured)
            except subprocess.CalledProcessError:
                print(f"{pace}, {streams} streams: left out", file=sys.stderr, flush=True)
                continue
            results[str(streams)] = {
                name: {key: statistics.median(run[key] for run in them) for key in them[0]}
                for name, them in runs.items()
            }
    return results


def comparison(mine: Measured, bare: Measured) -> Iterator[str]:
    """Tell by how many times the front's figures are those of the bare server."""
    for name, text in (("message", "of a bare message"), ("token", "of a bare message for each token")):
        times = mine[f"front_cpu_us_per_{name}"] / bare["front_cpu_us_per_message"]
        yield f"{times:.2f} times the CPU {text}"
    yield f"{mine['tokens_per_second'] / bare['tokens_per_second']:.2f} times the tokens/s"


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 48, 256, MAX_STREAMS])
    parser.add_argument("--seconds", type=float, default=3.0, help="time of a measurement")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--paces", nargs="*", choices=list(PACES), default=list(PACES))
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--pids", type=int, nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--bare", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare is not None:
        uvloop.run(serve_bare(arguments.bare))
        return
    if arguments.address:
        client = Client(arguments.pids[0], arguments.pids[1:])
        driven = uvloop.run(client.drive(arguments.address, arguments.streams[0], arguments.seconds))
        print(msgspec.json.encode(driven).decode())
        return
    result: dict[str, Any] = {"machine": machine()} | {
        one: getattr(arguments, one) for one in ("repetitions", "seconds")
    }
    result["paces"] = {pace: compare(pace, arguments) for pace in arguments.paces}
    header = ["streams", "server", "messages/s", "tokens/s", "tokens/message", "front us/token", "front us/message"]
    header += ["front us/request", "engine us/token", "client us/message", "late ms p50", "late ms p99", "front MiB"]
    for pace, results in result["paces"].items():
        rows = [
            [streams, name, *measured.values()] for streams, both in results.items() for name, measured in both.items()
        ]
        print(f"\n{pace}\n\n{table(header, rows)}")
        for streams, both in results.items():
            print(f"{streams} streams: {'; '.join(comparison(both['runnerd'], both['bare grpc.aio']))}")
    print(f"written to {save('frontend', result)}")


if __name__ == "__main__":
    main()
