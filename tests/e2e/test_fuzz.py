"""Any message to any method: it ends with a status that says what is wrong, or rightly; and nothing stays of it.

The messages are made from the descriptors, so that each field is met, those of later releases included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import grpc
import pytest
from google.protobuf import struct_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runnerd.v1 import generation_pb2, inference_pb2, server_pb2, server_pb2_grpc

WAIT = 60
SERVICE = "/runnerd.v1.InferenceService"
RIGHT = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
}
"""DEADLINE_EXCEEDED would be a hang, UNAVAILABLE a server or an engine that died."""
METHODS: dict[str, type[Message]] = {
    "Generate": generation_pb2.GenerateRequest,
    "StreamGenerate": generation_pb2.GenerateRequest,
    "Tokenize": inference_pb2.TokenizeRequest,
    "Detokenize": inference_pb2.DetokenizeRequest,
    "Abort": inference_pb2.AbortRequest,
}

_NUMBERS = [0, 1, 2, 3, 16, 17, 63, 64, 65, 255, 256, 257, 10_000, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1]
_TEXTS = [
    "",
    "x",
    " ",
    "\0",
    "é\u0301\u202e\U0001f9d1\u200d\U0001f680",
    "x" * 129,
    "x" * 1025,
    "x" * 100_000,
    "{{ 1 / 0 }}",
    "{{ ''.__class__.__mro__ }}",
    "{% for message in messages %}{{ message.content }}{% endfor %}",
    "{% for",
    "{",
    "[[:alpha:]](((",
    "../../etc/passwd",
    "%s%n",
]
_RANGES = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}
_FLOATS = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.0, 100.0, 101.0, 1e-45, 3e38]


def extremes(field: FieldDescriptor) -> list:
    """Give values of a scalar field at and beyond its ends, and of the kinds that are handled apart."""
    if field.type in _RANGES:
        least, most = _RANGES[field.type]
        return [one for number in _NUMBERS for one in sorted({number, -number}) if least <= one <= most]
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return _FLOATS
    if field.type == FieldDescriptor.TYPE_BOOL:
        return [False, True]
    assert field.type == FieldDescriptor.TYPE_STRING, field.full_name
    return _TEXTS


@cache
def _scalars(field: FieldDescriptor) -> st.SearchStrategy:
    values = extremes(field)
    # By number: a strategy is shown with what it holds.
    known = st.integers(0, len(values) - 1).map(values.__getitem__)
    if field.type in _RANGES:
        return known | st.integers(0, 5)
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return known | st.floats(width=32)
    return known if field.type == FieldDescriptor.TYPE_BOOL else known | st.text(max_size=20)


_JSON = st.recursive(
    st.none() | st.booleans() | st.sampled_from(_FLOATS) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def _struct(content: dict) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    struct.update(content)
    return struct


def _deep(levels: int) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    inner = struct
    for _ in range(levels):
        inner = inner.fields["a"].struct_value
    return struct


_STRUCTS = st.dictionaries(st.text(max_size=3), _JSON, max_size=3).map(_struct) | st.integers(1, 30).map(_deep)
_DURATIONS = st.builds(
    Duration,
    seconds=st.sampled_from([0, 1, -1, 2**31, 315_576_000_000, 2**63 - 1, -(2**63)]),
    nanos=st.sampled_from([0, 1, -1, 999_999_999, 2**31 - 1, -(2**31)]),
)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _value(field: FieldDescriptor) -> st.SearchStrategy:
    """Give values of one field, which is no list."""
    if field.message_type is None:
        return _scalars(field)
    if field.message_type.full_name == "google.protobuf.Struct":
        return _STRUCTS
    if field.message_type.full_name == "google.protobuf.Duration":
        return _DURATIONS
    return messages(field.message_type)


def _set(message: Message, field: FieldDescriptor, value: object) -> None:
    if _is_map(field):
        getattr(message, field.name).update(value)
    elif field.is_repeated:
        getattr(message, field.name).extend(value)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


@cache
def _values(field: FieldDescriptor) -> st.SearchStrategy:
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return st.dictionaries(_scalars(key), _scalars(value), max_size=4)
    if not field.is_repeated:
        return _value(field)
    few = st.lists(_value(field), max_size=3)
    return few if field.message_type is not None else few | _scalars(field).map(_many)


def _many(value: object) -> list:
    return [value] * (2000 if len(str(value)) < 2000 else 2)


@st.composite
def messages(draw, descriptor: Descriptor) -> Message:
    """Give messages of a kind with a few of their fields set, whatever these may hold."""
    message = _classes()[descriptor.full_name]()
    if descriptor.fields:
        for field in draw(st.lists(st.sampled_from(list(descriptor.fields)), max_size=5)):
            _set(message, field, draw(_values(field)))
    return message


@cache
def _classes() -> dict[str, type[Message]]:
    found: dict[str, type[Message]] = {}
    for module in (generation_pb2, inference_pb2):
        for descriptor in module.DESCRIPTOR.message_types_by_name.values():
            found[descriptor.full_name] = getattr(module, descriptor.name)
    return found


METADATA = st.lists(
    st.tuples(
        st.sampled_from(["x-tenant", "authorization", "traceparent", "tracestate", "x", "x-priority"]),
        st.sampled_from(["", "a", "b" * 64, "c" * 65, "Bearer x", f"00-{0:032}-{1:016}-01", "~", "a,b"])
        | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30).map(str.strip),
    ),
    max_size=3,
).map(tuple)


@dataclass(frozen=True)
class Call:
    """A call to make, and after how many messages to leave its stream."""

    method: str
    data: bytes
    metadata: tuple[tuple[str, str], ...]
    leave_after: int
    num_outputs: int | None
    """Of a generation; None: of none."""


def _call(method: str, message: Message, metadata: tuple, leave_after: int, with_prompt: bool) -> Call:
    if isinstance(message, generation_pb2.GenerateRequest):
        if with_prompt and message.WhichOneof("prompt") is None:
            message.text = "x"
        outputs = message.output.n if message.output.HasField("n") else 1
        return Call(method, message.SerializeToString(), metadata, leave_after, outputs)
    return Call(method, message.SerializeToString(), metadata, leave_after, None)


CALLS = st.one_of(
    *(
        st.builds(
            _call,
            st.just(method),
            messages(kind.DESCRIPTOR),
            METADATA,
            st.sampled_from([0, 1, 2, 10**9, 10**9]),
            st.sampled_from([True, True, True, False]),
        )
        for method, kind in METHODS.items()
    )
)
BYTES = st.builds(Call, st.sampled_from(sorted(METHODS)), st.binary(max_size=40), METADATA, st.just(1), st.none())


@pytest.fixture(scope="module")
def server(module_daemon) -> Iterator[tuple]:
    """A daemon whose requests are short, whatever they ask for, and a channel to it."""
    # Synchronous, so that guided decoding is served, too.
    options = ("--async-execution", "off")
    started = module_daemon(*options, "--max-model-len", "96", "--tenant-metadata", "x-tenant", "--log-level", "debug")
    address = started.wait_until_ready()
    with grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        yield started, channel
        _check_idle(channel)
        log = started.log()
        assert "Traceback" not in log
        assert " ERROR " not in log


def _check_idle(channel: grpc.Channel) -> None:
    stub = server_pb2_grpc.ServerServiceStub(channel)
    for _ in range(6000):
        load = stub.GetLoad(server_pb2.GetLoadRequest(), timeout=WAIT)
        if (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0):
            return
    raise AssertionError(load)


def _make(channel: grpc.Channel, call: Call) -> grpc.StatusCode:
    path = f"{SERVICE}/{call.method}"
    if call.method != "StreamGenerate":
        try:
            answer = channel.unary_unary(path)(call.data, metadata=call.metadata, timeout=WAIT)
        except grpc.RpcError as error:
            return error.code()
        if call.num_outputs is not None:
            response = inference_pb2.GenerateResponse.FromString(answer)
            assert [one.index for one in response.outputs] == list(range(call.num_outputs))
            assert all(one.HasField("finish") for one in response.outputs)
        return grpc.StatusCode.OK
    stream = channel.unary_stream(path)(call.data, metadata=call.metadata, timeout=WAIT)
    num_finished, count = 0, 0
    try:
        for count, message in enumerate(stream):
            if count >= call.leave_after:
                stream.cancel()
            num_finished += inference_pb2.StreamGenerateResponse.FromString(message).output.HasField("finish")
    except grpc.RpcError as error:
        code = error.code()
        was_left = count >= call.leave_after
        return code if was_left or code is not grpc.StatusCode.CANCELLED else grpc.StatusCode.UNKNOWN
    assert num_finished == call.num_outputs
    return grpc.StatusCode.OK


# Derandomized: the same messages each time, so that a failure is one for everybody.
_ALIKE = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


def _leaves(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Give each scalar field below ``message``, with the message that it is to be set in: one by one, set up to it."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is None or _is_map(field):
            yield message, field
        elif field.message_type.full_name.startswith("runnerd."):
            inner = getattr(message, field.name)
            if field.is_repeated:
                yield from _leaves(inner.add())
            else:
                inner.SetInParent()
                yield from _leaves(inner)
        message.ClearField(field.name)


def _extreme_values(field: FieldDescriptor) -> list:
    if _is_map(field):
        keys, values = (extremes(field.message_type.fields_by_name[name]) for name in ("key", "value"))
        return [{key: 1.0} for key in keys] + [{5: value} for value in values]
    if field.is_repeated:
        values = extremes(field)
        return [[], *([value] for value in values), values, _many(values[1])]
    return extremes(field)


def test_each_extreme_of_each_field_is_served_or_refused(server) -> None:
    num_calls = 0
    for method in ("Generate", "Tokenize", "Detokenize", "Abort"):
        request = METHODS[method]()
        if method == "Generate":
            request.text = "x"
            request.stopping.max_tokens = 2
        for holder, field in _leaves(request):
            if method == "Tokenize" and field.containing_type is not request.DESCRIPTOR:
                continue  # a conversation is Generate's
            for value in _extreme_values(field):
                _set(holder, field, value)
                call = _call(method, request, (), 10**9, with_prompt=True)
                assert _make(server[1], call) in RIGHT, (field.full_name, str(value)[:100])
                holder.ClearField(field.name)
                num_calls += 1
    assert num_calls > 400


@settings(max_examples=150, **_ALIKE)
@given(CALLS | BYTES)
def test_any_call_ends_with_a_status_that_fits_and_leaves_nothing(server, call: Call) -> None:
    assert _make(server[1], call) in RIGHT


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=5_000, **_ALIKE)
@given(CALLS | BYTES)
def test_any_of_very_many_calls_ends_with_a_status_that_fits(server, call: Call) -> None:
    assert _make(server[1], call) in RIGHT


def test_a_struct_deeper_than_protobuf_reads_is_refused(server) -> None:
    codes = [
        _make(server[1], Call("Generate", _deep_request(levels), (), 0, None)) for levels in (1, *range(28, 40), 2000)
    ]
    assert set(codes) <= RIGHT
    assert codes[0] is grpc.StatusCode.OK
    assert codes[-1] is grpc.StatusCode.INVALID_ARGUMENT


def _deep_request(levels: int) -> bytes:
    """Give a request with so many structs in each other among its template's variables: more than can be made."""
    data = b""
    for _ in range(levels):  # Value{struct_value{fields{"a": ...}}}, written from the inside
        data = _tagged(0x2A, _tagged(0x0A, b"\x0a\x01a" + _tagged(0x12, data)))
    struct = _tagged(0x0A, b"\x0a\x01a" + _tagged(0x12, data))
    message = _tagged(0x0A, b"\x0a\x04user\x12\x01x")
    return _tagged(0x22, message + _tagged(0x32, struct))


def _tagged(tag: int, data: bytes) -> bytes:
    return bytes([tag]) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    found = bytearray()
    while number >= 128:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])
