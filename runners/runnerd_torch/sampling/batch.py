"""What one step asks of the sampler: the parameters of its rows, and only of the features they use.

Everything is known on the host when the step is planned, and immutable afterwards, so that a later admit or release
cannot change a step that is still running. Row numbers are places in the step's logits. Knows no generated token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from runnerd_torch.sampling.packing import ArrayRef


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row of logits from which the token at ``output_index`` of a request is chosen."""

    slot: int
    epoch: int
    output_index: int
    """How many outputs come before, unresolved ones included."""
    allowed: bytes | None = None
    """Its :class:`~runnerd_spi.TokenMask`."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Rows whose plan says which tokens they may choose."""

    # [n] int64
    rows: ArrayRef
    # [n, ceil(vocab_size / 8)] uint8, a bit for each token, the lowest first
    allowed: ArrayRef
    # [8] uint8: the powers of two
    bits: ArrayRef


@dataclass(frozen=True, slots=True)
class Penalties:
    """Rows with a repetition, presence or frequency penalty."""

    # [n] int64
    rows: ArrayRef
    slots: ArrayRef
    num_prompt_tokens: ArrayRef
    num_tokens: ArrayRef
    # [n, 1] float32
    repetition: ArrayRef | None
    """None: no row has one."""
    presence: ArrayRef | None
    """None: no row has a presence or frequency penalty."""
    frequency: ArrayRef | None
    max_num_tokens: int


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Values added to single logits."""

    # [n] int64, row * vocab_size + token id
    places: ArrayRef
    # [n] float32
    values: ArrayRef


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Rows that may choose from a list only."""

    # [n] int64
    rows: ArrayRef
    # [m] int64, place among ``rows`` * vocab_size + token id
    places: ArrayRef


@dataclass(frozen=True, slots=True)
class BadWords:
    """Bad words of two tokens or more that fit into the outputs so far, one entry each."""

    # [w] int64
    slots: ArrayRef
    num_tokens: ArrayRef
    # [w] int64, row * vocab_size + last token id
    places: ArrayRef
    # [w, longest prefix] int64, right-aligned, filled up with -1
    prefixes: ArrayRef


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that draw a token in one way; what a field of None limits is unlimited in all of them."""

    # [n] int64
    rows: ArrayRef | None
    """None: all rows of the step."""
    # [n, 1] float32
    temperature: ArrayRef
    # [n, 1] float64 in [0, 1)
    uniforms: ArrayRef
    # [n, 1] int64, min-p as a weight
    min_weight: ArrayRef | None
    # [n, 1] int64
    top_k: ArrayRef | None
    # [n, 1] float64
    top_p: ArrayRef | None
    typical_p: ArrayRef | None
    num_candidates: int | None
    """How many of the most likely tokens to look at; None: all of them."""


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Rows whose log-probabilities are returned."""

    # [n] int64
    rows: ArrayRef | None
    """None: all rows of the step."""
    row_numbers: tuple[int, ...]
    num_top: tuple[int, ...]
    """How many alternatives each of them asks for."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """A step's rows. A field of None costs nothing; with all None a step is one argmax."""

    num_rows: int
    packed: npt.NDArray[np.uint8] | None
    """[size]: all arrays, on the host; None: there are none."""
    buffer: torch.Tensor | None
    """[size] uint8: the same memory, and after :meth:`on` a copy on the device."""
    masks: TokenMasks | None = None
    penalties: Penalties | None = None
    logit_bias: LogitBias | None = None
    allowed: AllowedTokens | None = None
    banned: ArrayRef | None = None
    """[n] int64, row * vocab_size + token id of what no row may choose now, whatever came before."""
    bad_words: BadWords | None = None
    id_order_draws: Draws | None = None
    """Rows without top-k and top-p: they need no sorting."""
    top_k_draws: Draws | None = None
    """Rows with a small top-k: they need the most likely few."""
    sorted_draws: Draws | None = None
    """Rows with top-p alone or a large top-k: they need all tokens sorted."""
    logprobs: LogprobRows | None = None

    def on(self, buffer: torch.Tensor) -> SamplingBatch:
        """Give the same batch with its arrays in ``buffer``, a copy on the device."""
        return replace(self, buffer=buffer)

    @property
    def changes_logits(self) -> bool:
        """Whether any row's logits are changed before the choice."""
        changes = (self.masks, self.penalties, self.logit_bias, self.allowed, self.banned, self.bad_words)
        return any(change is not None for change in changes)
