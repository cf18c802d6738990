"""What runs on the worker thread: the token table, the requests, and the computation of a step.

All of it belongs to that thread, which takes the plans in order. So the inputs of a row are read from the table after
every earlier step has written what it sampled. It knows nothing of handles or of the host's view.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from runnerd_llamacpp.model import Context, Float32Array, Span
from runnerd_spi import Row, RowOutput, SamplingParams, StepOutput, StepPlan, TokenLogprobs
from runnerd_spi.sampling import History, choose, is_plain_greedy, token_logprobs, uniform


@dataclass(slots=True)
class _Request:
    """A request in its slot, which is also its sequence."""

    params: SamplingParams
    num_prompt_tokens: int
    plain_greedy: bool
    num_computed: int = 0
    """Positions in the KV memory."""
    failure: str | None = None
    """Set by the first row that failed; every later one fails the same."""


class Executor:
    """Computes steps.

    Args:
        context: With a sequence for each slot.
        max_num_seqs: Number of slots.
        max_model_len: Most tokens of a request.
    """

    def __init__(self, context: Context, *, max_num_seqs: int, max_model_len: int) -> None:
        self._context = context
        self._requests: dict[int, _Request] = {}
        # [max_num_seqs, max_model_len]
        self._token_table = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)

    def run(self, plan: StepPlan) -> StepOutput:
        """Apply the plan's deltas, compute its rows and write the sampled tokens into the table.

        Raises:
            DecodeError: llama.cpp could not.
        """
        for release in plan.releases:
            if self._requests.pop(release.slot).num_computed:
                self._context.forget(release.slot)
        for admit in plan.admits:
            params = admit.sampling_params
            self._requests[admit.slot] = _Request(params, admit.num_prompt_tokens, is_plain_greedy(params))
            self._token_table[admit.slot, : len(admit.token_ids)] = admit.token_ids
        spans = [self._span(row) for row in plan.rows if self._requests[row.slot].failure is None]
        logits = iter(self._context.compute(spans) if spans else ())
        masks = {mask.slot: mask.allowed for mask in plan.masks}
        return StepOutput(plan.step_id, tuple(self._output(row, logits, masks.get(row.slot)) for row in plan.rows))

    def _span(self, row: Row) -> Span:
        request = self._requests[row.slot]
        first, end = row.first_position, row.first_position + row.num_new_tokens
        if first < request.num_computed:
            self._context.forget(row.slot, first)
        request.num_computed = end
        wants_logits = np.zeros(row.num_new_tokens, dtype=np.bool_)
        wants_logits[: self._num_prompt_records(row, request)] = True
        wants_logits[-1] |= row.sample
        return Span(row.slot, first, self._token_table[row.slot, first:end], wants_logits)

    def _num_prompt_records(self, row: Row, request: _Request) -> int:
        if request.params.num_prompt_logprobs is None:
            return 0
        # The last prompt token has no prompt token behind it.
        return max(min(row.num_new_tokens, request.num_prompt_tokens - 1 - row.first_position), 0)

    def _output(self, row: Row, logits: Iterator[Float32Array], allowed: bytes | None) -> RowOutput:
        request = self._requests[row.slot]
        if request.failure is not None:
            return RowOutput(failure=request.failure)
        prompt_logprobs = tuple(self._prompt_logprobs(row, request, logits))
        if not row.sample:
            return RowOutput(prompt_logprobs=prompt_logprobs)
        end = row.first_position + row.num_new_tokens
        scores = next(logits)
        token_id = self._choose(row.slot, request, end, scores, allowed)
        if token_id is None:
            return RowOutput(failure=request.failure, prompt_logprobs=prompt_logprobs)
        self._token_table[row.slot, end] = token_id
        num_top = request.params.num_logprobs
        logprobs = None if num_top is None else token_logprobs(scores, token_id, num_top)
        return RowOutput(token_id, logprobs, prompt_logprobs)

    def _prompt_logprobs(self, row: Row, request: _Request, logits: Iterator[Float32Array]) -> Iterator[TokenLogprobs]:
        num_top = request.params.num_prompt_logprobs or 0
        first = row.first_position + 1
        for position in range(first, first + self._num_prompt_records(row, request)):
            yield token_logprobs(next(logits), int(self._token_table[row.slot, position]), num_top)

    def _choose(
        self, slot: int, request: _Request, num_tokens: int, logits: Float32Array, allowed: bytes | None
    ) -> int | None:
        best = int(logits.argmax())  # the lowest id among equals
        if not np.isfinite(logits[best]):
            request.failure = f"the model's highest logit is {logits[best]}: its weights or the input are broken"
            return None
        if request.plain_greedy and allowed is None:
            return best
        params = request.params
        history = History(self._token_table[slot, :num_tokens], request.num_prompt_tokens)
        token_id = choose(logits, params, history, uniform(params.seed, history.output_index), allowed)
        if token_id is None:
            request.failure = "no token is left to choose: all are banned or not allowed"
        return token_id
