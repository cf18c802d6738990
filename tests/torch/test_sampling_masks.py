"""Masked rows of the torch sampler choose as if the mask's tokens were the only allowed ones; other rows as ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runnerd_spi import Admit, SamplingParams
from runnerd_torch.sampling import Sampler, SampleRow, row_outputs

MAX_MODEL_LEN = 8
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=1.2),
    "top-k": SamplingParams(temperature=1.0, top_k=5),
    "top-p": SamplingParams(temperature=1.0, top_p=0.7),
    "min-p": SamplingParams(temperature=1.0, min_p=0.1),
    "typical-p": SamplingParams(temperature=1.0, typical_p=0.6),
    "penalties": SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=-0.5),
    "bias": SamplingParams(temperature=0.0, logit_bias={3: 50.0, 4: -50.0}),
    "bad words": SamplingParams(bad_words_token_ids=((6,), (1, 2))),
    "log-probabilities": SamplingParams(num_logprobs=3),
}


def packed(token_ids: list[int], vocab_size: int) -> bytes:
    allowed = bytearray(-(-vocab_size // 8))
    for token_id in token_ids:
        allowed[token_id // 8] |= 1 << token_id % 8
    return bytes(allowed)


def choose(params: list[SamplingParams], masks: list[bytes | None], vocab_size: int) -> list[object]:
    sampler = Sampler(len(params), MAX_MODEL_LEN, vocab_size)
    for slot, one in enumerate(params):
        sampler.admit(Admit(slot, 0, (1, 2, 3), 1, one))
    table = torch.tensor([[1, 2, 3, 0, 0, 0, 0, 0]] * len(params))
    rows = [SampleRow(slot, 0, 2, mask) for slot, mask in enumerate(masks)]
    batch = sampler.plan(rows)
    logits = 3 * torch.randn(len(params), vocab_size, generator=torch.Generator().manual_seed(4))
    before = logits.clone()
    found = row_outputs(batch, sampler.sample(logits, batch, table))
    assert torch.equal(logits, before), "the logits are the caller's"
    return found


@pytest.mark.parametrize("vocab_size", [24, 29, 1001])
@pytest.mark.parametrize("name", PARAMS)
def test_a_mask_does_what_allowed_token_ids_do(name: str, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    params, listed, masks = [], [], []
    for slot in range(9):
        one = replace(PARAMS[name], seed=slot)
        ids = torch.randperm(vocab_size, generator=generator)[: 1 + 3 * slot].sort().values.tolist()
        is_guided = slot % 3 != 1
        params.append(one)
        listed.append(replace(one, allowed_token_ids=tuple(ids)) if is_guided else one)
        masks.append(packed(ids, vocab_size) if is_guided else None)
    assert choose(params, masks, vocab_size) == choose(listed, [None] * 9, vocab_size)


def test_a_mask_of_nothing_fails_its_row_alone() -> None:
    params = [SamplingParams(temperature=float(slot % 2), seed=slot) for slot in range(4)]
    plain = choose(params, [None] * 4, 20)
    masked = choose(params, [None, bytes(3), bytes(3), None], 20)
    assert masked[1].failure is not None
    assert masked[2].failure is not None
    assert (masked[0], masked[3]) == (plain[0], plain[3])
