"""What the sampler remembers of each request, on the host, by slot. Holds no generated token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import numpy.typing as npt

from runnerd_spi import Admit, PlanError, SamplingParams
from runnerd_torch.sampling.uniforms import seed_states

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class Feature(IntFlag):
    """What a request asks beyond the highest logit."""

    RANDOM = 1
    PENALTIES = 2
    LOGIT_BIAS = 4
    ALLOWED = 8
    BAD_WORDS = 16
    MIN_TOKENS = 32
    LOGPROBS = 64


@dataclass(frozen=True, slots=True)
class TokenLists:
    """The token ids a request names, as arrays."""

    # [num_biased]
    bias_ids: IntArray
    bias_values: FloatArray
    # [num_allowed]
    allowed_ids: IntArray
    # [num_banned], the bad words of one token
    banned_ids: IntArray
    # [num_stop]
    stop_ids: IntArray
    # [num_words, longest prefix]: all but the last token of each longer bad word, right-aligned, filled up with -1
    bad_prefixes: IntArray
    # [num_words]
    bad_prefix_lens: IntArray
    bad_last_ids: IntArray


class SlotTable:
    """The sampling parameters of all slots, one array per parameter.

    Args:
        max_num_seqs: Number of slots.
        vocab_size: Token ids are below this.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # each [max_num_seqs]
        self.epoch = np.full(max_num_seqs, -1, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.features = np.zeros(max_num_seqs, np.int64)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.min_p = np.zeros(max_num_seqs, np.float64)
        self.typical_p = np.ones(max_num_seqs, np.float64)
        self.seed_state = np.zeros(max_num_seqs, np.uint64)
        self.repetition_penalty = np.ones(max_num_seqs, np.float32)
        self.presence_penalty = np.zeros(max_num_seqs, np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, np.float32)
        self.min_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_logprobs = np.zeros(max_num_seqs, np.int64)
        self.lists: dict[int, TokenLists] = {}

    def check(self, admit: Admit) -> None:
        """Refuse parameters that name a token outside the vocabulary; changes nothing.

        Raises:
            PlanError: With the field and the id.
        """
        params = admit.sampling_params
        named: tuple[tuple[str, Iterable[int]], ...] = (
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad_words_token_ids", (token for word in params.bad_words_token_ids for token in word)),
            ("stop_token_ids", params.stop_token_ids),
        )
        for field, ids in named:
            for one in ids:
                if not 0 <= one < self._vocab_size:
                    raise PlanError(
                        f"admit: slot {admit.slot}: {field} names token {one}, expected 0 to {self._vocab_size - 1}"
                    )
        if any(not word for word in params.bad_words_token_ids):
            raise PlanError(f"admit: slot {admit.slot}: bad_words_token_ids has an empty word; leave it out")

    def admit(self, admit: Admit) -> None:
        """Take over the parameters of a request.

        Raises:
            PlanError: They name a token outside the vocabulary; nothing was changed.
        """
        self.check(admit)
        slot, params = admit.slot, admit.sampling_params
        self.epoch[slot] = admit.epoch
        self.num_prompt_tokens[slot] = admit.num_prompt_tokens
        # A temperature too small for float32 must not become 0 there.
        tiny = float(np.finfo(np.float32).tiny)
        self.temperature[slot] = max(params.temperature, tiny) if params.temperature > 0 else 0.0
        self.top_k[slot] = params.top_k if params.top_k < self._vocab_size else 0
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.typical_p[slot] = params.typical_p
        self.seed_state[slot] = seed_states(np.array([params.seed], np.uint64))[0]
        self.repetition_penalty[slot] = params.repetition_penalty
        self.presence_penalty[slot] = params.presence_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        self.min_tokens[slot] = params.min_tokens
        self.num_logprobs[slot] = -1 if params.num_logprobs is None else params.num_logprobs
        self.features[slot] = _features(params)
        self.lists[slot] = _token_lists(params)

    def release(self, slot: int) -> None:
        """Forget the request in ``slot``."""
        self.epoch[slot] = -1
        self.features[slot] = 0
        self.lists.pop(slot, None)


def _features(params: SamplingParams) -> Feature:
    penalties = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    asked = {
        Feature.RANDOM: params.temperature > 0,
        Feature.PENALTIES: penalties,
        Feature.LOGIT_BIAS: bool(params.logit_bias),
        Feature.ALLOWED: params.allowed_token_ids is not None,
        Feature.BAD_WORDS: bool(params.bad_words_token_ids),
        Feature.MIN_TOKENS: params.min_tokens > 0 and bool(params.stop_token_ids),
        Feature.LOGPROBS: params.num_logprobs is not None,
    }
    features = Feature(0)
    for feature, wanted in asked.items():
        if wanted:
            features |= feature
    return features


def _token_lists(params: SamplingParams) -> TokenLists:
    words = [word for word in params.bad_words_token_ids if len(word) > 1]
    longest = max((len(word) - 1 for word in words), default=0)
    prefixes = np.full((len(words), longest), -1, np.int64)
    for place, word in enumerate(words):
        prefixes[place, longest - len(word) + 1 :] = word[:-1]
    return TokenLists(
        bias_ids=_ids(params.logit_bias),
        bias_values=np.fromiter(params.logit_bias.values(), np.float32),
        allowed_ids=_ids(params.allowed_token_ids or ()),
        banned_ids=_ids(word[0] for word in params.bad_words_token_ids if len(word) == 1),
        stop_ids=_ids(params.stop_token_ids),
        bad_prefixes=prefixes,
        bad_prefix_lens=_ids(len(word) - 1 for word in words),
        bad_last_ids=_ids(word[-1] for word in words),
    )


def _ids(ids: Iterable[int]) -> IntArray:
    return np.fromiter(ids, np.int64)
