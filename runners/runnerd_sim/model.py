"""The simulated model: logits that are a deterministic function of a request's whole history.

A history is a sum of one 64-bit word per (position, token). The sum of a prefix is what the simulated KV cache holds at
the prefix's last position, so a step adds only its own tokens, and any wrong, missing or misplaced token changes every
later logit. This module knows nothing of slots, blocks, steps or sampling.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

VOCAB_SIZE = 257
"""Ids 0 to 255 are bytes."""
EOS_TOKEN_ID = 256

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

# The constants of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

_SCRIPT_LOGIT = np.float32(1000.0)


def history_terms(positions: Int64Array, token_ids: Int64Array) -> UInt64Array:
    """Give the words that tokens at positions add to a history. All three are ``[num_tokens]``."""
    # 512 > VOCAB_SIZE keeps (position, token) pairs apart.
    words: UInt64Array = (positions * 512 + token_ids).astype(np.uint64)
    return _mix(words * np.uint64(_GAMMA))


class SimModel:
    """Turns histories into logits.

    Args:
        eos_bias: Logit of EOS before noise. The letters and signs of ASCII have 0 to 3.5, other bytes -14.
        script: Text to say instead of what the hash says, then EOS; None for none.
    """

    def __init__(self, eos_bias: float, script: str | None) -> None:
        self._script = None if script is None else (*script.encode(), EOS_TOKEN_ID)
        # [VOCAB_SIZE] float32
        self._bias = _readable_bias(eos_bias)
        # [VOCAB_SIZE] uint64: one random word per token id
        self._keys = _mix(np.arange(1, VOCAB_SIZE + 1, dtype=np.uint64) * np.uint64(_GAMMA))
        # [65536] float32: quantiles of the Gumbel distribution, so that the highest logit is a draw from softmax(bias).
        # A table, because a vectorised log may round the same number differently at different places of an array.
        quantiles = (np.arange(65536, dtype=np.float64) + 0.5) / 65536
        self._noise: Float32Array = (-np.log(-np.log(quantiles))).astype(np.float32)

    def logits(self, histories: UInt64Array) -> Float32Array:
        """Give the logits after each history.

        Args:
            histories: ``[num_rows]``.

        Returns:
            ``[num_rows, VOCAB_SIZE]``; a row depends on its history alone.
        """
        words = histories[:, None] ^ self._keys
        words *= np.uint64(_MIX_1)
        words ^= words >> np.uint64(32)
        words *= np.uint64(_MIX_2)
        words >>= np.uint64(48)
        logits: Float32Array = self._noise[words]
        logits += self._bias
        return logits

    def add_script(self, logits: Float32Array, output_index: int) -> None:
        """Raise the scripted token of an output index above all others, in ``[VOCAB_SIZE]`` logits; or do nothing."""
        if self._script is not None:
            logits[self._script[output_index % len(self._script)]] += _SCRIPT_LOGIT


def _readable_bias(eos_bias: float) -> Float32Array:
    bias = np.full(VOCAB_SIZE, -14.0, dtype=np.float32)
    bias[ord(" ") : ord("~") + 1] = 0.0
    bias[ord("a") : ord("z") + 1] = 2.0
    bias[ord(" ")] = 3.5
    bias[EOS_TOKEN_ID] = eos_bias
    return bias


def _mix(words: UInt64Array) -> UInt64Array:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX_2)
    return words ^ (words >> np.uint64(31))
