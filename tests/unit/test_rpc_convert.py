"""Every field of the request messages reaches the front end's types."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from runnerd.v1 import generation_pb2 as pb
from runnerd.v1 import inference_pb2
from runnerd_service.errors import FieldViolation, InvalidRequest
from runnerd_service.frontend.types import ChatPrompt, Generation
from runnerd_service.rpc.convert import skip_special_tokens, to_generation, tokenize_prompt

Path = tuple[FieldDescriptor, ...]

WELL_KNOWN = ("google.protobuf.Duration", "google.protobuf.Struct")


def leaves(descriptor: Descriptor, above: Path = ()) -> Iterator[Path]:
    for field in descriptor.fields:
        path = (*above, field)
        inner = field.message_type
        if inner is None or inner.full_name in WELL_KNOWN or inner.GetOptions().map_entry:
            yield path
        else:
            yield from leaves(inner, path)


def name(path: Path) -> str:
    return ".".join(field.name for field in path)


PROMPT = pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["prompt"]
LEAVES = list(leaves(pb.GenerateRequest.DESCRIPTOR))


def request_for(path: Path) -> pb.GenerateRequest:
    """Give a request that is whole but for the field."""
    return pb.GenerateRequest() if path[0].containing_oneof is PROMPT else pb.GenerateRequest(text="hello")


def parent_of(request: pb.GenerateRequest, path: Path) -> Message:
    message: Message = request
    for field in path[:-1]:
        inner = getattr(message, field.name)
        message = inner.add() if field.is_repeated else inner
        if not field.is_repeated:
            message.SetInParent()
    return message


def set_leaf(message: Message, field: FieldDescriptor) -> None:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        getattr(message, field.name)[3] = 1.5
    elif kind is not None and kind.full_name == "google.protobuf.Duration":
        getattr(message, field.name).FromMilliseconds(1500)
    elif kind is not None:
        inner = getattr(message, field.name)
        (inner.add() if field.is_repeated else inner)["key"] = 5
    elif field.is_repeated:
        getattr(message, field.name).append("x" if field.type == field.TYPE_STRING else 7)
    elif field.enum_type is not None:
        setattr(message, field.name, 2)
    elif field.type == field.TYPE_STRING:
        setattr(message, field.name, "x")
    else:
        setattr(message, field.name, True if field.type == field.TYPE_BOOL else 7)


def outcome(request: pb.GenerateRequest) -> Generation | tuple[FieldViolation, ...]:
    try:
        return to_generation(request)
    except InvalidRequest as error:
        return error.violations


@pytest.mark.parametrize("path", LEAVES, ids=name)
def test_setting_a_field_changes_the_generation(path: Path) -> None:
    without, with_field = request_for(path), request_for(path)
    parent_of(without, path)
    set_leaf(parent_of(with_field, path), path[-1])
    assert outcome(with_field) != outcome(without)


@pytest.mark.parametrize(
    "path",
    [path for path in LEAVES if path[-1].has_presence and path[-1].enum_type is None and path[-1].message_type is None],
    ids=name,
)
def test_an_optional_field_set_to_zero_differs_from_unset(path: Path) -> None:
    if name(path) in ("chat.continue_final_message", "guided_decoding.json_object"):
        pytest.skip("false says the same as unset")
    without, with_field = request_for(path), request_for(path)
    parent_of(without, path)
    setattr(parent_of(with_field, path), path[-1].name, path[-1].default_value)
    assert outcome(with_field) != outcome(without)


def test_an_empty_request_has_no_prompt_and_says_so() -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_generation(pb.GenerateRequest())
    assert [violation.field for violation in caught.value.violations] == ["prompt"]


def test_unset_options_are_none() -> None:
    assert to_generation(pb.GenerateRequest(text="x")) == Generation(prompt="x")


def test_unknown_enum_numbers_are_refused_all_at_once() -> None:
    request = pb.GenerateRequest(text="x")
    request.prompt_options.truncation = 99  # type: ignore[assignment]
    request.output.stream_mode = 98  # type: ignore[assignment]
    with pytest.raises(InvalidRequest) as caught:
        to_generation(request)
    assert {violation.field for violation in caught.value.violations} == {
        "prompt_options.truncation",
        "output.stream_mode",
    }


def test_a_conversation_becomes_what_templates_expect() -> None:
    chat = pb.ChatPrompt(
        messages=[
            pb.ChatMessage(role="user", parts=[pb.ContentPart(text="what is it?"), pb.ContentPart(image_url="data:x")]),
            pb.ChatMessage(role="assistant", name="bob"),
            pb.ChatMessage(role="tool", content="4", tool_call_id="one"),
        ]
    )
    chat.messages[1].tool_calls.add()["arguments"] = {"a": 2, "b": [1.5, 3.0]}
    chat.chat_template_kwargs["thinking"] = False
    prompt = to_generation(pb.GenerateRequest(chat=chat)).prompt
    assert isinstance(prompt, ChatPrompt)
    assert list(prompt.messages) == [
        {"role": "user", "content": [{"type": "text", "text": "what is it?"}, {"type": "image", "url": "data:x"}]},
        {"role": "assistant", "content": "", "name": "bob", "tool_calls": [{"arguments": {"a": 2, "b": [1.5, 3]}}]},
        {"role": "tool", "content": "4", "tool_call_id": "one"},
    ]
    whole_number = prompt.messages[1]["tool_calls"][0]["arguments"]["a"]
    assert isinstance(whole_number, int)
    assert prompt.template_kwargs == {"thinking": False}


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_lacks_is_refused_by_its_path(number: float) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="assistant")])
    chat.messages[0].tool_calls.add()["a"] = [1, number]
    chat.tools.add()["b"] = {"c": number}
    chat.chat_template_kwargs["d"] = number
    with pytest.raises(InvalidRequest) as caught:
        to_generation(pb.GenerateRequest(chat=chat))
    assert {violation.field for violation in caught.value.violations} == {
        "chat.messages[0].tool_calls[0].a[1]",
        "chat.tools[0].b.c",
        "chat.chat_template_kwargs.d",
    }


def test_every_kind_of_value_reaches_the_template() -> None:
    chat = pb.ChatPrompt()
    chat.chat_template_kwargs.update({"a": None, "b": "x", "c": True, "d": -0.5, "e": 1e300, "f": [[], {}]})
    chat.chat_template_kwargs.fields["g"].SetInParent()
    prompt = to_generation(pb.GenerateRequest(chat=chat)).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs == {
        "a": None, "b": "x", "c": True, "d": -0.5, "e": int(1e300), "f": [[], {}], "g": None
    }  # fmt: skip


@pytest.mark.parametrize(("seconds", "nanos"), [(1, -1), (-1, 1), (0, 10**9), (0, -(10**9))])
def test_a_duration_that_is_none_is_refused(seconds: int, nanos: int) -> None:
    request = pb.GenerateRequest(text="x")
    request.stopping.time_limit.seconds, request.stopping.time_limit.nanos = seconds, nanos
    with pytest.raises(InvalidRequest) as caught:
        to_generation(request)
    assert [violation.field for violation in caught.value.violations] == ["stopping.time_limit"]


def test_content_beside_parts_is_refused() -> None:
    message = pb.ChatMessage(role="user", content="a", parts=[pb.ContentPart(text="b")])
    request = inference_pb2.TokenizeRequest(chat=pb.ChatPrompt(messages=[message]))
    with pytest.raises(InvalidRequest, match=r"chat\.messages\[0\]\.parts"):
        tokenize_prompt(request)


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, value: int | bytes) -> bytes:
    """Give a field as the wire has it: a varint, or bytes with their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


