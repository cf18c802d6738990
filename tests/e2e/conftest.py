"""Real servers for real clients: in this process (rpc over the real engine process), or as a daemon of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from runnerd_client import AsyncClient
from runnerd_service.config import EngineConfig, ServerConfig
from runnerd_service.frontend.frontend import Frontend
from runnerd_service.rpc.server import RpcServer

WAIT_SECONDS = 30


@dataclass(frozen=True)
class LiveServer:
    """A server in this process and a client of it."""

    server: RpcServer
    frontend: Frontend
    client: AsyncClient

    @property
    def address(self) -> str:
        return self.server.addresses[0]


@asynccontextmanager
async def _serve(*, engine: dict | None = None, options: dict[str, str] | None = None, load: bool = True, **server):
    config = ServerConfig(
        port=0,
        engine=EngineConfig(runner="sim", runner_options=options or {}, **(engine or {})),
        **server,
    )
    frontend = Frontend(config)
    rpc_server = RpcServer(config, frontend)
    await rpc_server.start()
    try:
        if load:
            await frontend.start()
        async with AsyncClient(rpc_server.addresses[0], timeout=WAIT_SECONDS) as client:
            yield LiveServer(rpc_server, frontend, client)
    finally:
        await rpc_server.stop(0)
        await frontend.close()


@pytest.fixture(scope="session")
def serve() -> Callable[..., object]:
    """Gives ``async with serve(engine={...}, options={...}, load=False, ...) as live:``."""
    return _serve


@pytest.fixture(scope="module")
def serve_for_module() -> Callable[..., object]:
    """The same, for fixtures of a module."""
    return _serve


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live() -> AsyncIterator[LiveServer]:
    """A server whose tokens come at once."""
    async with _serve() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow() -> AsyncIterator[LiveServer]:
    """A server that takes 20 ms for a token."""
    async with _serve(options={"step_seconds": "0.02"}) as server:
        yield server


@pytest.fixture
def eventually() -> Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]:
    """Waits until an asynchronous condition holds."""

    async def wait(condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not await condition():  # noqa: ASYNC110 - the condition is asked over the wire
                await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def idle(eventually):
    """Waits until a server has neither requests nor used blocks, then checks the engine's books."""

    async def wait(live: LiveServer) -> None:
        async def is_idle() -> bool:
            load = await live.client.load()
            return (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0)

        await eventually(is_idle)
        assert live.frontend.num_live == 0

    return wait


@dataclass
class Daemon:
    """``runnerd serve`` in a process of its own."""

    process: subprocess.Popen[str]
    log_path: Path
    lines: list[str] = field(default_factory=list)

    def log(self) -> str:
        return self.log_path.read_text()

    def wait_for_log(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.log()):
                return found
            assert self.process.poll() is None, self.log()
            time.sleep(0.02)
        raise AssertionError(f"{pattern!r} did not appear in:\n{self.log()}")

    @property
    def listening_address(self) -> str:
        return self.wait_for_log(r"listening on ([^\s,;]+)")[1]

    def wait_until_ready(self) -> str:
        """Give the address of the ready line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"serving \S+ on (\S+)", line):
                return found[1]
        raise AssertionError(f"no ready line; exit code {self.process.wait(WAIT_SECONDS)}:\n{self.log()}")

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self.process.wait(WAIT_SECONDS)


@contextmanager
def _daemons(folder: Path) -> Iterator[Callable[..., Daemon]]:
    started: list[Daemon] = []

    def start(*arguments: str, environment: dict[str, str] | None = None) -> Daemon:
        log_path = folder / f"daemon{len(started)}.log"
        defaults = ["--runner", "sim", "--port", "0"]
        with log_path.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "runnerd_service", "serve", *defaults, *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | (environment or {}),
            )
        started.append(Daemon(process, log_path))
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            if one.process.poll() is None:
                one.process.kill()
                one.process.wait(WAIT_SECONDS)
            assert one.process.stdout is not None
            one.process.stdout.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts ``python -m runnerd_service serve --runner sim --port 0 ARGUMENTS``; kills what is left at the end."""
    with _daemons(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def module_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Daemon]]:
    """The same for the tests of a module together."""
    with _daemons(tmp_path_factory.mktemp("daemons")) as start:
        yield start


@pytest.fixture
def runnerd() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``python -m runnerd_service ARGUMENTS`` to its end."""

    def run(*arguments: str, stdin: str = "", environment: dict[str, str] | None = None):
        return subprocess.run(
            [sys.executable, "-m", "runnerd_service", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_SECONDS,
            env=os.environ | (environment or {}),
        )

    return run
