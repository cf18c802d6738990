"""Draws a token from processed logits with one uniform number per row: inverse CDF in whole numbers.

The probability of a token relative to the most likely one, a float32 in [0, 1], is turned into an int64 weight of
``WEIGHT_BITS`` fractional bits. Sums of integers are exact in any order, so a cumulative sum does not depend on how a
device splits it, nor on the other rows of the batch, and a token of weight 0 (masked, or less likely than 2**-40 of
the most likely one) takes no part of the interval: it cannot be chosen, however near to 1 the uniform number is.

Rows without top-k and top-p accumulate in token-id order and need no sorting. The others accumulate from the most
to the least likely token, the lower id first among equals. A row's order depends on its own parameters alone.
Exactly k tokens survive top-k, so that a top-k of 1 is the greedy choice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from runnerd_torch.sampling.batch import Draws

WEIGHT_BITS = 40
"""2**40 times a vocabulary of 2**22 tokens fits into int64."""

_LEAST_EXPONENT = -64.0

Truncate = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""``truncate(logits, top_p, top_k)``: a chip's own kernel; gives the logits, minus infinity outside top-k and top-p.

``logits`` is ``[n, vocab_size]`` float32, divided by the temperature; ``top_p`` ``[n]`` float32 in (0, 1] or None;
``top_k`` ``[n]`` int32, 1 to 1024 and at most vocab_size.
"""


def draw_tokens(
    logits: torch.Tensor,
    highest: torch.Tensor,
    draws: Draws,
    buffer: torch.Tensor,
    truncate: Truncate | None = None,
) -> torch.Tensor:
    """Draw one token for each row.

    Args:
        logits: [n, vocab_size] float32, processed, those of the rows of ``draws``.
        highest: [n, 1] float32, the highest logit of each row.
        draws: Their parameters.
        buffer: The batch's arrays on the device.
        truncate: What takes the place of the order where all rows have a small top-k. How it treats equals and sums is
            the chip's, so the same seed may then choose other tokens than without it.

    Returns:
        [n] int64 token ids.
    """
    if truncate is not None and draws.num_candidates is not None and draws.top_k is not None:
        ids, weights = None, _truncated_weights(logits, highest, draws, buffer, truncate)
    else:
        ids, weights = token_weights(logits, highest, draws, buffer)
    places = _choose(weights, draws.uniforms.of(buffer))
    return (places if ids is None else ids.gather(1, places)).squeeze(1)


