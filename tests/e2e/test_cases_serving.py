"""Faults that streaming inference servers were reported for, shown absent: stopping, draining, observing.

Each test is one such fault or its whole kind, through a real server and a real client.
"""

from __future__ import annotations

import asyncio

import grpc
import pytest

from runnerd.v1 import inference_pb2_grpc
from runnerd.v1.generation_pb2 import GenerateRequest
from runnerd_client import InvalidRequestError, RequestCancelledError, UnavailableError

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = {"max_tokens": 5000, "ignore_eos": True}


class Span(grpc.aio.UnaryStreamClientInterceptor):
    """What tracing libraries put around a call: it is told of its start and its end."""

    def __init__(self) -> None:
        self.open = 0

    async def intercept_unary_stream(self, continuation, client_call_details, request):
        self.open += 1
        call = await continuation(client_call_details, request)
        call.add_done_callback(self._end)
        return call

    def _end(self, _) -> None:
        self.open -= 1


async def read(stream) -> None:
    async for _ in stream:
        pass


# G33
async def test_calls_that_were_refused_cancelled_or_aborted_do_not_hold_up_the_stop(serve) -> None:
    async with serve(options={"step_seconds": "0.01"}) as live:
        with pytest.raises(InvalidRequestError):
            await live.client.generate("")
        aborted, left, running = (live.client.stream("x", request_id=name, **LONG) for name in ("a", "b", "c"))
        for stream in (aborted, left, running):
            assert (await anext(stream)).HasField("started")
        await live.client.abort("a")
        with pytest.raises(RequestCancelledError):
            await read(aborted)
        left.cancel()
        assert not await live.frontend.drain(0.05)  # ends the one that runs
        async with asyncio.timeout(10):
            await live.server.stop(grace_seconds=60)  # nothing is left that the grace would wait for
        with pytest.raises(UnavailableError):
            await read(running)


# G40
async def test_a_tracing_client_streams_and_cancels_like_any_other(slow, idle, eventually) -> None:
    span = Span()
    async with grpc.aio.insecure_channel(slow.address, interceptors=[span]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = GenerateRequest(text="x")
        request.sampling.seed = 1
        request.stopping.max_tokens = 10
        request.stopping.ignore_eos = True
        text = "".join([message.output.text async for message in stub.StreamGenerate(request)])
        whole = await slow.client.generate("x", seed=1, max_tokens=10, ignore_eos=True)
        assert text == whole.outputs[0].text
        request.stopping.max_tokens = 5000
        calls = [stub.StreamGenerate(request) for _ in range(10)]
        for call in calls:
            await anext(aiter(call))
            call.cancel()

        async def all_ended() -> bool:
            return span.open == 0

        await eventually(all_ended)
    await idle(slow)


# G40
async def test_recording_a_trace_disturbs_no_stream_and_keeps_nothing_of_those_that_leave(slow, idle) -> None:
    async def one(number: int) -> str:
        texts = [text async for text in slow.client.stream("x", seed=number, max_tokens=10, ignore_eos=True).texts()]
        return "".join(texts)

    async def left() -> None:
        stream = slow.client.stream("x", **LONG)
        await anext(stream)
        await asyncio.sleep(0.05)
        stream.cancel()

    alone = [await one(number) for number in range(3)]
    recording = asyncio.create_task(slow.client.capture_trace(1.0))
    await asyncio.sleep(0.1)
    together = await asyncio.gather(*(one(number) for number in range(3)), *(left() for _ in range(10)))
    assert together[:3] == alone
    trace = await recording
    assert trace.num_steps > 0
    await idle(slow)
