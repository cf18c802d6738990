"""Faults that streaming inference servers were reported for, shown absent: requests that end early, ids, statuses.

Each test is one such fault or its whole kind, through a real server and a real client.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

import grpc
import pytest

from runnerd.v1 import inference_pb2_grpc
from runnerd.v1.generation_pb2 import FinishReason, GenerateRequest, OutputOptions, TokenIds
from runnerd_client import (
    AlreadyExistsError,
    AsyncClient,
    InvalidRequestError,
    RequestCancelledError,
    UnavailableError,
    chat,
)
from runnerd_client.errors import from_rpc_error

sys.path.insert(0, str(Path(__file__).parent))

from slow_prompts import slow_to_prepare

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = {"max_tokens": 5000, "ignore_eos": True}


async def started(stream) -> None:
    assert (await anext(aiter(stream))).HasField("started")


async def ended(stream) -> Counter[int]:
    """Read a stream to its end; give how many finishes each output had."""
    finishes: Counter[int] = Counter()
    async for message in stream:
        if message.HasField("output"):
            assert finishes[message.output.index] == 0, "something followed a finish"
            finishes[message.output.index] += message.output.HasField("finish")
    return finishes


# G1
async def test_a_hundred_requests_cancelled_while_they_are_added_leave_nothing(slow, idle) -> None:
    before = (await slow.client.load()).generation_tokens

    async def cancelled(number: int) -> None:
        prompt = "x" * 5000 if number % 2 else "x"  # the long one is prepared in a thread
        task = asyncio.create_task(slow.client.generate(prompt, request_id=f"add {number}", n=1 + number % 3, **LONG))
        for _ in range(number % 20):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(cancelled(number) for number in range(100)))
    await idle(slow)
    again = await asyncio.gather(
        *(slow.client.generate("x", request_id=f"add {number}", max_tokens=1) for number in range(0, 100, 10))
    )
    assert len(again) == 10
    assert (await slow.client.load()).generation_tokens - before < 100 * 3 * 3  # nobody was computed to the end


# G2
async def test_an_id_taken_again_while_its_abort_is_under_way_names_the_new_request_alone(slow, idle) -> None:
    for _ in range(5):
        first = slow.client.stream("x", request_id="again", **LONG)
        await started(first)
        aborting = asyncio.create_task(slow.client.abort("again"))
        while True:  # its id is not free before the first has ended
            try:
                answer = await slow.client.generate("y", request_id="again", max_tokens=5, ignore_eos=True)
                break
            except AlreadyExistsError:
                await asyncio.sleep(0)
        assert answer.outputs[0].finish.usage.completion_tokens == 5
        assert await aborting
        with pytest.raises(RequestCancelledError):
            await ended(first)
    await idle(slow)


# G3
async def test_of_many_requests_with_one_id_at_once_one_is_served_and_the_others_are_refused(slow, idle) -> None:
    answers = await asyncio.gather(
        *(slow.client.generate("x", request_id="one", max_tokens=20, ignore_eos=True) for _ in range(20)),
        return_exceptions=True,
    )
    served = [one for one in answers if not isinstance(one, BaseException)]
    assert [type(one) for one in answers if isinstance(one, BaseException)] == [AlreadyExistsError] * 19
    assert [one.outputs[0].finish.usage.completion_tokens for one in served] == [20]
    await idle(slow)


# G5
async def test_requests_that_end_while_they_wait_are_never_computed(serve, idle, eventually) -> None:
    async with serve(engine={"max_num_seqs": 1}, options={"step_seconds": "0.02"}) as live:
        running = live.client.stream("x", **LONG)
        await started(running)
        waiting = [live.client.stream("y" * 1000, request_id=f"waits {number}", **LONG) for number in range(4)]
        for stream in waiting:
            await started(stream)

        async def all_wait() -> bool:
            return (await live.client.load()).num_waiting == 4

        async def none_waits() -> bool:
            return (await live.client.load()).num_waiting == 0

        await eventually(all_wait)
        waiting[0].cancel()
        waiting[1].cancel()
        assert await live.client.abort("waits 2")
        assert await live.client.abort("waits 3")
        await eventually(none_waits)
        running.cancel()
        await idle(live)
        assert (await live.client.generate("z", max_tokens=1)).outputs
        assert (await live.client.load()).prefix_cache_queries == 2  # prompt tokens of the first and the last request


# G7
async def test_requests_that_end_while_they_are_preempted_give_their_memory_back(serve, idle, eventually) -> None:
    options = {"step_seconds": "0.005", "num_blocks": "24", "kv_shadow": "true"}
    async with serve(engine={"max_num_seqs": 8, "block_size": 4}, options=options) as live:
        streams = [
            live.client.stream(f"prompt {number}", request_id=f"{number}", max_tokens=80, ignore_eos=True)
            for number in range(8)
        ]
        for stream in streams:
            await started(stream)

        async def some_are_preempted() -> bool:
            load = await live.client.load()
            return load.num_preemptions > 0 and load.num_waiting > 0

        await eventually(some_are_preempted)
        for number, stream in enumerate(streams[:-1]):
            if number % 2:
                stream.cancel()
            else:
                await live.client.abort(f"{number}")
        assert await ended(streams[-1]) == {0: 1}
        await idle(live)


# G8
async def test_an_abort_while_the_prompt_is_prepared_is_remembered(live, idle, eventually) -> None:
    steps = (await live.client.load()).num_steps
    call = asyncio.create_task(live.client.generate(slow_to_prepare("x"), request_id="early", **LONG))

    async def aborted() -> bool:
        return await live.client.abort("early")

    await eventually(aborted)
    with pytest.raises(RequestCancelledError) as caught:
        await call
    assert caught.value.reason == "REQUEST_ABORTED"
    await idle(live)
    assert (await live.client.load()).num_steps == steps


async def test_a_reader_that_leaves_before_the_first_token_ends_its_request(live, idle) -> None:
    steps = (await live.client.load()).num_steps
    stream = live.client.stream(slow_to_prepare("x"), **LONG)
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.05)
    reading.cancel()
    stream.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await idle(live)
    assert (await live.client.load()).num_steps == steps


# G9, G38
async def test_a_generation_stops_within_the_steps_in_flight_when_its_client_goes(serve, eventually) -> None:
    async with serve(options={"step_seconds": "0.1"}) as live:
        stream = live.client.stream("x", **LONG)
        async for message in stream:
            if message.HasField("output"):
                break
        before = (await live.client.load()).num_steps
        stream.cancel()

        async def is_idle() -> bool:
            return (await live.client.load()).num_running == 0

        await eventually(is_idle)
        after = (await live.client.load()).num_steps
        await asyncio.sleep(0.3)
        assert (await live.client.load()).num_steps == after
        assert after - before <= 20  # two in flight, and what it took the cancel to arrive on a busy machine


# G11
async def test_an_aborted_generation_never_looks_complete(slow, idle) -> None:
    unary = asyncio.create_task(slow.client.generate("x", request_id="unary", n=2, **LONG))
    stream = slow.client.stream("x", request_id="stream", n=2, **LONG)
    await started(stream)
    await asyncio.sleep(0.1)
    assert await slow.client.abort("unary")
    assert await slow.client.abort("stream")
    with pytest.raises(RequestCancelledError, match="aborted"):
        await unary
    with pytest.raises(RequestCancelledError, match="aborted"):
        assert not +(await ended(stream)), "an output had a finish"
    await idle(slow)


# G12
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tokens": 1}, FinishReason.FINISH_REASON_LENGTH),
        ({"max_tokens": 50}, FinishReason.FINISH_REASON_LENGTH),
        ({"ignore_eos": False, "logit_bias": {256: 100.0}}, FinishReason.FINISH_REASON_STOP),
        ({"stop_token_ids": list(range(256))}, FinishReason.FINISH_REASON_STOP),
        ({"stop": list("aeiou nrst")}, FinishReason.FINISH_REASON_STOP),
        ({"time_limit": 0.000_001}, FinishReason.FINISH_REASON_TIME_LIMIT),
        ({"text": False, "max_tokens": 3}, FinishReason.FINISH_REASON_LENGTH),
        ({"stream_mode": "cumulative", "max_tokens": 3}, FinishReason.FINISH_REASON_LENGTH),
    ],
    ids=str,
)
async def test_a_stream_that_ends_ok_has_one_finish_for_each_output(live, idle, options: dict, reason: int) -> None:
    for n in (1, 3):
        finishes, reasons = Counter[int](), set()
        async for message in live.client.stream("x", **({"ignore_eos": True} | options), n=n):
            if message.HasField("output"):
                assert finishes[message.output.index] == 0, "something followed a finish"
                if message.output.HasField("finish"):
                    finishes[message.output.index] += 1
                    reasons.add(message.output.finish.reason)
        assert finishes == dict.fromkeys(range(n), 1)
        assert reasons == {reason}
    await idle(live)


# G12, G13
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"fail_at_step": "6"}, grpc.StatusCode.UNAVAILABLE),
        ({"crash_at_step": "6"}, grpc.StatusCode.UNAVAILABLE),
        ({"fail_row_token": "poison", "script": "some poison here"}, grpc.StatusCode.INTERNAL),
    ],
    ids=str,
)
async def test_a_fault_after_the_first_tokens_is_a_status_and_no_end(serve, fault: dict, code: grpc.StatusCode) -> None:
    async with (
        serve(options=fault | {"step_seconds": "0.01"}, max_engine_restarts=0) as live,
        grpc.aio.insecure_channel(live.address) as channel,
    ):
        request = GenerateRequest(text="x")
        request.stopping.max_tokens = 5000
        request.stopping.ignore_eos = True
        call = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(request)
        chunks = []

        async def read_to_the_end() -> None:
            while (message := await call.read()) is not grpc.aio.EOF:
                chunks.append(message.output)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_the_end()
        assert any(chunk.text for chunk in chunks)
        assert not any(chunk.HasField("finish") for chunk in chunks)
        assert caught.value.code() is await call.code() is code
        assert [name for name, _ in caught.value.trailing_metadata()] == ["grpc-status-details-bin"]
        assert caught.value.details()


# G11, G12
async def test_a_killed_engine_ends_every_kind_of_call_with_a_status(daemon) -> None:
    faults = ("--runner-option", "step_seconds=0.01", "--runner-option", "crash_at_step=40")
    server = daemon(*faults, "--max-engine-restarts", "0")

    async def calls(client: AsyncClient) -> list[object]:
        return await asyncio.gather(
            *(ended(client.stream(f"{number}", **LONG)) for number in range(3)),
            client.generate("x", n=2, **LONG),
            ended(client.stream("x", n=3, prompt_logprobs=1, **LONG)),
            return_exceptions=True,
        )

    address = await asyncio.to_thread(server.wait_until_ready)
    async with AsyncClient(address, timeout=30) as client:
        outcomes = await calls(client)
        assert {type(outcome) for outcome in outcomes} == {UnavailableError}
    assert await asyncio.to_thread(server.wait) == 1
    assert "the engine failed and is not restarted again: EngineProcessDied" in server.log()


# G23
@pytest.mark.parametrize(
    "prompt",
    [{}, {"text": ""}, {"token_ids": TokenIds()}, {"chat": chat()}, {"chat": chat({"role": "", "content": ""})}],
    ids=["none", "text", "token_ids", "chat", "message"],
)
async def test_an_empty_prompt_is_refused_and_harms_nobody(slow, idle, prompt) -> None:
    other = asyncio.create_task(slow.client.generate("x", max_tokens=10, ignore_eos=True))
    # The stubs: the Python client refuses an empty sequence before it is sent.
    async with grpc.aio.insecure_channel(slow.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for n in (1, 3):
            request = GenerateRequest(output=OutputOptions(n=n), **prompt)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request, timeout=30)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidRequestError)
            assert error.violations
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.StreamGenerate(request, timeout=30).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await other).outputs[0].finish.usage.completion_tokens == 10
    await idle(slow)
