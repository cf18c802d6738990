"""What a model's configuration says before its weights are read: whether it can be served, how long, and where it ends.

Works on what transformers parsed; it reads no file.
"""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PretrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from runnerd_spi import ModelLoadError

_PAGED_LAYER_TYPES = {"full_attention", "sliding_attention"}
# transformers' names of layers that keep a state of fixed size, which every token changes.
_RECURRENT_LAYER_TYPES = {"linear_attention", "hybrid", "hybrid_sliding"}


def refuse_architecture(name: str, config: PretrainedConfig) -> None:
    """Refuse what a paged KV cache cannot serve.

    Raises:
        ModelLoadError: With the reason.
    """
    if config.is_encoder_decoder:
        raise ModelLoadError(
            f"{name}: {config.model_type} is an encoder-decoder; only decoders (causal language models) can be served"
        )
    # Of many models a property, which is not among the settings of config.json.
    layer_types = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    if layer_types & _RECURRENT_LAYER_TYPES:
        raise ModelLoadError(
            f"{name}: {config.model_type} keeps a recurrent state besides attention; "
            "only decoders made of attention can be served"
        )
    if others := layer_types - _PAGED_LAYER_TYPES:
        raise ModelLoadError(
            f"{name}: {config.model_type} has layers of type {', '.join(sorted(others))}; "
            f"only {' and '.join(sorted(_PAGED_LAYER_TYPES))} can be served"
        )


def quantization(config: PretrainedConfig) -> str | None:
    """Give the name of the method by which the checkpoint is quantized."""
    settings = config.to_dict().get("quantization_config")
    return None if settings is None else str(settings.get("quant_method"))


def refuse_quantization(name: str, config: PretrainedConfig) -> None:
    """Refuse a method that transformers would leave out with a warning, as if the weights were plain.

    Raises:
        ModelLoadError: With the method.
    """
    method = quantization(config)
    # bitsandbytes has an entry for each of its two widths.
    if method not in (None, "bitsandbytes", *AUTO_QUANTIZATION_CONFIG_MAPPING):
        raise ModelLoadError(
            f"{name}: the checkpoint is quantized by {method}, which transformers does not know; "
            "take the unquantized model or a GGUF file"
        )


def model_length(name: str, config: PretrainedConfig, asked: int | None) -> int:
    """Give the most tokens of a request: ``asked``, or what the model allows.

    Raises:
        ModelLoadError: More is asked than the model allows, or neither names a length.
    """
    text = _text(config)
    allowed = text.get("max_position_embeddings")
    why = "max_position_embeddings"
    rope = text.get("rope_parameters") or {}
    original = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and original and allowed and original < allowed:
        # Beyond it the rotation of every token changes, those in the KV cache included, with the longest in the batch.
        allowed, why = original, "original_max_position_embeddings; longrope beyond it is not served"
    if asked is not None and asked < 1:
        raise ModelLoadError(f"max_model_len {asked}, expected at least 1")
    if allowed is None:
        if asked is None:
            raise ModelLoadError(f"{name}: its config has no max_position_embeddings; set max_model_len")
        return asked
    if asked is not None and asked > allowed:
        raise ModelLoadError(
            f"{name}: max_model_len {asked} is above the model's {allowed} ({why}); ask for {allowed} at most"
        )
    return int(allowed if asked is None else asked)


def intermediate_size(config: PretrainedConfig) -> int:
    """Give the width of the MLP; four times the hidden size where the config has none, as in GPT-2."""
    text = _text(config)
    return int(text.get("intermediate_size") or 4 * text["hidden_size"])


def eos_token_ids(config: PretrainedConfig, generation: GenerationConfig | None) -> tuple[int, ...]:
    """Give the ids that end a request, sorted: those of the generation config and of the model's config."""
    found: set[int] = set()
    for one in (
        None if generation is None else generation.eos_token_id,
        config.to_dict().get("eos_token_id"),
        _text(config).get("eos_token_id"),
    ):
        if one is not None:
            found.update([one] if isinstance(one, int) else one)
    return tuple(sorted(found))


def _text(config: PretrainedConfig) -> dict[str, Any]:
    """Give the decoder's settings, under transformers' common names besides the model's own (``n_positions``)."""
    text = config.get_text_config(decoder=True)
    settings: dict[str, Any] = text.to_dict()
    return settings | {common: settings[own] for common, own in text.attribute_map.items() if own in settings}
