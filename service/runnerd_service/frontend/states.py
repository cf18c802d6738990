"""The server's state and who follows it. Knows nothing of why it changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from runnerd_service.frontend.types import ServerState


class StateBoard:
    """Holds the state; followers see the latest one, and may miss those that passed in between.

    Args:
        state: The first state.
    """

    def __init__(self, state: ServerState) -> None:
        self.state: ServerState = state
        self._closed = False
        self._changed = asyncio.Event()

    def set(self, state: ServerState) -> None:
        """Change the state and wake the followers."""
        self.state = state
        self._wake()

    def close(self) -> None:
        """End the followers' iterations."""
        self._closed = True
        self._wake()

    async def follow(self) -> AsyncGenerator[ServerState, None]:
        """Give the present state, then each change, until closed."""
        shown: ServerState | None = None
        while True:
            changed = self._changed
            if self.state != shown:
                shown = self.state
                yield shown
            elif self._closed:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        # A fresh event each time: nobody has to clear it, and no follower can miss the last change.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
