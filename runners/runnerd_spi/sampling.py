"""Chooses tokens from logits in host memory: the whole pipeline of SamplingParams in numpy, one row at a time.

A part like those of ``parts``: for a runner whose logits are on the host anyway. It is not imported with the package,
so that listing runners does not import numpy. It knows nothing of where logits come from, nor of slots and steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runnerd_spi.plan import SamplingParams, TokenLogprobs

Float64Array = npt.NDArray[np.float64]
TokenArray = npt.NDArray[np.integer[Any]]

_MASK = (1 << 64) - 1
# The constants of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class History:
    """What a choice may depend on besides the logits."""

    # [num_tokens], integers: prompt, then outputs
    token_ids: TokenArray
    num_prompt_tokens: int

    @property
    def output_index(self) -> int:
        """Index of the output that is chosen next."""
        return len(self.token_ids) - self.num_prompt_tokens


def uniform(seed: int, output_index: int) -> float:
    """Give the random number in [0, 1) that belongs to an output index of a seed, and to nothing else."""
    word = _splitmix(_splitmix(seed & _MASK) + output_index * _GAMMA)
    return (word >> 11) * 2.0**-53


def is_plain_greedy(params: SamplingParams) -> bool:
    """Whether the choice is the highest raw logit, whatever the history, and nothing else is asked for."""
    return (
        params.temperature == 0
        and params.num_logprobs is None
        and not _changes_logits(params)
        and not (params.min_tokens and params.stop_token_ids)
    )


def choose(
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    history: History,
    uniform: float,
    allowed: bytes | None = None,
) -> int | None:
    """Choose the next token.

    Args:
        logits: ``[vocab_size]`` raw logits; left as they are.
        params: The request's parameters.
        history: Its tokens so far.
        uniform: A number in [0, 1) that decides the draw; unused when greedy.
        allowed: The row's :class:`~runnerd_spi.plan.TokenMask`; None: it has none.

    Returns:
        The token id; None when everything is banned.
    """
    scores = logits.astype(np.float64)
    if allowed is not None:
        bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=len(scores), bitorder="little")
        scores[bits == 0] = -np.inf
    scores = _adjusted(scores, params, history)
    best = int(scores.argmax())  # the lowest id among equals
    if scores[best] == -np.inf:
        return None
    if params.temperature == 0:
        return best
    with np.errstate(over="ignore"):  # a tiny temperature may take the others to -inf, which is right
        weights = np.exp((scores - scores[best]) / params.temperature)
    _truncate(weights, scores, params)
    cumulative = weights.cumsum()
    token_id = int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))
    # Rounding can carry the threshold to the very end of the cumulative sum.
    return token_id if token_id < len(weights) and weights[token_id] > 0 else int(weights.nonzero()[0][-1])


def token_logprobs(logits: npt.NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    """Give the log-probability record of a token under ``[vocab_size]`` raw logits."""
    scores = logits.astype(np.float64)
    logprobs = scores - scores.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    order = np.argsort(-scores, kind="stable")
    rank = int((order == token_id).argmax()) + 1
    top = tuple((int(one), float(logprobs[one])) for one in order[:num_top])
    return TokenLogprobs(token_id, float(logprobs[token_id]), rank, top)


def _changes_logits(params: SamplingParams) -> bool:
    return (
        _penalizes(params)
        or bool(params.logit_bias)
        or params.allowed_token_ids is not None
        or bool(params.bad_words_token_ids)
    )


def _penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _adjusted(scores: Float64Array, params: SamplingParams, history: History) -> Float64Array:
    if _penalizes(params):
        _penalize(scores, params, history)
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += bias
    if params.allowed_token_ids is not None:
        allowed = np.full_like(scores, -np.inf)
        allowed[list(params.allowed_token_ids)] = scores[list(params.allowed_token_ids)]
        scores = allowed
    if params.bad_words_token_ids:
        outputs = history.token_ids[history.num_prompt_tokens :]
        for *before, last in params.bad_words_token_ids:
            if len(outputs) >= len(before) and outputs[len(outputs) - len(before) :].tolist() == before:
                scores[last] = -np.inf
    if history.output_index < params.min_tokens:
        scores[list(params.stop_token_ids)] = -np.inf
    return scores


def _penalize(scores: Float64Array, params: SamplingParams, history: History) -> None:
    seen = np.bincount(history.token_ids, minlength=len(scores)) > 0
    factor = params.repetition_penalty
    scores[seen] = np.where(scores[seen] > 0, scores[seen] / factor, scores[seen] * factor)
    counts = np.bincount(history.token_ids[history.num_prompt_tokens :], minlength=len(scores))
    scores -= params.frequency_penalty * counts
    scores -= params.presence_penalty * (counts > 0)


def _truncate(weights: Float64Array, scores: Float64Array, params: SamplingParams) -> None:
    """Set the weights of tokens outside top-k, top-p, min-p and typical-p to 0. The highest weight is 1."""
    if params.top_k or params.top_p < 1.0:
        order = np.argsort(-scores, kind="stable")
        if params.top_k:
            weights[order[params.top_k :]] = 0.0
        if params.top_p < 1.0:
            cumulative = weights[order].cumsum()
            # A token stays while the ones before it fall short of top_p.
            num_kept = int(cumulative.searchsorted(params.top_p * cumulative[-1], side="left")) + 1
            weights[order[num_kept:]] = 0.0
    if params.min_p > 0.0:
        weights[weights < params.min_p] = 0.0
    if params.typical_p < 1.0:
        _keep_typical(weights, params.typical_p)


def _keep_typical(weights: Float64Array, typical_p: float) -> None:
    kept = weights.nonzero()[0]
    shares = weights[kept] / weights.sum()
    surprisals = -np.log(shares)
    distances = np.abs(surprisals - (shares * surprisals).sum())
    order = np.argsort(distances, kind="stable")
    cumulative = shares[order].cumsum()
    last = order[int(cumulative.searchsorted(typical_p * cumulative[-1], side="left"))]
    weights[kept[distances > distances[last]]] = 0.0


def _splitmix(word: int) -> int:
    word = (word + _GAMMA) & _MASK
    word = ((word ^ (word >> 30)) * _MIX_1) & _MASK
    word = ((word ^ (word >> 27)) * _MIX_2) & _MASK
    return word ^ (word >> 31)
