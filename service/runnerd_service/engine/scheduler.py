"""The scheduler decides what runs next. It knows nothing of torch, gRPC, sockets or text.

It runs ahead of the results: a row may be launched while the token it reads is still unresolved. Whatever frees, hashes
or reports goes by settled counts. Tokens of launched rows are never generated twice: a preempted request still takes
those that were in flight when it lost its slot, and is admitted again only after the last of them has settled.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from runnerd_service.engine.kv_cache import BlockManager, IntegrityError, num_blocks_for
from runnerd_service.engine.prefill_sharing import PrefillSharing
from runnerd_service.engine.request import RequestState, Status, order
from runnerd_spi import Admit, BlockGrant, Release, Row, StepPlan

# Looking a member up in its class costs a tenth of a microsecond, for each row of each step.
_RUNNING, _FINISHED = Status.RUNNING, Status.FINISHED


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan and whose rows it has: ``requests[i]`` belongs to ``plan.rows[i]``."""

    plan: StepPlan
    requests: tuple[RequestState, ...]


@dataclass(slots=True)
class _Draft:
    """A step under construction."""

    budget: int
    admits: list[Admit] = field(default_factory=list)
    grants: list[BlockGrant] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    requests: list[RequestState] = field(default_factory=list)

    def add_row(self, request: RequestState, num_new_tokens: int, sample: bool) -> None:
        first = request.num_computed_tokens
        self.rows.append(Row(request.slot, request.epoch, num_new_tokens, first, sample))
        self.requests.append(request)
        self.budget -= num_new_tokens
        request.num_computed_tokens = first + num_new_tokens
        request.num_in_flight_rows += 1
        if sample:
            request.num_in_flight_tokens += 1


