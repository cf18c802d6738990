"""The seam between a model's projections and how the device multiplies, and torch's own way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention


class Linear(Protocol):
    """A projection ``[num_rows, num_inputs] -> [num_rows, num_outputs]``."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Project ``inputs``."""
        ...

    def added_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Give ``residual``, ``[num_rows, num_outputs]``, plus the projection of ``inputs``."""
        ...

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Give rows of the weight, ``[len(indices), num_inputs]``: an embedding that shares it reads them."""
        ...


LinearFactory = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""Makes a projection of a weight ``[num_outputs, num_inputs]`` and a bias ``[num_outputs]`` or None."""


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """A projection by torch, over the weight as the checkpoint has it."""

    # [num_outputs, num_inputs]
    weight: torch.Tensor
    # [num_outputs]
    bias: torch.Tensor | None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Project ``inputs``."""
        return F.linear(inputs, self.weight, self.bias)

    def added_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Give ``residual`` plus the projection, in one operation where there is no bias."""
        if self.bias is None:
            return torch.addmm(residual, inputs, self.weight.t())
        return residual + self(inputs)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Give rows of the weight."""
        return F.embedding(indices, self.weight)
