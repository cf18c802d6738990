"""Builds requests: prompts, and options as keyword arguments named like the fields of ``generation.proto``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Literal, NotRequired, TypedDict, cast

from google.protobuf.duration_pb2 import Duration

from runnerd.v1 import generation_pb2 as pb
from runnerd.v1 import inference_pb2
from runnerd_client.channel import checked_seconds


class ChatTurn(TypedDict):
    """One message of a conversation; :class:`pb.ChatMessage` has the rarer fields."""

    role: str
    content: str
    name: NotRequired[str]


Conversation = Sequence[ChatTurn | pb.ChatMessage] | pb.ChatPrompt
"""Messages, oldest first; :func:`chat` gives a ChatPrompt, which has further options."""
Prompt = str | Sequence[int] | Conversation
"""Text, token ids, or a conversation."""


class GenerateOptions(TypedDict, total=False):
    """What a generation can be asked for; an option left out or None takes the server's default."""

    request_id: str | None
    priority: int | None
    model: str | None
    adapter: str | None
    cache_salt: str | None
    add_special_tokens: bool | None
    truncation: Literal["none", "left", "right"] | None
    max_prompt_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    beam_width: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop: bool | None
    ignore_eos: bool | None
    time_limit: float | None
    """Seconds."""
    n: int | None
    text: bool | None
    tokens: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    include_prompt: bool | None
    skip_special_tokens: bool | None
    stream_mode: Literal["delta", "cumulative"] | None
    pooling: Literal["last", "mean", "cls"] | None
    guided_decoding: pb.GuidedDecoding | None


_MISFITS = (ValueError, TypeError, OverflowError)
"""What protobuf raises of a value that its field cannot hold."""
_TRUNCATION = {
    "none": pb.TRUNCATION_SIDE_NONE,
    "left": pb.TRUNCATION_SIDE_LEFT,
    "right": pb.TRUNCATION_SIDE_RIGHT,
}
_POOLING = {"last": pb.POOLING_LAST, "mean": pb.POOLING_MEAN, "cls": pb.POOLING_CLS}
_STREAM_MODE = {"delta": pb.STREAM_MODE_DELTA, "cumulative": pb.STREAM_MODE_CUMULATIVE}


def chat(*messages: ChatTurn | pb.ChatMessage, add_generation_prompt: bool | None = None) -> pb.ChatPrompt:
    """Give a conversation as a prompt: ``chat({"role": "user", "content": "Hello"})``.

    Args:
        messages: Oldest first.
        add_generation_prompt: Open the assistant's turn; None means the server's default.

    Raises:
        TypeError: A message has a key that ChatTurn does not have.
        ValueError: A message has no role or no content.
    """
    return pb.ChatPrompt(
        messages=[
            message if isinstance(message, pb.ChatMessage) else _message(index, message)
            for index, message in enumerate(messages)
        ],
        add_generation_prompt=add_generation_prompt,
    )


def _conversation(prompt: Sequence[int] | Conversation) -> pb.ChatPrompt | None:
    """Give the conversation that ``prompt`` is; None for token ids.

    Raises:
        TypeError: It is neither.
        ValueError: It is empty, and could be either.
    """
    if isinstance(prompt, pb.ChatPrompt):
        return prompt
    _check_sequence(prompt)
    if len(prompt) == 0:
        raise ValueError("prompt is empty; give a text, at least one token id, or at least one chat message")
    if isinstance(prompt[0], (Mapping, pb.ChatMessage)):
        return chat(*cast(Sequence[ChatTurn | pb.ChatMessage], prompt))
    return None


def _check_sequence(prompt: object) -> None:
    """Refuse what may look like a sequence, and is none of token ids or messages.

    Raises:
        TypeError: It says what ``prompt`` is.
    """
    if isinstance(prompt, (Mapping, pb.ChatMessage)):
        raise TypeError("prompt is one chat message; give a list of them, [message]")
    if isinstance(prompt, (bytes, bytearray, memoryview)):
        raise TypeError(f"prompt is {type(prompt).__name__}; give a text: decode it, as by prompt.decode()")
    if isinstance(prompt, Set) or not (hasattr(prompt, "__len__") and hasattr(prompt, "__getitem__")):
        raise TypeError(f"prompt is {prompt!r}, expected a text, token ids, or chat messages")


def _no_text(error: UnicodeError) -> ValueError:
    return ValueError(f"prompt is no text: {error}")


def _token_ids(ids: Sequence[int]) -> pb.TokenIds:
    try:
        return pb.TokenIds(ids=ids)
    except _MISFITS as error:
        raise _kind(error)(f"prompt does not fit; of token ids each is from 0 to {2**32 - 1}: {error}") from error


