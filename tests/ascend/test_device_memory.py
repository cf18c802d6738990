"""What steps need is measured on the device: a larger step leaves less for the KV cache, and the rest can be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from driving import make_checkpoint
from runnerd_spi import KVBudget, RunnerConfig
from runnerd_torch.ascend.plugin import ASCEND

BLOCK_SIZE = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A vocabulary that makes the logits of a step outweigh all else.
    return make_checkpoint(tmp_path_factory.mktemp("models"), "LlamaConfig", vocab_size=8000)


def measure(model: Path, max_num_batched_tokens: int, attention: str) -> tuple[KVBudget, int]:
    """Give the budget, and what was left of it when all its blocks were allocated and a step had run."""
    config = RunnerConfig(
        max_num_seqs=2,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=BLOCK_SIZE,
        model=str(model),
        dtype="bfloat16",
        max_model_len=512,
        memory_fraction=0.05,
        enforce_eager=True,
        options={"attention": attention},
    )
    runner = ASCEND.create(config)
    try:
        runner.load(lambda stage, done, total: None)
        budget = runner.profile()
        runner.init_kv_cache(budget.available_bytes // budget.bytes_per_block)
        runner.warm_up()
        return budget, torch.accelerator.memory_allocated()
    finally:
        runner.close()


@pytest.mark.parametrize("attention", ["fused", "torch"])
def test_a_larger_step_leaves_less_for_the_kv_cache(model: Path, attention: str) -> None:
    small, _ = measure(model, 16, attention)
    large, allocated = measure(model, 400, attention)
    # The logits of 384 more prompt positions, in bfloat16.
    assert small.available_bytes - large.available_bytes >= 384 * 8000 * 2
    assert 0 < large.available_bytes < allocated <= 0.05 * (4 << 30)
