"""Nothing in the device part of the sampler makes the host wait, whichever features a batch uses."""

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runnerd_spi import Admit, SamplingParams
from runnerd_torch.sampling import Sampler, SampleRow, SamplingBatch
from runnerd_torch.sampling.planner import MAX_TOP_K_CANDIDATES

VOCAB_SIZE = MAX_TOP_K_CANDIDATES + 500
MAX_MODEL_LEN = 12

WAITING = {
    "_local_scalar_dense",
    "allclose",
    "argwhere",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "multinomial",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
    "_unique",
    "_unique2",
}

FEATURES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 5},
    "large top_k": {"temperature": 0.8, "top_k": MAX_TOP_K_CANDIDATES + 1},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.2},
    "presence": {"presence_penalty": 0.4, "frequency_penalty": 0.1},
    "bias": {"logit_bias": {3: 1.0}},
    "allowed": {"allowed_token_ids": tuple(range(100))},
    "bad words": {"bad_words_token_ids": ((4,), (1, 2, 3), (1, 5))},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (0, 1)},
    "logprobs": {"num_logprobs": 4},
}


class NoHostWait(TorchDispatchMode):
    """Raises at an operation that reads device values on the host, or whose shape depends on them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITING or (name.startswith(("index", "_index")) and has_mask(args)):
            raise AssertionError(f"{func} makes the host wait")
        return func(*args, **(kwargs or {}))


def has_mask(args: tuple[Any, ...]) -> bool:
    indices = [one for arg in args if isinstance(arg, list | tuple) for one in arg]
    return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indices)


def params_of(names: tuple[str, ...]) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": 0.0}
    for name in names:
        fields |= FEATURES[name]
    return SamplingParams(**fields)


def feature_sets(largest: int) -> Iterator[tuple[str, ...]]:
    """Give all sets of up to ``largest`` features, and the set of all."""
    for size in (*range(largest + 1), len(FEATURES)):
        yield from combinations(FEATURES, size)


def planned(all_params: list[SamplingParams]) -> SamplingBatch:
    sampler = Sampler(len(all_params), MAX_MODEL_LEN, VOCAB_SIZE)
    for slot, params in enumerate(all_params):
        sampler.admit(Admit(slot, 0, (1, 2), 2, params))
    return sampler.plan([SampleRow(slot, 0, 4) for slot in range(len(all_params))])


def test_no_feature_combination_makes_the_host_wait() -> None:
    # A greedy row beside each makes the batch mixed.
    batches = [planned([params_of(names), SamplingParams(temperature=0)]) for names in feature_sets(3)]
    batches.append(planned([params_of((name,)) for name in FEATURES] * 2))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2 * len(FEATURES), VOCAB_SIZE, generator=generator)
    table = torch.randint(6, (2 * len(FEATURES), MAX_MODEL_LEN), generator=generator)
    with NoHostWait():
        for batch in batches:
            sampler = Sampler(batch.num_rows, MAX_MODEL_LEN, VOCAB_SIZE)
            sampler.sample(logits[: batch.num_rows], batch, table[: batch.num_rows])
        sampler.prompt_logprobs(logits, table[:, 0], 3)


def test_every_shape_is_known_without_any_values() -> None:
    # A tensor on the meta device has a shape and no values: whatever would need them raises.
    meta = torch.device("meta")
    for names in feature_sets(2):
        batch = planned([params_of(names), SamplingParams(temperature=0)])
        sampler = Sampler(2, MAX_MODEL_LEN, VOCAB_SIZE)
        logits = torch.empty(2, VOCAB_SIZE, device=meta)
        table = torch.empty(2, MAX_MODEL_LEN, dtype=torch.int64, device=meta)
        if batch.buffer is not None:
            batch = batch.on(batch.buffer.to(meta))
        sampled = sampler.sample(logits, batch, table)
        assert sampled.token_ids.shape == (2,)
        if "logprobs" in names:
            assert sampled.logprobs is not None
            assert sampled.logprobs.top_ids.shape == (1, 4)


def test_a_plain_greedy_batch_is_one_argmax_and_needs_no_arrays() -> None:
    batch = planned([SamplingParams(temperature=0, top_k=3, top_p=0.5)] * 3)
    assert batch == SamplingBatch(3, None, None)


@pytest.mark.parametrize(
    "waiting",
    [
        lambda tensor: tensor[0].item(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: torch.nonzero(tensor),
        lambda tensor: torch.masked_select(tensor, tensor > 0),
        lambda tensor: torch.multinomial(tensor, 1),
        lambda tensor: bool(tensor[0] > 0),
        lambda tensor: torch.equal(tensor, tensor + 1),
        lambda tensor: tensor.index_put_((tensor > 0,), torch.tensor(0.0)),
        lambda tensor: torch.unique(tensor),
    ],
)
def test_the_watch_notices_what_makes_a_host_wait(waiting: Callable[[torch.Tensor], object]) -> None:
    with NoHostWait(), pytest.raises(AssertionError, match="makes the host wait"):
        waiting(torch.ones(4))