def _message(index: int, turn: ChatTurn) -> pb.ChatMessage:
    if not isinstance(turn, Mapping):
        raise TypeError(f"messages[{index}] is {turn!r}, expected a chat message")
    if unknown := turn.keys() - ChatTurn.__annotations__.keys():
        raise TypeError(f"unknown key {min(unknown)!r} in a chat message; known: {', '.join(ChatTurn.__annotations__)}")
    for key in ("role", "content"):
        if not isinstance(turn.get(key), str):
            raise ValueError(f"messages[{index}].{key} is {turn.get(key)!r}, expected a text")  # noqa: TRY004 - mostly it is missing
    return pb.ChatMessage(role=turn["role"], content=turn["content"], name=turn.get("name"))


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Give the request for ``prompt`` with ``options``.

    Raises:
        ValueError: A value does not fit its field, such as a negative count; the message names the option.
        TypeError: A value has the wrong type, or an option is unknown.
    """
    if unknown := set(options) - GenerateOptions.__annotations__.keys():
        raise TypeError(f"unknown option {min(unknown)!r}; known: {', '.join(GenerateOptions.__annotations__)}")
    try:
        return _request(prompt, options)
    except _MISFITS as error:
        _check_each(options)
        if isinstance(error, UnicodeError):
            raise _no_text(error) from error
        raise


def _check_each(options: GenerateOptions) -> None:
    """Find the option whose value no message can hold: protobuf's own error does not tell."""
    for name, value in options.items():
        try:
            _request("", cast(GenerateOptions, {name: value}))
        except _MISFITS as error:
            if str(error).startswith(f"{name} is "):
                raise
            raise _kind(error)(f"{name} is {value!r}, which does not fit its field: {error}") from error


def _kind(error: Exception) -> type[Exception]:
    """Give the class to name the argument with; that of a text that is no Unicode takes more than a message."""
    return TypeError if isinstance(error, TypeError) else ValueError


def _request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        request_id=options.get("request_id"),
        priority=options.get("priority"),
        model=options.get("model"),
        adapter=options.get("adapter"),
        cache_salt=options.get("cache_salt"),
        prompt_options=_prompt_options(options),
        sampling=_sampling(options),
        stopping=_stopping(options),
        output=_output(options),
        guided_decoding=options.get("guided_decoding"),
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif (conversation := _conversation(prompt)) is not None:
        request.chat.CopyFrom(conversation)
    else:
        request.token_ids.CopyFrom(_token_ids(cast(Sequence[int], prompt)))
    return request


def _prompt_options(options: GenerateOptions) -> pb.PromptOptions:
    truncation = options.get("truncation")
    if truncation is not None and truncation not in _TRUNCATION:
        raise ValueError(f"expected one of {', '.join(_TRUNCATION)}")
    return pb.PromptOptions(
        add_special_tokens=options.get("add_special_tokens"),
        truncation=None if truncation is None else _TRUNCATION[truncation],
        max_prompt_tokens=options.get("max_prompt_tokens"),
    )


def _sampling(options: GenerateOptions) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=options.get("temperature"),
        top_k=options.get("top_k"),
        top_p=options.get("top_p"),
        min_p=options.get("min_p"),
        typical_p=options.get("typical_p"),
        seed=options.get("seed"),
        repetition_penalty=options.get("repetition_penalty"),
        presence_penalty=options.get("presence_penalty"),
        frequency_penalty=options.get("frequency_penalty"),
        logit_bias=options.get("logit_bias"),
        allowed_token_ids=options.get("allowed_token_ids"),
        bad_words=_texts(options.get("bad_words")),
        beam_width=options.get("beam_width"),
    )


def _texts(value: Sequence[str] | None) -> Sequence[str] | None:
    return [value] if isinstance(value, str) else value  # a lone text is one text, not its characters


def _stopping(options: GenerateOptions) -> pb.StoppingParams:
    time_limit = options.get("time_limit")
    return pb.StoppingParams(
        max_tokens=options.get("max_tokens"),
        min_tokens=options.get("min_tokens"),
        stop=_texts(options.get("stop")),
        stop_token_ids=options.get("stop_token_ids"),
        include_stop=options.get("include_stop"),
        ignore_eos=options.get("ignore_eos"),
        time_limit=None if time_limit is None else duration("time_limit", time_limit),
    )


def duration(name: str, seconds: float) -> Duration:
    """Give ``seconds``, of the argument ``name``, as a protobuf duration. Raises as :func:`checked_seconds`."""
    checked_seconds(name, seconds)
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


def _output(options: GenerateOptions) -> pb.OutputOptions:
    stream_mode = options.get("stream_mode")
    if stream_mode is not None and stream_mode not in _STREAM_MODE:
        raise ValueError(f"expected one of {', '.join(_STREAM_MODE)}")
    pooling = options.get("pooling")
    if pooling is not None and pooling not in _POOLING:
        raise ValueError(f"expected one of {', '.join(_POOLING)}")
    return pb.OutputOptions(
        n=options.get("n"),
        text=options.get("text"),
        tokens=options.get("tokens"),
        logprobs=options.get("logprobs"),
        prompt_logprobs=options.get("prompt_logprobs"),
        include_prompt=options.get("include_prompt"),
        skip_special_tokens=options.get("skip_special_tokens"),
        stream_mode=None if stream_mode is None else _STREAM_MODE[stream_mode],
        pooling=None if pooling is None else _POOLING[pooling],
    )


def tokenize_request(prompt: str | Conversation, add_special_tokens: bool | None) -> inference_pb2.TokenizeRequest:
    """Give the request that tokenizes ``prompt``.

    Raises:
        TypeError: It is neither a text nor a conversation.
        ValueError: It is no Unicode text, or a message has no role or no content.
    """
    if isinstance(prompt, str):
        try:
            return inference_pb2.TokenizeRequest(text=prompt, add_special_tokens=add_special_tokens)
        except UnicodeError as error:
            raise _no_text(error) from error
    if not isinstance(prompt, pb.ChatPrompt):
        _check_sequence(prompt)
        prompt = chat(*prompt)
    return inference_pb2.TokenizeRequest(chat=prompt, add_special_tokens=add_special_tokens)
