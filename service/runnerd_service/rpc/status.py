"""The one table from the service's errors to gRPC statuses with google.rpc details.

Knows the wire's rules of size, not who raises what. An error that is not in the tree becomes INTERNAL with a fixed
text: its own text may hold what is not for clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from runnerd_service.errors import (
    ConfigurationError,
    DuplicateRequest,
    EngineFailed,
    EngineStartFailed,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    PermissionDenied,
    PoisonousRequest,
    ReaderStalled,
    RequestAborted,
    RowFailed,
    RunnerdError,
    Unauthenticated,
)
from runnerd_service.rpc.replies import duration

DOMAIN = "runnerd"
UNKNOWN_ERROR_TEXT = "internal error {error_id}; the server's log has the details under this id"

# Clients refuse trailers above 8 KiB. The message crosses twice (percent-encoded, and inside the details in base64).
_MAX_MESSAGE_BYTES = 512
_MAX_VIOLATIONS_BYTES = 3072
_MAX_DESCRIPTION_BYTES = 512

Details = Callable[[RunnerdError], list[Message]]


def _bad_request(error: RunnerdError) -> list[Message]:
    assert isinstance(error, InvalidRequest)
    message = error_details_pb2.BadRequest()
    for violation in error.violations:
        entry = message.field_violations.add()
        entry.field = _cut(violation.field, _MAX_DESCRIPTION_BYTES)
        entry.description = _cut(violation.description, _MAX_DESCRIPTION_BYTES)
        if message.ByteSize() > _MAX_VIOLATIONS_BYTES:
            # the status message still counts them all
            del message.field_violations[-1]
            break
    return [message]


def _retry_info(seconds: float | None) -> list[Message]:
    return [] if seconds is None else [error_details_pb2.RetryInfo(retry_delay=duration(seconds))]


def _unavailable(error: RunnerdError) -> list[Message]:
    assert isinstance(error, (NotReady, EngineFailed))
    return _retry_info(error.retry_after_seconds)


def _overloaded(error: RunnerdError) -> list[Message]:
    assert isinstance(error, Overloaded)
    violation = error_details_pb2.QuotaFailure.Violation(subject=error.subject, description=_text(error))
    return [error_details_pb2.QuotaFailure(violations=[violation]), *_retry_info(error.retry_after_seconds)]


def _none(_: RunnerdError) -> list[Message]:
    return []


@dataclass(frozen=True, slots=True)
class StatusMapping:
    """What one error class is on the wire."""

    code: grpc.StatusCode
    reason: str
    """Of ErrorInfo: stable, for programs."""
    details: Details = _none


TABLE: Mapping[type[RunnerdError], StatusMapping] = {
    RunnerdError: StatusMapping(grpc.StatusCode.INTERNAL, "INTERNAL"),
    InvalidRequest: StatusMapping(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", _bad_request),
    Unauthenticated: StatusMapping(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    PermissionDenied: StatusMapping(grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
    ModelNotFound: StatusMapping(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    DuplicateRequest: StatusMapping(grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST"),
    RequestAborted: StatusMapping(grpc.StatusCode.CANCELLED, "REQUEST_ABORTED"),
    ReaderStalled: StatusMapping(grpc.StatusCode.DEADLINE_EXCEEDED, "READER_STALLED"),
    NotReady: StatusMapping(grpc.StatusCode.UNAVAILABLE, "NOT_READY", _unavailable),
    Overloaded: StatusMapping(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", _overloaded),
    EngineFailed: StatusMapping(grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILED", _unavailable),
    EngineStartFailed: StatusMapping(grpc.StatusCode.UNAVAILABLE, "ENGINE_START_FAILED"),
    RowFailed: StatusMapping(grpc.StatusCode.INTERNAL, "ROW_FAILED"),
    # not UNAVAILABLE: clients and proxies would send it again by themselves
    PoisonousRequest: StatusMapping(grpc.StatusCode.INTERNAL, "POISONOUS_REQUEST"),
    ConfigurationError: StatusMapping(grpc.StatusCode.FAILED_PRECONDITION, "CONFIGURATION"),
}


_UNKNOWN = "UNKNOWN"
REASONS = (*(mapping.reason for mapping in TABLE.values()), _UNKNOWN)
"""All reasons that ErrorInfo may have."""


def reason_of(error: Exception) -> str:
    """Give the reason of ErrorInfo that tells a client of ``error``."""
    return _mapping(error).reason if isinstance(error, RunnerdError) else _UNKNOWN


def is_internal(error: Exception) -> bool:
    """Whether a client is told no more than that the server failed."""
    return not isinstance(error, RunnerdError) or _mapping(error).code is grpc.StatusCode.INTERNAL


def to_status(error: Exception, error_id: str = "") -> grpc.Status:
    """Give the status, trailers included, that tells a client of ``error``.

    Args:
        error: What ended the call.
        error_id: Under which the log tells of it; of those that are internal.
    """
    info = error_details_pb2.ErrorInfo(domain=DOMAIN, reason=_UNKNOWN)
    if error_id:
        info.metadata["error_id"] = error_id
    if not isinstance(error, RunnerdError):
        return _status(grpc.StatusCode.INTERNAL, UNKNOWN_ERROR_TEXT.format(error_id=error_id), [info])
    mapping = _mapping(error)
    info.reason = mapping.reason
    return _status(mapping.code, _text(error), [info, *mapping.details(error)])


def _mapping(error: RunnerdError) -> StatusMapping:
    return next(TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)


def _status(code: grpc.StatusCode, text: str, details: list[Message]) -> grpc.Status:
    status = status_pb2.Status(code=code.value[0], message=text)
    for message in details:
        packed = AnyMessage()
        packed.Pack(message)
        status.details.append(packed)
    made: grpc.Status = rpc_status.to_status(status)
    return made


def _text(error: RunnerdError) -> str:
    text = str(error)
    if isinstance(error, InvalidRequest) and len(error.violations) > 1:
        text = f"{len(error.violations)} violations: {text}"
    return _cut(text, _MAX_MESSAGE_BYTES)


def _cut(text: str, num_bytes: int) -> str:
    """Give at most ``num_bytes`` of UTF-8; lone surrogates, which the wire cannot carry, become question marks."""
    encoded = text.encode("utf-8", errors="replace")
    if len(encoded) <= num_bytes:
        return encoded.decode()
    return encoded[: num_bytes - 3].decode(errors="ignore") + "…"
