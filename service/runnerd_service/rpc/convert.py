"""Reads protobuf requests into the front end's types. Knows the wire, not what is served: ranges are the front end's.

An unset optional becomes None. What the wire cannot express as a value of the field (no prompt, an enum number of a
later release) is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from google.protobuf import duration_pb2, struct_pb2
from google.protobuf.message import Message

from runnerd.v1 import generation_pb2, inference_pb2
from runnerd_service.errors import FieldViolation, InvalidRequest
from runnerd_service.frontend.types import ChatPrompt, Generation
from runnerd_service.frontend.validation import Violations
from runnerd_service.guided.guide import Guide
from runnerd_service.rpc.unknown_fields import check_known

_T = TypeVar("_T")
_Truncation = Literal["none", "left", "right"]

_TRUNCATION: Mapping[int, _Truncation | None] = {
    generation_pb2.TRUNCATION_SIDE_UNSPECIFIED: None,
    generation_pb2.TRUNCATION_SIDE_NONE: "none",
    generation_pb2.TRUNCATION_SIDE_LEFT: "left",
    generation_pb2.TRUNCATION_SIDE_RIGHT: "right",
}
_CUMULATIVE: Mapping[int, bool] = {
    generation_pb2.STREAM_MODE_UNSPECIFIED: False,
    generation_pb2.STREAM_MODE_DELTA: False,
    generation_pb2.STREAM_MODE_CUMULATIVE: True,
}
_POOLING: Mapping[int, str | None] = {
    generation_pb2.POOLING_UNSPECIFIED: None,
    generation_pb2.POOLING_LAST: "last",
    generation_pb2.POOLING_MEAN: "mean",
    generation_pb2.POOLING_CLS: "cls",
}


def to_generation(request: generation_pb2.GenerateRequest) -> Generation:
    """Give the generation that ``request`` asks for, each field of it carried.

    Raises:
        InvalidRequest: An unknown field, no prompt, or a field that has no meaning; all violations at once.
    """
    check_known(request)
    violations = Violations()
    options, sampling, stopping, output = request.prompt_options, request.sampling, request.stopping, request.output
    generation = Generation(
        prompt=_prompt(request, violations),
        request_id=_optional(request, "request_id", request.request_id),
        add_special_tokens=_optional(options, "add_special_tokens", options.add_special_tokens),
        truncation=_enum("prompt_options.truncation", options.truncation, _TRUNCATION, None, violations),
        max_prompt_tokens=_optional(options, "max_prompt_tokens", options.max_prompt_tokens),
        temperature=_optional(sampling, "temperature", sampling.temperature),
        top_k=_optional(sampling, "top_k", sampling.top_k),
        top_p=_optional(sampling, "top_p", sampling.top_p),
        min_p=_optional(sampling, "min_p", sampling.min_p),
        typical_p=_optional(sampling, "typical_p", sampling.typical_p),
        seed=_optional(sampling, "seed", sampling.seed),
        repetition_penalty=_optional(sampling, "repetition_penalty", sampling.repetition_penalty),
        presence_penalty=_optional(sampling, "presence_penalty", sampling.presence_penalty),
        frequency_penalty=_optional(sampling, "frequency_penalty", sampling.frequency_penalty),
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        bad_words=tuple(sampling.bad_words),
        beam_width=_optional(sampling, "beam_width", sampling.beam_width),
        max_tokens=_optional(stopping, "max_tokens", stopping.max_tokens),
        min_tokens=_optional(stopping, "min_tokens", stopping.min_tokens),
        stop=tuple(stopping.stop),
        stop_token_ids=tuple(stopping.stop_token_ids),
        include_stop=_optional(stopping, "include_stop", stopping.include_stop),
        ignore_eos=_optional(stopping, "ignore_eos", stopping.ignore_eos),
        time_limit_seconds=_time_limit(stopping, violations),
        n=_optional(output, "n", output.n),
        text=_optional(output, "text", output.text),
        tokens=_optional(output, "tokens", output.tokens),
        logprobs=_optional(output, "logprobs", output.logprobs),
        prompt_logprobs=_optional(output, "prompt_logprobs", output.prompt_logprobs),
        include_prompt=_optional(output, "include_prompt", output.include_prompt),
        skip_special_tokens=_optional(output, "skip_special_tokens", output.skip_special_tokens),
        cumulative=_enum("output.stream_mode", output.stream_mode, _CUMULATIVE, False, violations),
        pooling=_enum("output.pooling", output.pooling, _POOLING, None, violations),
        guide=_guide(request, violations),
        priority=_optional(request, "priority", request.priority),
        model=_optional(request, "model", request.model),
        adapter=_optional(request, "adapter", request.adapter),
        cache_salt=_optional(request, "cache_salt", request.cache_salt),
    )
    if violations.found:
        raise InvalidRequest(*violations.found)
    return generation


def tokenize_prompt(request: inference_pb2.TokenizeRequest) -> str | ChatPrompt:
    """Give the prompt to tokenize.

    Raises:
        InvalidRequest: An unknown field, no prompt, or a chat message that has no meaning.
    """
    check_known(request)
    violations = Violations()
    prompt: str | ChatPrompt = request.text
    if request.HasField("chat"):
        prompt = _chat(request.chat, violations)
    elif not request.HasField("text"):
        violations.add("prompt", "no prompt was given; set one of text, chat")
    if violations.found:
        raise InvalidRequest(*violations.found)
    return prompt


def add_special_tokens(request: inference_pb2.TokenizeRequest) -> bool | None:
    """Give the option as set; None when unset."""
    return _optional(request, "add_special_tokens", request.add_special_tokens)


def skip_special_tokens(request: inference_pb2.DetokenizeRequest) -> bool | None:
    """Give the option as set; None when unset.

    Raises:
        InvalidRequest: The request has an unknown field.
    """
    check_known(request)
    return _optional(request, "skip_special_tokens", request.skip_special_tokens)


def _optional(message: Message, field: str, value: _T) -> _T | None:
    return value if message.HasField(field) else None


def to_seconds(field: str, duration: duration_pb2.Duration) -> float:
    """Give the seconds of ``duration``, the value of ``field``.

    Raises:
        InvalidRequest: It is no protobuf duration.
    """
    seconds, nanos = duration.seconds, duration.nanos
    if abs(nanos) >= 10**9 or seconds * nanos < 0:
        got = f"got {seconds} seconds and {nanos} nanos, expected nanos of the same sign and below 1e9"
        raise InvalidRequest(FieldViolation(field, got))
    return seconds + nanos / 1e9


def _enum(field: str, number: int, meanings: Mapping[int, _T], default: _T, violations: Violations) -> _T:
    if number in meanings:
        return meanings[number]
    known = f"{min(meanings)} to {max(meanings)}"
    violations.add(field, f"got the enum number {number}, expected {known}")
    return default


def _time_limit(stopping: generation_pb2.StoppingParams, violations: Violations) -> float | None:
    if not stopping.HasField("time_limit"):
        return None
    try:
        return to_seconds("stopping.time_limit", stopping.time_limit)
    except InvalidRequest as refused:
        for one in refused.violations:
            violations.add(one.field, one.description)
        return None


def _prompt(request: generation_pb2.GenerateRequest, violations: Violations) -> str | Sequence[int] | ChatPrompt:
    if request.HasField("text"):
        return request.text
    if request.HasField("token_ids"):
        return tuple(request.token_ids.ids)
    if request.HasField("chat"):
        return _chat(request.chat, violations)
    violations.add("prompt", "no prompt was given; set one of text, token_ids, chat")
    return ""


def _guide(request: generation_pb2.GenerateRequest, violations: Violations) -> Guide | None:
    if not request.HasField("guided_decoding"):
        return None
    guided = request.guided_decoding
    kind = guided.WhichOneof("guide")
    if kind is None:
        violations.add("guided_decoding", "no guide was given; set one kind or leave the field unset")
        return None
    if kind == "json_object":
        return Guide("json_object") if guided.json_object else None
    return Guide(kind, tuple(guided.choice.texts) if kind == "choice" else (getattr(guided, kind),))


def _chat(chat: generation_pb2.ChatPrompt, violations: Violations) -> ChatPrompt:
    return ChatPrompt(
        messages=tuple(
            _message(f"chat.messages[{index}]", message, violations) for index, message in enumerate(chat.messages)
        ),
        add_generation_prompt=_optional(chat, "add_generation_prompt", chat.add_generation_prompt),
        continue_final_message=chat.continue_final_message,
        tools=_structs("chat.tools", chat.tools, violations),
        chat_template=_optional(chat, "chat_template", chat.chat_template),
        template_kwargs=_struct("chat.chat_template_kwargs", chat.chat_template_kwargs, violations),
    )


def _message(path: str, message: generation_pb2.ChatMessage, violations: Violations) -> Mapping[str, Any]:
    if message.content and message.parts:
        violations.add(f"{path}.parts", "content and parts are both set; set one of them")
    converted: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        converted["content"] = [
            _part(f"{path}.parts[{index}]", part, violations) for index, part in enumerate(message.parts)
        ]
    if message.HasField("name"):
        converted["name"] = message.name
    if message.tool_calls:
        converted["tool_calls"] = list(_structs(f"{path}.tool_calls", message.tool_calls, violations))
    if message.HasField("tool_call_id"):
        converted["tool_call_id"] = message.tool_call_id
    return converted


def _part(path: str, part: generation_pb2.ContentPart, violations: Violations) -> Mapping[str, Any]:
    if part.HasField("image_url"):
        return {"type": "image", "url": part.image_url}
    if not part.HasField("text"):
        violations.add(path, "an empty part was given; set one of text, image_url")
    return {"type": "text", "text": part.text}


def _structs(path: str, structs: Iterable[struct_pb2.Struct], violations: Violations) -> tuple[Mapping[str, Any], ...]:
    return tuple(_struct(f"{path}[{index}]", struct, violations) for index, struct in enumerate(structs))


def _struct(path: str, struct: struct_pb2.Struct, violations: Violations) -> dict[str, Any]:
    return {name: _value(f"{path}.{name}", value, violations) for name, value in struct.fields.items()}


def _value(path: str, value: struct_pb2.Value, violations: Violations) -> Any:
    match value.WhichOneof("kind"):
        case "struct_value":
            return _struct(path, value.struct_value, violations)
        case "list_value":
            items = enumerate(value.list_value.values)
            return [_value(f"{path}[{index}]", item, violations) for index, item in items]
        case "number_value":
            return _number(path, value.number_value, violations)
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case _:
            return None


def _number(path: str, number: float, violations: Violations) -> float | int:
    """Turn 3.0 into 3: a Struct has floats only, and templates print what they get."""
    if not math.isfinite(number):
        violations.add(path, f"got {number}, expected a number that JSON has")
    return int(number) if number.is_integer() else number
