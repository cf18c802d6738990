"""What each tenant has: its outputs that run and wait, those that are held back from the engine, and its totals.

A tenant with more outputs than it may have in the engine has the further ones held here, by priority and arrival, until
one of its own ends: so it cannot fill the engine's queue before others. This module knows no engine process.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from runnerd_service.config import TenantConfig
from runnerd_service.frontend.occupancy import Limits, Occupancy
from runnerd_service.metrics import TenantFigures

MAX_NAMES = 100
"""Tenants with figures of their own; those that come later share the figures of ``OTHERS``."""
OTHERS = "(others)"


@dataclass(frozen=True, slots=True, order=True)
class _Held:
    priority: int
    arrival: int
    uid: int = field(compare=False)
    num_tokens: int = field(compare=False)
    start: Callable[[], None] = field(compare=False)


class _Tenant:
    """One tenant's outputs."""

    def __init__(self, name: str, limits: TenantConfig) -> None:
        self.occupancy = Occupancy(
            Limits(limits.max_running, limits.max_waiting, limits.max_waiting_tokens), f"tenant {name}"
        )
        self._limits = limits
        self._running: dict[int, int] = {}
        """Tokens that those in the engine may come to have, by uid."""
        self._num_running_tokens = 0
        self._queue: list[_Held] = []
        """A heap; some of them may have ended meanwhile."""
        self._held: set[int] = set()

    @property
    def num_held(self) -> int:
        return len(self._held)

    def add(self, held: _Held) -> None:
        heapq.heappush(self._queue, held)
        self._held.add(held.uid)
        self.start_what_may()

    def close(self, uid: int) -> None:
        self.occupancy.close(uid)
        self._held.discard(uid)
        self._num_running_tokens -= self._running.pop(uid, 0)

    def start_what_may(self) -> None:
        """Start those at the head for which there is room."""
        while self._queue:
            head = self._queue[0]
            if head.uid in self._held and not self._has_room(head.num_tokens):
                return
            heapq.heappop(self._queue)
            if head.uid in self._held:
                self._held.discard(head.uid)
                self._running[head.uid] = head.num_tokens
                self._num_running_tokens += head.num_tokens
                head.start()

    def held_by(self, uid: int) -> str:
        """Give the name of the limit that holds an output back; empty when none does."""
        if uid not in self._held:
            return ""
        return self._limit_reached(self._queue[0].num_tokens)  # the first holds up those behind it

    def _has_room(self, num_tokens: int) -> bool:
        return not self._limit_reached(num_tokens)

    def _limit_reached(self, num_tokens: int) -> str:
        limits = self._limits
        if limits.max_running is not None and len(self._running) >= limits.max_running:
            return "max_running"
        if limits.max_tokens is None or not self._running:
            return ""
        return "max_tokens" if self._num_running_tokens + num_tokens > limits.max_tokens else ""


class Tenants:
    """All tenants that have something, and the totals of those that had.

    Args:
        limits: Of each named tenant; requests of none are not limited here.
    """

    def __init__(self, limits: TenantConfig) -> None:
        self._limits = limits
        self._present: dict[str, _Tenant] = {}
        self._of_uid: dict[int, str] = {}
        self._arrivals = itertools.count()
        self._totals: dict[str, TenantFigures] = {}

    @property
    def num_held(self) -> int:
        """Outputs that are held back from the engine; may be asked from any thread."""
        return sum(tenant.num_held for tenant in tuple(self._present.values()))

    def check_room(self, name: str, num_new: int, reported_waiting: int, num_prompt_tokens: int = 0) -> None:
        """Check that a tenant may have ``num_new`` more outputs; see :meth:`Occupancy.check_room`.

        Raises:
            Overloaded: Too many of its own would wait.
        """
        if name:
            tenant = self._present.get(name) or _Tenant(name, self._limits)
            tenant.occupancy.check_room(num_new, reported_waiting, num_prompt_tokens)

    def open(self, name: str, uid: int, num_prompt_tokens: int) -> None:
        """Note a new output of a tenant."""
        if name:
            self._of_uid[uid] = name
            if name not in self._present:
                self._present[name] = _Tenant(name, self._limits)
            self._present[name].occupancy.open(uid, num_prompt_tokens)

    def start(self, uid: int, priority: int, num_tokens: int, start: Callable[[], None]) -> None:
        """Start an output, now or when its tenant has room for it.

        Args:
            uid: As it was opened.
            priority: Of those that are held, the lowest goes first.
            num_tokens: What it may come to have, its prompt included.
            start: Gives it to the engine; called at most once.
        """
        if uid in self._of_uid:
            self._present[self._of_uid[uid]].add(_Held(priority, next(self._arrivals), uid, num_tokens, start))
        else:
            start()

    def held_by(self, uid: int) -> str:
        """Give the limit of its tenant that holds an output back, as ``tenant_max_running``; empty when none does."""
        name = self._of_uid.get(uid)
        limit = "" if name is None else self._present[name].held_by(uid)
        return limit and f"tenant_{limit}"

    def heard(self, uid: int) -> None:
        """Note that the engine gave something for an output."""
        if uid in self._of_uid:
            self._present[self._of_uid[uid]].occupancy.heard(uid)

    def close(self, uid: int) -> None:
        """Note that an output has ended, and start what has room now. Harmless when it has already."""
        name = self._of_uid.pop(uid, None)
        if name is None:
            return
        tenant = self._present[name]
        tenant.close(uid)
        tenant.start_what_may()
        if not len(tenant.occupancy):
            del self._present[name]

    def note_refused(self, name: str) -> None:
        """Count a request of a tenant that was refused for want of room."""
        self._count(name, num_refused=1)

    def note_ended(self, name: str, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """Count a request of a tenant that had been accepted, whatever ended it."""
        self._count(name, num_requests=1, prompt_tokens=num_prompt_tokens, generation_tokens=num_generation_tokens)

    def figures(self) -> Mapping[str, TenantFigures]:
        """Give each tenant's figures; may be called from any thread."""
        found = dict(self._totals)
        for name, tenant in tuple(self._present.items()):
            shown = _shown(name, found)
            before = found.get(shown, TenantFigures())
            num_waiting = tenant.occupancy.num_silent
            found[shown] = replace(
                before,
                num_running=before.num_running + len(tenant.occupancy) - num_waiting,
                num_waiting=before.num_waiting + num_waiting,
            )
        return found

    def _count(self, name: str, **more: int) -> None:
        if name:
            shown = _shown(name, self._totals)
            before = self._totals.get(shown, TenantFigures())
            self._totals[shown] = replace(
                before, **{field: getattr(before, field) + number for field, number in more.items()}
            )


def _shown(name: str, names: Mapping[str, TenantFigures]) -> str:
    return name if name in names or len(names) < MAX_NAMES else OTHERS
