"""Which prefixes running requests are about to fill, so that an equal prompt waits for them and computes nothing twice.

It knows requests and hashes, but no queue, step or device, and decides nothing.
"""

from __future__ import annotations

from runnerd_service.engine.request import Awaited, RequestState, order


class PrefillSharing:
    """The full blocks that requests in prefill have promised to publish, by hash.

    A request waits only for one that goes before it in the queue's order and that has a slot. So nobody waits in a
    circle, nor for one that others may pass. A promise ends with the leader's slot, kept or not: whoever waited looks
    again, shares what was settled and computes the rest.

    Args:
        block_size: Tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._leader_of: dict[bytes, RequestState] = {}

    def promise(self, request: RequestState) -> None:
        """Note that a request was admitted: its prefill fills those full blocks that it did not find cached."""
        request.num_promised_blocks = len(request.token_ids) // self._block_size
        for index in range(request.num_published_blocks, request.num_promised_blocks):
            self._leader_of.setdefault(request.block_hash(index, self._block_size), request)

    def keep(self, request: RequestState, index: int) -> None:
        """Note that block ``index`` is settled and published."""
        if index < request.num_promised_blocks:
            self._forget(request, index)

    def withdraw(self, request: RequestState) -> None:
        """Note that a request publishes no more: it lost its slot, or what it holds is not to be found."""
        for index in range(request.num_published_blocks, request.num_promised_blocks):
            self._forget(request, index)
        request.num_promised_blocks = 0

    def is_worth_waiting(self, request: RequestState, num_cached: int, num_full: int) -> bool:
        """Say whether blocks beyond the cached ones are being filled for a request by one before it.

        Args:
            request: Waits for a slot; what it waits for is noted at it.
            num_cached: Blocks of its prefix that are published.
            num_full: Blocks that it could share at most.
        """
        request.awaited = None
        if num_cached >= num_full:
            return False
        leader = self._leader_of.get(request.block_hash(num_cached, self._block_size))
        if leader is None or order(leader) > order(request):
            return False
        end = num_cached + 1
        most = min(num_full, leader.num_promised_blocks)
        while end < most and leader.block_hash(end, self._block_size) == request.block_hash(end, self._block_size):
            end += 1
        request.awaited = Awaited(leader, leader.epoch, end)
        return True

    def leaders(self) -> set[RequestState]:
        """Give the requests whose promises are open."""
        return set(self._leader_of.values())

    def _forget(self, request: RequestState, index: int) -> None:
        one = request.block_hash(index, self._block_size)
        if self._leader_of.get(one) is request:
            del self._leader_of[one]
