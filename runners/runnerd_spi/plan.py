"""What the engine tells a runner to do in one step, and what the runner answers.

All objects are frozen; those that come once per row are named tuples, which cost a third to make. A plan is a
difference: requests arrive once (:class:`Admit`), get KV blocks as they grow (:class:`BlockGrant`), leave once
(:class:`Release`), and in between a :class:`Row` names only how many of their tokens to compute. No row carries a token
id: the runner owns the token table, writes the tokens it samples into it, and reads the inputs of later steps from it.
This module knows nothing of the scheduler, of devices or of text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. Values arrive validated; ``seed`` is always set.

    The order of effects: the row's :class:`TokenMask`, penalties, logit bias, allowed and banned tokens, then
    temperature, top-k, top-p, min-p, typical-p, and the draw. Log-probabilities are those of the raw logits (before any
    of it).
    """

    temperature: float = 1.0
    """0 means greedy: the highest logit, the lowest token id among equals. Otherwise above 0."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; in [0, 1]."""
    typical_p: float = 1.0
    """Of what the others left, keep the tokens whose surprisal is nearest to its mean, until their probability reaches
    this; in (0, 1]. With the last of them all that are as near stay. Meister et al., "Locally Typical Sampling" (2022).
    """
    seed: int = 0
    """64-bit unsigned. Randomness at output index i is a function of (seed, i) alone."""
    repetition_penalty: float = 1.0
    """Above 0. Divides positive and multiplies negative logits of tokens seen in prompt or output."""
    presence_penalty: float = 0.0
    """In [-2, 2]. Subtracted once from the logit of each token seen in the output."""
    frequency_penalty: float = 0.0
    """In [-2, 2]. Subtracted from a token's logit once per occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to the value added to its logit."""
    allowed_token_ids: tuple[int, ...] | None = None
    """When set, no other token is chosen."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token is banned wherever the ones before it are the latest outputs."""
    min_tokens: int = 0
    """While fewer outputs than this exist, ``stop_token_ids`` are banned."""
    stop_token_ids: tuple[int, ...] = ()
    """The ids that end the request (EOS included unless ignored); read for ``min_tokens`` only: the engine stops."""
    num_logprobs: int | None = None
    """Return the chosen token's log-probability and rank and this many most likely alternatives; None returns none."""
    num_prompt_logprobs: int | None = None
    """The same for every prompt token but the first; None returns none."""


@dataclass(frozen=True, slots=True)
class Admit:
    """A request enters ``slot``. Every row, grant and release of it names the same slot and epoch."""

    slot: int
    """In [0, max_num_seqs). Free: never used, or released by this plan or an earlier one."""
    epoch: int
    """Grows with each use of a slot, so that a late result of the slot's former request cannot be mistaken."""
    token_ids: tuple[int, ...]
    """All settled tokens: the prompt, or prompt and outputs when the request resumes. Never empty."""
    num_prompt_tokens: int
    """How many of ``token_ids`` are the prompt; the others are outputs. Output index of position p = p - this."""
    sampling_params: SamplingParams
    adapter_id: str | None = None
    """Adapter to apply (LoRA). None until a runner declares adapters."""


@dataclass(frozen=True, slots=True)
class BlockGrant:
    """KV blocks appended to a request's block table, in order. The first may be shared blocks of a cached prefix."""

    slot: int
    epoch: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """A request leaves ``slot``. Work already launched for it runs on; its late results carry the old epoch."""

    slot: int
    epoch: int


class Row(NamedTuple):
    """Compute ``num_new_tokens`` tokens of one request, at positions from ``first_position``.

    The tokens before ``first_position`` are computed already (by earlier rows, or by whoever filled the shared blocks).
    A request has at most one row in a plan.
    """

    slot: int
    epoch: int
    num_new_tokens: int
    """At least 1."""
    first_position: int
    sample: bool
    """True: choose the token after the last position and write it into the table. False: only fill the KV cache."""


class TokenMask(NamedTuple):
    """The only tokens that a row of this plan may choose, whatever its parameters say: what a guide allows there.

    A mask follows from all tokens before it. So it comes only where one step is in flight at most (``max_in_flight``
    is 1), and only to a runner that declares ``guided_decoding``. It holds for this plan alone.
    """

    slot: int
    epoch: int
    """Those of a row with ``sample``; a row has one mask at most."""
    allowed: bytes
    """``ceil(vocab_size / 8)`` bytes; token t may be chosen if ``allowed[t // 8] >> t % 8 & 1``. Further bits are 0."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Applied in the order releases, admits, grants, rows. May hold no row (deltas only)."""

    step_id: int
    """One more than that of the plan before; the first is 0."""
    releases: tuple[Release, ...] = ()
    admits: tuple[Admit, ...] = ()
    grants: tuple[BlockGrant, ...] = ()
    rows: tuple[Row, ...] = ()
    masks: tuple[TokenMask, ...] = ()
    """Of the rows that are guided; the others choose among all tokens."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural logarithm, of the raw logits."""

    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top: tuple[tuple[int, float], ...]
    """The asked number of most likely (token id, log-probability) pairs, most likely first."""


class RowOutput(NamedTuple):
    """The result of one row. Exactly the rows with ``sample`` have a ``token_id``, unless the row failed."""

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For each position p of the row with p + 1 in the prompt: the record of prompt token p + 1; empty unless asked."""
    failure: str | None = None
    """What went wrong with this row alone; the request ends, others go on."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave. ``rows[i]`` belongs to ``plan.rows[i]``. The receiver owns it."""

    step_id: int
    rows: tuple[RowOutput, ...]
