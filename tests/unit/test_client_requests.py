"""The client's options are the request's fields."""

from __future__ import annotations

import numpy as np
import pytest

from runnerd.v1 import generation_pb2 as pb
from runnerd_client import ChatMessage, Client, GenerateOptions, chat
from runnerd_client.requests import generate_request, tokenize_request
from runnerd_service.frontend.types import ChatPrompt, Generation
from runnerd_service.guided.guide import Guide
from runnerd_service.rpc.convert import to_generation

OPTIONS: GenerateOptions = {
    "request_id": "r",
    "priority": -1,
    "model": "m",
    "adapter": "a",
    "cache_salt": "c",
    "add_special_tokens": False,
    "truncation": "left",
    "max_prompt_tokens": 5,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 0.5,
    "min_p": 0.25,
    "typical_p": 0.75,
    "seed": 2**64 - 1,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.0,
    "frequency_penalty": 0.5,
    "logit_bias": {7: -100.0},
    "allowed_token_ids": (1, 2),
    "bad_words": ("bad",),
    "beam_width": 2,
    "max_tokens": 8,
    "min_tokens": 3,
    "stop": ("end", "."),
    "stop_token_ids": (9,),
    "include_stop": True,
    "ignore_eos": True,
    "time_limit": 1.5,
    "n": 2,
    "text": False,
    "tokens": True,
    "logprobs": 0,
    "prompt_logprobs": 1,
    "include_prompt": False,
    "skip_special_tokens": False,
    "stream_mode": "cumulative",
    "pooling": "mean",
    "guided_decoding": pb.GuidedDecoding(regex="a+"),
}


def test_each_option_arrives_at_the_server_as_it_was_given() -> None:
    assert OPTIONS.keys() == GenerateOptions.__annotations__.keys()
    expected = dict(OPTIONS)
    expected["time_limit_seconds"] = expected.pop("time_limit")
    expected["cumulative"] = expected.pop("stream_mode") == "cumulative"
    expected["guide"] = Guide("regex", ("a+",))
    del expected["guided_decoding"]
    assert to_generation(generate_request("hello", OPTIONS)) == Generation(prompt="hello", **expected)


def test_each_field_of_the_request_has_an_option() -> None:
    groups = {"prompt_options", "sampling", "stopping", "output"}
    prompts = {field.name for field in pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["prompt"].fields}
    names = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} - groups - prompts
    for group in groups:
        names |= set(pb.GenerateRequest.DESCRIPTOR.fields_by_name[group].message_type.fields_by_name)
    assert {name.replace("time_limit_seconds", "time_limit") for name in names} == set(OPTIONS)


def test_options_left_out_and_none_are_unset() -> None:
    assert to_generation(generate_request("hello", {})) == Generation(prompt="hello")
    nothing: GenerateOptions = dict.fromkeys(OPTIONS)  # type: ignore[assignment]
    assert to_generation(generate_request("hello", nothing)) == Generation(prompt="hello")


def test_prompts_are_text_token_ids_or_a_conversation() -> None:
    assert to_generation(generate_request((1, 2), {})).prompt == (1, 2)
    prompt = to_generation(generate_request(chat({"role": "user", "content": "hi"}), {})).prompt
    assert isinstance(prompt, ChatPrompt)
    assert list(prompt.messages) == [{"role": "user", "content": "hi"}]
    turns = [{"role": "user", "content": "hi"}, ChatMessage(role="assistant", content="ho")]
    assert generate_request(turns, {}).chat == chat(*turns) == tokenize_request(turns, None).chat
    assert to_generation(generate_request(np.array([1, 2]), {})).prompt == (1, 2)
    assert chat(ChatMessage(role="user", content="hi")) == chat({"role": "user", "content": "hi"})


def test_an_empty_sequence_could_be_two_kinds_of_prompt_and_is_refused() -> None:
    for empty in ([], (), np.array([], dtype=np.int64)):
        with pytest.raises(ValueError, match="prompt is empty; give a text, at least one token id, or"):
            generate_request(empty, {})


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "hi"}, "role is None"),
        ({"role": "user"}, "content is None"),
        ({"role": 1, "content": ""}, "role is 1"),
    ],
)
def test_a_chat_message_without_role_or_content_is_refused_by_name(message, field: str) -> None:
    for build in (lambda turns: generate_request(turns, {}), lambda turns: tokenize_request(turns, None)):
        with pytest.raises(ValueError, match=rf"^messages\[1\]\.{field}, expected a text"):
            build([{"role": "user", "content": "hi"}, message])


def test_metadata_that_grpc_does_not_carry_is_refused_by_its_key() -> None:
    for value in ("é", "a\nb"):
        with pytest.raises(ValueError, match=r"^metadata 'x-tenant' has characters that gRPC does not carry"):
            Client("127.0.0.1:1", metadata={"x-tenant": value})


def test_a_lone_stop_text_is_one_text_and_not_its_characters() -> None:
    assert to_generation(generate_request("x", {"stop": "end", "bad_words": "no"})).stop == ("end",)


def test_unknown_options_and_keys_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="unknown option 'max_token'"):
        generate_request("x", {"max_token": 1})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match="unknown key 'rôle'"):
        chat({"rôle": "user", "content": ""})  # type: ignore[typeddict-unknown-key,typeddict-item]


def test_a_value_that_does_not_fit_its_field_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        generate_request("x", {"max_tokens": -1})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"top_k": -1}, ValueError),
        ({"seed": 2**64}, ValueError),
        ({"logit_bias": {-1: 1.0}}, ValueError),
        ({"temperature": "hot"}, TypeError),
        ({"truncation": "middle"}, ValueError),
        ({"stream_mode": "both"}, ValueError),
    ],
)
def test_a_value_that_no_message_can_hold_is_refused_by_the_option_s_name(options, error) -> None:
    (name,) = options
    with pytest.raises(error, match=f"^{name} is .*does not fit"):
        generate_request("x", {"max_tokens": 1, **options})
