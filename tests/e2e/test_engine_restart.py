"""A daemon whose engine is killed, hangs or dies of a request: streams are whole and equal to those without a fault."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from collections.abc import Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runnerd.v1.server_pb2 import GetServerInfoResponse, ServerState
from runnerd_client import (
    AsyncClient,
    DeadlineError,
    InternalError,
    RequestCancelledError,
    UnavailableError,
)

SECONDS = 100
LOADING_SECONDS = 250
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def options(**values: object) -> list[str]:
    return [part for name, value in values.items() for part in ("--runner-option", f"{name}={value}")]


@pytest.fixture
def serve(daemon):
    """Gives ``async with serve(ARGUMENTS) as (server, client)``; equal prompts are computed each time."""

    @asynccontextmanager
    async def start(*arguments: str):
        server = daemon("--no-prefix-caching", *arguments)
        address = await asyncio.to_thread(server.wait_until_ready)
        async with AsyncClient(address, timeout=SECONDS) as client:
            yield server, client

    return start


def long(number: int, **values: object) -> dict[str, object]:
    return {"seed": number, "ignore_eos": True, "max_tokens": 100, "tokens": True} | values


class Streams:
    """Streams of a client, read at the same time; what each gave is put together message by message."""

    def __init__(self, client: AsyncClient, requests: Iterable[tuple[str, dict[str, object]]]) -> None:
        self.num_started = self.num_tokens = 0
        self._changed = asyncio.Event()
        self.tasks = [asyncio.create_task(self._read(client, *request)) for request in requests]

    async def whole(self, seconds: float = SECONDS) -> list[object]:
        async with asyncio.timeout(seconds):
            return await asyncio.gather(*self.tasks)

    async def until_started(self, least: int) -> None:
        await self._until(lambda: self.num_started >= least)

    async def until_tokens(self, least: int) -> None:
        await self._until(lambda: self.num_tokens >= least)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def _read(self, client: AsyncClient, prompt: str, wanted: dict[str, object]) -> object:
        prompt_tokens, outputs = [], {}
        async for message in client.stream(prompt, **wanted):
            self.num_started += message.HasField("started")
            prompt_tokens += map(str, message.prompt.tokens)
            if message.HasField("output"):
                text, tokens, finishes = outputs.setdefault(message.output.index, ([], [], []))
                assert not finishes, "something followed a finish"
                text.append(message.output.text)
                tokens += map(str, message.output.tokens)
                finishes += [str(message.output.finish)] if message.output.HasField("finish") else []
                self.num_tokens += len(message.output.tokens)
            self._changed.set()
        return prompt_tokens, {index: ("".join(one[0]), one[1], one[2]) for index, one in sorted(outputs.items())}


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SECONDS):
        while not await condition():  # noqa: ASYNC110 - the condition is asked over the wire
            await asyncio.sleep(0.01)


async def informed(client: AsyncClient, condition: Callable[[GetServerInfoResponse], bool]) -> GetServerInfoResponse:
    """Wait until the server says so of itself."""
    found: list[GetServerInfoResponse] = []

    async def holds() -> bool:
        found.append(await client.server_info())
        return condition(found[-1])

    await eventually(holds)
    return found[-1]


async def kill(client: AsyncClient, number: signal.Signals = signal.SIGKILL) -> None:
    """Send the engine a signal and wait until the server has seen what it did."""
    before = await informed(client, lambda info: bool(info.engine_pid))
    os.kill(before.engine_pid, number)
    await informed(client, lambda info: info.num_engine_restarts > before.num_engine_restarts)


async def test_many_streams_survive_two_kills_in_decode(serve) -> None:
    requests = [
        (f"{number}", long(number, n=1 + number % 3, logprobs=number % 2 or None, presence_penalty=0.1 * (number % 5)))
        for number in range(40)
    ]
    async with serve("--max-num-seqs", "64", *options(step_seconds=0.01)) as (_, client):
        expected = await Streams(client, requests).whole()
        streams = Streams(client, requests)
        await streams.until_started(len(requests))  # what was not accepted yet would be refused
        for least in (200, 3000):
            await streams.until_tokens(least)
            await kill(client)
        assert await streams.whole() == expected
        info = await client.server_info()
        assert info.num_engine_restarts == 2
        assert info.last_error == "EngineProcessDied: the engine process was killed by SIGKILL"
        assert info.state == ServerState.SERVER_STATE_SERVING


async def test_a_stream_whose_prompt_is_being_computed_survives_a_kill(serve) -> None:
    requests = [("x" * 2000, long(1, prompt_logprobs=1, n=2, max_tokens=5))]
    async with serve(*options(seconds_per_token=0.0005)) as (_, client):
        expected = await Streams(client, requests).whole()
        before = (await client.load()).num_steps
        streams = Streams(client, requests)

        async def computes() -> bool:
            load = await client.load()
            return load.num_running > 0 and load.num_steps >= before + 2

        await eventually(computes)
        await kill(client)
        assert streams.num_tokens == 0
        assert await streams.whole() == expected


async def test_a_unary_call_survives_a_kill(serve) -> None:
    async with serve(*options(step_seconds=0.01)) as (_, client):
        expected = await client.generate("x", **long(1, n=2))
        call = asyncio.create_task(client.generate("x", **long(1, n=2)))
        steps = (await client.load()).num_steps

        async def decodes() -> bool:
            return (await client.load()).num_steps > steps + 20

        await eventually(decodes)
        await kill(client)
        answer = await call
        assert [str(output) for output in answer.outputs] == [str(output) for output in expected.outputs]


async def test_under_load_every_accepted_stream_is_whole_and_refused_ones_may_be_sent_again(serve) -> None:
    """Sixteen clients send one request after the other while the engine is killed; they do what RetryInfo says."""
    requests = [(f"{number}", long(number, max_tokens=30)) for number in range(96)]
    async with serve("--max-num-seqs", "8", *options(step_seconds=0.005)) as (_, client):
        expected = await Streams(client, requests).whole()
        got: dict[int, object] = {}
        refusals: list[UnavailableError] = []
        todo = list(enumerate(requests))

        async def send(request: tuple[str, dict[str, object]]) -> object:
            while True:
                try:
                    return (await Streams(client, [request]).whole())[0]
                except UnavailableError as error:
                    refusals.append(error)
                await asyncio.sleep(refusals[-1].retry_after or 0.1)

        async def work() -> None:
            while todo:
                number, request = todo.pop()
                got[number] = await send(request)

        workers = [asyncio.create_task(work()) for _ in range(16)]
        for least in (10, 30, 50):
            await eventually(lambda least=least: asyncio.sleep(0, len(got) >= least))
            await kill(client)
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*workers)
        assert [got[number] for number in range(len(requests))] == expected
        assert all(error.reason == "NOT_READY" and error.retry_after for error in refusals)


@pytest.mark.parametrize("way", ["the process stands still", "a step does not end"])
async def test_streams_survive_an_engine_that_hangs(serve, way: str) -> None:
    stall = {"stall_at_step": 150, "stall_seconds": 3600} if way == "a step does not end" else {}
    requests = [(f"{number}", long(number)) for number in range(4)]
    async with serve("--step-timeout", "2", *options(step_seconds=0.005, **stall)) as (server, client):
        expected = await Streams(client, requests).whole()  # 100 steps and a few
        streams = Streams(client, requests)
        await streams.until_started(len(requests))
        if not stall:
            await streams.until_tokens(100)
            await kill(client, signal.SIGSTOP)
        assert await streams.whole() == expected
        info = await client.server_info()
        assert info.num_engine_restarts >= 1
        assert info.last_error == "EngineHung: requests were waiting, and no step ended in 2 s"
        # What its threads did is in the log, if they could still say so.
        assert ("Thread 0x" in server.log()) is bool(stall)


async def test_a_poisonous_request_ends_with_an_error_of_its_own_and_the_others_are_whole(serve) -> None:
    requests = [(f"{number}", long(number, n=2)) for number in range(8)]
    async with serve(*options(step_seconds=0.01, crash_row_token="POISON")) as (server, client):
        expected = await Streams(client, requests).whole()
        streams = Streams(client, requests)
        await streams.until_started(len(requests))
        await streams.until_tokens(50)
        with pytest.raises(InternalError, match="the engine died of this request") as caught:
            await client.generate("a POISON", request_id="its\n\x1bname", max_tokens=5)
        assert caught.value.reason == "POISONOUS_REQUEST"
        assert caught.value.retry_after is None
        assert await streams.whole() == expected
        assert (await client.server_info()).num_engine_restarts == 3
        assert r"request its\n\x1bname is failed: engines die of it" in server.log()
        assert r"Generate of request its\n\x1bname failed: PoisonousRequest" in server.log()


async def test_health_info_load_and_metrics_tell_of_an_outage(serve) -> None:
    arguments = ("--metrics-port", "0", *options(step_seconds=0.01, load_seconds=2))
    async with (
        serve(*arguments) as (server, client),
        grpc.aio.insecure_channel(server.listening_address) as channel,
    ):
        metrics_url = server.wait_for_log(r"metrics on (\S+)")[1]
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        streams = Streams(client, [("x", long(1))])
        await streams.until_tokens(5)
        await kill(client)
        assert (await watch.read()).status == NOT_SERVING
        info = await client.server_info()
        assert (info.state, info.engine_pid) == (ServerState.SERVER_STATE_RECOVERING, 0)
        load = await client.load()
        assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 1, 0)
        with pytest.raises(UnavailableError, match="is being restarted") as caught:
            await client.generate("new")
        assert caught.value.reason == "NOT_READY"
        assert caught.value.retry_after is not None
        assert (await client.model_info()).name == "sim"
        assert (await watch.read()).status == SERVING
        await streams.whole()
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(metrics_url, timeout=SECONDS).read().decode())
        assert 'runnerd_engine_restarts_total{cause="signal"} 1.0' in text
        assert 'runnerd_engine_restarts_total{cause="hang"} 0.0' in text


async def test_aborts_and_deadlines_hold_during_an_outage(serve) -> None:
    async with serve(*options(step_seconds=0.01, load_seconds=6)) as (_, client):
        aborted = Streams(client, [("x", long(1, request_id="aborted"))])
        late = Streams(client, [("x", long(1, timeout=3.0))])
        await aborted.until_tokens(5)
        await late.until_tokens(5)
        await kill(client)
        assert await client.abort("aborted")
        with pytest.raises(RequestCancelledError):
            await aborted.whole()
        with pytest.raises(DeadlineError):
            await late.whole()

        async def is_empty() -> bool:
            return (await client.load()).num_waiting == 0

        await eventually(is_empty)


async def test_the_daemon_ends_when_the_engine_cannot_be_brought_back(serve) -> None:
    arguments = ("--max-engine-restarts", "2", "--engine-restart-backoff", "0.1")
    # The first step takes long enough for all to be accepted.
    async with serve(*arguments, *options(crash_at_step=0, step_seconds=2)) as (server, client):
        streams = Streams(client, [(f"{number}", long(number)) for number in range(3)])
        for task in streams.tasks:
            with pytest.raises(UnavailableError, match="the engine failed, 3 times in a row") as caught:
                await task
            assert caught.value.reason == "ENGINE_FAILED"
            assert caught.value.retry_after is not None
        assert await asyncio.to_thread(server.wait) == 1
        assert "the engine failed and is not restarted again: EngineProcessDied" in server.log()


async def test_sigterm_during_an_outage_lets_the_streams_finish(serve) -> None:
    requests = [("x", long(1))]
    async with serve(*options(step_seconds=0.01, load_seconds=0.5)) as (server, client):
        expected = await Streams(client, requests).whole()
        streams = Streams(client, requests)
        await streams.until_tokens(5)
        await kill(client)
        server.terminate()
        assert await streams.whole() == expected
        assert await asyncio.to_thread(server.wait) == 0


async def test_sigterm_during_an_outage_that_does_not_end_is_bounded(serve) -> None:
    async with serve("--drain-seconds", "0.5", *options(step_seconds=0.01, load_seconds=3)) as (server, client):
        streams = Streams(client, [("x", long(1, max_tokens=5000))])
        await streams.until_tokens(5)
        await kill(client)
        server.terminate()
        with pytest.raises(UnavailableError, match="shutting down"):
            await streams.whole()
        assert await asyncio.to_thread(server.wait) == 0


@pytest.mark.timeout(600)
async def test_the_real_model_goes_on_token_for_token(serve, demo_gguf) -> None:
    requests = [
        ("The capital of France is", long(1, max_tokens=24, timeout=LOADING_SECONDS, temperature=0.0)),
        ("def fibonacci(n):\n    ", long(2, max_tokens=24, timeout=LOADING_SECONDS, n=2, logprobs=2)),
        (
            "Once upon a time",
            long(3, max_tokens=24, timeout=LOADING_SECONDS, repetition_penalty=1.2, prompt_logprobs=1),
        ),
        (
            "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, " * 8,
            long(4, max_tokens=24, timeout=LOADING_SECONDS, top_p=0.9, stop=["never said"]),
        ),
    ]
    arguments = ("--runner", "cpu", "--dtype", "float32", "--max-model-len", "512", "--max-num-batched-tokens", "64")
    async with serve(str(demo_gguf), *arguments) as (_, client):
        expected = await Streams(client, requests).whole(LOADING_SECONDS)
        streams = Streams(client, requests)
        await streams.until_started(len(requests))
        await streams.until_tokens(40)
        await kill(client)
        assert await streams.whole(LOADING_SECONDS) == expected
