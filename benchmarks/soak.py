"""A daemon on the simulated runner under users who misbehave and an engine that is killed: is anything lost or left?

Users ask, read, cancel, stall, let deadlines pass, abort, reconnect and vanish, while the engine gets SIGKILL again and
again. Every token of every stream is compared with the answer of an undisturbed server. At the end, at rest, the
daemon has to hold what it held before: no request, block, task, thread or descriptor more, and no more memory.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import uvloop
from common import Daemon, daemon, machine, save, table
from grpc_health.v1 import health_pb2, health_pb2_grpc
from soak_relay import Relay
from soak_requests import Reference, draw_requests, undisturbed
from soak_users import Tally, User, World
from soak_watch import Held, Memory, Probe, children, left_over, slope_per_hour

from runnerd_client import AsyncClient

_REST_SECONDS = 60.0
_JUDGED_SECONDS = 300.0
"""Shorter runs say nothing about memory: caches and pools are still filling."""
_GROWTH_MIB = 8.0
_GROWTH_SHARE = 0.05


@dataclass(slots=True)
class Outages:
    """What health told, and how the daemon answered."""

    kills: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of each time in which health was not SERVING."""
    answer_seconds: list[float] = field(default_factory=list)
    """Of GetLoad, once a second."""

    async def follow_health(self, address: str) -> None:
        """Note each outage until cancelled."""
        began: float | None = None
        async with grpc.aio.insecure_channel(address) as channel:
            async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                if answer.status != health_pb2.HealthCheckResponse.SERVING:
                    began = time.monotonic()
                elif began is not None:
                    self.seconds.append(time.monotonic() - began)
                    began = None

    async def ask(self, client: AsyncClient) -> None:
        """Ask for the load once a second until cancelled; it has to answer in every state."""
        while True:
            began = time.monotonic()
            await client.load(timeout=30)
            self.answer_seconds.append(time.monotonic() - began)
            await asyncio.sleep(1.0)

    async def kill(self, pid: int, times: Sequence[float]) -> None:
        """Kill the engine process at each of ``times`` (of ``time.monotonic``), be it serving or starting."""
        killed: set[int] = set()  # one that was killed is a child until the daemon has seen it
        for at in times:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            while not (engines := [one for one in children(pid) if one not in killed]):  # noqa: ASYNC110 - between two
                await asyncio.sleep(0.02)
            os.kill(engines[0], signal.SIGKILL)
            killed.add(engines[0])
            self.kills += 1


async def references(arguments: argparse.Namespace) -> list[Reference]:
    """Ask an undisturbed server for all answers."""
    source = random.Random(arguments.seed)
    requests = list(draw_requests(source, arguments.requests, arguments.max_tokens))
    with daemon("--runner", "sim") as server:
        async with AsyncClient(server.address, timeout=600) as client:
            return list(await asyncio.gather(*(undisturbed(client, *request) for request in requests)))


async def recovered(client: AsyncClient) -> None:
    """Wait until a second engine serves."""
    async with asyncio.timeout(_REST_SECONDS):
        while True:
            info = await client.server_info()
            if info.num_engine_restarts and info.engine_pid:
                return
            await asyncio.sleep(0.05)


async def at_rest(client: AsyncClient, probe: Probe, before: Held | None) -> tuple[dict[str, int], Held]:
    """Wait until the daemon holds no more than ``before``; give what it still does when the time is over, and all."""
    end = time.monotonic() + _REST_SECONDS
    while True:
        gc.collect()  # of ours: a closed channel keeps its connection for as long as its calls are garbage
        load = await client.load(timeout=30)
        used = {"running": load.num_running, "waiting": load.num_waiting, "blocks": load.num_used_blocks}
        await asyncio.sleep(0.2)  # until the server has done with that call
        held = await probe.held()
        left = {name: count for name, count in used.items() if count} | (left_over(before, held) if before else {})
        if not left or time.monotonic() > end:
            return left, held
        await asyncio.sleep(0.5)


