"""Which requests are live, which of their outputs the engine still works on, and whether there is room for more.

Engine requests have uids that are never used twice, so a request id may be used again as soon as it is free. This
module knows no engine process: it is told.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from runnerd_service.errors import DuplicateRequest, Overloaded, RunnerdError
from runnerd_service.frontend.stream import RequestStream

_OVERLOAD_RETRY_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has begun and whose reader has not left."""

    request_id: str
    uids: list[int] = field(default_factory=list)
    """Its engine requests, by output index; empty until submitted."""
    stream: RequestStream | None = None
    error: RunnerdError | None = None
    """Why it ends before it was submitted."""

    def fail(self, error: RunnerdError) -> bool:
        """Let its reader get ``error``; give whether it had neither ended nor failed."""
        if self.stream is not None:
            return self.stream.fail(error)
        first, self.error = self.error is None, self.error or error
        return first


class LiveRequests:
    """All live requests.

    Args:
        max_running: Outputs that may run at once.
        max_waiting: Outputs that may wait for a place.
        max_waiting_tokens: Prompt tokens that these may have together; None for no limit.
    """

    def __init__(self, max_running: int, max_waiting: int, max_waiting_tokens: int | None = None) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._by_id: dict[str, LiveRequest] = {}
        self._uids = itertools.count(1)
        self._open: set[int] = set()
        """Engine requests whose end is not known yet."""
        self._silent: dict[int, int] = {}
        """Those of them that gave nothing yet, with the tokens of their prompts."""
        self._num_silent_tokens = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(tuple(self._by_id.values()))

    def find(self, request_id: str) -> LiveRequest | None:
        """Give the live request of this id."""
        return self._by_id.get(request_id)

    def begin(self, request_id: str | None) -> LiveRequest:
        """Note a new request; its id is drawn when None.

        Raises:
            DuplicateRequest: A live request has this id.
        """
        name = uuid.uuid4().hex if request_id is None else request_id
        if name in self._by_id:
            raise DuplicateRequest(f"a live request has the id {name!r}; use another or wait for its end")
        live = self._by_id[name] = LiveRequest(name)
        self._idle.clear()
        return live

    def end(self, live: LiveRequest) -> None:
        """Forget a request: its reader has left."""
        self.close_outputs(live.uids)
        del self._by_id[live.request_id]
        if not self._by_id:
            self._idle.set()

    async def wait_until_none(self) -> None:
        """Wait until no request is live."""
        await self._idle.wait()

    def open_output(self, live: LiveRequest, num_prompt_tokens: int) -> int:
        """Give a new uid for the next output of ``live``."""
        uid = next(self._uids)
        live.uids.append(uid)
        self._open.add(uid)
        self._silent[uid] = num_prompt_tokens
        self._num_silent_tokens += num_prompt_tokens
        return uid

    def heard(self, uid: int) -> None:
        """Note that the engine gave something for ``uid``."""
        if self._silent:
            self._num_silent_tokens -= self._silent.pop(uid, 0)

    def has_begun(self, live: LiveRequest) -> bool:
        """Whether the engine gave something for an output of ``live``."""
        return not all(uid in self._silent for uid in live.uids)

    def close_outputs(self, uids: Iterable[int]) -> None:
        """Note that the engine does not work on these any more; some may be closed already."""
        self._open.difference_update(uids)
        for uid in uids:
            self.heard(uid)

    def check_room(self, num_new: int, reported_waiting: int, num_prompt_tokens: int = 0) -> None:
        """Check that ``num_new`` more outputs may be given to the engine.

        Args:
            num_new: Outputs.
            reported_waiting: The engine's own count of waiting ones, as of its last step.
            num_prompt_tokens: Of each of the new ones; 0 while that is not known.

        Raises:
            Overloaded: Too many would wait.
        """
        beyond_places = len(self._open) + num_new - self._max_running
        # When memory is short, some wait though places are free; the engine's count may be a step old.
        num_waiting = min(reported_waiting, len(self._silent))
        if beyond_places > self._max_waiting or (num_waiting and num_waiting + num_new > self._max_waiting):
            limit = self._max_waiting
            raise Overloaded(
                f"{len(self._open)} outputs run or wait; with {num_new} more, more than {limit} would wait; try later",
                subject="max_waiting",
                retry_after_seconds=_OVERLOAD_RETRY_SECONDS,
            )
        if self._max_waiting_tokens is None or not (beyond_places > 0 or num_waiting):
            return
        num_tokens = self._num_silent_tokens + num_new * num_prompt_tokens
        if num_tokens > self._max_waiting_tokens:
            raise Overloaded(
                f"the prompts that wait would have {num_tokens} tokens with this one, more than "
                f"{self._max_waiting_tokens}; try later, or with a shorter prompt",
                subject="max_waiting_tokens",
                retry_after_seconds=_OVERLOAD_RETRY_SECONDS,
            )
