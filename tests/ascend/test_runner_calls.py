"""What the Ascend runner asks of CANN: the aclnn calls of one step of each kind, for each family, as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_sim.interpreter import recorded_calls
from driving import FAMILIES, make_checkpoint, open_npu, prompts_of, torch_driving

pytestmark = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format:UserWarning")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> tuple[str, Path]:
    return request.param, make_checkpoint(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])


def test_the_calls_of_each_kind_of_step_are_the_known_ones(family, golden):
    name, model = family
    with open_npu(model, dtype="bfloat16", enforce_eager=True, max_in_flight=1) as driver:
        first, second = (torch_driving.Request(prompt, 4) for prompt in prompts_of([5, 150]))
        driver.admit(first)
        kinds = {}
        for kind, requests, chunk in (
            ("prefill", [first], 256),
            ("decode", [first], 256),
            ("chunked", [second], 140),
            ("mixed", [first, second], 256),
        ):
            if kind == "chunked":
                driver.admit(second)
            with recorded_calls() as calls:
                handle, computing = driver.step(requests, chunk)
                driver.take(handle, computing)
            kinds[kind] = list(calls)
    for kind, calls in kinds.items():
        golden(f"{name}-{kind}", calls)


def test_a_replayed_step_gives_the_attention_of_each_layer_its_new_lengths(family):
    _, model = family
    with open_npu(model, dtype="bfloat16", max_in_flight=1) as driver:
        requests = [torch_driving.Request(prompt, 3) for prompt in prompts_of([5, 9, 130])]
        for one in requests:
            driver.admit(one)
        driver.take(*driver.step(requests))
        with recorded_calls() as calls:
            handle, computing = driver.step(requests)
            driver.take(handle, computing)
    attention = [call for call in calls if "FusedInferAttentionScore" in call]
    # Two layers; three rows and one of padding.
    assert len(attention) == 2
    assert all("actual_seq_lengths=[1,2,3,4] actual_seq_lengths_kv=[6,10,131,1]" in call for call in attention), (
        attention
    )
    assert handle.timeline.graph == "replayed"
    # What was captured is replayed, not asked for again.
    assert not [call for call in calls if "RmsNorm" in call or "SwiGlu" in call]


def test_no_call_of_a_step_of_sampling_is_unknown_to_the_contract(family):
    """A step with everything that sampling offers makes no call that CANN does not have."""
    from runnerd_spi import SamplingParams

    _, model = family
    params = SamplingParams(
        temperature=0.8,
        top_k=9,
        top_p=0.9,
        min_p=0.01,
        seed=4,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={5: 1.0},
        allowed_token_ids=tuple(range(100)),
        bad_words_token_ids=((7,), (8, 9)),
        min_tokens=2,
        stop_token_ids=(11,),
        num_logprobs=3,
        num_prompt_logprobs=2,
    )
    with open_npu(model, dtype="bfloat16", enforce_eager=True) as driver:
        request = torch_driving.Request(prompts_of([9])[0], 4, params)
        driver.admit(request)
        with recorded_calls() as calls:
            driver.run([request])
    assert len(request.token_ids) == 4
    assert all(token < 100 and token != 7 for token in request.token_ids)
    assert not [call for call in calls if "NonZero" in call or "Multinomial" in call]
