"""What the status page shows, as JSON, and the page itself: one file without anything from elsewhere."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files

import msgspec

from runnerd_service.telemetry.web import Answer

_KEEP_SECONDS = 0.5
"""However many look, the engine is asked no more often."""
_ANSWER_SECONDS = 2.0

_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


def status_page() -> Answer:
    """Give the page."""
    body = (files("runnerd_service.telemetry") / "status.html").read_bytes()
    return Answer(body, "text/html; charset=utf-8", headers=_SECURITY)


class StatusData:
    """What the page polls.

    Args:
        read: Gives what there is to tell; called from any thread.
        recent_steps: Gives JSON of the engine's last steps; empty when there is no engine. Runs in ``loop``.
        loop: The event loop of ``recent_steps``.
    """

    def __init__(
        self, read: Callable[[], object], recent_steps: Callable[[], Awaitable[str]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._read = read
        self._recent_steps = recent_steps
        self._loop = loop
        self._lock = threading.Lock()
        self._body = b""
        self._made_at = float("-inf")

    def answer(self) -> Answer:
        """Give the present figures; may be half a second old."""
        with self._lock:
            if time.monotonic() - self._made_at > _KEEP_SECONDS:
                told = {"now": time.time(), "server": self._read(), "steps": msgspec.Raw(self._steps() or b"null")}
                self._body = msgspec.json.encode(told)
                self._made_at = time.monotonic()
            return Answer(self._body, "application/json")

    def _steps(self) -> bytes:
        asked = asyncio.run_coroutine_threadsafe(self._ask(), self._loop)
        try:
            return asked.result(_ANSWER_SECONDS).encode()
        except concurrent.futures.TimeoutError:
            asked.cancel()
            return b""

    async def _ask(self) -> str:
        return await self._recent_steps()
