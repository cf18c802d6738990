"""The sampler: remembers each slot's parameters on the host, chooses tokens on the device without a host wait.

``admit``, ``release`` and ``plan`` belong to the thread that drives the runner. ``sample`` reads nothing but its
arguments, so it may run on another thread (the CPU device) or enqueue on a stream, steps later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from runnerd_spi import Admit
from runnerd_torch.sampling.batch import Draws, SampleRow, SamplingBatch
from runnerd_torch.sampling.draw import Truncate, draw_tokens
from runnerd_torch.sampling.logprobs import LogprobTensors, compute_logprobs
from runnerd_torch.sampling.planner import plan_batch
from runnerd_torch.sampling.processors import process_logits
from runnerd_torch.sampling.slots import SlotTable

Choose = Callable[[torch.Tensor], torch.Tensor]
"""Chooses from logits [n, size]: gives [2, n] int64, the place of the first of the highest of each row, NaN being the
highest of all, and a STATUS_ that tells whether the row can be sampled at all."""

STATUS_OK = 0
STATUS_NO_TOKEN = 1
"""Every token of the row is masked."""
STATUS_NOT_FINITE = 2
"""The logits hold a NaN or plus infinity."""


@dataclass(frozen=True, slots=True)
class SampledTensors:
    """What a step chose."""

    # [2, num_rows] int64: the token ids, and a STATUS_ of each row; one tensor, so that one copy brings both
    choices: torch.Tensor
    logprobs: LogprobTensors | None
    """Of the rows ``batch.logprobs.row_numbers`` only; None: no row asked."""

    @property
    def token_ids(self) -> torch.Tensor:
        """[num_rows] int64, in the vocabulary for every row, a failed one too; write them into the token table."""
        return self.choices[0]

    def map(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> SampledTensors:
        """Give the same with ``copy`` applied to each tensor, e.g. an asynchronous copy to host memory."""
        return SampledTensors(copy(self.choices), None if self.logprobs is None else self.logprobs.map(copy))


class Sampler:
    """Chooses the tokens of all requests of a runner.

    Args:
        max_num_seqs: Number of slots.
        max_model_len: Width of the token table.
        vocab_size: Width of the logits.
        truncate: The chip's own top-k and top-p, for the rows it takes; None: all rows are truncated exactly.
        choose: The runner's own search for the highest logits; None: PyTorch's.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        truncate: Truncate | None = None,
        choose: Choose | None = None,
    ) -> None:
        self._table_shape = (max_num_seqs, max_model_len)
        self._vocab_size = vocab_size
        self._slots = SlotTable(max_num_seqs, vocab_size)
        self._truncate = truncate
        self._choose = choose or _choose

    def check(self, admit: Admit) -> None:
        """Refuse what :meth:`admit` would refuse; changes nothing.

        Raises:
            PlanError: The sampling parameters name a token outside the vocabulary.
        """
        self._slots.check(admit)

    def admit(self, admit: Admit) -> None:
        """Remember the sampling parameters of a request that enters a slot.

        Raises:
            PlanError: They name a token outside the vocabulary; nothing was changed.
        """
        self._slots.admit(admit)

    def release(self, slot: int) -> None:
        """Forget the request in ``slot``. Batches planned before stay valid."""
        self._slots.release(slot)

    def plan(self, rows: Sequence[SampleRow]) -> SamplingBatch:
        """Prepare the choice for ``rows``; row i is row i of the logits given to :meth:`sample`.

        Raises:
            PlanError: A row names a slot that belongs to another epoch.
        """
        return plan_batch(rows, self._slots, self._vocab_size)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, token_table: torch.Tensor) -> SampledTensors:
        """Choose a token for each row. Enqueues device work only; the logits are left as they are.

        Args:
            logits: [num_rows, vocab_size], any float type, on the device.
            batch: The plan of these rows, its arrays on the device.
            token_table: [max_num_seqs, max_model_len] int64, on the device; holds all earlier tokens of the rows.

        Raises:
            ValueError: A shape does not fit.
        """
        self._check_shapes(logits, batch, token_table)
        raw = logits
        processed = logits.to(torch.float32, copy=batch.changes_logits, memory_format=torch.contiguous_format)
        if batch.buffer is None:
            return SampledTensors(self._choose(processed), None)
        buffer = batch.buffer
        process_logits(processed, batch, buffer, token_table)
        choices = self._choose(processed)
        highest = processed.gather(1, choices[0][:, None])
        for draws in (batch.id_order_draws, batch.top_k_draws, batch.sorted_draws):
            if draws is not None:
                _draw_rows(processed, highest, choices[0], draws, buffer, self._truncate)
        return SampledTensors(choices, _row_logprobs(raw, choices[0], batch, buffer))

    def prompt_logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
        """Give the log-probabilities of prompt tokens; enqueues device work only.

        Args:
            logits: [n, vocab_size], any float type: row i is what the model says of ``token_ids[i]``.
            token_ids: [n] int64, on the device.
            num_top: How many of the most likely alternatives to give.
        """
        return compute_logprobs(logits, token_ids, num_top)

    def _check_shapes(self, logits: torch.Tensor, batch: SamplingBatch, token_table: torch.Tensor) -> None:
        if tuple(logits.shape) != (batch.num_rows, self._vocab_size):
            raise ValueError(f"logits have shape {tuple(logits.shape)}, expected {(batch.num_rows, self._vocab_size)}")
        if tuple(token_table.shape) != self._table_shape:
            raise ValueError(f"token_table has shape {tuple(token_table.shape)}, expected {self._table_shape}")


def _choose(logits: torch.Tensor) -> torch.Tensor:
    token_ids = logits.argmax(dim=1)
    # It takes a NaN for the highest, so the highest value tells of the whole row.
    highest = logits.gather(1, token_ids[:, None]).squeeze(1)
    no_token = (highest == -torch.inf).to(torch.int64) * STATUS_NO_TOKEN
    not_finite = (~(highest < torch.inf)).to(torch.int64) * STATUS_NOT_FINITE
    return torch.stack((token_ids, no_token + not_finite))


def _draw_rows(
    logits: torch.Tensor,
    highest: torch.Tensor,
    token_ids: torch.Tensor,
    draws: Draws,
    buffer: torch.Tensor,
    truncate: Truncate | None,
) -> None:
    """Replace the greedy choice of the rows that draw."""
    if draws.rows is None:
        token_ids.copy_(draw_tokens(logits, highest, draws, buffer, truncate))
        return
    rows = draws.rows.of(buffer)
    drawn = draw_tokens(logits.index_select(0, rows), highest.index_select(0, rows), draws, buffer, truncate)
    token_ids.index_copy_(0, rows, drawn)


def _row_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, batch: SamplingBatch, buffer: torch.Tensor
) -> LogprobTensors | None:
    asked = batch.logprobs
    if asked is None:
        return None
    if asked.rows is not None:
        rows = asked.rows.of(buffer)
        logits, token_ids = logits.index_select(0, rows), token_ids.index_select(0, rows)
    return compute_logprobs(logits, token_ids, max(asked.num_top))
