"""A leaner forward for Llama-like decoders: one projection for query, key and value, one for gate and up, no modules.

The generic path spends, on small models, as long in module calls and small operations as in the matrix products. Here a
layer is a dozen operations on two-dimensional tensors; those between the matrix products are the device's own
(:class:`~runnerd_torch.layer_ops.LayerOps`). The weights are taken out of the transformers model, so nothing is held
twice. Which layers attend how was found by the probe of the generic path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from runnerd_torch.layer_ops import LayerOps, Norm, RotaryEmbedding, Rotate
from runnerd_torch.linear import Linear, LinearFactory
from runnerd_torch.models import LayerSpec, StepAttention, TransformersModel

_FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


@dataclass(frozen=True, slots=True)
class _Layer:
    spec: LayerSpec
    input_norm: Norm
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    mlp_norm: Norm
    gate_up: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]
    down: Linear


class FusedModel:
    """A Llama, Mistral, Qwen2 or Qwen3 decoder.

    Args:
        network: The loaded model; its weights are taken out of it, so it must not be used afterwards.
        probed: The generic path over the same model.
        make_linear: Makes the projections of their weights.
        ops: What the device does between them.
        max_positions: Positions are below this.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        probed: TransformersModel,
        make_linear: LinearFactory,
        ops: LayerOps,
        max_positions: int,
    ) -> None:
        self._specs = probed.layers
        self._vocab_size = probed.vocab_size
        self._ops = ops
        decoder = network.model
        embedding: torch.Tensor = decoder.embed_tokens.weight
        self._rotation = ops.rotary_tables(
            RotaryEmbedding(decoder.rotary_emb, max_positions, embedding.dtype, embedding.device)
        )
        self._layers = tuple(
            _take_layer(layer, spec, make_linear) for layer, spec in zip(decoder.layers, probed.layers, strict=True)
        )
        # What follows each layer's MLP: the next layer's first norm, at last the model's.
        self._next_norms = (*(layer.input_norm for layer in self._layers[1:]), _take_norm(decoder.norm))
        is_tied = network.lm_head.weight is embedding
        self._head = _take(make_linear, network.lm_head)
        # A tied embedding reads the head's weight, wherever that has gone.
        self._embed: Callable[[torch.Tensor], torch.Tensor] = (
            self._head.rows if is_tied else partial(F.embedding, weight=embedding)
        )
        decoder.embed_tokens.register_parameter("weight", None)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The attention layers."""
        return self._specs

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._vocab_size

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_index: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Compute one step."""
        ops = self._ops
        # [num_tokens, hidden_size]
        hidden = self._embed(input_ids)
        rotate = ops.rotate(*self._rotation(positions))
        normed = ops.norm(hidden, self._layers[0].input_norm)
        last = len(self._layers) - 1
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            heads = _attend(layer, index, normed, rotate, attention)
            if index == last:
                # Beyond the last keys and values, only what is sampled from counts.
                heads, hidden = heads.index_select(0, logits_index), hidden.index_select(0, logits_index)
            normed, hidden = ops.add_norm(layer.output, heads, hidden, layer.mlp_norm)
            gated = ops.gate(layer.gate_up(normed), layer.activation)
            normed, hidden = ops.add_norm(layer.down, gated, hidden, next_norm)
        return self._head(normed)


def can_fuse(network: PreTrainedModel) -> bool:
    """Whether :class:`FusedModel` serves the model: a known family with plain, unquantized projections."""
    return type(network) in _FAMILIES and all(
        type(module) is nn.Linear for name, module in network.named_modules() if name.endswith("_proj")
    )


def _attend(layer: _Layer, index: int, inputs: torch.Tensor, rotate: Rotate, attention: StepAttention) -> torch.Tensor:
    spec = layer.spec
    num_tokens = inputs.shape[0]
    # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    qkv = layer.qkv(inputs).view(num_tokens, -1, spec.head_dim)
    num_rotated = spec.num_heads + spec.num_kv_heads
    query, key = rotate(qkv[:, :num_rotated], spec.num_heads, layer.query_norm, layer.key_norm)
    return attention.run(index, query, key, qkv[:, num_rotated:], spec).view(num_tokens, -1)


def _take_layer(layer: Any, spec: LayerSpec, make_linear: LinearFactory) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    # Qwen3 normalizes queries and keys.
    norms = dict(attention.named_children())
    return _Layer(
        spec=spec,
        input_norm=_take_norm(layer.input_layernorm),
        qkv=_take(make_linear, attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=_take_norm(norms["q_norm"]) if "q_norm" in norms else None,
        key_norm=_take_norm(norms["k_norm"]) if "k_norm" in norms else None,
        output=_take(make_linear, attention.o_proj),
        mlp_norm=_take_norm(layer.post_attention_layernorm),
        gate_up=_take(make_linear, mlp.gate_proj, mlp.up_proj),
        activation=mlp.act_fn,
        down=_take(make_linear, mlp.down_proj),
    )


def _take(make_linear: LinearFactory, *projections: Any) -> Linear:
    """Join projections of the same input; each loses its weight, so that no more than these are held twice."""
    weights = [one.weight for one in projections]
    biases = [one.bias for one in projections if one.bias is not None]
    for one in projections:
        one.register_parameter("weight", None)
    return make_linear(torch.cat(weights) if len(weights) > 1 else weights[0], torch.cat(biases) if biases else None)


def _take_norm(norm: Any) -> Norm:
    return Norm(norm.weight, norm.variance_epsilon)
