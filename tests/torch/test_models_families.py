"""Decoder families over the generic path give the tokens of transformers' own generate, in chunks and in batches."""

from __future__ import annotations

import random

import pytest
import transformers


def rope(kind: str, **more: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0} | more}


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES = {
    "llama_linear_rope": ("LlamaConfig", rope("linear", factor=3.0)),
    "llama_dynamic_rope": ("LlamaConfig", rope("dynamic", factor=3.0)),
    "llama_one_kv_head_of_odd_heads": (
        "LlamaConfig",
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24},
    ),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2_yarn": ("Qwen2Config", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "qwen3_window": ("Qwen3Config", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "mistral3": ("Ministral3Config", {}),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "phi": ("PhiConfig", {"head_dim": 8}),
    "phi3_partial_rotary_window": (
        "Phi3Config",
        {"head_dim": 8, "sliding_window": 6, **rope("default", partial_rotary_factor=0.5)},
    ),
    "gpt_neox": ("GPTNeoXConfig", {"head_dim": 8}),
    "gpt_neox_sequential": ("GPTNeoXConfig", {"head_dim": 8, "use_parallel_residual": False}),
    "qwen3_moe": ("Qwen3MoeConfig", {**MOE, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2MoeConfig", {**MOE, "shared_expert_intermediate_size": 16}),
    "mixtral_window": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": 5}),
    "olmo2": ("Olmo2Config", {"head_dim": 8}),
    "olmoe": ("OlmoeConfig", {**MOE, "head_dim": 8}),
    "cohere2": ("Cohere2Config", {"sliding_window": 5, "head_dim": 8}),
    "glm4": ("Glm4Config", {}),
    "smollm3": ("SmolLM3Config", {"head_dim": 8, "no_rope_layer_interval": 2}),
    "starcoder2": ("Starcoder2Config", {"head_dim": 8, "sliding_window": 5}),
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_tokens_of_transformers_in_chunks_and_batches(family, make_checkpoint, open_runner, greedy):
    config_class, settings = FAMILIES[family]
    path = make_checkpoint(config_class, **settings)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    dice = random.Random(7)
    prompts = [[dice.randrange(3, 160) for _ in range(length)] for length in (1, 9, 26)]
    expected = [greedy(oracle, prompt, 10) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 3, "the model says too little to tell"
    driver = open_runner(path, options={"model_impl": "transformers"})
    assert driver.generate(prompts, 10) == expected
    assert driver.generate(prompts, 10, chunk=7) == expected
