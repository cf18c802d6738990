"""The Drain call: what an orchestrator asks for before it ends the process."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runnerd.v1.server_pb2 import ServerState
from runnerd_client import Client, InvalidRequestError, UnavailableError

PROTOS = Path(__file__).parents[2] / "protos"
BUF = shutil.which("buf", path=str(Path(sys.executable).parent))
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


# G35
async def test_drain_refuses_new_requests_and_lets_live_ones_finish(serve) -> None:
    async with (
        serve(options={"step_seconds": "0.02"}) as live,
        grpc.aio.insecure_channel(live.address) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        stream = live.client.stream("x", max_tokens=40, ignore_eos=True)
        assert (await anext(stream)).HasField("started")
        draining = asyncio.create_task(live.client.drain(60, timeout=60))
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(UnavailableError, match="shutting down") as caught:
            await live.client.generate("y")
        assert (caught.value.reason, caught.value.retry_after) == ("NOT_READY", 1)
        assert (await live.client.server_info()).state == ServerState.SERVER_STATE_DRAINING
        messages = [message async for message in stream]
        assert messages[-1].output.finish.usage.completion_tokens == 40
        assert await draining
        assert await live.client.drain(0)  # there is nothing left to wait for


async def test_drain_ends_what_takes_longer(serve, idle) -> None:
    async with serve(options={"step_seconds": "0.02"}, drain_seconds=0.1) as live:
        stream = live.client.stream("x", max_tokens=5000, ignore_eos=True)
        assert (await anext(stream)).HasField("started")
        assert not await live.client.drain()
        with pytest.raises(UnavailableError, match="shutting down"):
            async for _ in stream:
                pass
        await idle(live)


async def test_a_negative_time_is_refused_and_nothing_is_drained(serve) -> None:
    async with serve() as live:
        with pytest.raises(InvalidRequestError, match="timeout: got -1 s"):
            await live.client.drain(-1)
        assert (await live.client.generate("x", max_tokens=1)).outputs


@pytest.mark.skipif(BUF is None, reason="needs buf, of the package buf-bin")
def test_a_drained_daemon_stays_until_it_is_ended(daemon) -> None:
    server = daemon()
    address = server.wait_until_ready()
    url = f"http://{address}/runnerd.v1.ServerService/Drain"
    command = [str(BUF), "curl", "--schema", str(PROTOS), "--protocol", "grpc", "--http2-prior-knowledge"]
    done = subprocess.run([*command, "-d", '{"timeout": "1s"}', url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"completed": True}
    with Client(address, timeout=30) as client:
        assert client.load().num_running == 0
        with pytest.raises(UnavailableError):
            client.generate("x")
    server.terminate()
    assert server.wait() == 0
