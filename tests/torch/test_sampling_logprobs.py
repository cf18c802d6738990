import pytest
import torch

from runnerd_spi import Admit, SamplingParams
from runnerd_torch.sampling import LogprobTensors, Sampler, SampleRow, row_outputs, token_logprobs
from runnerd_torch.sampling.logprobs import compute_logprobs


def test_logprobs_are_those_of_the_raw_logits() -> None:
    params = SamplingParams(
        temperature=0, logit_bias={0: 50.0}, repetition_penalty=2.0, allowed_token_ids=(0, 1), num_logprobs=3
    )
    sampler = Sampler(1, 4, 5)
    sampler.admit(Admit(0, 0, (4,), 1, params))
    batch = sampler.plan([SampleRow(0, 0, 0)])
    logits = torch.tensor([[0.5, 3.0, -1.0, 2.0, 4.0]])
    (output,) = row_outputs(batch, sampler.sample(logits, batch, torch.full((1, 4), 4)))
    expected = torch.log_softmax(logits[0], 0).tolist()
    assert output.logprobs is not None
    assert output.token_id == output.logprobs.token_id == 0
    assert output.logprobs.rank == 4
    assert output.logprobs.logprob == pytest.approx(expected[0])
    assert [token_id for token_id, _ in output.logprobs.top] == [4, 1, 3]
    assert [logprob for _, logprob in output.logprobs.top] == pytest.approx([expected[4], expected[1], expected[3]])


def test_each_row_gets_as_many_alternatives_as_it_asked_for() -> None:
    asked = [None, 0, 4, None, 2, 100]
    sampler = Sampler(len(asked), 4, 7)
    for slot, num_logprobs in enumerate(asked):
        sampler.admit(Admit(slot, 0, (1,), 1, SamplingParams(num_logprobs=num_logprobs, seed=slot)))
    batch = sampler.plan([SampleRow(slot, 0, 0) for slot in range(len(asked))])
    logits = torch.randn(len(asked), 7, generator=torch.Generator().manual_seed(0))
    sampled = sampler.sample(logits, batch, torch.ones(len(asked), 4, dtype=torch.int64))
    outputs = row_outputs(batch, sampled)
    assert [None if one.logprobs is None else len(one.logprobs.top) for one in outputs] == [None, 0, 4, None, 2, 7]
    assert [one.token_id for one in outputs] == sampled.token_ids.tolist()


def test_equal_logits_share_a_rank_and_list_the_lower_id_first() -> None:
    logits = torch.tensor([[2.0, 1.0, 2.0, 1.0, 0.0]])
    records = [token_logprobs(compute_logprobs(logits, torch.tensor([token]), 4))[0] for token in range(5)]
    assert [record.rank for record in records] == [1, 3, 1, 3, 5]
    assert [token_id for token_id, _ in records[0].top] == [0, 2, 1, 3]


def test_prompt_logprobs_of_many_positions_are_those_of_each_alone() -> None:
    vocab_size, num_positions = 60_000, 150  # more than one part
    sampler = Sampler(1, 4, vocab_size)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_positions, vocab_size, generator=generator).bfloat16()
    token_ids = torch.randint(vocab_size, (num_positions,), generator=generator)
    records = token_logprobs(sampler.prompt_logprobs(logits, token_ids, 2))
    assert len(records) == num_positions
    for position in (0, 1, 68, 69, 70, 149):
        alone = sampler.prompt_logprobs(logits[position : position + 1], token_ids[position : position + 1], 2)
        assert token_logprobs(alone) == (records[position],)
        expected = torch.log_softmax(logits[position].float(), 0)[token_ids[position]].item()
        assert records[position].logprob == pytest.approx(expected)


def test_no_positions_give_no_records() -> None:
    sampler = Sampler(1, 4, 9)
    assert token_logprobs(sampler.prompt_logprobs(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), 3)) == ()


def test_map_copies_every_tensor() -> None:
    tensors = compute_logprobs(torch.randn(3, 9), torch.tensor([1, 2, 3]), 2)
    copied: list[torch.Tensor] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor)
        return tensor.clone()

    mapped: LogprobTensors = tensors.map(copy)
    assert len(copied) == 5
    assert token_logprobs(mapped) == token_logprobs(tensors)
