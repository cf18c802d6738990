"""Measures what steps hold beside weights and KV cache, by the largest step that the configuration allows.

It decides what is run; the device measures. It knows nothing of budgets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from runnerd_spi import Admit, BlockGrant, ModelLoadError, Row, RunnerConfig, SamplingParams, StepFailed, StepPlan
from runnerd_torch.attention import PagedAttention
from runnerd_torch.devices.base import Device
from runnerd_torch.launching import StepLauncher
from runnerd_torch.loading import LoadedModel
from runnerd_torch.memory import block_bytes


def measure_step_bytes(
    config: RunnerConfig, device: Device, loaded: LoadedModel, attention: PagedAttention, max_logprobs: int
) -> int | None:
    """Run the largest step and give the most bytes it holds beside weights and KV cache; None: they are not counted.

    Raises:
        ModelLoadError: The step does not fit into the device's memory.
    """
    step = LargestStep(config, loaded.info.max_model_len, max_logprobs)

    def run() -> None:
        launcher = StepLauncher(config, device, loaded, attention, step.num_blocks, max_logprobs)
        for plan in step.plans():
            launcher.launch(plan, time.monotonic_ns()).result()

    try:
        peak = device.peak_bytes(run)
    except (StepFailed, torch.OutOfMemoryError) as error:
        cause = error.__cause__ if isinstance(error, StepFailed) else error
        if not isinstance(cause, torch.OutOfMemoryError):
            raise
        raise ModelLoadError(
            f"{loaded.info.name}: a step of {config.max_num_batched_tokens} tokens in {config.max_num_seqs} sequences "
            f"of up to {loaded.info.max_model_len} does not fit into the memory of {device.description} beside the "
            "weights; lower --max-num-batched-tokens, --max-num-seqs or --max-model-len"
        ) from error
    if peak is None:
        return None
    return peak - step.num_blocks * block_bytes(loaded.shape.layers, config.block_size, loaded.shape.dtype)


@dataclass(frozen=True, slots=True)
class LargestStep:
    """One prompt's last chunk beside requests that decode, all as long as a request may be, all sampled.

    Args:
        config: The runner's configuration.
        max_model_len: Most tokens of a request.
        max_logprobs: Most alternatives a request may ask for.
    """

    config: RunnerConfig
    max_model_len: int
    max_logprobs: int

    @property
    def num_blocks(self) -> int:
        """Blocks it needs: what lies before the new tokens is the same block again and again."""
        return 1 + sum(self._num_written_blocks(count) for count in self._new_tokens())

    def plans(self) -> Iterator[StepPlan]:
        """Give the plans, from step 0 on; the last one is the step. There is none where a request cannot sample."""
        if self.max_model_len < 2:
            return
        length = self.max_model_len - 1
        new_tokens = self._new_tokens()
        # All that sampling can be asked for at once, in the way that sorts the whole vocabulary.
        params = SamplingParams(
            temperature=1.0,
            top_p=0.9,
            repetition_penalty=1.1,
            presence_penalty=0.1,
            frequency_penalty=0.1,
            num_logprobs=self.max_logprobs,
            num_prompt_logprobs=self.max_logprobs,
        )
        token_ids = (0,) * length
        # One at a time: how many tokens enter the table at once is another matter.
        for slot in range(len(new_tokens)):
            yield StepPlan(slot, admits=(Admit(slot, 0, token_ids, length, params),))
        yield StepPlan(
            len(new_tokens),
            grants=tuple(self._grants(new_tokens, length)),
            rows=tuple(Row(slot, 0, count, length - count, sample=True) for slot, count in enumerate(new_tokens)),
        )

    def _new_tokens(self) -> list[int]:
        left = self.config.max_num_batched_tokens
        num_rows = min(self.config.max_num_seqs, left)
        counts: list[int] = []
        for row in range(num_rows):
            counts.append(min(left - (num_rows - 1 - row), max(self.max_model_len - 1, 1)))
            left -= counts[-1]
        return counts

    def _grants(self, new_tokens: list[int], length: int) -> Iterator[BlockGrant]:
        num_blocks = -(-length // self.config.block_size)
        next_block = 1
        for slot, count in enumerate(new_tokens):
            written = min(self._num_written_blocks(count), num_blocks)
            block_ids = (0,) * (num_blocks - written) + tuple(range(next_block, next_block + written))
            next_block += written
            yield BlockGrant(slot, 0, block_ids)

    def _num_written_blocks(self, count: int) -> int:
        return -(-count // self.config.block_size) + 1
