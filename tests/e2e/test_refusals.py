"""What a server refuses: each wrong field by its name, too much, too early; and that nobody else is harmed."""

from __future__ import annotations

import asyncio
import itertools

import grpc
import pytest

from runnerd.v1 import generation_pb2 as pb
from runnerd.v1 import inference_pb2, inference_pb2_grpc, server_pb2, server_pb2_grpc
from runnerd.v1.server_pb2 import GetModelInfoRequest, ServerState
from runnerd_client import (
    ChatMessage,
    ChatPrompt,
    GuidedDecoding,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RunnerdError,
    UnavailableError,
    chat,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOO_LONG = "x" * 9000

WRONG_OPTIONS = [
    ({"request_id": ""}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"adapter": "lora"}, "adapter"),
    ({"max_prompt_tokens": 0}, "prompt_options.max_prompt_tokens"),
    ({"temperature": -0.1}, "sampling.temperature"),
    ({"temperature": float("nan")}, "sampling.temperature"),
    ({"temperature": float("inf")}, "sampling.temperature"),
    ({"top_k": 100_000}, "sampling.top_k"),
    ({"top_p": 0.0}, "sampling.top_p"),
    ({"top_p": 1.5}, "sampling.top_p"),
    ({"min_p": -0.5}, "sampling.min_p"),
    ({"typical_p": 1.5}, "sampling.typical_p"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
    ({"presence_penalty": 3.0}, "sampling.presence_penalty"),
    ({"frequency_penalty": -3.0}, "sampling.frequency_penalty"),
    ({"logit_bias": {1000: 1.0}}, "sampling.logit_bias[1000]"),
    ({"logit_bias": {1: 101.0}}, "sampling.logit_bias[1]"),
    ({"allowed_token_ids": [5, 1000]}, "sampling.allowed_token_ids[1]"),
    ({"bad_words": [""]}, "sampling.bad_words[0]"),
    ({"beam_width": 4}, "sampling.beam_width"),
    ({"max_tokens": 0}, "stopping.max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "stopping.min_tokens"),
    ({"stop": [""]}, "stopping.stop[0]"),
    ({"stop": ["x"] * 17}, "stopping.stop"),
    ({"stop_token_ids": [1000]}, "stopping.stop_token_ids[0]"),
    ({"time_limit": 0.0}, "stopping.time_limit"),
    ({"n": 0}, "output.n"),
    ({"n": 1000}, "output.n"),
    ({"n": 2**32 - 1}, "output.n"),  # takes no room before it is refused
    ({"logprobs": 100}, "output.logprobs"),
    ({"prompt_logprobs": 100}, "output.prompt_logprobs"),
    ({"guided_decoding": GuidedDecoding(json_schema="{}")}, "guided_decoding.json_schema"),
    ({"guided_decoding": GuidedDecoding(regex="a")}, "guided_decoding.regex"),
    ({"guided_decoding": GuidedDecoding()}, "guided_decoding"),
]

WRONG_PROMPTS = [
    ("", "text"),
    ([1, 1000], "token_ids.ids[1]"),
    (TOO_LONG, "prompt"),
    (ChatPrompt(), "chat.messages"),
    (chat({"role": "", "content": "x"}), "chat.messages[0].role"),
    (ChatPrompt(messages=[ChatMessage(role="user", parts=[pb.ContentPart()])]), "chat.messages[0].parts[0]"),
    (
        ChatPrompt(messages=[ChatMessage(role="user", parts=[pb.ContentPart(image_url="data:,")])]),
        "chat.messages[0].parts[0]",
    ),
]


def fields(error: RunnerdError) -> list[str]:
    return [violation.field for violation in error.violations]


@pytest.mark.parametrize(("options", "field"), WRONG_OPTIONS, ids=itertools.count())
async def test_a_wrong_option_is_refused_by_its_name(live, options: dict, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await live.client.generate("x", **options)
    assert fields(caught.value) == [field]
    assert caught.value.violations[0].description
    assert caught.value.reason == "INVALID_REQUEST"


@pytest.mark.parametrize(("prompt", "field"), WRONG_PROMPTS, ids=itertools.count())
async def test_a_wrong_prompt_is_refused_by_its_name(live, prompt, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await live.client.generate(prompt)
    assert any(one == field or one.startswith(field + ".") for one in fields(caught.value))


async def test_all_violations_come_at_once_and_before_the_first_message(live) -> None:
    stream = live.client.stream("x", top_p=2.0, n=0, max_tokens=0)
    with pytest.raises(InvalidRequestError) as caught:
        await anext(stream)
    assert set(fields(caught.value)) == {"sampling.top_p", "output.n", "stopping.max_tokens"}


async def test_no_prompt_is_refused(live) -> None:
    async with grpc.aio.insecure_channel(live.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(inference_pb2.TokenizeRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Abort(inference_pb2.AbortRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_another_model_is_not_found(live) -> None:
    name = (await live.client.model_info()).name
    assert (await live.client.generate("x", model=name, max_tokens=1)).outputs
    with pytest.raises(NotFoundError, match=name):
        await live.client.generate("x", model="gpt")


async def test_ids_outside_of_the_vocabulary_are_not_detokenized(live) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await live.client.detokenize([1, 2, 100_000])
    assert fields(caught.value) == ["ids[2]"]


async def test_refusals_harm_no_live_request_and_leave_nothing(live, idle) -> None:
    async def refused(options: dict) -> None:
        with pytest.raises(InvalidRequestError):
            await live.client.generate("x", **options)

    alone = await live.client.generate("healthy", max_tokens=200, seed=1, ignore_eos=True)
    together = asyncio.create_task(live.client.generate("healthy", max_tokens=200, seed=1, ignore_eos=True))
    await asyncio.gather(*(refused(options) for options, _ in WRONG_OPTIONS))
    assert (await together).outputs[0].text == alone.outputs[0].text
    await idle(live)


async def test_bytes_that_are_no_message_end_with_a_status(live) -> None:
    async with grpc.aio.insecure_channel(live.address) as channel:
        call = channel.unary_unary("/runnerd.v1.InferenceService/Generate")
        async with asyncio.timeout(10):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"\xff\xff\xff")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            unknown = channel.unary_unary("/runnerd.v1.InferenceService/NoSuchMethod")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await unknown(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert (await live.client.generate("x", max_tokens=1)).outputs


# G36
async def test_an_option_of_a_newer_client_is_refused_and_not_ignored(live) -> None:
    newer = pb.GenerateRequest(text="x").SerializeToString() + b"\x98\x06\x01"  # field 99, a varint
    async with grpc.aio.insecure_channel(live.address) as channel:
        for method in ("Generate", "StreamGenerate"):
            make = channel.unary_unary if method == "Generate" else channel.unary_stream
            call = make(f"/runnerd.v1.InferenceService/{method}")(newer, timeout=30)
            with pytest.raises(grpc.aio.AioRpcError, match="this server knows no field 99") as caught:
                await (call if method == "Generate" else call.read())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


METHODS = [
    method
    for service in (
        *inference_pb2.DESCRIPTOR.services_by_name.values(),
        *server_pb2.DESCRIPTOR.services_by_name.values(),
    )
    for method in service.methods
    if not method.server_streaming  # the one that streams has its own test
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_each_call_refuses_fields_that_it_does_not_know(live, method) -> None:
    async with grpc.aio.insecure_channel(live.address) as channel:
        call = channel.unary_unary(f"/{method.containing_service.full_name}/{method.name}")
        with pytest.raises(grpc.aio.AioRpcError, match="this server knows no field 99") as caught:
            await call(b"\x98\x06\x01", timeout=30)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_over_the_limit_says_which_limit(serve) -> None:
    async with serve(max_message_bytes=2000) as live:
        assert (await live.client.server_info()).max_message_bytes == 2000
        with pytest.raises(InvalidRequestError, match="--max-message-bytes") as caught:
            await live.client.generate("x" * 2000)
        assert fields(caught.value) == ["GenerateRequest"]
        with pytest.raises(InvalidRequestError, match="the server takes 2000"):
            async for _ in live.client.stream("x" * 2000):
                pass
        with pytest.raises(InvalidRequestError, match="message larger than max"):  # gRPC's own limit, far above
            await live.client.generate("x" * 3_000_000)
        assert (await live.client.generate("x" * 1900, max_tokens=1)).outputs


async def test_messages_above_grpcs_default_are_taken_by_default(live) -> None:
    with pytest.raises(InvalidRequestError) as caught:  # too long for the model, not for the wire
        await live.client.generate("x" * 6_000_000)
    assert "GenerateRequest" not in fields(caught.value)


async def test_too_many_waiting_requests_are_refused_with_a_time_to_retry(serve, idle, eventually) -> None:
    async with serve(engine={"max_num_seqs": 1}, max_waiting=2, options={"step_seconds": "0.02"}) as live:
        streams = [live.client.stream("x", max_tokens=5000, ignore_eos=True) for _ in range(3)]
        for stream in streams:
            assert (await anext(aiter(stream))).HasField("started")
        with pytest.raises(OverloadedError) as caught:
            await live.client.generate("one too many")
        assert caught.value.reason == "OVERLOADED"
        assert caught.value.retry_after is not None

        async def two_wait() -> bool:
            return (await live.client.load()).num_waiting == 2

        await eventually(two_wait)
        for stream in streams:
            stream.cancel()
        await idle(live)
        assert (await live.client.generate("x", max_tokens=1)).outputs


async def test_a_loading_server_answers_questions_and_refuses_generations(serve) -> None:
    async with serve(load=False, options={"load_seconds": "1"}) as live:
        starting = asyncio.create_task(live.frontend.start())
        info = await live.client.server_info()
        assert info.state == ServerState.SERVER_STATE_LOADING
        assert info.runner == "sim"
        assert info.num_blocks == 0
        assert (await live.client.load()).num_steps == 0
        assert {runner.name for runner in await live.client.runners()} >= {"sim", "cpu"}
        with pytest.raises(UnavailableError, match="loading") as caught:
            await live.client.generate("x")
        assert caught.value.reason == "NOT_READY"
        assert caught.value.retry_after is not None
        async with grpc.aio.insecure_channel(live.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await server_pb2_grpc.ModelServiceStub(channel).GetModelInfo(GetModelInfoRequest())
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        await starting
        info = await live.client.server_info()
        assert info.state == ServerState.SERVER_STATE_SERVING
        assert (info.async_effective, info.max_in_flight) == (True, 2)
        assert info.num_blocks > 0
        assert info.uptime.ToMilliseconds() > 0


async def test_a_failed_engine_ends_its_streams_with_a_status(serve) -> None:
    async with serve(options={"fail_at_step": "5", "step_seconds": "0.01"}, max_engine_restarts=0) as live:
        with pytest.raises(RunnerdError) as caught:
            async for _ in live.client.stream("x", max_tokens=500, ignore_eos=True):
                pass
        assert isinstance(caught.value, (UnavailableError, InternalError))
        assert caught.value.reason == "ENGINE_FAILED"
        info = await live.client.server_info()
        assert info.state == ServerState.SERVER_STATE_FAILED
        assert info.last_error
        with pytest.raises(UnavailableError, match="the engine failed"):
            await live.client.generate("x")


async def test_a_template_that_fails_is_refused_and_no_internal_error(live) -> None:
    prompt = chat({"role": "user", "content": "x"})
    prompt.chat_template = "{{ 1 / 0 }}"
    with pytest.raises(InvalidRequestError) as caught:
        await live.client.generate(prompt)
    assert fields(caught.value)[0].startswith("chat")
