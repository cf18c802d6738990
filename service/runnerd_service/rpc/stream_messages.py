"""The messages of a stream, serialized.

Most hold the new text of one output, or tokens without log-probabilities, and nothing else. They are put together here
from bytes, which takes a fifth of the time that building and serializing protobuf objects takes; all others are built
from those.
"""

from __future__ import annotations

from runnerd.v1 import inference_pb2
from runnerd_service.frontend.types import Event, OutputChunk, PromptRecords, Started, TokenRecord
from runnerd_service.rpc import replies

_INDEX, _ID = b"\x08", b"\x08"
_TEXT, _TOKEN, _OUTPUT = b"\x12", b"\x1a", b"\x12"
"""Tags (number << 3 | wire type) of OutputChunk.index and Token.id, which are varints, and of OutputChunk.text,
Token.text, OutputChunk.tokens and StreamGenerateResponse.output, which have their lengths before them."""


def serialized(event: Event) -> bytes:
    """Give the stream message of one event, as it goes over the wire."""
    if isinstance(event, OutputChunk) and event.finish is None:
        tokens = event.tokens
        # Either all tokens of a request have log-probabilities, or none has.
        if not tokens or tokens[0].logprob is None:
            return _plain_message(event.index, event.text, tokens)
    return _message(event).SerializeToString()


def _plain_message(index: int, text: str, tokens: tuple[TokenRecord, ...]) -> bytes:
    output = _field(_TEXT, text.encode()) if text else b""
    if index:
        output = b"".join((_INDEX, _varint(index), output))
    if tokens:
        output = b"".join((output, *map(_token, tokens)))
    return _field(_OUTPUT, output)


def _token(record: TokenRecord) -> bytes:
    token_id, text = record.id, record.text
    data = _field(_TEXT, text.encode()) if text else b""
    if token_id:
        data = b"".join((_ID, _varint(token_id), data))
    return _field(_TOKEN, data)


def _field(tag: bytes, data: bytes) -> bytes:
    return b"".join((tag, _varint(len(data)), data))


def _varint(number: int) -> bytes:
    """Write a number that is not negative: seven bits a byte, the lowest first; all but the last have the top bit."""
    if number < 128:
        return _SMALL[number]
    data = bytearray()
    while number >= 128:
        data.append(number & 127 | 128)
        number >>= 7
    data.append(number)
    return bytes(data)


_SMALL = [bytes((number,)) for number in range(128)]


def _message(event: Event) -> inference_pb2.StreamGenerateResponse:
    match event:
        case OutputChunk():
            output = inference_pb2.OutputChunk(
                index=event.index,
                text=event.text,
                tokens=[replies.token(record) for record in event.tokens],
                finish=None if event.finish is None else replies.finish(event.finish),
            )
            return inference_pb2.StreamGenerateResponse(output=output)
        case Started():
            started = inference_pb2.Started(
                request_id=event.request_id, seed=event.seed, prompt_tokens=event.prompt_tokens
            )
            return inference_pb2.StreamGenerateResponse(started=started)
        case PromptRecords():
            prompt = inference_pb2.PromptTokens(tokens=[replies.token(record) for record in event.tokens])
            return inference_pb2.StreamGenerateResponse(prompt=prompt)
