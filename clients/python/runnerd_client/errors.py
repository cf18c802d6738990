"""The client's errors, one tree, made from gRPC statuses and their google.rpc details."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

_M = TypeVar("_M", bound=Message)


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """What is wrong with one field of a request."""

    field: str
    description: str


CONNECTION_LOST = "CONNECTION_LOST"
"""Reason of an :class:`UnavailableError` whose connection broke, or whose server ended, while it answered."""


class RunnerdError(Exception):
    """Root of the client's errors: a call ended with another status than OK."""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode,
        reason: str = "",
        violations: tuple[FieldViolation, ...] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        """The server's stable name of the error, such as "INVALID_REQUEST", or :data:`CONNECTION_LOST`; else empty."""
        self.violations = violations
        """The wrong fields, with :class:`InvalidRequestError`."""
        self.retry_after = retry_after
        """Seconds after which to try again, when the server said so."""


class InvalidRequestError(RunnerdError):
    """Fields are wrong or ask for what is not served, see ``violations``; or the request is too large for gRPC."""


class UnauthenticatedError(RunnerdError):
    """The server wants to know who calls: the token is missing or not known there."""


class PermissionDeniedError(RunnerdError):
    """The caller is known and may not do this; administration needs an administrator's token or certificate."""


class NotFoundError(RunnerdError):
    """The request names a model that is not served."""


class AlreadyExistsError(RunnerdError):
    """A live request has this request id."""


class OverloadedError(RunnerdError):
    """The server's queue is full; see ``retry_after``."""


class UnavailableError(RunnerdError):
    """The server cannot be reached, still loads, drains, ended or lost its engine; see ``retry_after``."""


class RequestCancelledError(RunnerdError):
    """The request was aborted, or this client cancelled the call, or the client is closed."""


class DeadlineError(RunnerdError):
    """The timeout was over before the call ended."""


class InternalError(RunnerdError):
    """The server failed; its log has the details."""


_CLASSES: dict[grpc.StatusCode, type[RunnerdError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.INTERNAL: InternalError,
}

# gRPC has one status for several failures, and tells them apart in its text alone. Beyond its limits on messages and on
# metadata, waiting does not help, as it does where a proxy says the same status of its rate limit.
_LARGE_MESSAGE = re.compile("message larger than max", re.IGNORECASE)
_LARGE_METADATA = re.compile("metadata size exceeds", re.IGNORECASE)
_SERVER_ENDED = re.compile("Cancelling all calls")
_BROKEN = re.compile("Stream removed")
_CLOSED = re.compile("Socket closed|Connection reset")


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the client knows about a call that failed, beside its status."""

    timeout: float | None = None
    """Of the call, in seconds; None: none."""
    if_closed: str = ""
    """What to try where the server closes each connection before it answers."""
    answered: bool = False
    """A message of the server had come."""


def closed_error() -> RequestCancelledError:
    """Give the error of a call on a client that is closed."""
    return RequestCancelledError("the client is closed; make another", code=grpc.StatusCode.CANCELLED)


def _unpack(packed: Iterable[AnyMessage], message: _M) -> _M | None:
    return next((message for one in packed if one.Unpack(message)), None)


def from_rpc_error(error: grpc.RpcError, circumstances: Circumstances | None = None) -> RunnerdError:
    """Give the error of the tree that ``error`` stands for."""
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return InternalError(str(error), code=grpc.StatusCode.UNKNOWN)
    code, text = error.code(), error.details() or error.code().name
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # a proxy changed the status and left the details
        status = None
    packed = [] if status is None else list(status.details)
    info = _unpack(packed, error_details_pb2.ErrorInfo())
    if not packed:
        return _of_grpc(code, text, circumstances or Circumstances())
    bad_request = _unpack(packed, error_details_pb2.BadRequest())
    retry = _unpack(packed, error_details_pb2.RetryInfo())
    return _CLASSES.get(code, RunnerdError)(
        text,
        code=code,
        reason="" if info is None else info.reason,
        violations=()
        if bad_request is None
        else tuple(FieldViolation(one.field, one.description) for one in bad_request.field_violations),
        retry_after=None if retry is None else retry.retry_delay.ToNanoseconds() / 1e9,
    )


def _of_grpc(code: grpc.StatusCode, text: str, circumstances: Circumstances) -> RunnerdError:
    """Give the error where the server gave no details: mostly gRPC's own, whose text names no remedy."""
    kind, reason = _CLASSES.get(code, RunnerdError), ""
    if kind is DeadlineError and circumstances.timeout is not None:
        text = (
            f"the call's timeout of {circumstances.timeout:g} s passed ({text}); give a longer timeout, or to a "
            "generation a time_limit, which ends it in order"
        )
    elif kind is OverloadedError and _LARGE_MESSAGE.search(text):
        kind = InvalidRequestError
        text += "; send less, or ask the operator for a larger --max-message-bytes"
    elif kind is OverloadedError and _LARGE_METADATA.search(text):
        kind = InvalidRequestError
        text += "; send less metadata, or ask the operator for a larger --max-metadata-bytes"
    elif kind is UnavailableError and _SERVER_ENDED.search(text):
        text, reason = f"the server ended while it answered ({text})", CONNECTION_LOST
    elif kind is UnavailableError and (circumstances.answered or _BROKEN.search(text)):
        text, reason = f"the connection broke while the server answered ({text})", CONNECTION_LOST
    elif kind is UnavailableError and _CLOSED.search(text):
        text += circumstances.if_closed
    return kind(text, code=code, reason=reason)