async def soak(arguments: argparse.Namespace, server: Daemon, probe: Probe, right: list[Reference]) -> dict[str, Any]:
    """Run it and give what was seen."""
    pid, tally, outages, memory = server.process.pid, Tally(), Outages(), Memory()
    source = random.Random(arguments.seed)
    relay = Relay(server.address)
    await relay.start()
    async with AsyncClient(server.address, timeout=60) as client:
        await asyncio.gather(*(client.generate(one.prompt, max_tokens=2) for one in right[:8]))
        os.kill((await client.server_info()).engine_pid, signal.SIGKILL)  # what the first restart keeps is kept once
        await recovered(client)
        _, before = await at_rest(client, probe, None)
        began = time.monotonic()
        end = began + arguments.seconds
        times = kill_times(source, began, 0.8 * arguments.seconds, arguments.kills)
        watchers = [
            asyncio.create_task(memory.sample(pid, began)),
            asyncio.create_task(outages.follow_health(server.address)),
            asyncio.create_task(outages.ask(client)),
        ]
        world = World(server.address, relay, right, tally, arguments.step_seconds)
        users = [User(world, arguments.seed * 1_000_000 + number) for number in range(arguments.streams)]
        working = asyncio.gather(outages.kill(pid, times), *(user.run(end) for user in users))
        await asyncio.wait([working, *watchers], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        else:  # the daemon is gone: there is nothing to wait for
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        seconds = time.monotonic() - began
        for watcher in watchers:
            if watcher.done():
                raise SystemExit(f"the daemon cannot be watched any more: {watcher.exception()!r}")
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await relay.close()
        users.clear()
        watchers.clear()
        left, after = await at_rest(client, probe, before)
        restarts = (await client.server_info()).num_engine_restarts
    return {
        "seconds": seconds,
        "kills": outages.kills,
        "restarts": restarts,
        "outages": outages.seconds,
        "max_answer_seconds": max(outages.answer_seconds),
        "calls": {name: dict(ends) for name, ends in sorted(tally.ended.items())},
        "tokens_compared": tally.num_tokens,
        "num_failures": tally.num_failures,
        "failures": tally.failures,
        "left": left,
        "held_before": before,
        "held_after": after,
        "memory": {"front": _memory(memory.front), "engine": _memory(_last_life(memory.engine))},
    }


def kill_times(source: random.Random, began: float, seconds: float, count: int) -> list[float]:
    """Give a time in each of ``count`` equal parts; some follow each other closely.

    The end of the run goes undisturbed, so that an engine gets old enough to show how its memory goes.
    """
    part = seconds / max(1, count)
    return [began + part * (number + source.random()) for number in range(count)]


def _last_life(samples: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Give the samples of the last engine: since its memory last was much less than just before."""
    drops = [i for i in range(1, len(samples)) if samples[i][1] < 0.8 * samples[i - 1][1]]
    return samples[drops[-1] :] if drops else samples


def _memory(samples: list[tuple[float, float]]) -> dict[str, Any]:
    late = samples[len(samples) // 5 :]
    part = max(1, len(late) // 8)
    first, last = (statistics.fmean(value for _, value in one) for one in (late[:part], late[-part:]))
    return {
        "first_mib": first,
        "last_mib": last,
        "max_mib": max(value for _, value in samples),
        "slope_mib_per_hour": slope_per_hour(late),
        "samples": [(round(at, 1), round(value, 1)) for at, value in samples[:: max(1, len(samples) // 120)]],
    }


def problems(result: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    """Say what speaks against the daemon."""
    found = [f"{result['num_failures']} calls went wrong"] if result["num_failures"] else []
    found += [f"left at rest: {name}: {count}" for name, count in result["left"].items()]
    if result["restarts"] < arguments.kills + 1:  # one before it began
        found.append(f"{result['restarts']} restarts after {arguments.kills} kills")
    if result["exit_code"]:
        found.append(f"the daemon ended with exit code {result['exit_code']}")
    found += [f"left behind in the temporary folder: {name}" for name in result["files_left"]]
    if arguments.seconds >= _JUDGED_SECONDS:
        for name, one in result["memory"].items():
            growth = one["last_mib"] - one["first_mib"]
            if growth > max(_GROWTH_MIB, _GROWTH_SHARE * one["first_mib"]):
                found.append(f"memory of the {name} process grew by {growth:.1f} MiB")
    return found


def report(result: dict[str, Any]) -> None:
    """Print tables and the verdict."""
    ends = sorted({end for ended in result["calls"].values() for end in ended})
    rows = [[name, *(ended.get(end, 0) for end in ends)] for name, ended in result["calls"].items()]
    print(table(["what users did", *ends], rows))
    memory = result["memory"]
    keys = ("first_mib", "last_mib", "max_mib", "slope_mib_per_hour")
    print(table(["process", *keys], [[name, *(one[key] for key in keys)] for name, one in memory.items()]))
    outages = result["outages"]
    longest = (
        f", health not SERVING for {statistics.median(outages):.2f} s (longest {max(outages):.2f})" if outages else ""
    )
    print(
        f"{result['seconds']:.0f} s, {result['kills']} kills, {result['restarts']} restarts{longest}; GetLoad answered "
        f"within {result['max_answer_seconds']:.2f} s; {result['tokens_compared']} tokens compared"
    )
    for line in result["failures"]:
        print(f"  {line}")
    print("\n".join(f"FAILED: {one}" for one in result["problems"]) or "nothing lost, nothing wrong, nothing left")


def main() -> int:
    """Run the soak; gives 1 when something speaks against the daemon."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--streams", type=int, default=256, help="users, each with one stream at a time")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--requests", type=int, default=200, help="different requests")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="folder of the result")
    arguments = parser.parse_args()
    before = machine()
    right = uvloop.run(references(arguments))
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        temporary = folder / "tmp"
        temporary.mkdir()
        options = {"step_seconds": arguments.step_seconds, "kv_shadow": "true", "num_blocks": 2500}
        log_path = folder / "log"
        with log_path.open("w") as log:
            with daemon(
                "--runner", "sim", "--max-num-seqs", "256",
                # Kills follow each other closely at times; when to give up is not the question here.
                "--engine-restart-backoff", "0.2", "--max-engine-restarts", "20",
                *(part for key, value in options.items() for part in ("--runner-option", f"{key}={value}")),
                program=(str(Path(__file__).with_name("probe.py")), str(folder / "held")),
                log=log,
                environment={"TMPDIR": str(temporary)},
            ) as server:  # fmt: skip
                try:
                    result = uvloop.run(soak(arguments, server, Probe(server.process.pid, folder / "held"), right))
                except BaseException:
                    with suppress(OSError):
                        print(log_path.read_text()[-5000:], file=sys.stderr)
                    raise
            result["exit_code"] = server.process.returncode
        result["files_left"] = [path.name for path in temporary.iterdir()]
        result["log_errors"] = sum("Traceback" in line for line in log_path.read_text().splitlines())
    given = {name: value for name, value in vars(arguments).items() if name != "results"}
    result = {"machine": before, "arguments": given} | result
    result["problems"] = problems(result, arguments)
    report(result)
    print(f"written to {save('soak', result, arguments.results)}")
    return int(bool(result["problems"]))


if __name__ == "__main__":
    sys.exit(main())
