"""Ends a stream whose reader takes nothing. A write waits while the reader's window is full; here is for how long.

Setting a timer for each message would cost more than the rest of this: one timer a stream looks at times noted.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from runnerd_service.errors import ReaderStalled


class StallLimit:
    """Cancels the block that it manages when a write in it takes too long.

    Args:
        seconds: How long a write may take; 0: for any time.

    Raises:
        ReaderStalled: From the block, when one took longer.
    """

    __slots__ = ("_loop", "_seconds", "_timeout", "_timer", "_writing_since")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._writing_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timeout = asyncio.timeout(None)

    def begin(self) -> None:
        """Note that a write begins."""
        self._writing_since = self._loop.time()
        if self._timer is None and self._seconds:
            self._timer = self._loop.call_later(self._seconds, self._look)

    def end(self) -> None:
        """Note that it has ended."""
        self._writing_since = None

    @property
    def error(self) -> ReaderStalled | None:
        """Why the block is cancelled; None when it is not this limit that cancels it."""
        if not self._timeout.expired():
            return None
        return ReaderStalled(
            f"the reader took nothing of the stream for {self._seconds:g} s; read on, or raise --stall-timeout"
        )

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            stalled = self.error
            assert stalled is not None
            raise stalled from None

    def _look(self) -> None:
        """End the block, or look again when the present write, or the next one, may have taken too long."""
        self._timer = None
        if self._writing_since is None:
            return
        end = self._writing_since + self._seconds
        if end <= self._loop.time():
            self._timeout.reschedule(end)
        else:
            self._timer = self._loop.call_at(end, self._look)
