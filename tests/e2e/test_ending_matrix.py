"""Each way in which a request ends early, in each phase of its life: it is told so, and nothing of it is left."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import pytest_asyncio

from runnerd.v1 import inference_pb2_grpc
from runnerd.v1.generation_pb2 import FinishReason, GenerateRequest
from runnerd.v1.inference_pb2 import AbortRequest
from runnerd_client import chat
from runnerd_client.errors import from_rpc_error

pytestmark = pytest.mark.asyncio(loop_scope="module")

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: the connection ends by a reset
SECONDS = 60
MAX_TOKENS = 5000


@dataclass(frozen=True)
class Phase:
    """A server on which a request stays in the phase for long, and how that is seen."""

    options: dict[str, str]
    engine: dict[str, object]
    deadline_seconds: float
    request: Callable[[str], GenerateRequest]
    reached: Callable[[Any, Any], bool]
    """From the load before and the load now."""
    with_blocker: bool = False
    """Another request has the only place."""
    is_computed: bool = True
    may_finish: bool = False
    """It is so near its end that it may end by itself."""


def request_of(text: str, max_tokens: int = MAX_TOKENS) -> GenerateRequest:
    request = GenerateRequest(text=text, request_id="mine")
    request.sampling.seed = 7
    request.stopping.ignore_eos = True
    request.stopping.max_tokens = max_tokens
    return request


def slow_to_prepare(text: str) -> GenerateRequest:
    """A request whose template takes a good part of a second, in a process of its own."""
    request = request_of("")
    request.chat.CopyFrom(chat({"role": "user", "content": text}))
    loops = (
        "{% for j in range(20) %}{% for i in range(50000) %}{% if (i ~ j) == 'x' %}y{% endif %}{% endfor %}{% endfor %}"
    )
    request.chat.chat_template = loops + "{{ messages[0].content }}"
    return request


def runs(before: Any, now: Any) -> bool:
    return now.num_running == 1 and now.generation_tokens == before.generation_tokens


def gives_tokens(before: Any, now: Any) -> bool:
    return now.num_running == 1 and now.generation_tokens > before.generation_tokens + 1


PHASES = {
    "before it is added": Phase({}, {}, 0.1, slow_to_prepare, lambda before, now: True, is_computed=False),
    "waiting": Phase(
        {"step_seconds": "0.01"},
        {"max_num_seqs": 1},
        0.3,
        request_of,
        lambda before, now: now.num_waiting == 1,
        with_blocker=True,
    ),
    "prefill": Phase(
        {"step_seconds": "0.05"},
        {"max_num_seqs": 4, "max_num_batched_tokens": 16},
        0.5,
        lambda text: request_of(text + "x" * 3000),
        lambda before, now: runs(before, now) and now.num_steps > before.num_steps + 1,
    ),
    "decode": Phase({"step_seconds": "0.02"}, {}, 0.5, request_of, gives_tokens),
    # One step at a time, which takes the device no time: nearly always its tokens are on their way, and no other runs.
    "between steps": Phase({"copy_seconds": "0.02"}, {"async_execution": "off"}, 0.5, request_of, gives_tokens),
    # Its only token is on its way from the device.
    "finishing": Phase(
        {"copy_seconds": "0.5"}, {}, 0.25, lambda text: request_of(text, max_tokens=1), runs, may_finish=True
    ),
}


@dataclass
class Relay:
    """Relays connections to an address, and cuts them all."""

    target: str
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Relay until the block ends; gives the address."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield "{}:{}".format(*server.sockets[0].getsockname())
        finally:
            server.close()
            self.cut(reset=False)
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self, *, reset: bool) -> None:
        """End each connection, by a reset or in order; no HTTP/2 frame says so."""
        for writer in self._writers:
            end = writer.get_extra_info("socket")
            if reset and end is not None and not writer.transport.is_closing():
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()
            writer.close()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        host, _, port = self.target.rpartition(":")
        onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
        self._writers += [writer, onward_writer]
        await asyncio.gather(_copy(reader, onward_writer), _copy(onward_reader, writer), return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PHASES)
async def phase(request: pytest.FixtureRequest, serve_for_module) -> AsyncIterator[tuple[Phase, Any, list[int]]]:
    """A phase, its server, and the tokens that a short request gets there."""
    one = PHASES[request.param]
    options = {**one.options, "kv_shadow": "true"}
    async with serve_for_module(engine=one.engine, options=options, deadline_check=False) as live:
        yield one, live, await short_answer(live)


async def short_answer(live: Any) -> list[int]:
    answer = await live.client.generate("short", request_id="mine", seed=7, max_tokens=1, ignore_eos=True, tokens=True)
    return [token.id for token in answer.outputs[0].tokens]


async def read_to_the_end(call: Any) -> list[int]:
    """Read a call of either kind; give the reasons of its finishes."""
    if isinstance(call, grpc.aio.UnaryUnaryCall):
        return [output.finish.reason for output in (await call).outputs]
    reasons = []
    while (message := await call.read()) is not grpc.aio.EOF:
        if message.output.HasField("finish"):
            reasons.append(message.output.finish.reason)
    return reasons


ENDINGS = {
    "cancel": (grpc.StatusCode.CANCELLED, ""),
    "deadline": (grpc.StatusCode.DEADLINE_EXCEEDED, ""),
    "abort": (grpc.StatusCode.CANCELLED, "REQUEST_ABORTED"),
    "connection dropped": (grpc.StatusCode.UNAVAILABLE, ""),
    "connection reset": (grpc.StatusCode.UNAVAILABLE, ""),
}
"""And what the caller is told: status and reason."""
FINISHED = (grpc.StatusCode.OK, "")


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_request_that_ends_early_leaves_nothing(phase, ending: str, method: str, idle, eventually) -> None:
    one, live, expected = phase
    relay = Relay(live.address)
    blocker = live.client.stream("blocker", max_tokens=MAX_TOKENS, ignore_eos=True) if one.with_blocker else None
    if blocker is not None:
        await anext(aiter(blocker))
        await eventually(lambda: _async(live.frontend.load.num_running == 1))
    before = live.frontend.load
    async with relay.serving() as address, grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        # a connection first: a deadline is not for that
        await stub.Abort(AbortRequest(request_id="nobody"), timeout=SECONDS, wait_for_ready=True)
        timeout = one.deadline_seconds if ending == "deadline" else SECONDS
        call = getattr(stub, method)(one.request(f"{ending} {method} "), timeout=timeout)
        reading = asyncio.create_task(read_to_the_end(call))
        if ending != "deadline":
            num_others = 1 if blocker is not None else 0

            def is_there() -> bool:
                live_now = live.frontend.num_live > num_others
                return reading.done() or (live_now and one.reached(before, live.frontend.load))

            await eventually(lambda: _async(is_there()))
        match ending:
            case "cancel":
                call.cancel()
            case "abort":
                assert await live.client.abort("mine") or one.may_finish
            case "connection dropped" | "connection reset":
                relay.cut(reset=ending.endswith("reset"))
        ended = await outcome(reading)
        assert ended == ENDINGS[ending] or (one.may_finish and ended == FINISHED)
    if blocker is not None:
        tokens = live.frontend.load.generation_tokens
        await eventually(lambda: _async(live.frontend.load.generation_tokens > tokens))
        assert live.frontend.load.num_running == 1
        blocker.cancel()
    await idle(live)
    if not one.is_computed:
        assert live.frontend.load.num_steps == before.num_steps
    # name, place and blocks are free, and hold nothing of it
    assert await short_answer(live) == expected
    await idle(live)


async def outcome(reading: asyncio.Task[list[int]]) -> tuple[grpc.StatusCode, str]:
    """Give the status with which the call ended for its reader, and the server's reason."""
    try:
        async with asyncio.timeout(SECONDS):
            reasons = await reading
    except asyncio.CancelledError:  # by the reader itself
        return grpc.StatusCode.CANCELLED, ""
    except grpc.aio.AioRpcError as rpc_error:
        return rpc_error.code(), getattr(from_rpc_error(rpc_error), "reason", "")
    assert reasons == [FinishReason.FINISH_REASON_LENGTH]
    return FINISHED


async def _async(value: bool) -> bool:
    return value
