"""The runner's tokens are those of transformers' own generate, however a request is cut into steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import transformers

FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama_tied_no_gqa": ("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama_biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama3_rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
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


@pytest.mark.parametrize(
    "options",
    [{"model_impl": "transformers"}, {"linear": "torch"}, {}],
    ids=["transformers", "torch_linear", "default"],
)
def test_a_mixed_batch_gives_the_tokens_of_transformers_in_chunks_of_any_size(family, options, open_runner, greedy):
    oracle = transformers.AutoModelForCausalLM.from_pretrained(family).eval()
    prompts = prompts_of([1, 3, 8, 17, 30])
    expected = [greedy(oracle, prompt, 12) for prompt in prompts]
    driver = open_runner(family, options=options)
    assert driver.generate(prompts, 12) == expected
    assert driver.generate(prompts, 12, chunk=1) == expected
    assert driver.generate(prompts, 12, chunk=7) == expected


@pytest.fixture(scope="module")
def llama(make_checkpoint) -> Path:
    return make_checkpoint("LlamaConfig")


@pytest.fixture(scope="module")
def llama_oracle(llama) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(llama).eval()


@pytest.mark.parametrize("attention", ["torch", "auto"])
def test_every_attention_kernel_gives_the_same_tokens(attention, llama, llama_oracle, open_runner, greedy):
    prompts = prompts_of([2, 9, 33])
    driver = open_runner(llama, options={"attention": attention})
    assert driver.generate(prompts, 20, chunk=5) == [greedy(llama_oracle, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("block_size", [1, 16])
def test_the_block_size_does_not_change_tokens(block_size, llama, llama_oracle, open_runner, greedy):
    prompts = prompts_of([1, 16, 31])
    driver = open_runner(llama, block_size=block_size)
    assert driver.generate(prompts, 18, chunk=8) == [greedy(llama_oracle, prompt, 18) for prompt in prompts]


def test_requests_that_arrive_during_decoding_change_no_token(llama, llama_oracle, open_runner, greedy, request_type):
    prompts = prompts_of([4, 11, 6])
    driver = open_runner(llama, max_in_flight=2)
    running, launched = [], []
    for prompt in prompts:
        running.append(request_type(prompt, 10))
        driver.admit(running[-1])
        launched += [driver.step(running, chunk=4) for _ in range(3)]
    for handle, computing in launched:
        driver.take(handle, computing)
    driver.run(running)
    for request in running:
        assert request.token_ids[:10] == greedy(llama_oracle, request.prompt, 10)


def test_blocks_of_a_shared_prefix_serve_a_second_request(llama, llama_oracle, open_runner, greedy, request_type):
    first_prompt, tail = prompts_of([14, 5])
    driver = open_runner(llama)
    first = request_type(first_prompt, 3)
    driver.admit(first)
    driver.run([first])
    # Twelve tokens are three whole blocks; the two requests agree on them.
    second = request_type(first_prompt[:12] + tail, 12, shared_blocks=first.blocks[:3])
    driver.admit(second)
    handle, computing = driver.step([first, second])
    assert [row.failure for row in handle.result(60).rows] == [None, None]
    driver.take(handle, computing)
    driver.run([second])
    assert second.token_ids == greedy(llama_oracle, second.prompt, 12)


def test_a_preempted_request_resumes_with_the_same_tokens(llama, llama_oracle, open_runner, greedy, request_type):
    prompt, other = prompts_of([9, 20])
    driver = open_runner(llama, max_in_flight=2)
    preempted, staying = request_type(prompt, 5), request_type(other, 12)
    driver.admit(preempted)
    driver.admit(staying)
    driver.run([preempted])
    driver.release(preempted)
    preempted.max_tokens = 12
    driver.admit(preempted)
    driver.run([preempted, staying], chunk=6)
    assert preempted.token_ids == greedy(llama_oracle, prompt, 12)
    assert staying.token_ids == greedy(llama_oracle, other, 12)


def test_a_slot_is_reused_while_its_former_step_still_runs(llama, llama_oracle, open_runner, greedy, request_type):
    prompts = prompts_of([5, 13, 8])
    driver = open_runner(llama, max_num_seqs=1, max_in_flight=4)
    requests, launched = [request_type(prompt, 1) for prompt in prompts], []
    for request in requests:
        driver.admit(request)
        launched.append(driver.step([request]))
        driver.release(request)
    for handle, computing in launched:
        driver.take(handle, computing)
    assert [one.token_ids for one in requests] == [greedy(llama_oracle, prompt, 1) for prompt in prompts]


def test_smollm2_gives_the_tokens_of_transformers(smollm2, smollm2_oracle, greedy):
    prompts = prompts_of([3, 40], vocab_size=49152)
    assert smollm2.generate(prompts, 8, chunk=24) == [greedy(smollm2_oracle, prompt, 8) for prompt in prompts]
