"""Turns a plan into the arrays of one step: host work only, done once, never changed afterwards.

Everything here is known when the plan arrives, whatever is still unresolved: token ids appear only as places in the
token table, never as values, but for the settled ones that an admit brings. It knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from runnerd_spi import StepPlan

IntArray = npt.NDArray[np.int64]

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """A row whose prompt log-probabilities are asked for."""

    row: int
    """Index in the plan."""
    begin: int
    end: int
    """Its places among the step's prompt positions."""
    num_top: int


class StepArrays(NamedTuple, Generic[A]):
    """What the device needs of a step, on the host or on the device.

    A place in the token table is ``slot * max_model_len + position``.
    """

    # [num_admitted_tokens] int64: settled tokens that enter the table, and their places
    admit_tokens: A
    admit_places: A
    # [num_tokens] int64: places of the input ids, their positions, and where their keys and values go
    input_places: A
    positions: A
    slot_mapping: A
    # [num_rows + 1] int32
    query_start_loc: A
    # [num_rows] int32
    seq_lens: A
    # [num_rows, max_blocks] int32, padded with 0
    block_tables: A
    # [num_samples + num_prompt_positions] int64: tokens of the step whose logits are needed, the sampled ones first
    logits_index: A
    # [num_samples] int64: places that the sampled tokens are written to
    sample_places: A
    # [num_prompt_positions] int64: places of the prompt tokens whose log-probabilities are asked for
    prompt_places: A


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arrays of one step, and what the host must know of them."""

    arrays: StepArrays[npt.NDArray[Any]]
    max_query_len: int
    max_seq_len: int
    prompt_spans: tuple[PromptSpan, ...]
    sampled_rows: tuple[int, ...]
    """Indices in the plan of the rows that sample."""
    num_rows: int

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return len(self.arrays.positions)


class SlotArrays:
    """What the host remembers of the slots to build steps: block tables and prompt lengths, no token.

    Args:
        max_num_seqs: Number of slots.
        max_model_len: Width of the token table.
        block_size: Tokens in a block.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self._max_model_len = max_model_len
        self._block_size = block_size
        # A request may be granted a block ahead of need, hence one more than its tokens fill.
        max_blocks = -(-max_model_len // block_size) + 1
        # [max_num_seqs, max_blocks]
        self._block_tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        # each [max_num_seqs]
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_prompt_logprobs = np.full(max_num_seqs, -1, np.int64)

    def build(self, plan: StepPlan) -> StepInputs:
        """Take over the plan's deltas and give the step's arrays. The plan was checked."""
        admit_tokens, admit_places = self._admit(plan)
        for grant in plan.grants:
            self._grant(grant.slot, grant.block_ids)
        slots = np.array([row.slot for row in plan.rows], np.int64)
        first = np.array([row.first_position for row in plan.rows], np.int64)
        query_lens = np.array([row.num_new_tokens for row in plan.rows], np.int64)
        seq_lens = first + query_lens
        starts = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(query_lens, out=starts[1:])
        max_seq_len = int(seq_lens.max(initial=0))
        # Fancy indexing copies: later grants do not reach into this step.
        block_tables = self._block_tables[slots, : -(-max_seq_len // self._block_size)]
        row_of_token = np.repeat(np.arange(len(slots)), query_lens)
        positions = np.arange(starts[-1]) + (first - starts[:-1])[row_of_token]
        blocks = block_tables[row_of_token, positions // self._block_size].astype(np.int64)
        sampled = np.array([index for index, row in enumerate(plan.rows) if row.sample], np.int64)
        prompt_index, prompt_places, prompt_spans = self._prompt_positions(slots, first, starts)
        arrays: StepArrays[npt.NDArray[Any]] = StepArrays(
            admit_tokens=admit_tokens,
            admit_places=admit_places,
            input_places=slots[row_of_token] * self._max_model_len + positions,
            positions=positions,
            slot_mapping=blocks * self._block_size + positions % self._block_size,
            query_start_loc=starts.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            block_tables=block_tables,
            logits_index=np.concatenate((starts[1:][sampled] - 1, prompt_index)),
            sample_places=slots[sampled] * self._max_model_len + seq_lens[sampled],
            prompt_places=prompt_places,
        )
        return StepInputs(
            arrays=arrays,
            max_query_len=int(query_lens.max(initial=0)),
            max_seq_len=max_seq_len,
            prompt_spans=prompt_spans,
            sampled_rows=tuple(sampled.tolist()),
            num_rows=len(slots),
        )

    def output_index(self, slot: int, num_tokens: int) -> int:
        """Give how many of the request's ``num_tokens`` are outputs."""
        return num_tokens - int(self._num_prompt_tokens[slot])

    def _admit(self, plan: StepPlan) -> tuple[IntArray, IntArray]:
        tokens = [np.empty(0, np.int64)]
        places = [np.empty(0, np.int64)]
        for admit in plan.admits:
            asked = admit.sampling_params.num_prompt_logprobs
            self._num_blocks[admit.slot] = 0
            self._num_prompt_tokens[admit.slot] = admit.num_prompt_tokens
            self._num_prompt_logprobs[admit.slot] = -1 if asked is None else asked
            tokens.append(np.array(admit.token_ids, np.int64))
            begin = admit.slot * self._max_model_len
            places.append(np.arange(begin, begin + len(admit.token_ids)))
        return np.concatenate(tokens), np.concatenate(places)

    def _grant(self, slot: int, block_ids: tuple[int, ...]) -> None:
        begin = int(self._num_blocks[slot])
        end = begin + len(block_ids)
        if end > self._block_tables.shape[1]:
            # More than a request can fill is allowed by the contract, if useless.
            wider = np.zeros((len(self._block_tables), 2 * end), np.int32)
            wider[:, : self._block_tables.shape[1]] = self._block_tables
            self._block_tables = wider
        self._block_tables[slot, begin:end] = block_ids
        self._num_blocks[slot] = end

    def _prompt_positions(
        self, slots: IntArray, first: IntArray, starts: IntArray
    ) -> tuple[IntArray, IntArray, tuple[PromptSpan, ...]]:
        index = [np.empty(0, np.int64)]
        places = [np.empty(0, np.int64)]
        spans: list[PromptSpan] = []
        begin = 0
        for row in np.flatnonzero(self._num_prompt_logprobs[slots] >= 0).tolist():
            slot = int(slots[row])
            end_position = min(int(first[row] + starts[row + 1] - starts[row]), int(self._num_prompt_tokens[slot]) - 1)
            count = end_position - int(first[row])
            if count <= 0:
                continue
            index.append(np.arange(starts[row], starts[row] + count))
            place = slot * self._max_model_len + int(first[row]) + 1
            places.append(np.arange(place, place + count))
            spans.append(PromptSpan(row, begin, begin + count, int(self._num_prompt_logprobs[slot])))
            begin += count
        return np.concatenate(index), np.concatenate(places), tuple(spans)
