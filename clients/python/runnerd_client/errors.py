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
        """The server's stable name of the error, such as "INVALID_REQUEST"; empty when the server gave none."""
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
    """The server cannot be reached, still loads, drains, or lost its engine; see ``retry_after``."""


class RequestCancelledError(RunnerdError):
    """The request was aborted, or this client cancelled the call."""


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

# gRPC's own words for a message or metadata beyond its limits: waiting does not help, as it does where a proxy says the
# same status of its rate limit.
_BEYOND_A_LIMIT = re.compile("message larger than max|metadata size exceeds", re.IGNORECASE)


def _unpack(packed: Iterable[AnyMessage], message: _M) -> _M | None:
    return next((message for one in packed if one.Unpack(message)), None)


def from_rpc_error(error: grpc.RpcError) -> RunnerdError:
    """Give the error of the tree that ``error`` stands for."""
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return InternalError(str(error), code=grpc.StatusCode.UNKNOWN)
    code = error.code()
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # a proxy changed the status and left the details
        status = None
    packed = [] if status is None else list(status.details)
    info = _unpack(packed, error_details_pb2.ErrorInfo())
    bad_request = _unpack(packed, error_details_pb2.BadRequest())
    retry = _unpack(packed, error_details_pb2.RetryInfo())
    kind = _CLASSES.get(code, RunnerdError)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and info is None and _BEYOND_A_LIMIT.search(error.details() or ""):
        kind = InvalidRequestError
    return kind(
        error.details() or code.name,
        code=code,
        reason="" if info is None else info.reason,
        violations=()
        if bad_request is None
        else tuple(FieldViolation(one.field, one.description) for one in bad_request.field_violations),
        retry_after=None if retry is None else retry.retry_delay.ToNanoseconds() / 1e9,
    )
