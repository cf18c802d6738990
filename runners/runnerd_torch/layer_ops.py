"""The seam between the fused models and how the device does what lies between their matrix products.

A chip with fused kernels brings its own; plain PyTorch is here. It knows nothing of models, steps or the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from runnerd_torch.linear import Linear

Rotate = Callable[[torch.Tensor, int, "Norm | None", "Norm | None"], tuple[torch.Tensor, torch.Tensor]]
"""``rotate(heads, num_heads, query_norm, key_norm)`` gives queries and keys of a step, normalized and rotated.

``heads`` is ``[num_tokens, num_heads + num_kv_heads, head_dim]``, any strides, queries first; the results are
``[num_tokens, num_heads, head_dim]`` and ``[num_tokens, num_kv_heads, head_dim]``.
"""

RotaryTables = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Gives cosines and sines, each ``[num_tokens, head_dim]`` in the model's dtype, of positions ``[num_tokens]``."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm."""

    # [size]
    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """A model's rotary embedding, as transformers has it."""

    module: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """``module(x, position_ids=[1, n])`` gives cosines and sines ``[1, n, head_dim]`` in the dtype of ``x``."""
    max_positions: int
    """Positions are below this."""
    dtype: torch.dtype
    """The model's."""
    device: torch.device
    """Where the steps' positions are."""


class LayerOps(Protocol):
    """What a decoder layer does besides matrix products and attention."""

    def rotary_tables(self, rotary: RotaryEmbedding) -> RotaryTables:
        """Give what computes or looks up the rotation of a step's positions; called once per model."""
        ...

    def norm(self, inputs: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Normalize the last dimension."""
        ...

    def add_norm(
        self, linear: Linear, inputs: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project, add to the residual, normalize.

        Args:
            linear: The projection.
            inputs: ``[num_rows, num_inputs]``.
            residual: ``[num_rows, num_outputs]``.
            norm: Of the sum.

        Returns:
            The normalized sum and the sum, each ``[num_rows, num_outputs]``.
        """
        ...

    def rotate(self, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
        """Prepare the rotation of a step's tokens; ``cos`` and ``sin`` are ``[num_tokens, head_dim]``."""
        ...

    def gate(self, gate_up: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Give ``activation(gate) * up`` of the joined ``[num_rows, 2 * size]``; may overwrite it."""
        ...


class TorchLayerOps:
    """Plain PyTorch."""

    def rotary_tables(self, rotary: RotaryEmbedding) -> RotaryTables:
        """Compute each step's rotation: a table of all positions would be larger than a small model."""

        def compute(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            like = torch.empty(0, dtype=rotary.dtype, device=rotary.device)
            cos, sin = rotary.module(like, position_ids=positions.unsqueeze(0))
            return cos[0], sin[0]

        return compute

    def norm(self, inputs: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Normalize the last dimension."""
        return F.rms_norm(inputs, norm.weight.shape, norm.weight, norm.eps)

    def add_norm(
        self, linear: Linear, inputs: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add with the projection, then normalize."""
        added = linear.added_to(residual, inputs)
        return self.norm(added, norm), added

    def rotate(self, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
        """Rotate queries and keys together."""
        half = sin.shape[-1] // 2
        # [num_tokens, 1, head_dim]
        cos = cos.unsqueeze(1)
        # Turning a vector's halves around and negating the new first one is a roll times this sign.
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1).unsqueeze(1)

        def rotate(
            heads: torch.Tensor, num_heads: int, query_norm: Norm | None, key_norm: Norm | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if query_norm is not None and key_norm is not None:
                query, key = heads[:, :num_heads], heads[:, num_heads:]
                heads = torch.cat((self.norm(query, query_norm), self.norm(key, key_norm)), dim=1)
            heads = torch.addcmul(heads * cos, heads.roll(half, dims=-1), sin)
            return heads[:, :num_heads], heads[:, num_heads:]

        return rotate

    def gate(self, gate_up: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Activate and multiply."""
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate).mul_(up)
