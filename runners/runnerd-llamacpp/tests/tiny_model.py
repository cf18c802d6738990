"""Writes a small model with random weights as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

VOCAB_SIZE = 160
MAX_MODEL_LEN = 128
_HIDDEN, _FEED_FORWARD, _LAYERS, _HEADS, _KV_HEADS = 64, 128, 2, 4, 2
# Wide enough that the highest logit stands out of rounding.
_SCALE = 0.3


def write_tiny_model(path: Path, *, quantisation: gguf.GGMLQuantizationType | None = None) -> None:
    """Write a Llama of random weights, the same each time; quantised where a type is given, else in float32."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(_LAYERS)
    writer.add_context_length(MAX_MODEL_LEN)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"▁{index}" for index in range(VOCAB_SIZE - 3))]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * VOCAB_SIZE)
    writer.add_token_types([2, 3, 3] + [1] * (VOCAB_SIZE - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = (random.standard_normal((rows, columns)) * _SCALE).astype(np.float32)
        if quantisation is None:
            writer.add_tensor(f"{name}.weight", values)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, quantisation), raw_dtype=quantisation)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(_HIDDEN, dtype=np.float32))

    kv_width = _HIDDEN // _HEADS * _KV_HEADS
    matrix("token_embd", VOCAB_SIZE, _HIDDEN)
    for layer in range(_LAYERS):
        norm(f"blk.{layer}.attn_norm")
        matrix(f"blk.{layer}.attn_q", _HIDDEN, _HIDDEN)
        matrix(f"blk.{layer}.attn_k", kv_width, _HIDDEN)
        matrix(f"blk.{layer}.attn_v", kv_width, _HIDDEN)
        matrix(f"blk.{layer}.attn_output", _HIDDEN, _HIDDEN)
        norm(f"blk.{layer}.ffn_norm")
        matrix(f"blk.{layer}.ffn_gate", _FEED_FORWARD, _HIDDEN)
        matrix(f"blk.{layer}.ffn_up", _FEED_FORWARD, _HIDDEN)
        matrix(f"blk.{layer}.ffn_down", _HIDDEN, _FEED_FORWARD)
    norm("output_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
