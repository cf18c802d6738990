"""What a request held is free as soon as it has ended, however it ended, without a collection of garbage."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator

import grpc
import pytest

from runnerd.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from runnerd_service.errors import RunnerdError
from runnerd_service.frontend.live import LiveRequest
from runnerd_service.frontend.output import OutputBuffer
from runnerd_service.frontend.preparation import PreparedRequest
from runnerd_service.frontend.stream import RequestStream
from runnerd_service.rpc.stall import StallLimit

KINDS = (LiveRequest, OutputBuffer, PreparedRequest, RequestStream, StallLimit, RunnerdError)
NUM_CALLS = 5


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> Counter[str]:
    return Counter(type(one).__name__ for one in gc.get_objects() if issubclass(type(one), KINDS))


def request(max_tokens: int, **fields: object) -> generation_pb2.GenerateRequest:
    stopping = generation_pb2.StoppingParams(max_tokens=max_tokens, stop=["never this"], ignore_eos=True)
    return generation_pb2.GenerateRequest(text="a prompt", stopping=stopping, **fields)


async def rest(call: grpc.aio.UnaryStreamCall) -> None:
    while await call.read() != grpc.aio.EOF:
        pass


async def whole(stub: inference_pb2_grpc.InferenceServiceStub, number: int) -> None:
    assert [message async for message in stub.StreamGenerate(request(3))]
    await stub.Generate(request(3))


async def cancelled(stub: inference_pb2_grpc.InferenceServiceStub, number: int) -> None:
    call = stub.StreamGenerate(request(5_000))
    await call.read()
    call.cancel()


async def too_late(stub: inference_pb2_grpc.InferenceServiceStub, number: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
        async for _ in stub.StreamGenerate(request(5_000), timeout=0.3):
            pass


async def aborted(stub: inference_pb2_grpc.InferenceServiceStub, number: int) -> None:
    call = stub.StreamGenerate(request(5_000, request_id=f"number {number}"))
    await call.read()
    await stub.Abort(inference_pb2.AbortRequest(request_id=f"number {number}"))
    with pytest.raises(grpc.aio.AioRpcError, match=r"CANCELLED|ABORTED"):
        await rest(call)


async def refused(stub: inference_pb2_grpc.InferenceServiceStub, number: int) -> None:
    sampling = generation_pb2.SamplingParams(top_p=7)
    with pytest.raises(grpc.aio.AioRpcError, match="top_p"):
        await stub.Generate(request(3, sampling=sampling))
    with pytest.raises(grpc.aio.AioRpcError, match="top_p"):
        await stub.StreamGenerate(request(3, sampling=sampling)).read()


@pytest.mark.parametrize("end", [whole, cancelled, too_late, aborted, refused], ids=lambda end: end.__name__)
async def test_what_a_request_held_is_free_when_it_has_ended(serve, no_collections, end):
    options = {"step_seconds": "0.01"}
    async with serve(options=options) as live, grpc.aio.insecure_channel(live.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for number in range(NUM_CALLS):
            await end(stub, number)
        async with asyncio.timeout(30):
            # gRPC lets go of a call after its client has its end, and may keep the last error.
            while any(count > 1 for count in alive().values()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
