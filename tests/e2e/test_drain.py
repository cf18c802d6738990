"""The Drain call: what an orchestrator asks for before it ends the process."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runnerd.v1 import server_pb2, server_pb2_grpc
from runnerd.v1.server_pb2 import ServerState
from runnerd_client import Client, InvalidRequestError, UnavailableError
from runnerd_service.cli.main import main

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
        assert (caught.value.reason, caught.value.retry_after) == ("NOT_READY", None)  # there is no way back
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


@pytest.mark.parametrize("cut", ["timeout", "cancel"])
async def test_a_drain_whose_call_is_cut_keeps_its_limit(serve, idle, caplog, eventually, cut) -> None:
    async with serve(options={"step_seconds": "0.02"}) as live, grpc.aio.insecure_channel(live.address) as channel:
        stream = live.client.stream("x", max_tokens=5000, ignore_eos=True)
        assert (await anext(stream)).HasField("started")
        request = server_pb2.DrainRequest(timeout=Duration(seconds=1))
        call = server_pb2_grpc.ServerServiceStub(channel).Drain(request, timeout=0.1 if cut == "timeout" else None)

        async def drains() -> bool:
            return (await live.client.server_info()).state == ServerState.SERVER_STATE_DRAINING

        await eventually(drains)
        if cut == "cancel":
            call.cancel()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await call
        again = asyncio.create_task(live.client.drain(60))
        with pytest.raises(UnavailableError, match="shutting down"):
            async for _ in stream:
                pass
        assert not await again  # the first limit ended some
        await idle(live)
    assert "the administrator's call has left; the drain goes on, and its 1 s hold" in caplog.text


async def test_a_negative_time_is_refused_and_nothing_is_drained(serve) -> None:
    async with serve() as live:
        with pytest.raises(InvalidRequestError, match="timeout: got -1 s"):
            await live.client.drain(-1)
        assert (await live.client.generate("x", max_tokens=1)).outputs


@pytest.mark.parametrize("nanos", [-5, 2**31 - 1])
async def test_a_time_that_is_no_duration_is_refused_and_nothing_is_drained(serve, nanos) -> None:
    duration = Duration(seconds=int(nanos < 0), nanos=nanos)
    async with serve() as live, grpc.aio.insecure_channel(live.address) as channel:
        stub = server_pb2_grpc.ServerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match=f"timeout: got .* {nanos} nanos"):
            await stub.Drain(server_pb2.DrainRequest(timeout=duration))
        with pytest.raises(grpc.aio.AioRpcError, match=f"duration: got .* {nanos} nanos"):
            await stub.CaptureTrace(server_pb2.CaptureTraceRequest(duration=duration))
        unknown = server_pb2.DrainRequest.FromString(b"\x98\x06\x01")  # number 99
        with pytest.raises(grpc.aio.AioRpcError, match="99"):
            await stub.Drain(unknown)
        assert (await live.client.generate("x", max_tokens=1)).outputs


async def test_a_server_that_is_drained_while_it_loads_never_serves(serve, eventually) -> None:
    async with serve(options={"load_seconds": "0.5"}, load=False) as live:
        starting = asyncio.create_task(live.frontend.start())
        assert (await live.client.server_info()).state == ServerState.SERVER_STATE_LOADING
        assert await live.client.drain(60)
        with pytest.raises(UnavailableError, match="shutting down") as caught:
            await live.client.generate("x")
        assert caught.value.retry_after is None
        await starting
        assert (await live.client.server_info()).state == ServerState.SERVER_STATE_DRAINING
        assert (await live.client.model_info()).name == "sim"
        with pytest.raises(UnavailableError, match="shutting down"):
            await live.client.generate("x")


def test_a_daemon_that_is_drained_while_it_loads_does_not_say_that_it_serves(daemon, capsys) -> None:
    server = daemon("--runner-option", "load_seconds=0.5")
    assert main(["drain", "--address", server.listening_address]) == 0
    server.wait_for_log("the model is loaded, and nothing is served")
    server.terminate()
    assert server.wait() == 0
    assert server.process.stdout.read() == ""


def test_the_command_drains_and_says_how_it_went(daemon, capsys) -> None:
    server = daemon("--runner-option", "step_seconds=0.02")
    address = server.wait_until_ready()
    with Client(address, timeout=30) as client:
        stream = client.stream("x", max_tokens=5000, ignore_eos=True)
        assert next(stream).HasField("started")
        # Cut by its own time-out: the server goes on draining, and lets the stream go on.
        assert main(["drain", "--address", address, "--drain-seconds", "60", "--timeout", "0.3"]) == 1
        told = capsys.readouterr()
        assert told.out == "draining: 1 outputs run, 0 wait\n"
        assert "it drains on" in told.err
        assert next(stream).output.text
        assert main(["drain", "--address", address, "--drain-seconds", "0.1"]) == 1
        assert capsys.readouterr().out.splitlines()[1] == "drained: what took longer was ended"
        with pytest.raises(UnavailableError, match="shutting down"):
            list(stream)
        assert main(["drain", "--address", address]) == 0
        assert capsys.readouterr().out.splitlines()[1] == "drained: all live requests ended by themselves"
        # An engine that ends now, by a signal to the whole process group, is not missed.
        os.kill(client.server_info().engine_pid, signal.SIGTERM)
        server.wait_for_log("the engine ended after the drain, and is not restarted")
        with pytest.raises(UnavailableError, match="drained, and its engine has ended"):
            client.reset_prefix_cache()
    server.terminate()
    assert server.wait() == 0
    assert "restart 1" not in server.log()


def test_a_time_to_drain_that_is_none_is_refused(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["drain", "--drain-seconds", "-1"])
    assert caught.value.code == 2
    assert "expected seconds, 0 or from 0.000001 to 1000000000, got '-1'" in capsys.readouterr().err


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
