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


@pytest.mark.parametrize(
    ("prompt", "error", "told"),
    [
        ({"role": "user", "content": "hi"}, TypeError, r"one chat message; give a list of them"),
        (b"hi", TypeError, "bytes; give a text"),
        (None, TypeError, "None, expected a text"),
        (iter([1]), TypeError, "expected a text, token ids, or chat messages"),
        ([-1], ValueError, "from 0 to 4294967295"),
        (["a"], TypeError, "from 0 to 4294967295"),
        ("\ud800", ValueError, "no text"),
    ],
)
def test_a_prompt_that_is_none_is_refused_by_what_it_is(prompt, error, told: str) -> None:
    with pytest.raises(error, match=f"^prompt (is|does not fit).*{told}"):
        generate_request(prompt, {})
    if not isinstance(prompt, list):
        with pytest.raises(error, match=f"^prompt is .*{told}"):
            tokenize_request(prompt, None)


def test_what_is_no_chat_message_is_refused_by_its_place() -> None:
    for build in (lambda turns: generate_request(turns, {}), lambda turns: tokenize_request(turns, None)):
        with pytest.raises(TypeError, match=r"^messages\[1\] is 5, expected a chat message"):
            build([{"role": "user", "content": "hi"}, 5])


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300, "1"])
def test_seconds_that_no_timer_counts_are_refused_by_the_argument_s_name(seconds) -> None:
    error, told = (TypeError, "") if isinstance(seconds, str) else (ValueError, ", at most 1000000000")
    with Client("127.0.0.1:1") as client:
        for name, call in (
            ("time_limit", lambda: generate_request("x", {"time_limit": seconds})),
            ("timeout", lambda: Client("127.0.0.1:1", timeout=seconds)),
            ("timeout", lambda: client.load(timeout=seconds)),
            ("timeout", lambda: client.stream("x", timeout=seconds)),
            ("seconds", lambda: client.drain(seconds)),
            ("seconds", lambda: client.capture_trace(seconds)),
        ):
            with pytest.raises(error, match=f"^{name} is .*expected a number of seconds{told}$"):
                call()


@pytest.mark.parametrize("token", ["secret\n", "sécret", 5])
def test_a_token_that_grpc_does_not_carry_is_refused_and_not_told(token) -> None:
    with Client("127.0.0.1:1", token=lambda: token) as client, pytest.raises(ValueError, match=r"^token is") as caught:
        client.load()
    assert str(token) not in str(caught.value)
    if isinstance(token, str):
        with pytest.raises(ValueError, match=r"^token is"):
            Client("127.0.0.1:1", token=token)


def test_metadata_s_keys_and_binary_values_are_those_of_grpc() -> None:
    for key in ("X", "a b", ""):
        with pytest.raises(ValueError, match=f"^metadata '{key}' is no key"):
            Client("127.0.0.1:1", metadata={key: "1"})
    with pytest.raises(ValueError, match=r"^metadata 'x-bin' is 'a'; .* takes bytes"):
        Client("127.0.0.1:1", metadata={"x-bin": "a"})
    Client("127.0.0.1:1", metadata={"x-bin": b"\0"}).close()


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
        ({"stop": ["\ud800"]}, ValueError),
        ({"temperature": 10**400}, ValueError),
    ],
)
def test_a_value_that_no_message_can_hold_is_refused_by_the_option_s_name(options, error) -> None:
    (name,) = options
    with pytest.raises(error, match=f"^{name} is .*does not fit"):
        generate_request("x", {"max_tokens": 1, **options})
