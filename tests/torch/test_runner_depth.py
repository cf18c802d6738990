"""Steps in flight change no result; what is asked of sampling reaches it; log-probabilities are the model's."""

from __future__ import annotations

import math
import random

import pytest
import torch
import transformers

from runnerd_spi import SamplingParams

ASKED = (
    SamplingParams(temperature=0.0, num_logprobs=3),
    SamplingParams(temperature=0.9, seed=11, num_logprobs=0),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=5, repetition_penalty=1.3, num_logprobs=2),
    SamplingParams(temperature=1.2, min_p=0.05, seed=8, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, bad_words_token_ids=((7,), (8, 9)), min_tokens=4, stop_token_ids=(10, 11)),
)


@pytest.fixture(scope="module")
def llama(make_checkpoint):
    return make_checkpoint("LlamaConfig")


def run_all(driver, request_type, order=(0, 1, 2, 3, 4), chunk=5):
    dice = random.Random(3)
    prompts = [[dice.randrange(3, 160) for _ in range(4 + 5 * index)] for index in range(len(ASKED))]
    requests = [request_type(prompts[index], 14, ASKED[index]) for index in order]
    for one in requests:
        driver.admit(one)
    driver.run(requests, chunk)
    for one in requests:
        driver.release(one)
    return {index: one.outputs for index, one in zip(order, requests, strict=True)}


def test_depth_changes_neither_tokens_nor_logprobs(llama, open_runner, request_type):
    results = [run_all(open_runner(llama, max_in_flight=depth), request_type) for depth in (1, 2, 3, 4)]
    assert results[1:] == results[:-1]


def test_neither_slots_nor_neighbours_nor_chunks_change_the_tokens(llama, open_runner, request_type):
    expected = run_all(open_runner(llama), request_type)
    order, other = [3, 0, 4, 2, 1], open_runner(llama, max_in_flight=2)
    shuffled = run_all(other, request_type, order, chunk=1000)
    for index, outputs in expected.items():
        assert [one.token_id for one in shuffled[index]] == [one.token_id for one in outputs]


def test_the_batch_around_a_request_changes_no_bit_of_it(make_checkpoint, open_runner, request_type):
    # The kernels compute each row by itself and each sum in one order.
    path = make_checkpoint("LlamaConfig", head_dim=64, hidden_size=72)
    batched, single = open_runner(path), open_runner(path, max_in_flight=2)
    expected = run_all(batched, request_type)
    for index in expected:
        assert run_all(single, request_type, [index], chunk=1) == {index: expected[index]}


def test_logprobs_are_those_of_the_models_own_forward(llama, open_runner, request_type):
    oracle = transformers.AutoModelForCausalLM.from_pretrained(llama).eval()
    driver = open_runner(llama, max_in_flight=2)
    request = request_type([5, 9, 77, 31, 12], 6, SamplingParams(temperature=0.0, num_logprobs=4))
    driver.admit(request)
    driver.run([request])
    with torch.inference_mode():
        logits = oracle(torch.tensor([request.prompt + request.token_ids])).logits[0, 4:-1]
    logprobs = logits.log_softmax(-1)
    for output, position in zip(request.outputs, logprobs, strict=True):
        top = position.topk(4)
        assert output.logprobs.token_id == output.token_id
        assert output.logprobs.rank == 1
        assert output.logprobs.logprob == pytest.approx(position[output.token_id].item(), abs=1e-4)
        assert [token for token, _ in output.logprobs.top] == top.indices.tolist()
        assert [one for _, one in output.logprobs.top] == pytest.approx(top.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_prompt_logprobs_are_those_of_the_models_own_forward(chunk, llama, open_runner, request_type):
    oracle = transformers.AutoModelForCausalLM.from_pretrained(llama).eval()
    driver = open_runner(llama, max_in_flight=2)
    prompt = [5, 9, 77, 31, 12, 100, 3]
    asking = request_type(prompt, 2, SamplingParams(temperature=0.0, num_prompt_logprobs=2))
    silent = request_type(prompt[:3], 2)
    driver.admit(asking)
    driver.admit(silent)
    driver.run([asking, silent], chunk)
    with torch.inference_mode():
        logprobs = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert silent.prompt_logprobs == []
    assert [one.token_id for one in asking.prompt_logprobs] == prompt[1:]
    for record, position in zip(asking.prompt_logprobs, logprobs, strict=False):
        logprob = position[record.token_id].item()
        assert record.logprob == pytest.approx(logprob, abs=1e-4)
        assert record.rank == int((position > position[record.token_id]).sum()) + 1
        assert [token for token, _ in record.top] == position.topk(2).indices.tolist()


def test_a_resumed_request_reports_no_output_token_as_prompt(llama, open_runner, request_type):
    driver = open_runner(llama)
    request = request_type([5, 9, 77], 3, SamplingParams(temperature=0.0, num_prompt_logprobs=0))
    driver.admit(request)
    driver.run([request])
    driver.release(request)
    request.max_tokens, request.prompt_logprobs = 5, []
    driver.admit(request)
    driver.run([request])
    assert [one.token_id for one in request.prompt_logprobs] == [9, 77]


def test_a_row_with_logits_that_are_not_numbers_fails_alone(
    make_checkpoint, llama, tmp_path, open_runner, request_type
):
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        model.get_input_embeddings().weight[50] = math.nan
    model.save_pretrained(tmp_path)
    driver = open_runner(tmp_path, max_in_flight=2)
    bad = request_type([4, 50, 6], 1)
    bad_prompt = request_type([4, 50, 6, 7], 1, SamplingParams(temperature=0.0, num_prompt_logprobs=0))
    good = request_type([4, 5, 6], 4)
    for one in (bad, bad_prompt, good):
        driver.admit(one)
    handle, computing = driver.step([bad, bad_prompt, good], chunk=3)
    driver.take(handle, computing)
    driver.run([good])
    assert "NaN" in bad.outputs[0].failure
    assert bad.outputs[0].token_id is None
    assert "NaN" in bad_prompt.outputs[0].failure
    assert good.token_ids == open_runner(llama).generate([[4, 5, 6]], 4)[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_nearly_the_logprobs_of_float32(dtype, llama, open_runner, request_type):
    oracle = transformers.AutoModelForCausalLM.from_pretrained(llama).eval()
    driver = open_runner(llama, dtype=dtype)
    request = request_type([5, 9, 77, 31], 3, SamplingParams(temperature=0.0, num_logprobs=0))
    driver.admit(request)
    driver.run([request])
    with torch.inference_mode():
        logprobs = oracle(torch.tensor([request.prompt + request.token_ids])).logits[0, 3:-1].log_softmax(-1)
    for output, position in zip(request.outputs, logprobs, strict=True):
        assert output.logprobs.logprob == pytest.approx(position[output.token_id].item(), abs=0.3)
