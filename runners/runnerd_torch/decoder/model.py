"""A Llama, Mistral, Qwen2 or Qwen3 decoder whose step is one call of native code.

On small models Python spends as long between the operations of a step as the processor in them. Here nothing of it is
left between token ids and logits. The weights are taken out of the transformers model and packed one by one, so nothing
is held twice. Which layers attend how was found by the probe of the generic path.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from runnerd_torch.attention.native_attention import MAX_HEAD_DIM
from runnerd_torch.decoder.library import DecoderLibrary, LayerFields, ModelFields, StepFields
from runnerd_torch.decoder.packing import (
    PANEL,
    PackedWeight,
    Quantization,
    halves_taking_turns,
    inputs_multiple,
    pack,
    quantization_of_head,
    taking_turns,
)
from runnerd_torch.decoder.rotations import Rotations
from runnerd_torch.models import KVCache, LayerSpec, StepAttention, TransformersModel
from runnerd_torch.native.huge_pages import Arena


class NativeDecoder:
    """A decoder in native code.

    Args:
        network: The loaded model on the CPU, for which :func:`reason_against` gives nothing; its weights are taken out
            of it, so it must not be used afterwards.
        probed: The generic path over the same model.
        library: The compiled code.
        quantization: Of the projections and a tied embedding.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        probed: TransformersModel,
        library: DecoderLibrary,
        quantization: Quantization = "none",
    ) -> None:
        self._specs = probed.layers
        self._vocab_size = probed.vocab_size
        self._library = library
        self._kept: list[torch.Tensor | PackedWeight] = []
        self._arena = Arena()
        decoder: Any = network.model
        self._rotations = Rotations(decoder.rotary_emb)
        # Heads that are normalized first have to be whole before they are rotated.
        has_norms = "q_norm" in dict(decoder.layers[0].self_attn.named_children())
        self._halves_take_turns = probed.layers[0].head_dim % (2 * PANEL) == 0 and not has_norms
        layers = [
            self._take_layer(layer, spec, quantization)
            for layer, spec in zip(decoder.layers, probed.layers, strict=True)
        ]
        self._layers = (LayerFields * len(layers))(*layers)
        embedding: torch.Tensor = decoder.embed_tokens.weight
        is_tied = network.lm_head.weight is embedding
        head = self._take(quantization_of_head(quantization), network.lm_head)
        decoder.embed_tokens.register_parameter("weight", None)
        self._itemsize = head.values.itemsize
        self._model = ModelFields(
            layers=ctypes.cast(self._layers, ctypes.POINTER(LayerFields)),
            head=head.fields(),
            final_norm=self._keep_floats(decoder.norm.weight),
            embedding=None if is_tied else self._keep(embedding.contiguous()),
            num_layers=len(layers),
            hidden_size=head.num_inputs,
            num_heads=probed.layers[0].num_heads,
            num_kv_heads=probed.layers[0].num_kv_heads,
            head_dim=probed.layers[0].head_dim,
            intermediate_size=layers[0].down.num_inputs,
            halves_take_turns=self._halves_take_turns,
            eps=decoder.norm.variance_epsilon,
            scale=probed.layers[0].scale,
        )
        self._caches: tuple[KVCache, ...] = ()
        self._key_caches: Any = None
        self._value_caches: Any = None
        # Only the device's stream runs steps, one after the other: what a step leaves here is read within it.
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._logits = torch.empty(0)
        self.phase_ns: torch.Tensor | None = None
        """``[len(PHASES)]`` int64: nanoseconds of each phase are added here; None: they are not measured."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The attention layers."""
        return self._specs

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._vocab_size

    @property
    def weight_itemsize(self) -> int:
        """Bytes of a number of a projection."""
        return self._itemsize

    @property
    def weights_bytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(one.num_bytes if isinstance(one, PackedWeight) else one.nbytes for one in self._kept)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Give what ``argmax`` of each row of logits gives, much sooner."""
        return self._library.choose(logits)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_index: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Compute one step.

        Returns:
            Logits ``[num_logits, vocab_size]`` float32, valid until the next step.
        """
        metadata, caches = attention.metadata, attention.caches
        num_tokens, num_logits = len(input_ids), len(logits_index)
        cos, sin = self._rotations.at(positions, metadata.max_seq_len)
        block_tables = metadata.block_tables.contiguous()
        if caches is not self._caches:
            self._caches, pointers = caches, ctypes.c_void_p * len(caches)
            self._key_caches = pointers(*(cache.keys.data_ptr() for cache in caches))
            self._value_caches = pointers(*(cache.values.data_ptr() for cache in caches))
        num_blocks, block_size = caches[0].keys.shape[:2]
        self._grow(num_tokens, num_logits)
        step = StepFields(
            input_ids=input_ids.data_ptr(),
            slot_mapping=metadata.slot_mapping.data_ptr(),
            logits_index=logits_index.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            query_start_loc=metadata.query_start_loc.data_ptr(),
            seq_lens=metadata.seq_lens.data_ptr(),
            block_tables=block_tables.data_ptr(),
            key_caches=self._key_caches,
            value_caches=self._value_caches,
            workspace=self._workspace.data_ptr(),
            logits=self._logits.data_ptr(),
            phase_ns=None if self.phase_ns is None else self.phase_ns.data_ptr(),
            num_tokens=num_tokens,
            num_rows=metadata.num_rows,
            num_logits=num_logits,
            num_blocks=num_blocks,
            block_size=block_size,
            max_blocks=block_tables.shape[1],
            block_table_stride=block_tables.stride(0),
        )
        self._library.run(self._model, step)
        return self._logits[: num_logits * self._vocab_size].view(num_logits, self._vocab_size)

    def _grow(self, num_tokens: int, num_logits: int) -> None:
        needed = self._library.workspace_bytes(self._model, num_tokens)
        if needed > len(self._workspace):
            # The old one goes first.
            self._workspace = torch.empty(0, dtype=torch.uint8)
            self._workspace = torch.empty(needed, dtype=torch.uint8)
        if num_logits * self._vocab_size > len(self._logits):
            self._logits = torch.empty(0)
            self._logits = torch.empty(num_logits * self._vocab_size)

    def _take_layer(self, layer: Any, spec: LayerSpec, quantization: Quantization) -> LayerFields:
        attention, mlp = layer.self_attn, layer.mlp
        # Qwen3 normalizes queries and keys.
        norms = dict(attention.named_children())
        gate_up = taking_turns(_take_weight(mlp.gate_proj), _take_weight(mlp.up_proj))
        if self._halves_take_turns:
            for projection in (attention.q_proj, attention.k_proj):
                for name, parameter in list(projection.named_parameters()):
                    ordered = halves_taking_turns(parameter.data, spec.head_dim)
                    projection.register_parameter(name, nn.Parameter(ordered, requires_grad=False))
        return LayerFields(
            qkv=self._take(quantization, attention.q_proj, attention.k_proj, attention.v_proj).fields(),
            output=self._take(quantization, attention.o_proj).fields(),
            gate_up=self._keep_packed(pack(gate_up, None, quantization)).fields(),
            down=self._take(quantization, mlp.down_proj).fields(),
            input_norm=self._keep_floats(layer.input_layernorm.weight),
            mlp_norm=self._keep_floats(layer.post_attention_layernorm.weight),
            query_norm=self._keep_floats(norms["q_norm"].weight) if "q_norm" in norms else None,
            key_norm=self._keep_floats(norms["k_norm"].weight) if "k_norm" in norms else None,
            sliding_window=spec.sliding_window or 0,
        )

    def _take(self, quantization: Quantization, *projections: Any) -> PackedWeight:
        """Pack projections of the same input as one; each loses its weight."""
        biases = [one.bias for one in projections if one.bias is not None]
        weights = [_take_weight(one) for one in projections]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        weights.clear()
        return self._keep_packed(pack(weight, torch.cat(biases) if biases else None, quantization))

    def _keep_packed(self, packed: PackedWeight) -> PackedWeight:
        packed = packed.moved(self._arena)
        self._kept.append(packed)
        return packed

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _keep_floats(self, tensor: torch.Tensor) -> int:
        return self._keep(tensor.float().contiguous())


