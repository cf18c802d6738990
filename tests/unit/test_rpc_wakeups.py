"""gRPC's callback is called once for many events, and never without one."""

import asyncio
import socket
from contextlib import closing

import grpc
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runnerd_service.rpc.health import HealthServicer
from runnerd_service.rpc.wakeups import few_wakeups


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_all_bytes_that_are_there_are_read_and_the_callback_reads_one_of_them(run: object) -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        calls: asyncio.Queue[bytes] = asyncio.Queue()
        with closing(near), closing(far):
            with few_wakeups():
                asyncio.get_running_loop().add_reader(near, lambda: calls.put_nowait(near.recv(1)))
            for data in (b"x" * 10, b"y", b"z" * 5000, b"!"):
                far.send(data)
                while True:
                    assert await calls.get() == data[:1]
                    try:
                        near.recv(1, socket.MSG_PEEK)
                    except BlockingIOError:
                        break
                assert calls.empty()
            asyncio.get_running_loop().remove_reader(near)

    assert callable(run)
    run(main())


def test_the_loop_is_left_as_it_was() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with few_wakeups():
            assert "add_reader" in vars(loop)
        assert "add_reader" not in vars(loop)

    asyncio.run(main())


def test_no_call_of_many_at_once_waits_for_ever() -> None:
    async def main() -> None:
        with few_wakeups():
            server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(("a",)), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for _ in range(20):
                calls = [stub.Check(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(100)]
                assert len(await asyncio.gather(*calls)) == 100
        await server.stop(None)

    asyncio.run(main())
