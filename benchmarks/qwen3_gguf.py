"""A Qwen3 checkpoint (safetensors, bfloat16) as a GGUF file for llama.cpp, with the embedded model's tokenizer."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import torch
from checkpoints import embedded_model
from safetensors.torch import load_file


def add_hyperparameters(writer: gguf.GGUFWriter, config: dict[str, object]) -> None:
    """Add the shape of the model."""
    rope = config["rope_parameters"]
    assert isinstance(rope, dict)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Add the embedded model's tokenizer, filled up to the size of the vocabulary."""
    fields = gguf.GGUFReader(embedded_model()).fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    types: list[int] = fields["tokenizer.ggml.token_type"].contents()
    missing = range(len(tokens), vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *(f"[PAD{index}]" for index in missing)])
    writer.add_token_types([*types, *(gguf.TokenType.UNUSED for _ in missing)])
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    writer.add_eos_token_id(fields["tokenizer.ggml.eos_token_id"].contents())
    writer.add_add_bos_token(False)


def add_tensors(writer: gguf.GGUFWriter, checkpoint: Path, num_layers: int) -> None:
    """Add the weights: matrices in bfloat16, vectors in float32, as llama.cpp wants them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, num_layers)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name == "lm_head.weight":  # the embeddings once more
            continue
        target = names.get_name(name, try_suffixes=(".weight",))
        if tensor.ndim == 1:
            writer.add_tensor(target, tensor.float().numpy())
        else:
            as_bytes = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(target, as_bytes, raw_dtype=gguf.GGMLQuantizationType.BF16)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    config = json.loads((given.checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(given.target, "qwen3")
    writer.add_name(given.checkpoint.name)
    add_hyperparameters(writer, config)
    add_tokenizer(writer, config["vocab_size"])
    add_tensors(writer, given.checkpoint, config["num_hidden_layers"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
