"""How many outputs run and wait, of everybody or of one tenant, and whether there is room for more."""

from __future__ import annotations

from dataclasses import dataclass

from runnerd_service.errors import Overloaded

_OVERLOAD_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What may run and wait at once; None: as much as there is."""

    max_running: int | None
    """Outputs."""
    max_waiting: int | None
    """Outputs."""
    max_waiting_tokens: int | None
    """Prompt tokens of those."""


class Occupancy:
    """Outputs whose end is not known yet, and which of them gave nothing yet.

    Args:
        limits: What is refused beyond.
        whose: Begins the names of the limits in errors; empty for everybody's.
    """

    def __init__(self, limits: Limits, whose: str = "") -> None:
        self._limits = limits
        self._whose = whose
        self._open: set[int] = set()
        self._silent: dict[int, int] = {}
        """Those of them that gave nothing yet, with the tokens of their prompts."""
        self._num_silent_tokens = 0

    def __len__(self) -> int:
        """Outputs that run or wait."""
        return len(self._open)

    @property
    def num_silent(self) -> int:
        """Outputs that gave nothing yet."""
        return len(self._silent)

    def is_silent(self, uid: int) -> bool:
        """Whether an output gave nothing yet."""
        return uid in self._silent

    def open(self, uid: int, num_prompt_tokens: int) -> None:
        """Note a new output."""
        self._open.add(uid)
        self._silent[uid] = num_prompt_tokens
        self._num_silent_tokens += num_prompt_tokens

    def heard(self, uid: int) -> None:
        """Note that the engine gave something for an output."""
        if self._silent:
            self._num_silent_tokens -= self._silent.pop(uid, 0)

    def close(self, uid: int) -> None:
        """Note that an output has ended. Harmless when it has already."""
        self._open.discard(uid)
        self.heard(uid)

    def check_room(self, num_new: int, reported_waiting: int, num_prompt_tokens: int = 0) -> None:
        """Check that ``num_new`` more outputs may come.

        Args:
            num_new: Outputs.
            reported_waiting: The engine's own count of waiting ones, as of its last step.
            num_prompt_tokens: Of each of the new ones; 0 while that is not known.

        Raises:
            Overloaded: Too many would wait.
        """
        limits, of_whom = self._limits, f" of {self._whose}" if self._whose else ""
        beyond_places = 0 if limits.max_running is None else len(self._open) + num_new - limits.max_running
        # When memory is short, some wait though places are free; the engine's count may be a step old.
        num_waiting = min(reported_waiting, len(self._silent))
        most = limits.max_waiting
        if most is not None and (beyond_places > most or (num_waiting and num_waiting + num_new > most)):
            raise Overloaded(
                f"outputs{of_whom} that run or wait: {len(self._open)}; with {num_new} more, more than {most} "
                f"({self._flag('max_waiting')}) would wait; try later",
                subject=self._subject("max_waiting"),
                retry_after_seconds=_OVERLOAD_RETRY_SECONDS,
            )
        if limits.max_waiting_tokens is None or not (beyond_places > 0 or num_waiting):
            return
        num_tokens = self._num_silent_tokens + num_new * num_prompt_tokens
        if num_tokens > limits.max_waiting_tokens:
            raise Overloaded(
                f"the prompts{of_whom} that wait would have {num_tokens} tokens with this one, "
                f"more than {limits.max_waiting_tokens} ({self._flag('max_waiting_tokens')}); "
                "try later, or with a shorter prompt",
                subject=self._subject("max_waiting_tokens"),
                retry_after_seconds=_OVERLOAD_RETRY_SECONDS,
            )

    def _subject(self, limit: str) -> str:
        return f"tenant_{limit}" if self._whose else limit

    def _flag(self, limit: str) -> str:
        return "--" + self._subject(limit).replace("_", "-")
