"""Messages as plain data, for JSON and for people."""

from __future__ import annotations

from google.protobuf import json_format
from google.protobuf.message import Message


def to_dict(message: Message) -> dict[str, object]:
    """Give a message as JSON-ready data by the proto3 JSON mapping: field names as in the .proto, 64-bit as text."""
    data: dict[str, object] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return data
