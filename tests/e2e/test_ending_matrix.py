"""Each way in which a request ends early, in each phase of its life: it is told so, and nothing of it is left."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from runnerd.v1 import inference_pb2_grpc
from runnerd.v1.generation_pb2 import FinishReason, GenerateRequest
from runnerd.v1.inference_pb2 import AbortRequest
from runnerd_client.errors import from_rpc_error

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from slow_prompts import slow_to_prepare
from soak_relay import Relay

pytestmark = pytest.mark.asyncio(loop_scope="module")

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


def slow_request(text: str) -> GenerateRequest:
    request = request_of("")
    request.chat.CopyFrom(slow_to_prepare(text))
    return request


def runs(before: Any, now: Any) -> bool:
    return now.num_running == 1 and now.generation_tokens == before.generation_tokens


def gives_tokens(before: Any, now: Any) -> bool:
    return now.num_running == 1 and now.generation_tokens > before.generation_tokens + 1


PHASES = {
    "before it is added": Phase({}, {}, 0.1, slow_request, lambda before, now: True, is_computed=False),
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


@asynccontextmanager
async def relayed(target: str) -> AsyncIterator[Relay]:
    relay = Relay(target)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.close()


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
    "connection dropped": (grpc.StatusCode.UNAVAILABLE, "CONNECTION_LOST"),
    "connection reset": (grpc.StatusCode.UNAVAILABLE, "CONNECTION_LOST"),
}
"""And what the caller is told: status and reason."""
FINISHED = (grpc.StatusCode.OK, "")


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_request_that_ends_early_leaves_nothing(phase, ending: str, method: str, idle, eventually) -> None:
    one, live, expected = phase
    blocker = live.client.stream("blocker", max_tokens=MAX_TOKENS, ignore_eos=True) if one.with_blocker else None
    if blocker is not None:
        await anext(aiter(blocker))
        await eventually(lambda: _async(live.frontend.load.num_running == 1))
    before, num_others = live.frontend.load, 1 if blocker is not None else 0
    async with relayed(live.address) as relay, grpc.aio.insecure_channel(relay.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        # a connection first: a deadline is not for that
        await stub.Abort(AbortRequest(request_id="nobody"), timeout=SECONDS, wait_for_ready=True)
        timeout = one.deadline_seconds if ending == "deadline" else SECONDS
        call = getattr(stub, method)(one.request(f"{ending} {method} "), timeout=timeout)
        reading = asyncio.create_task(read_to_the_end(call))
        if ending != "deadline":

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
                relay.cut_all(reset=ending.endswith("reset"))
        ended = await outcome(reading)
        assert ended == ENDINGS[ending] or (one.may_finish and ended == FINISHED)
        # the server learns of it while the connection is there, not by its end
        await eventually(lambda: _async(live.frontend.num_live == num_others))
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
