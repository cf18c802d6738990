"""The runner's tokens are those of transformers' own generate, however a request is cut into steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import transformers

FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama_tied_no_gqa": ("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral_window": ("MistralConfig", {"sliding_window": 5}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": 5,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gpt2": ("GPT2Config", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 2.0, "attention_multiplier": 0.3}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, make_checkpoint) -> Path:
    config_class, settings = FAMILIES[request.param]
    return make_checkpoint(config_class, **settings)


def prompts_of(lengths: list[int], vocab_size: int = 160) -> list[list[int]]:
    dice = random.Random(7)
    return [[dice.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def test_a_mixed_batch_gives_the_tokens_of_transformers_in_chunks_of_any_size(family, open_runner, greedy):
    oracle = transformers.AutoModelForCausalLM.from_pretrained(family).eval()
    prompts = prompts_of([1, 3, 8, 17, 30])
    expected = [greedy(oracle, prompt, 12) for prompt in prompts]
    driver = open_runner(family)
    assert driver.generate(prompts, 12) == expected
    assert driver.generate(prompts, 12, chunk=1) == expected
    assert driver.generate(prompts, 12, chunk=7) == expected
