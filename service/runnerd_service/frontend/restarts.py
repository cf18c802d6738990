"""How often and how soon a failed engine is restarted, and how its failures are called. It starts nothing."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from runnerd_service.engine.client import HUNG, PROCESS_DIED
from runnerd_service.engine.messages import EngineError, EngineReady
from runnerd_service.errors import EngineStartFailed

RestartCause = Literal["exit", "signal", "error", "hang", "start"]
"""``exit``: the process ended. ``signal``: it was killed by one. ``error``: the runner failed for good and said so.
``hang``: no step ended in time. ``start``: a restart failed."""
CAUSES: tuple[RestartCause, ...] = ("exit", "signal", "error", "hang", "start")

_MAX_BACKOFF_SECONDS = 30.0
_SENT_BY_OTHERS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


@dataclass(slots=True)
class RestartBudget:
    """Counts failures in a row."""

    max_restarts: int
    """After so many without progress there is no other."""
    backoff_seconds: float
    num_failures: int = 0
    """Since the last progress."""

    def note_failure(self) -> float | None:
        """Count a failure; give the seconds to wait before the restart, None if there is to be none."""
        self.num_failures += 1
        if self.num_failures > self.max_restarts:
            return None
        if self.num_failures == 1:
            return 0.0
        # The exponent is bounded, as the number of restarts need not be.
        return min(self.backoff_seconds * 2.0 ** min(self.num_failures - 2, 16), _MAX_BACKOFF_SECONDS)

    def note_progress(self) -> None:
        """Forget the failures: an engine got further than the one before."""
        self.num_failures = 0


def cause_of(error: EngineError, exit_code: int | None) -> RestartCause:
    """Name how an engine failed.

    Args:
        error: What is known of it.
        exit_code: The process's, negative for a signal; None if it had not ended.
    """
    if error.kind == HUNG:
        return "hang"
    if error.kind != PROCESS_DIED:
        return "error"
    return "signal" if exit_code is not None and exit_code < 0 else "exit"


def is_from_outside(error: EngineError, exit_code: int | None) -> bool:
    """Whether somebody else ended the process: an administrator, or the kernel for want of memory."""
    if error.kind != PROCESS_DIED or exit_code is None:
        return False
    return exit_code == 0 or -exit_code in _SENT_BY_OTHERS  # it ends with 0 on SIGTERM


def check_same_model(before: EngineReady, now: EngineReady) -> None:
    """Check that requests can go on where they were.

    Raises:
        EngineStartFailed: The model is another one.
    """
    for name in ("model_name", "architecture", "vocab_size", "max_model_len", "eos_token_ids", "dtype"):
        was, got = getattr(before, name), getattr(now, name)
        if was != got:
            raise EngineStartFailed("ModelChanged", f"{name} was {was} and is {got} now; restart the server")
