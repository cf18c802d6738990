"""The server's end: live requests have a time to finish, whether or not anybody waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from runnerd_service.frontend.live import LiveRequests

logger = logging.getLogger(__name__)


class Draining:
    """Waits until no request is live, and ends those that take too long.

    Args:
        live: The live requests.
        end: Ends them.
        on_drained: Called when none is left, once for each wait.
    """

    def __init__(self, live: LiveRequests, end: Callable[[], None], on_drained: Callable[[], None]) -> None:
        self._live = live
        self._end = end
        self._on_drained = on_drained
        self._waits: set[asyncio.Task[None]] = set()
        self._num_ended = 0
        """Requests that did not end by themselves."""

    async def wait(self, seconds: float) -> bool:
        """Wait until no request is live; give whether all those that were live ended by themselves.

        A cancel ends this wait, not the limit. Of several limits the first to pass ends the requests.

        Args:
            seconds: After which those still live are ended.
        """
        num_before = self._num_ended
        task = asyncio.create_task(self._wait(seconds), name="drain")
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)
        await asyncio.shield(task)
        return self._num_ended == num_before

    def end_all(self) -> None:
        """End the live requests at once."""
        self._num_ended += len(self._live)
        self._end()

    def close(self) -> None:
        """Wait no more."""
        for task in tuple(self._waits):
            task.cancel()

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._live.wait_until_none()
        except TimeoutError:
            logger.warning("%d requests did not end in %g seconds; they are ended", len(self._live), seconds)
            self.end_all()
        self._on_drained()
