"""What a step holds is measured by running the largest one, where the device can count; the budget follows from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from runnerd_spi import KVBudget, ModelLoadError, PlanChecker, RunnerConfig, StepFailed
from runnerd_torch.attention import AttentionMetadata, build_attention
from runnerd_torch.attention.torch_attention import TorchPagedAttention
from runnerd_torch.devices.base import MemoryInfo
from runnerd_torch.devices.cpu import CpuDevice
from runnerd_torch.linear import build_linear
from runnerd_torch.profiling import LargestStep
from runnerd_torch.runner import TorchModelRunner

FREE_BYTES = 1 << 30
PEAK_BYTES = 100 << 20


class CountingDevice(CpuDevice):
    """The CPU with memory of a known size, of which a step is said to hold a known part."""

    def __init__(self) -> None:
        super().__init__(1)
        self.num_runs = 0

    def memory(self) -> MemoryInfo:
        return MemoryInfo(FREE_BYTES, FREE_BYTES)

    def peak_bytes(self, run: Callable[[], None]) -> int | None:
        run()
        self.num_runs += 1
        return PEAK_BYTES


class SmallDevice(CpuDevice):
    """Has no room for the step."""

    def peak_bytes(self, run: Callable[[], None]) -> int | None:
        raise torch.OutOfMemoryError("no memory")


class WatchingAttention(TorchPagedAttention):
    """Notes the sizes of the steps that it computes, and fails when told so."""

    def __init__(self) -> None:
        self.seen: list[AttentionMetadata] = []
        self.error: Exception | None = None

    def write(self, *arguments: object) -> None:
        if self.error is not None:
            raise self.error
        self.seen.append(arguments[-1])
        super().write(*arguments)


@pytest.fixture(scope="module")
def model(make_checkpoint) -> Path:
    return make_checkpoint("LlamaConfig")


def config_of(model: Path, **settings: object) -> RunnerConfig:
    defaults = {"max_num_seqs": 6, "max_num_batched_tokens": 40, "block_size": 4, "max_model_len": 64}
    return RunnerConfig(model=str(model), dtype="float32", **(defaults | settings))


def profile(config: RunnerConfig, device: CpuDevice, attention: TorchPagedAttention) -> tuple[KVBudget, int]:
    """Give the budget and the size of the weights."""
    runner = TorchModelRunner(config, device, lambda: attention, partial(build_linear, "torch"), 5)
    try:
        info = runner.load(lambda stage, done, total: None)
        return runner.profile(), info.weights_bytes
    finally:
        runner.close()


def test_the_kv_cache_gets_what_weights_and_the_measured_step_leave(model: Path) -> None:
    device, config = CountingDevice(), config_of(model)
    budget, weights_bytes = profile(config, device, build_attention("torch"))
    assert device.num_runs == 1
    # The step's own KV cache is no part of what it holds beside the KV cache.
    own = LargestStep(config, 64, 5).num_blocks * budget.bytes_per_block
    assert budget.available_bytes == int(FREE_BYTES * config.memory_fraction) - weights_bytes - PEAK_BYTES + own


def test_nothing_is_measured_when_the_operator_gave_the_size(model: Path) -> None:
    device = CountingDevice()
    budget, _ = profile(config_of(model, memory_bytes=1 << 20), device, build_attention("torch"))
    assert (device.num_runs, budget.available_bytes) == (0, 1 << 20)


def test_the_measured_step_is_as_large_as_a_step_can_be(model: Path) -> None:
    attention = WatchingAttention()
    profile(config_of(model), CountingDevice(), attention)
    step = attention.seen[-1]
    assert (step.num_rows, step.max_query_len, step.slot_mapping.shape[0]) == (6, 35, 40)
    assert step.seq_lens_cpu.tolist() == [63] * 6
    # Kernels may demand that no two new tokens go to one place.
    assert len(set(step.slot_mapping.tolist())) == 40


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len"),
    [
        (1, 1, 1, 2),
        (1, 512, 128, 64),
        (8, 4, 16, 64),
        (3, 200, 16, 64),
        (256, 512, 16, 40),
        (4, 40, 4, 1),
        (2, 9, 1, 5),
    ],
)
def test_the_largest_step_keeps_the_contract_of_plans(
    max_num_seqs: int, max_num_batched_tokens: int, block_size: int, max_model_len: int
) -> None:
    config = RunnerConfig(max_num_seqs, max_num_batched_tokens, block_size)
    step = LargestStep(config, max_model_len, 5)
    checker = PlanChecker(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=step.num_blocks,
        vocab_size=160,
    )
    plans = list(step.plans())
    for plan in plans:
        checker.apply(plan)
    if max_model_len > 1:
        rows = plans[-1].rows
        assert len(rows) == min(max_num_seqs, max_num_batched_tokens)
        assert sum(row.num_new_tokens for row in rows) == min(
            max_num_batched_tokens, max_num_seqs * (max_model_len - 1)
        )


def test_a_step_that_does_not_fit_is_refused_with_the_remedy(model: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"a step of 40 tokens in 6 sequences .* lower --max-num-batched-tokens"):
        profile(config_of(model), SmallDevice(1), build_attention("torch"))
    attention = WatchingAttention()
    attention.error = torch.OutOfMemoryError("no memory")
    with pytest.raises(ModelLoadError, match="does not fit into the memory"):
        profile(config_of(model), CountingDevice(), attention)


def test_a_step_that_fails_for_another_reason_says_so(model: Path) -> None:
    attention = WatchingAttention()
    attention.error = ArithmeticError("the kernel was lost")
    with pytest.raises(StepFailed, match="the kernel was lost"):
        profile(config_of(model), CountingDevice(), attention)
