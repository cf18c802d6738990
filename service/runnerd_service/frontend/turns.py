"""Whose turn it is: readers go on a few at a time, so that the event loop sees to everything else in between.

A step of the engine has news for all streams. Were they all let go at once, the loop would be busy with their messages
for tens of milliseconds, and a new call, of which gRPC takes one in a turn of the loop, would wait for that at each of
its own steps. It also decides how much a message carries: what comes for a reader that waits for its turn is merged.
Under light load nobody waits. This module knows no requests.
"""

from __future__ import annotations

import asyncio
from collections import deque

MAX_AT_ONCE = 32
"""Readers that go on in one turn of the loop: their messages take about a millisecond."""


class Turns:
    """Lets readers go on in the order in which they are called up. All methods run in one event loop.

    Args:
        max_at_once: How many go on in one turn of the loop.
    """

    def __init__(self, max_at_once: int = MAX_AT_ONCE) -> None:
        self._max_at_once = max_at_once
        self._queue: deque[asyncio.Future[None]] = deque()
        self._num_left = max_at_once
        """How many may still go on in this turn."""
        self._counts = False
        """Whether a new turn is to be noted."""

    @property
    def crowded(self) -> bool:
        """Whether readers wait for their turn."""
        return bool(self._queue)

    def new_waiter(self) -> asyncio.Future[None]:
        """Give what a reader waits for."""
        return asyncio.get_running_loop().create_future()

    def call_up(self, waiter: asyncio.Future[None]) -> None:
        """Let a reader go on: now, or after those who were called up before it."""
        if self._num_left and not self._queue:
            self._let_go(waiter)
        else:
            self._queue.append(waiter)
        if not self._counts:
            self._counts = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _let_go(self, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():  # else the reader has left
            waiter.set_result(None)
            self._num_left -= 1

    def _begin_turn(self) -> None:
        self._num_left = self._max_at_once
        while self._queue and self._num_left:
            self._let_go(self._queue.popleft())
        self._counts = self._num_left < self._max_at_once
        if self._counts:
            asyncio.get_running_loop().call_soon(self._begin_turn)
