"""The sampler draws on the NPU exactly what it draws on the CPU: the same ids from the same uniform numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
import torch_npu  # noqa: F401 - brings the device

from ascend_sim.interpreter import recorded_calls
from runnerd_spi import Admit, SamplingParams
from runnerd_torch.ascend.ops import truncate
from runnerd_torch.sampling import SampledTensors, Sampler, SampleRow, Truncate

VOCAB_SIZE, NUM_ROWS, MAX_MODEL_LEN = 1000, 8, 16
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=1.3),
    "top_k": SamplingParams(temperature=0.8, top_k=40),
    "top_p": SamplingParams(temperature=1.0, top_p=0.9),
    "top_k and top_p": SamplingParams(temperature=1.0, top_k=200, top_p=0.7),
    "min_p": SamplingParams(temperature=1.0, min_p=0.05),
    "typical_p": SamplingParams(temperature=1.0, typical_p=0.7),
    "typical_p and top_k": SamplingParams(temperature=1.0, top_k=40, typical_p=0.5),
}


def sample(
    device: str,
    params: SamplingParams,
    truncate: Truncate | None = None,
    dtype: torch.dtype = torch.bfloat16,
    masks: Sequence[bytes | None] = (None,) * NUM_ROWS,
) -> list[SampledTensors]:
    """Choose at ten output indices from wide logits, which have many equals in bfloat16."""
    sampler = Sampler(NUM_ROWS, MAX_MODEL_LEN, VOCAB_SIZE, truncate)
    for slot in range(NUM_ROWS):
        sampler.admit(Admit(slot, 0, (1, 2), 2, dataclasses.replace(params, seed=slot)))
    table = torch.arange(NUM_ROWS * MAX_MODEL_LEN).view(NUM_ROWS, MAX_MODEL_LEN).to(device)
    generator = torch.Generator().manual_seed(3)
    sampled = []
    for index in range(10):
        batch = sampler.plan([SampleRow(slot, 0, index, masks[slot]) for slot in range(NUM_ROWS)])
        if batch.buffer is not None:
            batch = batch.on(batch.buffer.to(device))
        logits = (2 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator)).to(dtype)
        sampled.append(sampler.sample(logits.to(device), batch, table).map(lambda one: one.cpu()))
    return sampled


@pytest.mark.parametrize("name", PARAMS)
def test_the_same_seeds_draw_the_same_tokens(name):
    for expected, actual in zip(sample("cpu", PARAMS[name]), sample("npu", PARAMS[name]), strict=True):
        assert actual.choices.tolist() == expected.choices.tolist()


@pytest.mark.parametrize("name", PARAMS)
def test_masked_rows_draw_the_same_tokens(name):
    masks = [bytes(slot * 31 % 256 for _ in range(125)) if slot % 3 else None for slot in range(NUM_ROWS)]
    steps = zip(*(sample(device, PARAMS[name], masks=masks) for device in ("cpu", "npu")), strict=True)
    for expected, actual in steps:
        assert actual.choices.tolist() == expected.choices.tolist()
        for mask, token_id in zip(masks, actual.token_ids.tolist(), strict=True):
            assert mask is None or mask[token_id // 8] >> token_id % 8 & 1


def test_a_sum_of_more_bits_than_a_float32_keeps_them():
    # The unlikely tokens lie above the last float32 below the sum; only an exact sum reaches them.
    logits = torch.tensor([[0.0] + [-20.0] * 10])
    sampler = Sampler(1, MAX_MODEL_LEN, logits.shape[1])
    sampler.admit(Admit(0, 0, (1, 2), 2, SamplingParams()))
    batch = sampler.plan([SampleRow(0, 0, 0)])
    assert batch.buffer is not None
    assert batch.id_order_draws is not None
    batch.id_order_draws.uniforms.of(batch.buffer).fill_(1 - 2**-53)
    table = torch.zeros(1, MAX_MODEL_LEN, dtype=torch.int64)
    chosen = sampler.sample(logits.to("npu"), batch.on(batch.buffer.to("npu")), table.to("npu"))
    assert chosen.token_ids.tolist() == [10]


@pytest.mark.parametrize("name", PARAMS)
def test_cann_s_truncation_is_used_where_it_is_documented_and_keeps_the_same_tokens(name):
    asked = [
        set(torch.topk(row, PARAMS[name].top_k).indices.tolist()) if PARAMS[name].top_k else set(range(VOCAB_SIZE))
        for row in _logits()
    ]
    with recorded_calls() as calls:
        sampled = sample("npu", PARAMS[name], truncate, torch.float32)
    assert any("ApplyTopKTopP" in call for call in calls) == bool(PARAMS[name].top_k)
    for step, tensors in enumerate(sampled):
        for row, token_id in enumerate(tensors.token_ids.tolist()):
            assert token_id in asked[step * NUM_ROWS + row]


def _logits() -> list[torch.Tensor]:
    """Give the rows that :func:`sample` draws from, in order."""
    generator = torch.Generator().manual_seed(3)
    return [row for _ in range(10) for row in 2 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator)]


def test_cann_s_truncation_draws_with_the_right_probabilities():
    # 3 tokens survive top-k, the last falls to top-p: two remain, 3 to 1.
    logits = torch.log(torch.tensor([[0.02, 0.66, 0.22, 0.0999, 0.0001]]))
    sampler = Sampler(1, 2048, 5, truncate)
    sampler.admit(Admit(0, 0, (1,), 1, SamplingParams(top_k=3, top_p=0.8, seed=5)))
    table = torch.zeros(1, 2048, dtype=torch.int64, device="npu")
    counts = torch.zeros(5)
    for index in range(400):
        batch = sampler.plan([SampleRow(0, 0, index)])
        assert batch.buffer is not None
        chosen = sampler.sample(logits.to("npu"), batch.on(batch.buffer.to("npu")), table)
        counts[int(chosen.token_ids.item())] += 1
    assert counts[[0, 3, 4]].sum() == 0
    assert 0.69 < counts[1] / 400 < 0.81  # 0.75 +- 2.8 standard deviations; the seed is fixed