def reason_against(
    network: PreTrainedModel, probed: TransformersModel, quantization: Quantization = "none"
) -> str | None:
    """Say why :class:`NativeDecoder` does not serve a model that the fused one does; None: it does."""
    decoder: Any = network.model
    spec = probed.layers[0]
    if network.lm_head.weight.dtype not in (torch.float32, torch.bfloat16):
        return f"its weights are {network.lm_head.weight.dtype}, expected float32 or bfloat16"
    if network.lm_head.weight.device.type != "cpu":
        return "it is not on the CPU"
    if any(
        (one.num_heads, one.num_kv_heads, one.head_dim, one.scale)
        != (
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.scale,
        )
        or one.softcap is not None
        for one in probed.layers
    ):
        return "its layers differ in their heads, or cap their scores"
    if spec.head_dim % 8 or spec.head_dim > MAX_HEAD_DIM:
        return f"its heads are {spec.head_dim} wide, expected a multiple of 8 up to {MAX_HEAD_DIM}"
    projections = [one for name, one in network.named_modules() if isinstance(one, nn.Linear)]
    multiple = inputs_multiple(quantization)
    if any(one.in_features % multiple for one in projections):
        return f"the inputs of a projection are no multiple of {multiple}"
    if any(layer.mlp.gate_proj.bias is not None for layer in decoder.layers):
        return "its MLP has biases"
    if not all(isinstance(layer.mlp.act_fn, (nn.SiLU, SiLUActivation)) for layer in decoder.layers):
        return "its activation is not SiLU"
    epsilons = {one.variance_epsilon for one in network.modules() if hasattr(one, "variance_epsilon")}
    if len(epsilons) > 1:
        return "its norms differ"
    rotary = getattr(decoder.config, "partial_rotary_factor", None)
    if rotary not in (None, 1.0):
        return "it rotates parts of its heads only"
    return None


def _take_weight(projection: Any) -> torch.Tensor:
    weight: torch.Tensor = projection.weight
    projection.register_parameter("weight", None)
    return weight
