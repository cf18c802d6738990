"""Turns the host copies of a step's results into SPI objects. Call it when the copies are complete."""

from __future__ import annotations

from collections.abc import Sequence

from runnerd_spi import RowOutput, TokenLogprobs
from runnerd_torch.sampling.batch import SamplingBatch
from runnerd_torch.sampling.logprobs import LogprobTensors
from runnerd_torch.sampling.sampler import STATUS_NO_TOKEN, STATUS_NOT_FINITE, STATUS_OK, SampledTensors

_FAILURES = {
    STATUS_NO_TOKEN: (
        "no token is allowed: allowed_token_ids, bad words, logit bias, min_tokens and the guide together ban the "
        "whole vocabulary; relax one of them"
    ),
    STATUS_NOT_FINITE: (
        "the logits hold a NaN or an infinity, expected numbers; check the model's weights and dtype, and the "
        "request's logit bias and penalties"
    ),
}


def row_outputs(batch: SamplingBatch, sampled: SampledTensors) -> list[RowOutput]:
    """Give one output for each row of ``batch``, without prompt log-probabilities.

    Args:
        batch: The plan of the step.
        sampled: What it chose, in host memory.
    """
    token_ids, statuses = sampled.choices.tolist()
    outputs = [RowOutput(token_id=token_id) for token_id in token_ids]
    if batch.logprobs is not None and sampled.logprobs is not None:
        records = token_logprobs(sampled.logprobs, batch.logprobs.num_top)
        for row, record in zip(batch.logprobs.row_numbers, records, strict=True):
            outputs[row] = RowOutput(token_id=record.token_id, logprobs=record)
    if any(statuses):
        for row, status in enumerate(statuses):
            if status != STATUS_OK:
                outputs[row] = RowOutput(failure=_FAILURES[status])
    return outputs


def token_logprobs(tensors: LogprobTensors, num_top: Sequence[int] | None = None) -> tuple[TokenLogprobs, ...]:
    """Give one record for each position.

    Args:
        tensors: In host memory.
        num_top: How many alternatives each record gets; None: all there are.
    """
    wanted = [tensors.top_ids.shape[1]] * len(tensors.token_ids) if num_top is None else num_top
    return tuple(
        TokenLogprobs(token_id, logprob, rank, tuple(zip(top_ids[:count], top_logprobs[:count], strict=True)))
        for token_id, logprob, rank, top_ids, top_logprobs, count in zip(
            tensors.token_ids.tolist(),
            tensors.logprobs.tolist(),
            tensors.ranks.tolist(),
            tensors.top_ids.tolist(),
            tensors.top_logprobs.tolist(),
            wanted,
            strict=True,
        )
    )
