"""A transformers model over a paged KV cache.

The model's attention layers call :func:`paged_attention_forward`, which is registered with transformers under a name of
ours; what belongs to one step travels as an argument of the model's forward, so nothing global changes between steps.
This module knows nothing of plans, slots or sampling.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from runnerd_spi import ModelLoadError
from runnerd_torch.attention import AttentionMetadata, PagedAttention

ATTENTION_NAME = "runnerd_paged"

# What a model may pass to its attention function without changing what paged attention must compute.
_HARMLESS_OPTIONS = {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "output_hidden_states"}
_KNOWN_OPTIONS = {"scaling", "sliding_window", "softcap"}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What an attention layer needs of the KV cache, and how it attends."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    softcap: float | None


class AttentionBackend(Protocol):
    """What the registered attention function calls."""

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """Attend from the step's new tokens.

        Args:
            layer_idx: Which layer calls.
            query: ``[num_tokens, num_heads, head_dim]``, any strides.
            key: ``[num_tokens, num_kv_heads, head_dim]``, any strides.
            value: Like ``key``.
            options: What the model passed by name.

        Returns:
            ``[num_tokens, num_heads, head_dim]``.
        """
        ...


@dataclass(frozen=True, slots=True)
class KVCache:
    """The keys and values of one layer, each ``[num_blocks, block_size, num_kv_heads, head_dim]``."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepAttention:
    """The attention of one step, over all layers."""

    kernel: PagedAttention
    caches: tuple[KVCache, ...]
    metadata: AttentionMetadata

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """Write the new keys and values, then attend over the cache."""
        return self._run(
            layer_idx,
            query,
            key,
            value,
            _scale(options, query),
            options.get("sliding_window"),
            options.get("softcap"),
        )

    def run(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: LayerSpec
    ) -> torch.Tensor:
        """Do the same for a layer whose parameters are known."""
        return self._run(layer_idx, query, key, value, spec.scale, spec.sliding_window, spec.softcap)

    def _run(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        cache = self.caches[layer_idx]
        self.kernel.write(key, value, cache.keys, cache.values, self.metadata)
        return self.kernel.forward(query, cache.keys, cache.values, self.metadata, scale, sliding_window, softcap)


class PagedModel(Protocol):
    """A decoder that computes packed tokens of several requests over a paged KV cache."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The attention layers, in order of their index."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_index: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Compute one step.

        Args:
            input_ids: ``[num_tokens]`` int64.
            positions: ``[num_tokens]`` int64, of each token in its request.
            logits_index: ``[num_logits]`` int64, the tokens whose logits are wanted.
            attention: The step's KV cache and layout.

        Returns:
            Logits ``[num_logits, vocab_size]``, in the model's dtype.
        """
        ...


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: AttentionBackend | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls; ``query`` is ``[1, num_heads, num_tokens, head_dim]``.

    Raises:
        ModelLoadError: The model's layers do not hand on what belongs to a step.
    """
    if paged is None:
        raise ModelLoadError(
            f"{type(module).__name__} gets none of the arguments of the model's forward; "
            "such a model cannot use a paged KV cache"
        )
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
    if module.__dict__.get("is_causal") is False:
        # Encoders that are also published as language models say it here, not in the call.
        options["is_causal"] = False
    output = paged.attend(
        int(module.layer_idx),  # type: ignore[arg-type] # nn.Module types every attribute as a tensor or a module
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        options,
    )
    return output.unsqueeze(0), None


def register_attention() -> None:
    """Make :data:`ATTENTION_NAME` known to transformers.

    No mask function is registered under the name on purpose: transformers then builds no mask at all.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


class TransformersModel:
    """Any causal decoder of transformers whose attention goes through its attention interface.

    Args:
        model: Loaded with ``attn_implementation=ATTENTION_NAME``, in evaluation mode.

    Raises:
        ModelLoadError: It does not attend in the way a paged KV cache can serve; the message says why.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._layers, self._vocab_size = _probe(model)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The attention layers."""
        return self._layers

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._vocab_size

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_index: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Compute one step, as one packed sequence."""
        output = self._model(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logits_index,
            paged=attention,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


class _Recorder:
    """Notes how each layer attends, and answers with zeros."""

    def __init__(self, name: str) -> None:
        self.layers: dict[int, LayerSpec] = {}
        self._name = name

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        given = {name for name, value in options.items() if value is not None and value is not False}
        if options.get("is_causal") is False:
            raise ModelLoadError(f"{self._name}: layer {layer_idx} attends to later tokens; only causal decoders work")
        if unknown := given - _HARMLESS_OPTIONS - _KNOWN_OPTIONS:
            raise ModelLoadError(
                f"{self._name}: layer {layer_idx} asks its attention for {', '.join(sorted(unknown))}, "
                "which paged attention does not do"
            )
        if key.shape != value.shape or query.shape[2] != key.shape[2]:
            raise ModelLoadError(
                f"{self._name}: layer {layer_idx} has heads of {query.shape[2]}, {key.shape[2]} and {value.shape[2]} "
                "(query, key, value), expected one size"
            )
        if layer_idx in self.layers:
            raise ModelLoadError(f"{self._name}: layer {layer_idx} attends twice; a KV cache holds one pair per layer")
        self.layers[layer_idx] = LayerSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[2],
            scale=_scale(options, query),
            sliding_window=options.get("sliding_window"),
            softcap=options.get("softcap"),
        )
        return query.new_zeros(query.shape)


def _probe(model: PreTrainedModel) -> tuple[tuple[LayerSpec, ...], int]:
    """Run two tokens through the model and give its layers and the width of its logits."""
    name = type(model).__name__
    taken = inspect.signature(model.forward).parameters
    if "logits_to_keep" not in taken:
        raise ModelLoadError(f"{name}.forward takes no logits_to_keep; the model's code is too old for this runner")
    recorder = _Recorder(name)
    logits = _probe_logits(model, recorder, {"position_ids": torch.arange(2, device=model.device).unsqueeze(0)})
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if missing := sorted(set(range(num_layers)) - set(recorder.layers)):
        raise ModelLoadError(
            f"{name}: {len(missing)} of {num_layers} layers (the first is {missing[0]}) do not attend through "
            "transformers' attention interface; such a model cannot use a paged KV cache"
        )
    # What is missing may vanish among further keyword arguments. The probe's attention gives zeros, so that the logits
    # depend on the embeddings alone; a model that counts from another number than 0 has others by itself.
    if "position_ids" not in taken or not torch.allclose(
        logits, _probe_logits(model, _Recorder(name), {}), equal_nan=True
    ):
        raise ModelLoadError(
            f"{name} takes no position_ids that count from 0; the position of a token in a packed step cannot be told"
        )
    _check_windows(name, model, recorder.layers.values())
    vocab_size = int(logits.shape[-1])
    num_embeddings = int(model.get_input_embeddings().weight.shape[0])
    if num_embeddings < vocab_size:
        raise ModelLoadError(f"{name}: {vocab_size} logits but {num_embeddings} embeddings; the checkpoint is damaged")
    return tuple(recorder.layers[layer] for layer in range(num_layers)), vocab_size


def _probe_logits(model: PreTrainedModel, recorder: _Recorder, positions: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        output = model(input_ids=tokens, use_cache=False, logits_to_keep=tokens[0, :1] + 1, paged=recorder, **positions)
    # Looked at on the host, where all is known to be there that a comparison takes.
    logits: torch.Tensor = output.logits.cpu()
    return logits


def _check_windows(name: str, model: PreTrainedModel, layers: Iterable[LayerSpec]) -> None:
    """Refuse a window that the model would apply in a mask, without telling its attention: no mask is built here."""
    settings = model.config.get_text_config(decoder=True).to_dict()
    window, length = settings.get("sliding_window"), settings.get("max_position_embeddings")
    kinds = settings.get("layer_types")
    is_meant = isinstance(window, int) and (length is None or window < length)
    is_used = kinds is None or "sliding_attention" in kinds
    if is_meant and is_used and all(layer.sliding_window is None for layer in layers):
        raise ModelLoadError(
            f"{name}: its config has a sliding_window of {window}, which its layers do not ask of their attention; "
            "such a model is not served. If it was trained without a window, remove sliding_window from config.json"
        )


def _scale(options: Mapping[str, Any], query: torch.Tensor) -> float:
    scaling = options.get("scaling")
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)
