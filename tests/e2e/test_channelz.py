"""gRPC's own view of a server's connections, when it is asked for."""

from __future__ import annotations

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

channelz_pb2 = pytest.importorskip("grpc_channelz.v1.channelz_pb2", reason="needs runnerd[channelz]")
channelz_pb2_grpc = pytest.importorskip("grpc_channelz.v1.channelz_pb2_grpc", reason="needs runnerd[channelz]")


async def test_channelz_tells_of_the_server_and_its_calls(serve) -> None:
    async with serve(channelz=True) as live, grpc.aio.insecure_channel(live.address) as channel:
        await live.client.generate("hi", max_tokens=1)
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        servers = (await stub.GetServers(channelz_pb2.GetServersRequest(), timeout=30)).server
        assert any(one.data.calls_succeeded for one in servers)
        asked = [channelz_pb2.GetServerSocketsRequest(server_id=one.ref.server_id) for one in servers]
        connections = [ref for one in asked for ref in (await stub.GetServerSockets(one, timeout=30)).socket_ref]
        assert len(connections) >= 2  # the client's, and this one


async def test_reflection_lists_and_describes_it(serve) -> None:
    name = "grpc.channelz.v1.Channelz"
    async with serve(channelz=True, load=False) as live, grpc.aio.insecure_channel(live.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        questions = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=name),
        ]
        listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(questions), timeout=30)]
        assert name in {service.name for service in listed.list_services_response.service}
        assert described.WhichOneof("message_response") == "file_descriptor_response"


async def test_without_being_asked_for_it_is_not_there(serve) -> None:
    async with serve(load=False) as live, grpc.aio.insecure_channel(live.address) as channel:
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetServers(channelz_pb2.GetServersRequest(), timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
