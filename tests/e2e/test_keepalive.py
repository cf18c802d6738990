"""Clients that ping as often as gRPC lets them."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from runnerd.v1 import server_pb2, server_pb2_grpc


@pytest.mark.slow
# G31
async def test_a_client_that_pings_every_ten_seconds_is_not_sent_away(serve) -> None:
    options = (
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    async with serve(load=False) as live, grpc.aio.insecure_channel(live.address, options) as channel:
        stub = server_pb2_grpc.ServerServiceStub(channel)
        await stub.GetLoad(server_pb2.GetLoadRequest())
        states = []
        async with asyncio.TaskGroup() as group:

            async def follow() -> None:
                while len(states) < 100:
                    state = channel.get_state(try_to_connect=True)
                    states.append(state)
                    await channel.wait_for_state_change(state)

            following = group.create_task(follow())
            await asyncio.sleep(65)
            following.cancel()
        assert set(states) == {grpc.ChannelConnectivity.READY}
        await stub.GetLoad(server_pb2.GetLoadRequest())
