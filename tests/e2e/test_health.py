"""Health and reflection, as tools that know nothing of us see them."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from runnerd_service.rpc.server import SERVICE_NAMES

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.fixture
def health():
    def stub(channel: grpc.aio.Channel) -> health_pb2_grpc.HealthStub:
        return health_pb2_grpc.HealthStub(channel)

    return stub


async def check(stub, service: str = "") -> int:
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)).status


async def read(call) -> int:
    async with asyncio.timeout(10):
        return (await call.read()).status


# G35
async def test_health_follows_the_state_from_loading_to_draining(serve, health) -> None:
    async with (
        serve(load=False, options={"load_seconds": "0.5"}) as live,
        grpc.aio.insecure_channel(live.address) as channel,
    ):
        stub = health(channel)
        for service in ("", *SERVICE_NAMES):
            assert await check(stub, service) == NOT_SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert await read(watch) == NOT_SERVING
        starting = asyncio.create_task(live.frontend.start())
        assert await read(watch) == SERVING
        await starting
        for service in ("", *SERVICE_NAMES):
            assert await check(stub, service) == SERVING
        await live.frontend.drain(5)
        assert await read(watch) == NOT_SERVING
        assert await check(stub) == NOT_SERVING


async def test_health_is_not_serving_once_the_engine_failed(serve, health) -> None:
    async with (
        serve(options={"fail_at_step": "3"}, max_engine_restarts=0) as live,
        grpc.aio.insecure_channel(live.address) as channel,
    ):
        stub = health(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAMES[0]))
        assert await read(watch) == SERVING
        await asyncio.gather(live.client.generate("x", max_tokens=100, ignore_eos=True), return_exceptions=True)
        assert await read(watch) == NOT_SERVING


async def test_an_unknown_service_is_not_found_and_can_be_watched(serve, health) -> None:
    async with serve(load=False) as live, grpc.aio.insecure_channel(live.address) as channel:
        stub = health(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(stub, "no.such.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))
        assert await read(watch) == SERVICE_UNKNOWN
        watch.cancel()


async def test_a_watcher_that_leaves_takes_no_other_with_it(serve, health) -> None:
    async with serve(load=False) as live, grpc.aio.insecure_channel(live.address) as channel:
        stub = health(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
        assert [await read(watch) for watch in watches] == [NOT_SERVING] * 3
        watches[0].cancel()
        await live.frontend.start()
        assert [await read(watch) for watch in watches[1:]] == [SERVING] * 2


async def test_open_watches_do_not_hold_up_a_stop(serve, health) -> None:
    async with serve(load=False) as live, grpc.aio.insecure_channel(live.address) as channel:
        watch = health(channel).Watch(health_pb2.HealthCheckRequest())
        assert await read(watch) == NOT_SERVING
        async with asyncio.timeout(5):
            await live.server.stop(grace_seconds=60)
            assert await watch.read() is grpc.aio.EOF


async def test_reflection_lists_every_service(serve) -> None:
    async with serve(load=False) as live, grpc.aio.insecure_channel(live.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="runnerd.v1.InferenceService"),
        ]
        listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
        names = {service.name for service in listed.list_services_response.service}
        assert names == {*SERVICE_NAMES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        assert described.file_descriptor_response.file_descriptor_proto
    assert set(SERVICE_NAMES) == {
        "runnerd.v1.InferenceService",
        "runnerd.v1.ModelService",
        "runnerd.v1.ServerService",
    }


async def test_reflection_refuses_what_is_no_message(serve) -> None:
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    question = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    async with serve(load=False) as live, grpc.aio.insecure_channel(live.address) as channel:
        call = channel.stream_stream(method)(iter([question, b"\xff\xff"]))
        assert await call.read()
        with pytest.raises(grpc.aio.AioRpcError, match="ServerReflectionRequest: the 2 bytes") as refused:
            await call.read()
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