class Scheduler:
    """Continuous batching under a token budget, in the one order of :func:`~runnerd_service.engine.request.order`.

    A step takes the running decodes first, then prefill chunks of running requests, then waiting requests while there
    is a slot and room for all their tokens. A decode that finds no free block preempts the running request that goes
    last; so the first one always moves on. Blocks go back to the pool when no launched step can write to them.

    A waiting request whose beginning is being computed waits for that, and shares it. Those behind it may pass only
    while slots and blocks are left for it.

    Args:
        blocks: The pool; the scheduler is its only user.
        max_num_seqs: Slots.
        max_num_batched_tokens: Most tokens in a step; at least ``max_num_seqs``.
        prefix_caching: Whether full blocks are shared between requests with equal beginnings.
        chunked_prefill: Whether a prompt may be spread over steps.
        grants_blocks: Whether plans tell the runner the block ids; without, the blocks only count its memory.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool,
        chunked_prefill: bool = True,
        grants_blocks: bool = True,
    ) -> None:
        self.blocks = blocks
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prefix_caching = prefix_caching
        self._chunked_prefill = chunked_prefill
        self._grants_blocks = grants_blocks
        # Both sorted by `order`.
        self._waiting: list[RequestState] = []
        self._running: list[RequestState] = []
        # Requests without a slot whose blocks launched steps may still write to.
        self._draining: set[RequestState] = set()
        self._sharing = PrefillSharing(blocks.block_size)
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._max_num_seqs = max_num_seqs
        self._releases: list[Release] = []
        self._num_steps = 0
        self._num_epochs = 0

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot that have not ended."""
        return len(self._waiting)

    @property
    def has_requests(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._running or self._waiting)

    @property
    def has_runnable(self) -> bool:
        """Whether a request lacks tokens that no launched step will give: more could run."""
        return bool(self._waiting) or not all(request.is_launched_to_the_end for request in self._running)

    @property
    def has_releases(self) -> bool:
        """Whether the runner has not been told yet that a slot is free."""
        return bool(self._releases)

    def add(self, request: RequestState) -> None:
        """Queue a request that can fit the pool."""
        insort(self._waiting, request, key=order)

    def schedule(self) -> ScheduledStep | None:
        """Give the next step; None when nothing can be launched before more has settled."""
        draft = _Draft(self._max_num_batched_tokens)
        prefills = self._schedule_decodes(draft)
        for request in prefills:
            if draft.budget and request.status is Status.RUNNING:
                self._schedule_prefill(draft, request)
        self._schedule_waiting(draft)
        return self._step(draft) if draft.rows else None

    def schedule_releases(self) -> ScheduledStep:
        """Give a step without rows that tells the runner of the free slots."""
        return self._step(_Draft(0))

    def settle_row(self, request: RequestState, row: Row) -> bool:
        """Count a launched row as resolved, whatever it gave; to be followed by :meth:`reclaim`.

        Returns:
            False when the row is late: its request has ended, and the result is to be dropped.
        """
        request.num_in_flight_rows -= 1
        if row.sample:
            request.num_in_flight_tokens -= 1
        return request.status is not _FINISHED and request.epoch == row.epoch

    def publish(self, request: RequestState, num_settled: int) -> None:
        """Share the full blocks among the first ``num_settled`` computed and settled tokens of a request."""
        if not (self._prefix_caching and request.publishes):
            return
        size = self.blocks.block_size
        while (request.num_published_blocks + 1) * size <= num_settled:
            index = request.num_published_blocks
            self.blocks.publish(request.block_ids[index], request.block_hash(index, size))
            self._sharing.keep(request, index)
            request.num_published_blocks += 1

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; gives how many blocks held one.

        Running requests keep their blocks. Nothing that was computed before is found again, nor what they build on it.
        """
        for request in (*self._running, *self._draining):
            self._sharing.withdraw(request)
            request.publishes = False
        return self.blocks.reset_prefix_cache()

    def reclaim(self, request: RequestState) -> None:
        """Free the blocks of a request without a slot once none of its rows is in flight."""
        if request in self._draining and not request.num_in_flight_rows:
            self._draining.remove(request)
            self._free_blocks(request)

    def finish(self, request: RequestState) -> None:
        """End a request, running, waiting or preempted; harmless when it has ended."""
        if request.status is Status.FINISHED:
            return
        was_running = request.status is Status.RUNNING
        request.status = Status.FINISHED
        if was_running:
            self._leave_slot(request)
        else:
            self._remove(self._waiting, request)

    def check_integrity(self) -> None:
        """Compare counts, queues, slots and blocks with each other.

        Raises:
            IntegrityError: They do not agree.
        """
        holders = [*self._running, *self._draining]
        self.blocks.check_integrity([request.block_ids for request in holders])
        slots = sorted([*self._free_slots, *(request.slot for request in self._running)])
        if slots != list(range(self._max_num_seqs)):
            raise IntegrityError(f"slots free or in use are {slots}, expected each of {self._max_num_seqs} once")
        if not self._sharing.leaders() <= set(self._running):
            raise IntegrityError("a prefix is awaited of a request without a slot")
        for request in self._waiting:
            if request.block_ids and request not in self._draining:
                raise IntegrityError(f"request {request.uid} waits and holds blocks")
        for request in (*holders, *self._waiting):
            if not 0 <= request.num_in_flight_tokens <= request.num_in_flight_rows:
                counts = f"{request.num_in_flight_tokens} tokens in {request.num_in_flight_rows} rows"
                raise IntegrityError(f"request {request.uid} has {counts} in flight")

    def _step(self, draft: _Draft) -> ScheduledStep:
        grants = tuple(draft.grants) if self._grants_blocks else ()
        plan = StepPlan(self._num_steps, tuple(self._releases), tuple(draft.admits), grants, tuple(draft.rows))
        self._num_steps += 1
        self._releases.clear()
        return ScheduledStep(plan, tuple(draft.requests))

    def _schedule_decodes(self, draft: _Draft) -> list[RequestState]:
        """Add a row for each running request that lacks one token; gives those that lack more."""
        prefills: list[RequestState] = []
        rows, requests, size = draft.rows, draft.requests, self.blocks.block_size
        for request in tuple(self._running):
            if request.status is not _RUNNING:  # preempted by one before it
                continue
            num_tokens = len(request.token_ids) + request.num_in_flight_tokens
            if num_tokens >= request.max_num_tokens:
                continue
            first = request.num_computed_tokens
            if num_tokens - first > 1:
                prefills.append(request)
                continue
            if first == len(request.block_ids) * size and not self._grow(draft, request):
                continue
            # Draft.add_row written out: this runs for every running request in every step.
            rows.append(Row(request.slot, request.epoch, 1, first, True))
            requests.append(request)
            request.num_computed_tokens = first + 1
            request.num_in_flight_rows += 1
            request.num_in_flight_tokens += 1
        draft.budget -= len(rows)
        return prefills

    def _schedule_prefill(self, draft: _Draft, request: RequestState) -> None:
        missing = request.num_tokens - request.num_computed_tokens
        chunk = min(missing, draft.budget)
        if chunk == missing or self._chunked_prefill:
            draft.add_row(request, chunk, sample=chunk == missing)

    def _grow(self, draft: _Draft, request: RequestState) -> bool:
        """Grant one more block, preempting others for it. False: the request has to wait, or was itself the last."""
        while not self.blocks.num_free:
            # What launched steps are about to give back is waited for: a further victim would be preempted for nothing.
            if self._draining or any(one.is_launched_to_the_end for one in self._running):
                return False
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        block_ids = self.blocks.allocate(1)
        request.block_ids += block_ids
        draft.grants.append(BlockGrant(request.slot, request.epoch, tuple(block_ids)))
        return True

    def _preempt(self, request: RequestState) -> None:
        self.num_preemptions += 1
        request.status = Status.PREEMPTED
        self._leave_slot(request)
        insort(self._waiting, request, key=order)

    def _schedule_waiting(self, draft: _Draft) -> None:
        """Admit waiting requests, in order."""
        # Kept for those that wait for a prefix: passing them must not cost them their place.
        num_kept_slots = num_kept_blocks = index = 0
        while draft.budget and index < len(self._waiting) and num_kept_slots < len(self._free_slots):
            request = self._waiting[index]
            # Nobody passes a request that lacks room, else the blocks it waits for would go to others for ever.
            if request.num_in_flight_rows:
                return
            cached = self._cached_prefix(request)
            if request.awaited is not None:
                num_own_blocks = num_blocks_for(len(request.token_ids), self.blocks.block_size)
                num_kept_blocks += num_own_blocks - request.awaited.num_blocks + 1
                num_kept_slots += 1
                index += 1
            elif not self._admit(draft, index, cached, num_kept_blocks):
                return

    def _admit(self, draft: _Draft, index: int, cached: list[int], num_kept_blocks: int) -> bool:
        request = self._waiting[index]
        num_tokens = len(request.token_ids)
        num_cached_tokens = len(cached) * self.blocks.block_size
        if not self._chunked_prefill and num_tokens - num_cached_tokens > draft.budget:
            return False
        missing = num_blocks_for(num_tokens, self.blocks.block_size) - len(cached)
        # One spare block for each running request: they are to grow before the next one is preempted again.
        num_spare = len(self._running) + num_kept_blocks
        if missing + num_spare > self.blocks.num_free - self.blocks.num_free_among(cached):
            return False
        self.blocks.share(cached)
        request.block_ids = cached + self.blocks.allocate(missing)
        request.num_published_blocks = len(cached)
        request.num_computed_tokens = num_cached_tokens
        request.publishes = True
        if not request.was_admitted:
            request.was_admitted = True
            request.began_ns = time.monotonic_ns()
            request.num_cached_tokens = min(num_cached_tokens, request.num_prompt_tokens)
            self.num_prompt_tokens += request.num_prompt_tokens
            self.prefix_cache_queries += num_tokens
            self.prefix_cache_hits += num_cached_tokens
        self._enter_slot(draft, index)
        if self._prefix_caching:
            self._sharing.promise(request)
        self._schedule_prefill(draft, request)
        return True

    def _cached_prefix(self, request: RequestState) -> list[int]:
        """Give the blocks that a waiting request can share; none while it waits for more of them."""
        if not self._prefix_caching or request.wants_prompt_logprobs:
            return []
        if request.awaited is not None and request.awaited.is_pending:
            return []
        # At least the last token is computed: its logits choose the next one.
        size = self.blocks.block_size
        num_full = (len(request.token_ids) - 1) // size
        cached = self.blocks.match(request.block_hash(index, size) for index in range(num_full))
        return [] if self._sharing.is_worth_waiting(request, len(cached), num_full) else cached

    def _enter_slot(self, draft: _Draft, index: int) -> None:
        request = self._waiting.pop(index)
        request.status = Status.RUNNING
        request.slot = self._free_slots.pop()
        request.epoch = self._num_epochs
        self._num_epochs += 1
        insort(self._running, request, key=order)
        draft.admits.append(
            Admit(
                request.slot,
                request.epoch,
                tuple(request.token_ids),
                request.num_prompt_tokens,
                request.sampling_params,
                request.adapter_id,
            )
        )
        draft.grants.append(BlockGrant(request.slot, request.epoch, tuple(request.block_ids)))

    def _leave_slot(self, request: RequestState) -> None:
        # The next plan carries the release before it can admit another, so the slot counts as free at once.
        self._remove(self._running, request)
        self._sharing.withdraw(request)
        self._releases.append(Release(request.slot, request.epoch))
        self._free_slots.append(request.slot)
        if request.num_in_flight_rows:
            self._draining.add(request)
        else:
            self._free_blocks(request)

    def _free_blocks(self, request: RequestState) -> None:
        self.blocks.free(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_published_blocks = 0

    @staticmethod
    def _remove(queue: list[RequestState], request: RequestState) -> None:
        index = bisect_left(queue, order(request), key=order)
        if queue[index] is not request:
            raise IntegrityError(f"request {request.uid} is not in its queue")
        del queue[index]
