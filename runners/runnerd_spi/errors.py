"""Errors that cross the SPI. Each message says what was got, what was expected and what to do."""

from __future__ import annotations


class RunnerError(Exception):
    """Root of the SPI's errors."""


class RunnerNotFound(RunnerError):
    """No installed distribution offers a runner of this name."""


class RunnerConflict(RunnerError):
    """Two distributions offer different runners under one name."""


class RunnerUnavailable(RunnerError):
    """The runner is installed but cannot be used here; the message holds the remedy."""


class SpiVersionMismatch(RunnerError):
    """The runner was built for another major version of the SPI."""


class InvalidOption(RunnerError):
    """A runner option is unknown or has a value of the wrong type."""


class LifecycleError(RunnerError):
    """A call came in a state that does not allow it; nothing was changed."""


class ModelLoadError(RunnerError):
    """The model cannot be read or cannot be served by this runner."""


class PlanError(RunnerError):
    """A plan breaks the contract; nothing was changed."""


class StepTimeout(RunnerError):
    """The step was not ready in time; its handle stays valid."""


class StepFailed(RunnerError):
    """A step failed. ``fatal``: the runner is unusable, and every later step fails with the same ``__cause__``."""

    def __init__(self, message: str, *, fatal: bool) -> None:
        super().__init__(message)
        self.fatal = fatal
