"""Log-probabilities and ranks of raw logits, on the device. Knows nothing of sampling parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from runnerd_torch.sampling.draw import most_likely_ids

_MAX_SCRATCH_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of one token at each of n positions, and of the most likely ones there."""

    # [n] int64
    token_ids: torch.Tensor
    # [n] float32
    logprobs: torch.Tensor
    # [n] int64, 1 is the most likely
    ranks: torch.Tensor
    # [n, k] int64, most likely first, the lower id first among equals
    top_ids: torch.Tensor
    # [n, k] float32
    top_logprobs: torch.Tensor

    def map(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> LogprobTensors:
        """Give the same with ``copy`` applied to each tensor, e.g. an asynchronous copy to host memory."""
        return LogprobTensors(
            token_ids=copy(self.token_ids),
            logprobs=copy(self.logprobs),
            ranks=copy(self.ranks),
            top_ids=copy(self.top_ids),
            top_logprobs=copy(self.top_logprobs),
        )


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """Give the log-probabilities of ``token_ids`` and of the ``num_top`` most likely tokens.

    Args:
        logits: [n, vocab_size], any float type, on the device.
        token_ids: [n] int64, on the same device.
        num_top: At least 0; cut to the vocabulary.
    """
    num_top = min(num_top, logits.shape[1])
    # Four scratch arrays of up to 8 bytes an element: many prompt positions are done in parts.
    rows_at_once = max(1, _MAX_SCRATCH_BYTES // (32 * logits.shape[1]))
    parts = [
        _compute(logits[begin : begin + rows_at_once].float(), token_ids[begin : begin + rows_at_once], num_top)
        for begin in range(0, max(1, logits.shape[0]), rows_at_once)
    ]
    if len(parts) == 1:
        return parts[0]
    return LogprobTensors(
        token_ids=token_ids,
        logprobs=torch.cat([part.logprobs for part in parts]),
        ranks=torch.cat([part.ranks for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        top_logprobs=torch.cat([part.top_logprobs for part in parts]),
    )


def _compute(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    logprobs = torch.log_softmax(logits, dim=1)
    ids = token_ids[:, None]
    ranks = 1 + (logits > logits.gather(1, ids)).sum(dim=1)
    top_ids = most_likely_ids(logits, num_top) if num_top else ids[:, :0]
    return LogprobTensors(
        token_ids=token_ids,
        logprobs=logprobs.gather(1, ids).squeeze(1),
        ranks=ranks,
        top_ids=top_ids,
        top_logprobs=logprobs.gather(1, top_ids),
    )
