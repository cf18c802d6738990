"""What a decoder layer does between its matrix products, by the fused kernels of torch_npu. No tensor is read back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.activations import SiLUActivation

from runnerd_torch.layer_ops import Norm, RotaryEmbedding, RotaryTables, Rotate, TorchLayerOps
from runnerd_torch.linear import Linear

_SILU = (nn.SiLU, SiLUActivation)


def truncate(logits: torch.Tensor, top_p: torch.Tensor | None, top_k: torch.Tensor) -> torch.Tensor:
    """Set all logits outside top-k and top-p to minus infinity, by ``npu_top_k_top_p``; see the sampler's ``Truncate``.

    It keeps whatever ties with the k-th, and sums probabilities in float32.
    """
    truncated: torch.Tensor = torch.ops.npu.npu_top_k_top_p(logits, top_p, top_k)
    return truncated


class AscendLayerOps:
    """The fused kernels; needs torch_npu to be imported.

    Sources: the documentation of ``npu_rms_norm``, ``npu_add_rms_norm``, ``npu_rotary_mul`` and ``npu_swiglu`` that
    torch_npu carries.
    """

    def rotary_tables(self, rotary: RotaryEmbedding) -> RotaryTables:
        """Compute the rotation of all positions once, on the host, and look a step's up in it.

        On the host, because large angles lose precision in the device's cosine, and because a step then needs two
        operations instead of ten.
        """
        positions = torch.arange(rotary.max_positions).unsqueeze(0)
        module = rotary.module
        if isinstance(module, nn.Module):
            module = module.cpu()
        # each [max_positions, head_dim]
        cos, sin = (table[0].to(rotary.device) for table in module(torch.empty(0, dtype=rotary.dtype), positions))

        def look_up(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return cos.index_select(0, positions), sin.index_select(0, positions)

        return look_up

    def norm(self, inputs: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Normalize the last dimension."""
        normed: torch.Tensor = torch.ops.npu.npu_rms_norm(inputs, norm.weight, norm.eps)[0]
        return normed

    def add_norm(
        self, linear: Linear, inputs: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project; then add and normalize in one kernel."""
        normed, _, added = torch.ops.npu.npu_add_rms_norm(linear(inputs), residual, norm.weight, norm.eps)
        return normed, added

    def rotate(self, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
        """Rotate by halves; queries and keys each, because attention takes them contiguous."""
        # [1, num_tokens, 1, head_dim]: the layout BSND with one batch
        cos, sin = cos[None, :, None], sin[None, :, None]

        def rotate(
            heads: torch.Tensor, num_heads: int, query_norm: Norm | None, key_norm: Norm | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            query, key = heads[:, :num_heads], heads[:, num_heads:]
            if query_norm is not None and key_norm is not None:
                query, key = self.norm(query, query_norm), self.norm(key, key_norm)
            rotary_mul = torch.ops.npu.npu_rotary_mul
            return rotary_mul(query[None], cos, sin, "half")[0], rotary_mul(key[None], cos, sin, "half")[0]

        return rotate

    def gate(self, gate_up: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Activate and multiply in one kernel where the activation is SiLU."""
        if isinstance(activation, _SILU):
            gated: torch.Tensor = torch.ops.npu.npu_swiglu(gate_up, -1)
            return gated
        return TorchLayerOps().gate(gate_up, activation)
