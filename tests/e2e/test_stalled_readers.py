"""Readers that stop reading: what they cost, what they get, and that nobody else notices."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest

from runnerd.v1 import inference_pb2_grpc
from runnerd.v1.generation_pb2 import GenerateRequest
from runnerd_client.errors import from_rpc_error

SECONDS = 60
NUM_TOKENS = 1500


def much() -> GenerateRequest:
    """Ask for more than the windows of a connection hold."""
    request = GenerateRequest(text="x", request_id="stalled")
    request.sampling.seed = 7
    request.stopping.ignore_eos = True
    request.stopping.max_tokens = NUM_TOKENS
    request.output.logprobs = 20
    return request


def narrow_channel(address: str) -> grpc.aio.Channel:
    """A client whose windows do not grow."""
    return grpc.aio.insecure_channel(
        address,
        [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.max_frame_size", 16_384)],
    )


async def read_into(ids: list[int], call) -> None:
    async with asyncio.timeout(SECONDS):
        while (message := await call.read()) is not grpc.aio.EOF:
            ids += [token.id for token in message.output.tokens]


# G30
async def test_a_reader_that_stalls_for_too_long_is_ended_and_told_why(serve, eventually, caplog) -> None:
    async with serve(stall_timeout_seconds=0.5) as live, narrow_channel(live.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        whole = [token.id for token in (await stub.Generate(much())).outputs[0].tokens]
        stalled = stub.StreamGenerate(much())
        await stalled.read()

        async def ended() -> bool:
            return live.frontend.num_live == 0

        await eventually(ended)
        ids: list[int] = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_into(ids, stalled)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "--stall-timeout" in caught.value.details()
        assert from_rpc_error(caught.value).reason == "READER_STALLED"
        assert ids == whole[: len(ids)]
        assert 0 < len(ids) < len(whole)
        load = await live.client.load()
        assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0)
        outcomes = live.frontend.request_stats.outcomes()
        assert (outcomes["reader_stalled"], outcomes["cancelled"]) == (1, 0)
        assert any(
            record.getMessage().startswith("request stalled reader_stalled:")
            for record in caplog.records
            if record.levelno == logging.WARNING
        )


async def test_a_reader_that_pauses_for_less_gets_all(serve, eventually) -> None:
    async with serve(stall_timeout_seconds=SECONDS) as live, narrow_channel(live.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        whole = [token.id for token in (await stub.Generate(much())).outputs[0].tokens]
        stalled = stub.StreamGenerate(much())
        await stalled.read()

        async def all_is_generated() -> bool:
            return live.frontend.load.generation_tokens == 2 * NUM_TOKENS

        await eventually(all_is_generated)
        ids: list[int] = []
        await read_into(ids, stalled)
        assert ids == whole


async def test_a_pause_between_tokens_is_no_stall(serve) -> None:
    """The stream is slow, its reader is not."""
    async with serve(stall_timeout_seconds=0.1, options={"step_seconds": "0.25"}) as live:
        answer = await live.client.generate("x", max_tokens=3, ignore_eos=True)
        texts = [
            text async for text in live.client.stream("x", seed=answer.seed, max_tokens=3, ignore_eos=True).texts()
        ]
        assert "".join(texts) == answer.outputs[0].text


async def test_many_readers_that_stall_slow_no_other(serve, idle, caplog) -> None:
    async with serve() as live, narrow_channel(live.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stalled = []
        for number in range(16):
            request = much()
            request.request_id = f"stalled {number}"
            stalled.append(stub.StreamGenerate(request))
            await stalled[-1].read()
        answer = await live.client.generate("y", max_tokens=200, ignore_eos=True, timeout=SECONDS)
        assert answer.outputs[0].finish.usage.completion_tokens == 200
        assert sum(not call.done() for call in stalled) == 16
        for call in stalled:
            call.cancel()
        await idle(live)
        assert live.frontend.request_stats.outcomes()["cancelled"] == 16
    # that they left is no error of the server's
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
