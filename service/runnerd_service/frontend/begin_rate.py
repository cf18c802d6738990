"""How fast waiting requests begin, and so how long one that comes now would wait at least.

Only begins while others wait count: without a queue, requests begin as fast as they come, and that says nothing.
"""

from __future__ import annotations

from collections import deque

_MAX_BEGINS = 64
_MIN_BEGINS = 8
_OPTIMISM = 2.0
"""How many times faster than lately they may begin from now on: refused is what would come too late even so."""


class BeginRate:
    """The latest begins. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_MAX_BEGINS)

    def note(self, now: float, *, others_wait: bool) -> None:
        """Note that an output gave its first token."""
        if others_wait:
            self._times.append(now)
        else:
            self._times.clear()

    def least_wait_seconds(self, num_ahead: int, now: float) -> float:
        """Give how long a request waits at least behind ``num_ahead`` outputs; 0 while little is known."""
        if len(self._times) < _MIN_BEGINS:
            return 0.0
        return num_ahead * (now - self._times[0]) / (len(self._times) - 1) / _OPTIMISM
