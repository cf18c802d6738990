"""Requests that end before their outputs do: cancel, deadline, abort, and what they leave behind (nothing)."""

from __future__ import annotations

import asyncio
import gc

import grpc
import pytest

from runnerd.v1 import inference_pb2_grpc
from runnerd.v1.generation_pb2 import GenerateRequest
from runnerd_client import (
    AlreadyExistsError,
    Client,
    DeadlineError,
    InternalError,
    RequestCancelledError,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = {"max_tokens": 5000, "ignore_eos": True}


async def started(stream) -> str:
    message = await anext(aiter(stream))
    return message.started.request_id


async def test_leaving_a_stream_frees_its_place(slow, idle) -> None:
    async with slow.client.stream("x", **LONG) as stream:
        async for message in stream:
            if message.HasField("output"):
                break
        assert (await slow.client.load()).num_running == 1
    await idle(slow)


async def test_dropping_a_stream_cancels_it(slow, idle) -> None:
    async for message in slow.client.stream("x", **LONG):
        if message.HasField("output"):
            break
    del message
    gc.collect()
    await idle(slow)


async def test_breaking_out_of_the_synchronous_client_cancels_the_call(slow, idle) -> None:
    def read_some() -> list[str]:
        texts = []
        with Client(slow.address) as client:
            for text in client.stream("x", **LONG).texts():
                texts.append(text)
                if len(texts) == 3:
                    break
            load = client.load()
        return [*texts, str(load.num_running)]

    assert len(await asyncio.to_thread(read_some)) == 4
    await idle(slow)


async def test_a_cancelled_unary_call_stops_the_generation(slow, idle, eventually) -> None:
    call = asyncio.create_task(slow.client.generate("x", **LONG))

    async def runs() -> bool:
        return (await slow.client.load()).num_running == 1

    await eventually(runs)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await idle(slow)


async def test_a_deadline_ends_the_call_and_the_request(slow, idle) -> None:
    with pytest.raises(DeadlineError):
        await slow.client.generate("x", timeout=0.3, **LONG)
    with pytest.raises(DeadlineError):
        async for _ in slow.client.stream("x", timeout=0.3, **LONG):
            pass
    await idle(slow)


async def test_cancels_at_every_moment_leave_nothing(slow, idle) -> None:
    async def one(number: int) -> None:
        task = asyncio.create_task(slow.client.generate(f"prompt {number}", **LONG))
        await asyncio.sleep(0.002 * number)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(one(number) for number in range(60)))
    await idle(slow)
    assert (await slow.client.generate("x", max_tokens=1)).outputs


async def test_an_abort_ends_the_stream_as_cancelled_and_says_so(slow, idle) -> None:
    stream = slow.client.stream("x", request_id="mine", **LONG)
    assert await started(stream) == "mine"
    assert await slow.client.abort("mine")
    with pytest.raises(RequestCancelledError, match="aborted") as caught:
        async for _ in stream:
            pass
    assert caught.value.reason == "REQUEST_ABORTED"
    assert not await slow.client.abort("mine")
    await idle(slow)


async def test_aborting_what_is_not_live_is_no_error(live) -> None:
    assert not await live.client.abort("never heard of")


async def test_a_duplicate_id_is_refused_and_the_first_goes_on(slow, idle) -> None:
    first = slow.client.stream("x", request_id="one", max_tokens=20, ignore_eos=True)
    await started(first)
    with pytest.raises(AlreadyExistsError, match="one"):
        await slow.client.generate("y", request_id="one")
    messages = [message async for message in first]
    assert messages[-1].output.finish.usage.completion_tokens == 20
    await idle(slow)


async def test_an_id_can_be_used_again_at_once_after_its_abort(slow, idle) -> None:
    for _ in range(5):
        stream = slow.client.stream("x", request_id="again", **LONG)
        await started(stream)
        await slow.client.abort("again")
        with pytest.raises(RequestCancelledError):
            async for _ in stream:
                pass
    answer = await slow.client.generate("x", request_id="again", max_tokens=2, ignore_eos=True)
    assert answer.outputs[0].finish.usage.completion_tokens == 2
    await idle(slow)


# G4
async def test_waiting_requests_can_be_aborted_before_they_run(serve, idle, eventually) -> None:
    async with serve(engine={"max_num_seqs": 1}, options={"step_seconds": "0.02"}) as live:
        running = live.client.stream("x", **LONG)
        await started(running)
        waiting = live.client.stream("y", request_id="waits", **LONG)
        await started(waiting)

        async def waits() -> bool:
            return (await live.client.load()).num_waiting == 1

        await eventually(waits)
        assert await live.client.abort("waits")
        with pytest.raises(RequestCancelledError):
            async for _ in waiting:
                pass
        assert (await live.client.load()).num_running == 1
        running.cancel()
        await idle(live)


async def test_one_row_that_fails_harms_no_other(serve, idle) -> None:
    async with serve(options={"fail_row_token": "poison", "step_seconds": "0.005"}) as live:
        healthy = asyncio.create_task(live.client.generate("healthy", max_tokens=50, ignore_eos=True))
        with pytest.raises(InternalError) as caught:
            await live.client.generate("poison", max_tokens=50)
        assert caught.value.reason == "ROW_FAILED"
        assert (await healthy).outputs[0].finish.usage.completion_tokens == 50
        await idle(live)


async def test_a_reader_that_stalls_slows_no_other(live, idle) -> None:
    async with grpc.aio.insecure_channel(live.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = GenerateRequest(text="x")
        request.stopping.max_tokens = 8000
        request.stopping.ignore_eos = True
        request.output.logprobs = 5
        stalled = stub.StreamGenerate(request)
        await stalled.read()
        answer = await live.client.generate("y", max_tokens=500, ignore_eos=True)
        assert answer.outputs[0].finish.usage.completion_tokens == 500
        stalled.cancel()
    await idle(live)
