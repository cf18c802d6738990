"""What runs on the simulated device: the token table, the requests' state and the computation of a step.

All of it belongs to the device's thread. It applies a plan's deltas in stream order, so a row's inputs are read from
the token table when the step runs, after every earlier step has written what it sampled. It knows nothing of the
clock, of handles or of the host's view.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runnerd_sim.device import CRASH_EXIT_CODE
from runnerd_sim.kv_cache import BlockTable, KVCache
from runnerd_sim.model import EOS_TOKEN_ID, Float32Array, SimModel, UInt64Array, history_terms
from runnerd_spi import Admit, Row, RowOutput, SamplingParams, StepOutput, StepPlan, TokenLogprobs
from runnerd_spi.sampling import History, choose, is_plain_greedy, token_logprobs, uniform

_NOTHING = RowOutput()


@dataclass(slots=True)
class _Request:
    """A request in its slot."""

    params: SamplingParams
    num_prompt_tokens: int
    table: BlockTable
    plain_greedy: bool
    failure: str | None = None
    """Set by the first row that failed; every later one fails the same."""


@dataclass(frozen=True, slots=True)
class _Forward:
    """What the forward pass gives for the rows of a step."""

    # [num_rows] uint64: the history up to each row's last position
    last: UInt64Array
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]]
    """By index of the row."""
    failures: dict[int, str]
    """By index of the row."""


class Executor:
    """Computes steps.

    Args:
        model: Gives the logits.
        kv_cache: Holds the histories.
        max_num_seqs: Number of slots.
        max_model_len: Most tokens of a request.
        block_size: Tokens in a block.
        fail_row_token: Text whose presence in a request's tokens makes its rows fail; None for none.
        crash_row_token: Text whose presence in a request's tokens ends the process; None for none.
    """

    def __init__(
        self,
        model: SimModel,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        fail_row_token: str | None,
        crash_row_token: str | None,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._block_size = block_size
        self._fail_row_bytes = None if fail_row_token is None else fail_row_token.encode()
        self._crash_row_bytes = None if crash_row_token is None else crash_row_token.encode()
        self._requests: dict[int, _Request] = {}
        # [max_num_seqs, max_model_len] int16
        self._token_table: npt.NDArray[np.int16] = np.zeros((max_num_seqs, max_model_len), dtype=np.int16)

    def run(self, plan: StepPlan) -> StepOutput:
        """Apply the plan's deltas, compute its rows and write the sampled tokens into the table.

        Raises:
            KVShadowError: With the shadow on, some row's blocks do not hold its history.
        """
        for release in plan.releases:
            self._kv_cache.drop(self._requests.pop(release.slot).table)
        for admit in plan.admits:
            self._admit(admit)
        for grant in plan.grants:
            self._kv_cache.hold(self._requests[grant.slot].table, grant.block_ids)
        if not plan.rows:
            return StepOutput(plan.step_id, ())
        masks = {mask.slot: mask.allowed for mask in plan.masks}
        return StepOutput(plan.step_id, self._sample(plan.rows, self._forward(plan.rows), masks))

    def _admit(self, admit: Admit) -> None:
        params = admit.sampling_params
        table = BlockTable(admit.slot, admit.epoch, self._block_size)
        self._requests[admit.slot] = _Request(params, admit.num_prompt_tokens, table, is_plain_greedy(params))
        self._token_table[admit.slot, : len(admit.token_ids)] = admit.token_ids

    def _forward(self, rows: tuple[Row, ...]) -> _Forward:
        forward = _Forward(np.zeros(len(rows), dtype=np.uint64), {}, {})
        decodes: list[int] = []
        for index, row in enumerate(rows):
            request = self._requests[row.slot]
            if self._crash_row_bytes is not None and self._contains(row, self._crash_row_bytes):
                os._exit(CRASH_EXIT_CODE)
            if self._fails(row, request):
                forward.failures[index] = request.failure or ""
            elif self._kv_cache.shadow or row.num_new_tokens > 1 or request.params.num_prompt_logprobs is not None:
                self._extend(index, row, request, forward)
            else:
                decodes.append(index)
        if decodes:
            forward.last[decodes] = self._decode([rows[index] for index in decodes])
        return forward

    def _extend(self, index: int, row: Row, request: _Request, forward: _Forward) -> None:
        """Compute one row, whatever it asks for."""
        end = row.first_position + row.num_new_tokens
        token_ids = self._token_table[row.slot, :end].astype(np.int64)
        histories = self._kv_cache.extend(request.table, row.first_position, token_ids[row.first_position :])
        if self._kv_cache.shadow:
            self._kv_cache.check_history(request.table, token_ids)
        forward.last[index] = histories[-1]
        num_top = request.params.num_prompt_logprobs
        if num_top is not None:
            forward.prompt_logprobs[index] = self._prompt_logprobs(row, request, histories, num_top)

    def _decode(self, rows: list[Row]) -> UInt64Array:
        """Compute rows of one token each, all at once. Gives ``[num_rows]``."""
        slots = np.array([row.slot for row in rows])
        positions = np.array([row.first_position for row in rows], dtype=np.int64)
        tables = [self._requests[row.slot].table for row in rows]
        places = [table.index(row.first_position) for table, row in zip(tables, rows, strict=True)]
        before = [table.index(max(row.first_position - 1, 0)) for table, row in zip(tables, rows, strict=True)]
        cache = self._kv_cache.histories
        histories = history_terms(positions, self._token_table[slots, positions].astype(np.int64))
        histories += np.where(positions > 0, cache[before], np.uint64(0))
        cache[places] = histories
        return histories

    def _prompt_logprobs(
        self, row: Row, request: _Request, histories: UInt64Array, num_top: int
    ) -> tuple[TokenLogprobs, ...]:
        end = min(row.first_position + row.num_new_tokens, request.num_prompt_tokens - 1)
        logits = self._model.logits(histories[: max(end - row.first_position, 0)])
        following = self._token_table[row.slot, row.first_position + 1 : end + 1].tolist()
        return tuple(token_logprobs(one, token_id, num_top) for one, token_id in zip(logits, following, strict=True))

    def _sample(self, rows: tuple[Row, ...], forward: _Forward, masks: dict[int, bytes]) -> tuple[RowOutput, ...]:
        logits = self._model.logits(forward.last)
        for index, row in enumerate(rows):
            end = row.first_position + row.num_new_tokens
            self._model.add_script(logits[index], end - self._requests[row.slot].num_prompt_tokens)
        # [num_rows]: the lowest id among equals
        best = logits.argmax(axis=1).tolist()
        outputs: list[RowOutput] = []
        for index, row in enumerate(rows):
            request = self._requests[row.slot]
            prompt_logprobs = forward.prompt_logprobs.get(index, ())
            if index in forward.failures:
                output = RowOutput(failure=forward.failures[index])
            elif not row.sample:
                output = RowOutput(prompt_logprobs=prompt_logprobs) if prompt_logprobs else _NOTHING
            elif request.plain_greedy and row.slot not in masks:
                output = RowOutput(best[index], None, prompt_logprobs)
            else:
                output = self._sample_row(row, request, logits[index], prompt_logprobs, masks.get(row.slot))
            if output.token_id is not None:
                self._token_table[row.slot, row.first_position + row.num_new_tokens] = output.token_id
            outputs.append(output)
        return tuple(outputs)

    def _sample_row(
        self,
        row: Row,
        request: _Request,
        logits: Float32Array,
        prompt_logprobs: tuple[TokenLogprobs, ...],
        allowed: bytes | None,
    ) -> RowOutput:
        params = request.params
        end = row.first_position + row.num_new_tokens
        history = History(self._token_table[row.slot, :end], request.num_prompt_tokens)
        token_id = choose(logits, params, history, uniform(params.seed, history.output_index), allowed)
        if token_id is None:
            request.failure = "no token is left to choose: all are banned or not allowed"
            return RowOutput(failure=request.failure)
        logprobs = None if params.num_logprobs is None else token_logprobs(logits, token_id, params.num_logprobs)
        return RowOutput(token_id, logprobs, prompt_logprobs)

    def _fails(self, row: Row, request: _Request) -> bool:
        """Whether the row is to fail; notes why in the request."""
        wanted = self._fail_row_bytes
        if request.failure is None and wanted is not None and self._contains(row, wanted):
            request.failure = f"the request contains {wanted.decode()!r} (option fail_row_token)"
        return request.failure is not None

    def _contains(self, row: Row, wanted: bytes) -> bool:
        """Whether ``wanted`` ends within the row; matches that end before it were found by the rows before."""
        begin = max(row.first_position - len(wanted) + 1, 0)
        tokens = self._token_table[row.slot, begin : row.first_position + row.num_new_tokens]
        # EOS becomes 255, which no UTF-8 text contains.
        return wanted in np.where(tokens == EOS_TOKEN_ID, 255, tokens).astype(np.uint8).tobytes()