def token_weights(
    logits: torch.Tensor, highest: torch.Tensor, draws: Draws, buffer: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Give the candidates in the order of their parts of the interval, and how large those are.

    Args: those of :func:`draw_tokens`.

    Returns:
        [n, num_candidates] int64 token ids, None when they are 0 to vocab_size - 1; and [n, num_candidates] int64
        weights, proportional to the probabilities, 0 for what may not be chosen.
    """
    if draws.top_k is None and draws.top_p is None:
        return None, _kept(_weights(logits, highest, draws, buffer), draws, buffer)
    if draws.num_candidates is None:
        values, ids = torch.sort(logits, dim=1, descending=True, stable=True)
    else:
        ids = most_likely_ids(logits, draws.num_candidates)
        values = logits.gather(1, ids)
    weights = _weights(values, highest, draws, buffer)
    if draws.top_k is not None:
        places = torch.arange(ids.shape[1], device=ids.device)
        weights.masked_fill_(places >= draws.top_k.of(buffer), 0)
    if draws.top_p is not None:
        weights.masked_fill_(_behind_top_p(weights, draws.top_p.of(buffer)), 0)
    return ids, _kept(weights, draws, buffer)


def most_likely_ids(logits: torch.Tensor, num_ids: int) -> torch.Tensor:
    """Give the ids of the highest logits of each row, highest first, the lower id first among equals.

    Args:
        logits: [n, vocab_size] float32.
        num_ids: At most vocab_size.

    Returns:
        [n, num_ids] int64.
    """
    # topk leaves the order of equals open, and logits of 16-bit models have many. An integer key that holds the logit
    # above and the id below has no equals. Adding 0 makes -0.0 and 0.0 one value.
    bits = (logits + 0.0).view(torch.int32)
    # Negative floats order backwards as integers: flip all but their sign.
    bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))
    backwards = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    keys = bits.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(backwards)
    return logits.shape[1] - 1 - (torch.topk(keys, num_ids, dim=1).values & 0xFFFFFFFF)


def _weights(values: torch.Tensor, highest: torch.Tensor, draws: Draws, buffer: torch.Tensor) -> torch.Tensor:
    # The difference comes before the division: a tiny temperature then gives -inf, never inf - inf.
    return _fixed_point((values - highest).div_(draws.temperature.of(buffer)))


def _truncated_weights(
    logits: torch.Tensor, highest: torch.Tensor, draws: Draws, buffer: torch.Tensor, truncate: Truncate
) -> torch.Tensor:
    """Give the weights in the order of ids, 0 for what the chip's kernel leaves out."""
    assert draws.top_k is not None
    top_p = None if draws.top_p is None else draws.top_p.of(buffer).squeeze(1).to(torch.float32)
    top_k = draws.top_k.of(buffer).squeeze(1).to(torch.int32)
    exponents = (logits - highest).div_(draws.temperature.of(buffer))
    return _kept(_fixed_point(truncate(exponents, top_p, top_k)), draws, buffer)


def _fixed_point(exponents: torch.Tensor) -> torch.Tensor:
    # Far below the smallest weight, and exp is many times slower on CPUs where its result underflows.
    relative = exponents.clamp_(min=_LEAST_EXPONENT).exp_()
    return relative.mul_(2.0**WEIGHT_BITS).to(torch.int64)


def _kept(weights: torch.Tensor, draws: Draws, buffer: torch.Tensor) -> torch.Tensor:
    """Drop what min-p and typical-p leave out; the weight of the most likely token is 2**WEIGHT_BITS."""
    if draws.min_weight is not None:
        weights.masked_fill_(weights < draws.min_weight.of(buffer), 0)
    if draws.typical_p is not None:
        weights.masked_fill_(_is_atypical(weights, draws.typical_p.of(buffer)), 0)
    return weights


def _is_atypical(weights: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Mark the tokens whose surprisal is further from the mean than those that reach ``typical_p`` of the whole.

    The mean, which is the entropy, is summed in whole numbers too, so that it depends on the row alone.
    """
    total = weights.sum(1, keepdim=True)
    shares = weights.to(torch.float32) / total.to(torch.float32)
    surprisals = shares.log().neg_()
    terms = (shares * surprisals).masked_fill_(weights == 0, 0)
    entropy = terms.mul_(2.0**WEIGHT_BITS).to(torch.int64).sum(1, keepdim=True).to(torch.float32) * 2.0**-WEIGHT_BITS
    distances = surprisals.sub_(entropy).abs_()
    nearest, order = torch.sort(distances, dim=1, stable=True)
    sums = weights.gather(1, order).cumsum(1)
    # At most the place where the sum reaches the whole: what has no weight lies behind it, at an infinite distance.
    last = (sums < _limit(typical_p, total)).sum(1, keepdim=True)
    return distances > nearest.gather(1, last)


def _behind_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mark the tokens before which the sum reaches ``top_p`` of the whole; the first token never is."""
    sums = weights.cumsum(1)
    return sums - weights >= _limit(top_p, sums[:, -1:])


def _limit(share: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Give the least sum of weights that is ``share`` of ``total`` or more; both, and the result, are [n, 1]."""
    # A product in float64 may fall below a total of more than 53 bits, and a share of 1 must keep all. No conversion
    # is spelled out here: torch_npu would convert to float32 where it is asked for float64.
    return torch.where(share < 1, (share * total).ceil().to(torch.int64), total)


def _choose(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Give [n, 1], the place whose part of the interval [0, sum) holds the row's uniform number."""
    sums = weights.cumsum(1)
    total = sums[:, -1:]
    # Below the total, however it rounds: the largest uniform number is 1 - 2**-53, one step of a float64 below 1.
    # The product is one of float64, as above.
    target = (uniforms * total).to(torch.int64)
    # The first place whose sum is above the target has a weight above 0. A row without any weight gives a place
    # behind the end; it is reported as failed elsewhere and needs only a valid id here.
    return torch.searchsorted(sums, target, right=True).clamp_(max=weights.shape[1] - 1)
