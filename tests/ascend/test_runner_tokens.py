"""The Ascend runner gives the tokens of transformers, however a request is cut into steps, eager and replayed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from ascend_sim.interpreter import recorded_calls
from driving import FAMILIES, make_checkpoint, open_cpu, open_npu, prompts_of, torch_driving
from runnerd_spi import SamplingParams

# The wheel says once per process that it makes plain tensors, which is what is wanted.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format:UserWarning")

LENGTHS = [1, 3, 17, 128, 131]
NUM_TOKENS = 8


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models"), "LlamaConfig")


def greedy(model: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Give what transformers generates."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens.append(output[0, len(prompt) :].tolist())
    return tokens


WAYS = {"fused": ("fused", True), "graphs": ("fused", False), "transformers": ("transformers", True)}


@pytest.mark.parametrize(("model_impl", "enforce_eager"), WAYS.values(), ids=WAYS)
def test_a_mixed_batch_gives_the_tokens_of_transformers(family, model_impl, enforce_eager):
    prompts = prompts_of(LENGTHS)
    expected = greedy(family, prompts, NUM_TOKENS)
    options = {"model_impl": model_impl}
    with open_npu(family, options, enforce_eager=enforce_eager, max_in_flight=2, max_num_batched_tokens=300) as driver:
        assert driver.generate(prompts, NUM_TOKENS) == expected
        assert driver.generate(prompts, NUM_TOKENS, chunk=50) == expected


def test_the_torch_attention_gives_the_same_tokens(llama):
    prompts = prompts_of(LENGTHS)
    with open_npu(llama, {"attention": "torch"}, max_in_flight=2) as driver:
        assert driver.generate(prompts, NUM_TOKENS, chunk=60) == greedy(llama, prompts, NUM_TOKENS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_half_precision_runs_and_graphs_change_nothing(llama, dtype, enforce_eager):
    prompts = prompts_of(LENGTHS)
    results = []
    for depth in (1, 3):
        with open_npu(llama, dtype=dtype, enforce_eager=enforce_eager, max_in_flight=depth) as driver:
            results.append(driver.generate(prompts, NUM_TOKENS))
    assert results[0] == results[1]
    assert all(0 <= token < 160 for tokens in results[0] for token in tokens)


@pytest.mark.parametrize("block_size", [256, 512])
def test_the_block_size_does_not_change_tokens(llama, block_size):
    prompts = prompts_of([1, 250, 40])
    expected = greedy(llama, prompts, 12)
    with open_npu(llama, block_size=block_size, num_blocks=8) as driver:
        assert driver.generate(prompts, 12, chunk=80) == expected


def test_what_sampling_gives_is_what_it_gives_on_the_cpu(llama):
    asked = [
        SamplingParams(temperature=0.9, seed=11, num_logprobs=2),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=5, repetition_penalty=1.3),
        SamplingParams(temperature=1.2, min_p=0.05, seed=8, presence_penalty=0.5, frequency_penalty=0.5),
        SamplingParams(temperature=0.0, bad_words_token_ids=((7,), (8, 9)), min_tokens=4, stop_token_ids=(10, 11)),
        SamplingParams(temperature=1.0, top_p=0.8, seed=3, logit_bias={5: 3.0}, num_prompt_logprobs=1),
        SamplingParams(temperature=1.0, seed=4, allowed_token_ids=tuple(range(0, 160, 3))),
    ]

    def run(driver) -> list:
        requests = [
            torch_driving.Request(prompt, 12, params)
            for prompt, params in zip(prompts_of([4, 130, 9, 14, 19, 24]), asked, strict=True)
        ]
        for one in requests:
            driver.admit(one)
        driver.run(requests, 70)
        return requests

    with open_cpu(llama) as cpu, open_npu(llama, max_in_flight=3) as npu:
        expected, requests = run(cpu), run(npu)
    for request, other in zip(requests, expected, strict=True):
        assert request.token_ids == other.token_ids
        for mine, theirs in zip(request.outputs, other.outputs, strict=True):
            assert mine.failure is theirs.failure is None
            assert (mine.logprobs is None) == (theirs.logprobs is None)
            if mine.logprobs is not None and theirs.logprobs is not None:
                assert mine.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)
                assert [token for token, _ in mine.logprobs.top] == [token for token, _ in theirs.logprobs.top]
        mine, theirs = request.prompt_logprobs, other.prompt_logprobs
        assert [one.token_id for one in mine] == [one.token_id for one in theirs]
        assert [one.logprob for one in mine] == pytest.approx([one.logprob for one in theirs], abs=1e-4)


MODES = [("0", True), ("1", True), ("2", True), ("0", False), ("1", False)]


@pytest.mark.parametrize(
    ("task_queue", "enforce_eager"), MODES, ids=[f"queue{queue}-{'eager' if e else 'graphs'}" for queue, e in MODES]
)
def test_delays_and_task_queues_change_no_token(llama, task_queue, enforce_eager):
    prompts = prompts_of([1, 20, 131])
    program = (
        "import json, sys; from pathlib import Path; from driving import open_npu, prompts_of\n"
        f"with open_npu(Path({str(llama)!r}), enforce_eager={enforce_eager}, max_in_flight=4) as driver:\n"
        "    print(json.dumps(driver.generate(prompts_of([1, 20, 131]), 6, chunk=70)))"
    )
    delays = {"ASCEND_SIM_COPY_US": "8000", "ASCEND_SIM_OP_US": "50", "TASK_QUEUE_ENABLE": task_queue}
    finished = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | delays, capture_output=True, text=True, timeout=100
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert json.loads(finished.stdout.splitlines()[-1]) == greedy(llama, prompts, 6)


def test_cann_s_truncation_gives_the_same_tokens_at_each_depth(llama):
    def run(depth: int) -> list[list[int]]:
        with open_npu(llama, {"fused_top_k_top_p": True}, max_in_flight=depth) as driver:
            requests = [
                torch_driving.Request(prompt, 8, SamplingParams(top_k=7, top_p=0.9, seed=seed))
                for seed, prompt in enumerate(prompts_of([4, 130, 9]))
            ]
            for one in requests:
                driver.admit(one)
            driver.run(requests, 70)
        return [one.token_ids for one in requests]

    with recorded_calls() as calls:
        tokens = run(1)
    assert sum("ApplyTopKTopP" in call for call in calls) >= 8
    assert run(3) == tokens
