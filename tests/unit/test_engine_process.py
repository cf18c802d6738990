"""The engine in a process of its own: start, streams, failures, and that nothing outlives its owner."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from runnerd_service.config import EngineConfig
from runnerd_service.engine.client import EngineClient
from runnerd_service.engine.messages import AddRequest, EngineError, LoadProgress, RequestOutput, Sampling
from runnerd_service.errors import ConfigurationError, EngineFailed, EngineStartFailed

SECONDS = 20.0


def sim(**options: str) -> EngineConfig:
    return EngineConfig(runner="sim", max_num_seqs=8, runner_options={"num_blocks": "512", **options})


class Sink:
    """Keeps the outputs of one request."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.changed = asyncio.Event()

    def __call__(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        self.changed.set()

    @property
    def text(self) -> str:
        return bytes(token for output in self.outputs for token in output.token_ids if token < 256).decode()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def finished(self) -> RequestOutput:
        await self.until(lambda: bool(self.outputs) and self.outputs[-1].finish is not None)
        return self.outputs[-1]


@asynccontextmanager
async def started(config: EngineConfig, failures: list[EngineError] | None = None) -> AsyncIterator[EngineClient]:
    client = EngineClient(config, (failures if failures is not None else []).append)
    async with asyncio.timeout(SECONDS):
        await client.start(lambda progress: None)
    try:
        yield client
    finally:
        await client.close()


def request(uid: int, max_tokens: int = 20, prompt: str = "hello") -> AddRequest:
    return AddRequest(uid, tuple(prompt.encode()), Sampling(seed=uid), max_tokens, eos_token_ids=(256,))


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110  counters and processes have no event to wait for
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def temporary() -> Iterator[Path]:
    """A directory for the sockets of this test alone. Short, as the names of sockets must be."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def sockets() -> list[str]:
    return os.listdir(tempfile.gettempdir())


async def test_requests_stream_and_the_engine_is_clean_afterwards() -> None:
    progress: list[LoadProgress] = []
    client = EngineClient(sim(script="once upon a time"))
    ready = await client.start(progress.append)
    try:
        assert (ready.vocab_size, ready.num_blocks, ready.max_in_flight) == (257, 512, 2)
        assert {report.stage for report in progress} >= {"loading weights", "profiling", "warming up"}
        sinks = [Sink() for _ in range(12)]
        for uid, sink in enumerate(sinks):
            client.add(request(uid), sink)
        for sink in sinks:
            assert (await sink.finished()).finish == "eos"
            assert sink.text == "once upon a time"
        await eventually(lambda: not client.load.num_unresolved_steps)  # the late rows after EOS
        assert await client.call("check_integrity") == (
            '{"num_running": 0, "num_waiting": 0, "num_used_blocks": 0, "num_unresolved_steps": 0}'
        )
        assert client.load.generation_tokens == 12 * 17
        assert int(await client.call("reset_prefix_cache")) > 0
        [directory] = sockets()
        assert (Path(tempfile.gettempdir()) / directory).stat().st_mode & 0o777 == 0o700
    finally:
        await client.close()
    assert sockets() == []
    assert not psutil.pid_exists(client.pid)


async def test_the_load_falls_to_zero_once_idle() -> None:
    async with started(sim(script="abc")) as client:
        sink = Sink()
        client.add(request(1), sink)
        await sink.finished()
        await eventually(lambda: not client.load.num_unresolved_steps and not client.load.num_used_blocks)
        assert (client.load.num_running, client.load.num_waiting) == (0, 0)


async def test_an_idle_engine_uses_no_cpu_and_wakes_at_once() -> None:
    async with started(sim(script="abc")) as client:
        process = psutil.Process(client.pid)
        await asyncio.sleep(0.2)
        before = sum(process.cpu_times()[:2])
        await asyncio.sleep(0.5)
        assert sum(process.cpu_times()[:2]) - before <= 0.05
        sink = Sink()
        client.add(request(1), sink)
        assert (await sink.finished()).finish == "eos"


async def test_an_aborted_request_says_nothing_more_and_its_blocks_come_back() -> None:
    async with started(sim(script="x" * 4000, step_seconds="0.002")) as client:
        aborted, other = Sink(), Sink()
        client.add(request(1, 4000), aborted)
        client.add(request(2, 40), other)
        await aborted.until(lambda: len(aborted.outputs) >= 3)
        client.abort([1, 99])
        count = len(aborted.outputs)
        await other.finished()
        assert len(aborted.outputs) == count
        await eventually(lambda: not client.load.num_used_blocks)


async def test_a_sink_that_raises_ends_its_request_only(caplog: pytest.LogCaptureFixture) -> None:
    def broken(output: RequestOutput) -> None:
        raise RuntimeError("broken sink")

    async with started(sim(script="abc")) as client:
        sink = Sink()
        client.add(request(1), broken)
        client.add(request(2), sink)
        assert (await sink.finished()).finish == "eos"
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        "request 1: its sink failed; the request is dropped"
    ]


async def test_a_live_uid_is_refused() -> None:
    async with started(sim(step_seconds="0.05")) as client:
        client.add(request(1), Sink())
        with pytest.raises(ValueError, match="uid 1 names a live request"):
            client.add(request(1), Sink())


async def test_a_killed_engine_is_reported_once_and_fails_its_requests() -> None:
    failures: list[EngineError] = []
    async with started(sim(step_seconds="0.01"), failures) as client:
        sinks = [Sink(), Sink()]
        for uid, sink in enumerate(sinks):
            client.add(request(uid, 4000), sink)
            await sink.until(lambda sink=sink: bool(sink.outputs))  # type: ignore[misc]
        os.kill(client.pid, signal.SIGKILL)
        for sink in sinks:
            last = await sink.finished()
            assert last.finish == "failed"
            assert last.error == "the engine failed: the engine process was killed by SIGKILL"
        [error] = failures
        assert (error.stage, error.kind) == ("step", "EngineProcessDied")
        assert client.failure is error
        with pytest.raises(EngineFailed, match="SIGKILL"):
            client.add(request(9), Sink())
        with pytest.raises(EngineFailed, match="SIGKILL"):
            await client.call("check_integrity")


async def test_requests_sent_to_an_engine_that_has_just_died_fail_like_the_others() -> None:
    async with started(sim()) as client:
        os.kill(client.pid, signal.SIGKILL)
        psutil.Process(client.pid).wait(SECONDS)
        time.sleep(0.2)  # noqa: ASYNC251  the event loop must not learn of the death before the requests are sent
        sinks = [Sink() for _ in range(3)]
        for uid, sink in enumerate(sinks):
            client.add(request(uid), sink)
        client.abort([2])
        for sink in sinks[:2]:
            assert (await sink.finished()).finish == "failed"
        assert sinks[2].outputs == []


async def test_a_crash_is_reported_with_its_exit_code() -> None:
    failures: list[EngineError] = []
    async with started(sim(crash_at_step="3"), failures) as client:
        sink = Sink()
        client.add(request(1), sink)
        assert (await sink.finished()).finish == "failed"
    assert failures[0].message.startswith("the engine process ended with exit code 70")


async def test_a_fatal_step_is_reported_with_its_root_cause() -> None:
    failures: list[EngineError] = []
    async with started(sim(fail_at_step="3"), failures) as client:
        sink = Sink()
        client.add(request(1), sink)
        assert "simulated device fault at step 3" in (await sink.finished()).error
        await eventually(lambda: not psutil.pid_exists(client.pid))
    [error] = failures
    assert (error.stage, error.kind) == ("step", "StepFailed")
    assert "\n" not in error.message


async def test_a_pending_call_fails_with_the_engine() -> None:
    async with started(sim(stall_at_step="0", stall_seconds="60")) as client:
        client.add(request(1, max_tokens=1), Sink())
        await asyncio.sleep(0.1)
        call = asyncio.ensure_future(client.call("check_integrity"))
        await asyncio.sleep(0)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match="SIGKILL"):
            await call


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (sim(nonsense="1"), "no option 'nonsense'"),
        (EngineConfig(runner="sim", block_size=3), "--block-size is 3"),
        (EngineConfig(runner="sim", block_size=16, memory_bytes=1), "one block takes"),
    ],
)
async def test_a_wrong_configuration_is_a_configuration_error(config: EngineConfig, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        await EngineClient(config).start(lambda progress: None)
    assert sockets() == []


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        (EngineConfig(runner="sim", max_model_len=9000), "ModelLoadError", "max_model_len 9000"),
        (EngineConfig(runner="sim", runner_options={"num_blocks": "0"}), "InvalidOption", "num_blocks takes"),
        (EngineConfig(runner="sim", model="/some/model"), "ModelLoadError", "takes none; leave it out"),
        (EngineConfig(runner="nowhere"), "RunnerNotFound", "no runner called 'nowhere'"),
    ],
)
async def test_a_failed_start_names_the_error(config: EngineConfig, kind: str, words: str) -> None:
    with pytest.raises(EngineStartFailed, match=words) as caught:
        await EngineClient(config).start(lambda progress: None)
    assert caught.value.kind == kind
    assert "\n" not in str(caught.value)


async def test_a_process_that_dies_while_it_loads_is_a_failed_start() -> None:
    client = EngineClient(sim(load_seconds="60"))
    with pytest.raises(EngineStartFailed, match="was killed by SIGKILL"):
        await client.start(lambda progress: os.kill(client.pid, signal.SIGKILL))


async def test_a_socket_path_that_is_too_long_is_a_failed_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(EngineStartFailed, match="set TMPDIR to a short path"):
        await EngineClient(sim()).start(lambda progress: None)
    assert sockets() == []


async def test_requests_before_the_start_and_after_the_end_are_refused() -> None:
    client = EngineClient(sim())
    await client.close()
    with pytest.raises(EngineFailed, match="not started"):
        client.add(request(1), Sink())
    async with started(sim()) as client:
        pass
    with pytest.raises(EngineFailed, match="closed"):
        client.add(request(1), Sink())


async def test_a_cancelled_start_leaves_no_process() -> None:
    client = EngineClient(sim(load_seconds="60"))
    loading = asyncio.Event()
    start = asyncio.ensure_future(client.start(lambda progress: loading.set()))
    async with asyncio.timeout(SECONDS):
        await loading.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not psutil.pid_exists(client.pid)
    assert sockets() == []


async def test_close_fails_live_requests_and_ends_a_stalled_engine() -> None:
    failures: list[EngineError] = []
    client = EngineClient(sim(stall_at_step="0", stall_seconds="60"), failures.append)
    await client.start(lambda progress: None)
    sink = Sink()
    client.add(request(1), sink)
    await asyncio.sleep(0.1)
    begin = time.monotonic()
    await client.close(timeout=0.2)
    assert time.monotonic() - begin < 10
    assert [output.error for output in sink.outputs] == ["the engine is shutting down"]
    assert failures == []
    assert not psutil.pid_exists(client.pid)
    await client.close()


async def test_sigint_is_left_to_the_parent_and_sigterm_ends_the_engine() -> None:
    failures: list[EngineError] = []
    async with started(sim(script="abc"), failures) as client:
        os.kill(client.pid, signal.SIGINT)
        sink = Sink()
        client.add(request(1), sink)
        assert (await sink.finished()).finish == "eos"
        os.kill(client.pid, signal.SIGTERM)
        await eventually(lambda: bool(failures))
    assert failures[0].message.startswith("the engine process ended with exit code 0")


async def test_a_restarted_engine_goes_on_after_the_tokens_that_were_sent() -> None:
    config = sim(step_seconds="0.005", eos_bias="-20")
    async with started(config) as client:
        whole = Sink()
        client.add(request(1, 30), whole)
        await whole.finished()
    async with started(config) as client:
        first = Sink()
        client.add(request(1, 30), first)
        await first.until(lambda: len(first.outputs) >= 10)
        os.kill(client.pid, signal.SIGKILL)
        await first.finished()
    sent = tuple(token for output in first.outputs for token in output.token_ids)
    async with started(config) as client:
        rest = Sink()
        client.add(AddRequest(2, tuple(b"hello"), Sampling(seed=1), 30, output_token_ids=sent), rest)
        await rest.finished()
    assert first.text + rest.text == whole.text


PARENT = textwrap.dedent(
    """
    import asyncio
    from runnerd_service.config import EngineConfig
    from runnerd_service.engine.client import EngineClient

    async def main():
        client = EngineClient(EngineConfig(runner="sim"))
        await client.start(lambda progress: None)
        print(client.pid, flush=True)
        await asyncio.sleep(60)

    asyncio.run(main())
    """
)


def test_the_engine_dies_with_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    _, alive = psutil.wait_procs([engine], timeout=SECONDS)
    assert alive == []
