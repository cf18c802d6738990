"""Runs a trace on a runner: a scheduler of the kit's own, small enough to be read, with no opinion on speed.

It keeps counts only, as a scheduler ahead of its device has no tokens. Which plan it makes depends on the trace alone,
never on when a step is seen to be done, so that a failing trace fails again.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from runnerd_spi.plan import Admit, BlockGrant, Release, Row, RowOutput, TokenLogprobs
from runnerd_spi.testing.subject import Broken, Launched, Session
from runnerd_spi.testing.traces import Trace, TraceRequest


@dataclass(slots=True)
class Outcome:
    """What a request got."""

    outputs: list[RowOutput] = field(default_factory=list)
    """One for each output index."""
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By position of the token."""

    @property
    def token_ids(self) -> list[int | None]:
        """The tokens; None where the row failed."""
        return [output.token_id for output in self.outputs]


@dataclass(slots=True)
class _Live:
    """A request as the driver knows it."""

    index: int
    request: TraceRequest
    outcome: Outcome
    slot: int = -1
    epoch: int = -1
    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_computed: int = 0
    num_rows: int = 0
    num_unsettled: int = 0
    is_dry: bool = False
    """The next row that samples was computed without ``sample`` already."""
    was_preempted: bool = False
    failed: bool = False

    @property
    def has_all(self) -> bool:
        return self.num_tokens >= len(self.request.prompt + self.request.given) + self.request.num_outputs


