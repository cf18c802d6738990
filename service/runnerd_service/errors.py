"""The service's errors, one tree. ``rpc/status.py`` holds the one table from these to gRPC statuses."""

from __future__ import annotations

from dataclasses import dataclass


class RunnerdError(Exception):
    """Root of the errors that a caller may see; the message is fit for clients."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """What is wrong with one field of a request."""

    field: str
    """Path in the request message, such as ``sampling.top_p``."""
    description: str
    """What was got, what was expected, what to do."""


class InvalidRequest(RunnerdError):
    """Fields of the request are wrong or ask for what is not served."""

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{one.field}: {one.description}" for one in violations))
        self.violations = violations


class Unauthenticated(RunnerdError):
    """The caller did not say who it is, or is not known."""


class PermissionDenied(RunnerdError):
    """The caller is known, and may not do this."""


class ModelNotFound(RunnerdError):
    """The request names a model that is not served here."""


class DuplicateRequest(RunnerdError):
    """A live request has this request id."""


class RequestAborted(RunnerdError):
    """The request was ended by Abort."""


class ReaderStalled(RunnerdError):
    """The reader of a stream took nothing for longer than it may."""


class NotReady(RunnerdError):
    """The model loads, the server drains, or the engine is down; ``retry_after_seconds`` says when to try again."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Overloaded(RunnerdError):
    """A queue is full; ``subject`` names the limit."""

    def __init__(self, message: str, *, subject: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.subject = subject
        self.retry_after_seconds = retry_after_seconds


class EngineFailed(RunnerdError):
    """The engine failed and was not brought back; ``retry_after_seconds`` says when another one may be there."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EngineStartFailed(RunnerdError):
    """The engine process could not start; ``kind`` is the class name of the error there."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RowFailed(RunnerdError):
    """The runner could not compute this request; others go on."""


class PoisonousRequest(RunnerdError):
    """The engine died of this request more than once, at last with no other beside it; it is not tried again."""


class ConfigurationError(RunnerdError):
    """The operator's configuration cannot be served; exit code 2."""
