"""Which requests are live, which of their outputs the engine still works on, and whether there is room for more.

Engine requests have uids that are never used twice, so a request id may be used again as soon as it is free. This
module knows no engine process: it is told. Request ids are each tenant's own.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from runnerd_service.config import ServerConfig
from runnerd_service.errors import DuplicateRequest, Overloaded, RunnerdError
from runnerd_service.frontend.begin_rate import BeginRate
from runnerd_service.frontend.occupancy import Limits, Occupancy
from runnerd_service.frontend.stream import RequestStream
from runnerd_service.frontend.tenants import Tenants
from runnerd_service.metrics import TenantFigures
from runnerd_service.telemetry.requests import RequestTimes

_MIN_RETRY_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has begun and whose reader has not left."""

    request_id: str
    uids: list[int] = field(default_factory=list)
    """Its engine requests, by output index; empty until submitted."""
    stream: RequestStream | None = None
    tenant: str = ""
    """On whose behalf; empty for nobody's in particular."""
    num_prompt_tokens: int = 0
    """0 until submitted."""
    times: RequestTimes = field(default_factory=RequestTimes)
    """Takes what becomes known of it."""
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
        config: Says how many may run and wait.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._all = Occupancy(Limits(config.engine.max_num_seqs, config.max_waiting, config.max_waiting_tokens))
        self._tenants = Tenants(config.tenant)
        self._by_id: dict[tuple[str, str], LiveRequest] = {}
        """By tenant and request id."""
        self._num_silent: Counter[int] = Counter()
        """Outputs that the engine was given and that gave nothing yet, by priority."""
        self._priorities: dict[int, int] = {}
        """Of each of those."""
        self._rate = BeginRate()
        self._uids = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(tuple(self._by_id.values()))

    @property
    def num_held(self) -> int:
        """Outputs that are held back from the engine, because their tenant has enough there."""
        return self._tenants.num_held

    def tenant_figures(self) -> Mapping[str, TenantFigures]:
        """Give what each tenant has and had; may be called from any thread."""
        return self._tenants.figures()

    def find(self, request_id: str, tenant: str | None) -> tuple[LiveRequest, ...]:
        """Give the live requests of this id: a tenant's one, or those of all when None."""
        if tenant is not None:
            found = self._by_id.get((tenant, request_id))
            return () if found is None else (found,)
        return tuple(live for live in self._by_id.values() if live.request_id == request_id)

    def begin(self, request_id: str | None, tenant: str) -> LiveRequest:
        """Note a new request; its id is drawn when None.

        Raises:
            DuplicateRequest: A live request of the tenant has this id.
        """
        name = uuid.uuid4().hex if request_id is None else request_id
        key = (tenant, name)
        if key in self._by_id:
            raise DuplicateRequest(f"a live request has the id {name!r}; use another or wait for its end")
        live = self._by_id[key] = LiveRequest(name, tenant=tenant)
        self._idle.clear()
        return live

    def end(self, live: LiveRequest) -> None:
        """Forget a request: its reader has left."""
        self.close_outputs(live.uids)
        del self._by_id[live.tenant, live.request_id]
        if live.stream is not None:
            self._tenants.note_ended(live.tenant, live.num_prompt_tokens, live.times.num_output_tokens)
            live.stream.let_go()
        # The stream knows its request, and an error's traceback both: only a collection of garbage would free them.
        live.stream = live.error = None
        if not self._by_id:
            self._idle.set()

    async def wait_until_none(self) -> None:
        """Wait until no request is live."""
        await self._idle.wait()

    def open_output(self, live: LiveRequest, num_prompt_tokens: int) -> int:
        """Give a new uid for the next output of ``live``."""
        uid = next(self._uids)
        live.uids.append(uid)
        live.num_prompt_tokens = num_prompt_tokens
        self._all.open(uid, num_prompt_tokens)
        self._tenants.open(live.tenant, uid, num_prompt_tokens)
        return uid

    def start_output(self, uid: int, priority: int, num_tokens: int, start: Callable[[], None]) -> None:
        """Call ``start`` when the output's tenant has room for it in the engine; see :meth:`Tenants.start`."""

        def begin() -> None:
            self._priorities[uid] = priority
            self._num_silent[priority] += 1
            start()

        self._tenants.start(uid, priority, num_tokens, begin)

    def heard(self, uid: int, reported_waiting: int) -> None:
        """Note that the engine gave something for ``uid`` at last, and counts ``reported_waiting`` that wait."""
        if self._all.is_silent(uid):
            self._all.heard(uid)
            self._tenants.heard(uid)
            self._forget_priority(uid)
            self._rate.note(time.monotonic(), others_wait=reported_waiting > 0)

    def has_begun(self, live: LiveRequest) -> bool:
        """Whether the engine gave something for an output of ``live``."""
        return not all(self._all.is_silent(uid) for uid in live.uids)

    def held_by(self, live: LiveRequest) -> str:
        """Give the limit of its tenant that keeps ``live`` from its begin; empty when it waits for a place."""
        limits = [self._tenants.held_by(uid) for uid in live.uids]
        return limits[0] if limits and all(limits) else ""

    def close_outputs(self, uids: Iterable[int]) -> None:
        """Note that the engine does not work on these any more; some may be closed already."""
        for uid in uids:
            self._forget_priority(uid)
            self._all.close(uid)
            self._tenants.close(uid)

    def check_deadline(self, tenant: str, priority: int, seconds: float) -> None:
        """Check that a request can begin in time, by how fast those that wait have begun lately.

        Args:
            tenant: Whose it is.
            priority: Those with a greater one go after it.
            seconds: In which it is to begin.

        Raises:
            Overloaded: It would come too late even if others now began twice as fast.
        """
        num_ahead = sum(number for other, number in self._num_silent.items() if other <= priority)
        wait = self._rate.least_wait_seconds(num_ahead, time.monotonic())
        if wait and wait > seconds:
            self._tenants.note_refused(tenant)
            raise Overloaded(
                f"{num_ahead} outputs wait before it, so it would begin in {wait:.1f} s at the earliest, and its "
                f"deadline is in {seconds:.1f} s; try later, elsewhere, or with a later deadline",
                subject="deadline",
                retry_after_seconds=max(wait - seconds, _MIN_RETRY_SECONDS),
            )

    def _forget_priority(self, uid: int) -> None:
        priority = self._priorities.pop(uid, None)
        if priority is not None:
            self._num_silent[priority] -= 1
            if not self._num_silent[priority]:
                del self._num_silent[priority]

    def check_room(self, tenant: str, num_new: int, reported_waiting: int, num_prompt_tokens: int = 0) -> None:
        """Check that ``num_new`` more outputs may be given to the engine.

        Args:
            tenant: Whose they are.
            num_new: Outputs.
            reported_waiting: The engine's own count of waiting ones, as of its last step.
            num_prompt_tokens: Of each of the new ones; 0 while that is not known.

        Raises:
            Overloaded: Too many would wait, of everybody's or of the tenant's.
        """
        try:
            self._all.check_room(num_new, reported_waiting, num_prompt_tokens)
            self._tenants.check_room(tenant, num_new, reported_waiting, num_prompt_tokens)
        except Overloaded:
            self._tenants.note_refused(tenant)
            raise
