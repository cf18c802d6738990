"""Refuses requests with fields that this server does not know: what a newer client asks for is not ignored in silence.

Protobuf keeps such fields, and known ones of another wire type than theirs, as bytes beside the message. They show in
its size: that costs about a microsecond for a usual request, and a millisecond for a hundred thousand token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from runnerd_service.errors import FieldViolation, InvalidRequest

_REMEDY = "leave it out, or generate the client's code from the protos/runnerd/v1 of this server"
_MAX_NAMED_BYTES = 4096
"""To be named each field becomes an object: many small ones would take a hundred times their bytes."""


def check_known(request: Message) -> None:
    """Check that this server knows each field of ``request``.

    Raises:
        InvalidRequest: It does not; the fields are named where they are few.
    """
    data = request.SerializeToString()
    request.DiscardUnknownFields()
    num_bytes = len(data) - request.ByteSize()
    if not num_bytes:
        return
    name, found = request.DESCRIPTOR.name, list[FieldViolation]()
    if num_bytes <= _MAX_NAMED_BYTES:
        found = [FieldViolation(path or name, what) for path, what in _unknown(type(request).FromString(data), "")]
    raise InvalidRequest(
        *(found or [FieldViolation(name, f"{num_bytes} bytes are of fields that this server does not know; {_REMEDY}")])
    )


def _unknown(message: Message, path: str) -> Iterator[tuple[str, str]]:
    """Give the path of each message with unknown fields, and what they are."""
    unknown: Iterable[Any] = UnknownFieldSet(message)  # type: ignore[assignment] # its stub knows no iteration
    if numbers := sorted({field.field_number for field in unknown}):
        known = message.DESCRIPTOR.fields_by_number
        yield (
            path,
            "; ".join(
                f"field {number} ({known[number].name}) came in another form than this server knows; {_REMEDY}"
                if number in known
                else f"this server knows no field {number}; {_REMEDY}"
                for number in numbers
            ),
        )
    prefix = f"{path}." if path else ""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for place, one in _messages(value):
            yield from _unknown(one, f"{prefix}{field.name}{place}")


def _messages(value: object) -> Iterator[tuple[str, Message]]:
    """Give the messages that the value of a field holds, and where in it."""
    if isinstance(value, Message):
        yield "", value
    elif hasattr(value, "items"):  # a map, of numbers or of messages
        yield from ((f".{key}", one) for key, one in value.items() if isinstance(one, Message))
    else:
        yield from ((f"[{index}]", one) for index, one in enumerate(value))  # type: ignore[arg-type,var-annotated]