class TraceRun:
    """One run of a trace.

    Args:
        session: At idle; left at idle unless something was broken.
        trace: What to run.
    """

    def __init__(self, session: Session, trace: Trace) -> None:
        self.steps: list[str] = []
        """What was launched, for people."""
        self.launched: list[Launched] = []
        self._session = session
        self._trace = trace
        self._waiting = [_Live(index, one, Outcome()) for index, one in enumerate(trace.requests)]
        self._all = list(self._waiting)
        self._running: list[_Live] = []
        # The rows beside their plan: a check may overwrite the plan.
        self._unsettled: deque[tuple[Launched, tuple[Row, ...], list[_Live]]] = deque()
        # Blocks may be shared; one is free again when its last holder lets go.
        self._holders: Counter[int] = Counter()
        self._released: list[tuple[Release, list[int]]] = []

    def launch_only(self, step: int) -> Launched:
        """Launch one step and ask for no result; what is unsettled is settled by ``run`` or ``abandon``."""
        self._launch(step)
        return self.launched[-1]

    def abandon(self) -> None:
        """Release what runs, settle what is launched, and leave the session at idle."""
        texts: list[str] = []
        self._waiting.clear()
        for one in list(self._running):
            self._release(one, texts, "abandon")
        self._launch(len(self.launched))
        while self._unsettled:
            self._settle()

    def run(self, first_step: int = 0) -> list[Outcome]:
        """Run to the end and give what each request got."""
        step = first_step
        while self._waiting or self._running:
            self._step(step)
            step += 1
            if step > 10_000:  # no trace of the kit's sizes is that long
                raise AssertionError("the kit's scheduler does not come to an end")
        while self._unsettled:
            self._settle()
        self._launch(step)
        self._settle()
        return [one.outcome for one in self._all]

    def _step(self, step: int) -> None:
        self._launch(step)
        keep = 0 if self._trace.settle_early else self._session.config.max_in_flight - 1
        while len(self._unsettled) > keep:
            self._settle()

    def _launch(self, step: int) -> None:
        texts: list[str] = []
        self._leave(texts)
        releases = tuple(release for release, _ in self._released)
        # A slot may be given away in the plan that releases it; a block only by a later one.
        self._session.free_slots[:0] = [release.slot for release in releases]
        admits, grants = self._admit(step, texts)
        rows, computing = self._rows(grants, texts)
        for _, blocks in self._released:
            self._drop(blocks)
        self._released = []
        merged = tuple(BlockGrant(slot, epoch, tuple(ids)) for (slot, epoch), ids in grants.items() if ids)
        self.steps.append(f"step {step}: " + ("; ".join(texts) or "no rows"))
        launched = self._session.launch(releases, tuple(admits), merged, tuple(rows))
        self.launched.append(launched)
        self._unsettled.append((launched, tuple(rows), computing))

    def _leave(self, texts: list[str]) -> None:
        for one in list(self._running):
            request = one.request
            if request.cancel_after is not None and one.num_rows >= request.cancel_after:
                self._release(one, texts, "cancel")
            elif one.failed:
                self._release(one, texts, "end the failed")
            elif request.preempt_after is not None and not one.was_preempted and one.num_rows >= request.preempt_after:
                self._release(one, texts, "preempt")
                one.was_preempted = True
                self._waiting.append(one)
            elif one.has_all:
                self._release(one, texts, "release")

    def _release(self, one: _Live, texts: list[str], why: str) -> None:
        self._running.remove(one)
        self._released.append((Release(one.slot, one.epoch), one.blocks))
        one.blocks = []
        texts.append(f"{why} request {one.index} (slot {one.slot}, epoch {one.epoch})")

    def _drop(self, blocks: list[int]) -> None:
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                # To the front: the next request gets it, so that what was left in it would be found.
                self._session.free_blocks.insert(0, block)

    def _admit(self, step: int, texts: list[str]) -> tuple[list[Admit], dict[tuple[int, int], list[int]]]:
        admits: list[Admit] = []
        grants: dict[tuple[int, int], list[int]] = {}
        for one in list(self._waiting):
            if step < one.request.arrival or one.num_unsettled or not self._session.free_slots:
                continue
            self._waiting.remove(one)
            outputs = tuple(token for token in one.outcome.token_ids if token is not None)
            tokens = one.request.prompt + one.request.given + outputs
            one.num_tokens = len(tokens)
            if one.has_all or one.failed:
                continue
            one.slot = self._session.free_slots.pop(0)
            one.epoch = self._session.take_epoch(one.slot)
            one.is_dry = False
            admits.append(Admit(one.slot, one.epoch, tokens, len(one.request.prompt), one.request.params))
            shared = self._shared_blocks(one, tokens)
            one.num_computed = len(shared) * self._session.sizes.block_size
            one.blocks = shared
            self._holders.update(shared)
            grants[one.slot, one.epoch] = list(shared)
            self._running.append(one)
            taken = f", blocks {shared} of request {one.request.shares_with}" if shared else ""
            texts.append(
                f"admit request {one.index} to slot {one.slot}, epoch {one.epoch}, {len(tokens)} tokens{taken}"
            )
        return admits, grants

    def _shared_blocks(self, one: _Live, tokens: tuple[int, ...]) -> list[int]:
        if one.request.shares_with is None:
            return []
        other = self._all[one.request.shares_with]
        same = 0
        # One token is left to compute, and only what the other has computed can be shared.
        for mine, theirs in zip(tokens[:-1], other.request.prompt[: other.num_computed], strict=False):
            if mine != theirs:
                break
            same += 1
        return other.blocks[: same // self._session.sizes.block_size]

    def _rows(self, grants: dict[tuple[int, int], list[int]], texts: list[str]) -> tuple[list[Row], list[_Live]]:
        rows: list[Row] = []
        computing: list[_Live] = []
        budget = self._session.sizes.max_num_batched_tokens
        # Decodes first: they are what a scheduler serves first, and so the order of rows is not that of slots.
        for one in sorted(self._running, key=lambda live: live.num_tokens - live.num_computed):
            if one.has_all or one.request.cancel_after == one.num_rows:
                continue
            missing = one.num_tokens - one.num_computed
            count = min(missing, self._trace.chunk, budget) if self._session.sizes.chunked_prefill else missing
            first, end = one.num_computed, one.num_computed + count
            if not 1 <= count <= budget or not self._grow(one, end, grants):
                continue
            budget -= count
            at_end = end == one.num_tokens
            is_dry_row = at_end and one.request.dry_rows and not one.is_dry
            sample = at_end and not is_dry_row
            rows.append(Row(slot=one.slot, epoch=one.epoch, num_new_tokens=count, first_position=first, sample=sample))
            computing.append(one)
            one.is_dry = is_dry_row
            # After a dry row its last position is computed once more.
            one.num_computed = end - 1 if is_dry_row else end
            one.num_tokens += sample
            one.num_rows += 1
            one.num_unsettled += 1
            where = f"position {first}" if count == 1 else f"positions {first} to {end - 1}"
            texts.append(f"request {one.index} computes {where}" + (" and samples" if sample else ""))
        return rows, computing

    def _grow(self, one: _Live, end: int, grants: dict[tuple[int, int], list[int]]) -> bool:
        missing = -(-end // self._session.sizes.block_size) - len(one.blocks)
        if missing > len(self._session.free_blocks):
            return False
        for _ in range(missing):
            block = self._session.free_blocks.pop(0)
            self._holders[block] += 1
            one.blocks.append(block)
            grants.setdefault((one.slot, one.epoch), []).append(block)
        return True

    def _settle(self) -> None:
        launched, rows, computing = self._unsettled.popleft()
        output = launched.take()
        for one, row, result in zip(computing, rows, output.rows, strict=True):
            one.num_unsettled -= 1
            one.outcome.prompt_logprobs |= {
                row.first_position + offset + 1: record for offset, record in enumerate(result.prompt_logprobs)
            }
            if one.failed:
                continue
            one.failed = result.failure is not None
            if not one.failed and (result.token_id is not None) != row.sample:
                raise Broken(
                    f"step {launched.plan.step_id}, slot {row.slot}: a row with sample={row.sample} returned "
                    f"{'no token' if result.token_id is None else f'token {result.token_id}'}"
                )
            if row.sample or one.failed:
                one.outcome.outputs.append(result)