TEXT = pb.GenerateRequest(text="x").SerializeToString()
TEMPLATE_VALUE = field(1, field(1, b"a") + field(2, field(88, 1)))  # of a Struct: the key "a", a value of field 88


@pytest.mark.parametrize(
    ("data", "path", "part"),
    [
        (field(99, 1), "GenerateRequest", "this server knows no field 99"),
        (field(99, 1) + field(98, b"x"), "GenerateRequest", "this server knows no field 98; leave"),
        (field(6, field(77, 1)), "sampling", "this server knows no field 77"),
        (field(6, 5), "GenerateRequest", "field 6 (sampling) came in another form"),
        (field(6, field(1, 1)), "sampling", "field 1 (temperature) came in another form"),
        (field(4, field(1, b"") + field(1, field(9, b"x"))), "chat.messages[1]", "this server knows no field 9"),
        (field(4, field(6, TEMPLATE_VALUE)), "chat.chat_template_kwargs.fields.a", "this server knows no field 88"),
        (field(99, b"x" * 5000), "GenerateRequest", "5004 bytes are of fields that this server does not know"),
        (field(99, 1) * 100_000, "GenerateRequest", "300000 bytes are of fields that this server does not know"),
    ],
)
def test_what_the_server_does_not_know_is_refused_by_its_path(data: bytes, path: str, part: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_generation(pb.GenerateRequest.FromString(TEXT + data))
    [violation] = caught.value.violations
    assert violation.field == path
    assert part in violation.description


def test_requests_of_the_tokenizer_are_checked_too() -> None:
    with pytest.raises(InvalidRequest, match="TokenizeRequest: this server knows no field 99"):
        tokenize_prompt(inference_pb2.TokenizeRequest.FromString(field(1, b"x") + field(99, 1)))
    with pytest.raises(InvalidRequest, match="DetokenizeRequest: this server knows no field 99"):
        skip_special_tokens(inference_pb2.DetokenizeRequest.FromString(field(99, 1)))


@pytest.mark.parametrize(
    "data",
    [
        field(3, field(1, 5) + field(1, 6)),  # token ids one by one
        field(7, field(1, 2)) + field(7, field(1, 3)),  # a message in parts
        field(10, 2**40),  # a number that is cut
        field(8, b"\x08\x80\x00"),  # a number with idle bytes
        field(6, field(10, b"")),  # an entry of a map without key and value
    ],
)
def test_another_form_of_what_is_known_is_taken(data: bytes) -> None:
    assert to_generation(pb.GenerateRequest.FromString(TEXT + data)).prompt
