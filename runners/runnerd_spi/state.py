"""The bookkeeping every runner needs: which slot belongs to whom, and whether a plan keeps the contract.

A runner hands each plan to :meth:`PlanChecker.apply` first. It either raises and has changed nothing, or returns and
knows the new state. Runner authors may use it or do the same checks themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runnerd_spi.errors import PlanError
from runnerd_spi.plan import Admit, StepPlan
from runnerd_spi.runner import KVMemory


@dataclass(slots=True)
class SlotState:
    """A request as the runner knows it. Token values are not here: they live in the runner's token table."""

    admit: Admit
    num_tokens: int
    """Tokens in the table, sampled ones that are still unresolved included."""
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Positions in the KV memory; kept where the runner places them itself."""


class PlanChecker:
    """Follows the slots through the plans and refuses one that breaks the contract.

    Args:
        max_num_seqs: Number of slots.
        max_num_batched_tokens: Most tokens in a plan.
        max_model_len: Most tokens of a request.
        block_size: Tokens in a block.
        num_blocks: Number of KV blocks.
        vocab_size: Token ids are below this.
        kv_memory: The runner's capability; with ``tokens`` the blocks are positions, and no plan grants any.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        kv_memory: KVMemory = "blocks",
    ) -> None:
        self.slots: dict[int, SlotState] = {}
        self.next_step_id = 0
        self._last_epochs: dict[int, int] = {}
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._grants_blocks = kv_memory == "blocks"

    def apply(self, plan: StepPlan) -> None:
        """Check ``plan`` and take over its deltas; sampled tokens are counted at once.

        Raises:
            PlanError: Nothing was changed.
        """
        if plan.step_id != self.next_step_id:
            raise PlanError(f"step_id {plan.step_id}, expected {self.next_step_id}")
        slots = dict(self.slots)
        for release in plan.releases:
            self._named(slots, release.slot, release.epoch, "release")
            del slots[release.slot]
        for admit in plan.admits:
            self._check_admit(slots, admit)
            slots[admit.slot] = SlotState(admit, len(admit.token_ids))
        if plan.grants and not self._grants_blocks:
            raise PlanError("the plan grants blocks, but the runner's KV memory is counted in tokens: it takes none")
        granted: dict[int, list[int]] = {}
        for grant in plan.grants:
            state = self._named(slots, grant.slot, grant.epoch, "grant")
            self._check_ids(grant.block_ids, self._num_blocks, "block")
            granted.setdefault(grant.slot, list(state.block_ids)).extend(grant.block_ids)
        lengths = self._check_rows(plan, slots, granted)
        if plan.masks:
            self._check_masks(plan)
        ends = {} if self._grants_blocks else self._check_memory(plan, slots)
        self.slots = slots
        for slot, block_ids in granted.items():
            slots[slot].block_ids = block_ids
        for slot, length in lengths.items():
            slots[slot].num_tokens = length
        for slot, end in ends.items():
            slots[slot].num_computed = end
        self._last_epochs |= {admit.slot: admit.epoch for admit in plan.admits}
        self.next_step_id += 1

    def _check_rows(self, plan: StepPlan, slots: dict[int, SlotState], granted: dict[int, list[int]]) -> dict[int, int]:
        lengths: dict[int, int] = {}
        total = 0
        for row in plan.rows:
            state = self._named(slots, row.slot, row.epoch, "row")
            if row.slot in lengths:
                raise PlanError(f"slot {row.slot} has two rows in step {plan.step_id}")
            end = row.first_position + row.num_new_tokens
            if row.num_new_tokens < 1 or row.first_position < 0 or end > state.num_tokens:
                raise PlanError(
                    f"slot {row.slot}: row of positions {row.first_position} to {end - 1}, "
                    f"expected inside the {state.num_tokens} tokens of the request"
                )
            if self._grants_blocks:
                capacity = len(granted.get(row.slot, state.block_ids)) * self._block_size
                if end > capacity:
                    raise PlanError(f"slot {row.slot}: row ends at {end}, but its blocks hold {capacity} tokens")
            if row.sample and end != state.num_tokens:
                raise PlanError(f"slot {row.slot}: row samples after position {end - 1} of {state.num_tokens} tokens")
            if row.sample and end >= self._max_model_len:
                raise PlanError(f"slot {row.slot}: row samples past max_model_len {self._max_model_len}")
            lengths[row.slot] = state.num_tokens + int(row.sample)
            total += row.num_new_tokens
        if total > self._max_num_batched_tokens:
            raise PlanError(f"{total} tokens in one step, at most {self._max_num_batched_tokens}")
        return lengths

    def _check_memory(self, plan: StepPlan, slots: dict[int, SlotState]) -> dict[int, int]:
        ends: dict[int, int] = {}
        for row in plan.rows:
            computed = slots[row.slot].num_computed
            if row.first_position > computed:
                raise PlanError(
                    f"slot {row.slot}: row begins at {row.first_position}, but {computed} positions are computed"
                )
            ends[row.slot] = row.first_position + row.num_new_tokens
        needed = sum(ends.get(slot, state.num_computed) for slot, state in slots.items())
        if needed > self._num_blocks:
            raise PlanError(f"the requests take {needed} positions, but the KV memory holds {self._num_blocks}")
        return ends

    def _check_masks(self, plan: StepPlan) -> None:
        sampling = {(row.slot, row.epoch) for row in plan.rows if row.sample}
        num_bytes = -(-self._vocab_size // 8)
        for mask in plan.masks:
            if (mask.slot, mask.epoch) not in sampling:
                raise PlanError(f"mask: slot {mask.slot} epoch {mask.epoch} has no row that samples, or two masks")
            sampling.remove((mask.slot, mask.epoch))
            if len(mask.allowed) != num_bytes:
                raise PlanError(f"mask: slot {mask.slot} has {len(mask.allowed)} bytes, expected {num_bytes}")
            if self._vocab_size % 8 and mask.allowed[-1] >> self._vocab_size % 8:
                raise PlanError(f"mask: slot {mask.slot} allows a token beyond {self._vocab_size - 1}")

    def _check_admit(self, slots: dict[int, SlotState], admit: Admit) -> None:
        if not 0 <= admit.slot < self._max_num_seqs:
            raise PlanError(f"admit: slot {admit.slot}, expected 0 to {self._max_num_seqs - 1}")
        if admit.slot in slots:
            raise PlanError(f"admit: slot {admit.slot} is in use by epoch {slots[admit.slot].admit.epoch}")
        last_epoch = self._last_epochs.get(admit.slot)
        if last_epoch is not None and admit.epoch <= last_epoch:
            raise PlanError(f"admit: slot {admit.slot} epoch {admit.epoch}, expected one above the last, {last_epoch}")
        if not 1 <= admit.num_prompt_tokens <= len(admit.token_ids) <= self._max_model_len:
            raise PlanError(
                f"admit: slot {admit.slot} has {len(admit.token_ids)} tokens, {admit.num_prompt_tokens} prompt; "
                f"expected 1 <= prompt <= tokens <= {self._max_model_len}"
            )
        self._check_ids(admit.token_ids, self._vocab_size, "token")

    @staticmethod
    def _named(slots: dict[int, SlotState], slot: int, epoch: int, what: str) -> SlotState:
        state = slots.get(slot)
        if state is None or state.admit.epoch != epoch:
            has = "empty" if state is None else f"epoch {state.admit.epoch}"
            raise PlanError(f"{what}: slot {slot} epoch {epoch}, but the slot is {has}")
        return state

    @staticmethod
    def _check_ids(ids: Sequence[int], limit: int, what: str) -> None:
        # min and max are much faster than a loop over a long prompt.
        if ids and (min(ids) < 0 or max(ids) >= limit):
            wrong = next(one for one in ids if not 0 <= one < limit)
            raise PlanError(f"{what} id {wrong}, expected 0 to {limit - 1}")
