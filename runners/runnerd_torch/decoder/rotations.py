"""By what queries and keys are turned at each position: computed by the model's own module, once where it allows it."""

from __future__ import annotations

from typing import Any

import torch

_FIXED_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of scaling whose angles depend on the position alone. Others look at the longest sequence of the step too."""


class Rotations:
    """Gives cosines and sines in float32, as the numbers they turn are.

    Args:
        rotary: The rotary embedding of a transformers model.
    """

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._is_fixed = getattr(rotary, "rope_type", None) in _FIXED_TYPES
        self._floats = torch.empty(0)
        self._cos = self._sin = torch.empty(0, 0)

    def at(self, positions: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Give them for ``positions``.

        Args:
            positions: ``[num_tokens]`` int64.
            end: No position reaches it.

        Returns:
            Two tensors ``[num_tokens, head_dim]``.
        """
        if not self._is_fixed:
            return self._compute(positions)
        if end > len(self._cos):
            self._cos, self._sin = self._compute(torch.arange(max(end, 2 * len(self._cos))))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _compute(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary(self._floats, position_ids=positions.unsqueeze(0))
        return cos[0].contiguous(), sin[0].contiguous()
