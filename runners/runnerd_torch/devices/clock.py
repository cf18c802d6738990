"""Puts the times of a device's events on the host's monotonic clock, without a wait for the device.

A device tells how long lies between two of its events, not when they were. Two things are known of any event: it did
not happen before the host had enqueued it, and it had happened when the host saw that it had. Over many events these
bounds come close to each other, and follow the two clocks as they drift apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

ElapsedTime = Callable[[torch.Event, torch.Event], float]

REBASE_NS = 1_000_000_000
"""In a second clocks drift apart by less than 100 us, and times between events, float32 milliseconds, stay exact."""


@dataclass(slots=True)
class TimeBase:
    """An event from which others are counted, and where it stands on the host's clock."""

    event: torch.Event
    enqueued_ns: int
    former: TimeBase | None
    """None as soon as the place is known."""
    place_ns: int | None = None
    # Bounds of the place that this base's own events gave.
    earliest_ns: int = 0
    latest_ns: int = 1 << 63


class DeviceClock:
    """The clock of one stream.

    Args:
        elapsed_ms: Gives the milliseconds between two events with timing that have both happened.
    """

    def __init__(self, elapsed_ms: ElapsedTime = torch.Event.elapsed_time) -> None:
        self._elapsed_ms = elapsed_ms
        self._lock = threading.Lock()
        self._base: TimeBase | None = None

    def base_of(self, event: torch.Event, enqueued_ns: int) -> TimeBase:
        """Give what a launch counts its events from.

        Args:
            event: The launch's first, with timing; it becomes the base when the present one is too old.
            enqueued_ns: When the host enqueued it, ``time.monotonic_ns``.
        """
        with self._lock:
            former = self._base
            if former is None or enqueued_ns - former.enqueued_ns > REBASE_NS:
                self._base = TimeBase(event, enqueued_ns, former)
            assert self._base is not None
            return self._base

    def restart(self) -> None:
        """Forget the base: events of a stream that failed cannot be counted from."""
        with self._lock:
            self._base = None

    def host_ns(
        self, base: TimeBase, events: tuple[torch.Event, ...], enqueued_ns: int, observed_ns: int
    ) -> tuple[int, ...]:
        """Give the ``time.monotonic_ns`` of a launch's events, which have all happened, in their order.

        Args:
            base: Of :meth:`base_of`.
            events: With timing.
            enqueued_ns: When the host enqueued the first.
            observed_ns: When the host saw that the last had happened.
        """
        passed = [self._passed_ns(base.event, event) for event in events]
        with self._lock:
            place_ns = self._place(base)
            base.earliest_ns = max(base.earliest_ns, enqueued_ns - passed[0])
            base.latest_ns = min(base.latest_ns, observed_ns - passed[-1])
            base.place_ns = max(min(place_ns, base.latest_ns), base.earliest_ns)
            place_ns = base.place_ns
        return tuple(place_ns + one for one in passed)

    def _place(self, base: TimeBase) -> int:
        if base.place_ns is not None:
            return base.place_ns
        former = base.former
        base.former = None  # or all bases since the start would be kept
        if former is None or former.place_ns is None:
            return base.enqueued_ns
        return former.place_ns + self._passed_ns(former.event, base.event)

    def _passed_ns(self, begin: torch.Event, end: torch.Event) -> int:
        return 0 if begin is end else round(self._elapsed_ms(begin, end) * 1e6)
