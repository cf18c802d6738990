"""A runner that crashes, hangs, leaks or prints rubbish harms the engine process only, and the operator learns why."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from runnerd.v1.server_pb2 import GetServerInfoResponse, ServerState
from runnerd_client import AsyncClient

SECONDS = 100
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

# The simulated runner, which misbehaves when a prompt says so: once in each way, whatever process it is in.
RUDE = """
import ctypes, os, resource, subprocess, sys, threading, time
from dataclasses import replace
from pathlib import Path

from runnerd_sim.plugin import SIM
from runnerd_spi import RunnerPlugin

FOLDER = Path(__file__).parent


def aborts():
    os.write(2, b"rude: the driver is gone\\n")
    os.abort()


def segfaults():
    print("rude: reading where nothing is", flush=True)
    ctypes.string_at(0)


def raises():
    try:
        raise OSError("the card fell off the bus")
    except OSError as error:
        raise RuntimeError("rude: cannot launch") from error


def hangs():
    time.sleep(3600)


def leaks():
    room = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    kept = []
    while True:
        kept.append(bytearray(1 << 20))


def leaves_a_child():
    child = subprocess.Popen(["sleep", "600"])
    (FOLDER / "child").write_text(str(child.pid))
    print("rude: good bye", file=sys.stderr, flush=True)
    os._exit(8)


def prints():
    for number in range(200):
        print("ERROR not at all", number, "\\x1b[2J\\x07", flush=True)
    os.write(1, bytes(range(256)) * 1000 + b"\\n")
    os.write(2, b"no end of line " * 20000)
    os.close(1)
    os.close(2)


class Rude:
    def __init__(self, config):
        self.inner = SIM.create(replace(config, options={"step_seconds": 0.005}))
        for name in ("load", "profile", "init_kv_cache", "warm_up", "close"):
            setattr(self, name, getattr(self.inner, name))

    def execute_model(self, plan):
        for admit in plan.admits:
            text = bytes(token for token in admit.token_ids if token < 256).decode(errors="replace")
            way = text.partition("please ")[2][:20].split(".")[0]
            if way and not (FOLDER / way).exists():
                (FOLDER / way).touch()
                globals()[way]()
        return self.inner.execute_model(plan)


PLUGIN = RunnerPlugin("rude", "for tests", SIM.capabilities, Rude)
"""


class Victims:
    """A daemon with the rude runner, and streams that are none of its faults."""

    def __init__(self, daemon, client: AsyncClient, folder: Path) -> None:
        self.daemon, self.client, self.folder = daemon, client, folder
        self.expected: dict[str, str] = {}

    async def text(self, prompt: str) -> str:
        answer = await self.client.generate(prompt, seed=3, ignore_eos=True, max_tokens=60)
        return answer.outputs[0].text

    async def beside(self, way: str) -> GetServerInfoResponse:
        """Run streams beside a request that has the runner misbehave; all are whole. Gives what is told after it."""
        prompts = ["one", "another", f"please {way}."]
        (self.folder / way).touch()
        expected = [await self.text(prompt) for prompt in prompts]
        (self.folder / way).unlink()
        async with asyncio.timeout(SECONDS):
            assert await asyncio.gather(*map(self.text, prompts)) == expected
            assert (self.folder / way).exists()
            info = await self.client.server_info()
            while info.state != ServerState.SERVER_STATE_SERVING:
                await asyncio.sleep(0.02)
                info = await self.client.server_info()
        assert self.daemon.process.poll() is None
        return info


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def victims(module_daemon, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Victims]:
    folder = tmp_path_factory.mktemp("rude")
    (folder / "rude.py").write_text(RUDE)
    installed = folder / "rude-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: rude\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[runnerd.runners]\nrude = rude:PLUGIN\n")
    daemon = module_daemon(
        *("--runner", "rude", "--no-prefix-caching", "--step-timeout", "5", "--engine-restart-backoff", "0.1"),
        environment={"PYTHONPATH": str(folder)},
    )
    address = await asyncio.to_thread(daemon.wait_until_ready)
    async with AsyncClient(address, timeout=SECONDS) as client:
        yield Victims(daemon, client, folder)
    daemon.terminate()
    assert await asyncio.to_thread(daemon.wait) == 0


@pytest.mark.parametrize(
    ("way", "causes"),
    [
        ("aborts", ["was killed by SIGABRT", "rude: the driver is gone"]),
        ("segfaults", ["was killed by SIGSEGV", "rude: reading where nothing is"]),
        ("raises", ["rude: cannot launch", "the card fell off the bus"]),
        ("leaks", ["MemoryError"]),
        ("hangs", ["no step ended"]),
    ],
)
async def test_streams_outlive_it_and_its_last_words_are_told(victims: Victims, way: str, causes: list[str]) -> None:
    before = (await victims.client.server_info()).num_engine_restarts
    info = await victims.beside(way)
    assert info.num_engine_restarts > before
    log = victims.daemon.log()
    for cause in causes:
        assert cause in info.last_error
        assert cause in log


async def test_a_process_it_leaves_behind_holds_nothing_up(victims: Victims) -> None:
    info = await victims.beside("leaves_a_child")
    child = int((victims.folder / "child").read_text())
    try:
        assert "ended with exit code 8" in info.last_error
        assert "rude: good bye" in info.last_error
        assert psutil.pid_exists(child)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


async def test_rubbish_is_printed_as_text_and_disturbs_nobody(victims: Victims) -> None:
    before = await victims.client.server_info()
    info = await victims.beside("prints")
    assert info.num_engine_restarts == before.num_engine_restarts
    assert info.engine_pid == before.engine_pid
    log = victims.daemon.log()
    assert r"not at all 199 \x1b[2J\x07" in log
    assert "no end of line no end of line" in log
    assert re.search("[\x00-\x08\x0b-\x1f]", log) is None
    assert max(map(len, log.splitlines())) < 10_000
