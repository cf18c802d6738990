"""A leaner forward for Llama-like decoders: one projection for query, key and value, one for gate and up, no modules.

The generic path spends, on small models, as long in module calls and small operations as in the matrix products. Here a
layer is a dozen operations on two-dimensional tensors. The weights are taken out of the transformers model, so nothing
is held twice. Which layers attend how was found by the probe of the generic path.
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

from runnerd_torch.linear import Linear, LinearFactory
from runnerd_torch.models import LayerSpec, StepAttention, TransformersModel

_FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


@dataclass(frozen=True, slots=True)
class _Norm:
    # [size]
    weight: torch.Tensor
    eps: float

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(inputs, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class _Layer:
    spec: LayerSpec
    input_norm: _Norm
    qkv: Linear
    query_norm: _Norm | None
    key_norm: _Norm | None
    output: Linear
    mlp_norm: _Norm
    gate_up: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]
    down: Linear


class FusedModel:
    """A Llama, Mistral, Qwen2 or Qwen3 decoder.

    Args:
        network: The loaded model; its weights are taken out of it, so it must not be used afterwards.
        probed: The generic path over the same model.
        make_linear: Makes the projections of their weights.
    """

    def __init__(self, network: PreTrainedModel, probed: TransformersModel, make_linear: LinearFactory) -> None:
        self._specs = probed.layers
        self._vocab_size = probed.vocab_size
        decoder = network.model
        self._rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]] = decoder.rotary_emb
        self._layers = tuple(
            _take_layer(layer, spec, make_linear) for layer, spec in zip(decoder.layers, probed.layers, strict=True)
        )
        self._norm = _take_norm(decoder.norm)
        embedding: torch.Tensor = decoder.embed_tokens.weight
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
        # [num_tokens, hidden_size]
        hidden = self._embed(input_ids)
        cos, sin = self._rotary(hidden, position_ids=positions.unsqueeze(0))
        # [num_tokens, 1, head_dim]
        cos, sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1)
        half = sin.shape[-1] // 2
        # Turning a vector's halves around and negating the new first one is a roll times this sign.
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            heads = _attend(layer, index, layer.input_norm(hidden), cos, sin, attention)
            if index == last:
                # Beyond the last keys and values, only what is sampled from counts.
                heads, hidden = heads.index_select(0, logits_index), hidden.index_select(0, logits_index)
            hidden = layer.output.added_to(hidden, heads)
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
            hidden = layer.down.added_to(hidden, layer.activation(gate).mul_(up))
        return self._head(self._norm(hidden))


def can_fuse(network: PreTrainedModel) -> bool:
    """Whether :class:`FusedModel` serves the model: a known family with plain, unquantized projections."""
    return type(network) in _FAMILIES and all(
        type(module) is nn.Linear for name, module in network.named_modules() if name.endswith("_proj")
    )


def _attend(
    layer: _Layer, index: int, inputs: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: StepAttention
) -> torch.Tensor:
    spec = layer.spec
    num_tokens = inputs.shape[0]
    # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    qkv = layer.qkv(inputs).view(num_tokens, -1, spec.head_dim)
    num_rotated = spec.num_heads + spec.num_kv_heads
    rotated, value = qkv[:, :num_rotated], qkv[:, num_rotated:]
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = qkv[:, : spec.num_heads], qkv[:, spec.num_heads : num_rotated]
        rotated = torch.cat((layer.query_norm(query), layer.key_norm(key)), dim=1)
    rotated = torch.addcmul(rotated * cos, rotated.roll(spec.head_dim // 2, dims=-1), sin)
    heads = attention.run(index, rotated[:, : spec.num_heads], rotated[:, spec.num_heads :], value, spec)
    return heads.view(num_tokens, -1)


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


def _take_norm(norm: Any) -> _Norm:
    return _Norm(norm.weight, norm.variance_epsilon)
