"""The host side of a step: check the plan, build the step's arrays, launch one closure, settle the oldest step.

It reads no token and waits for no other step than the one whose place is needed. It knows nothing of how the device
runs what it is given.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial

import torch

from runnerd_spi import (
    Admit,
    BlockGrant,
    PlanChecker,
    PlanError,
    Progress,
    Release,
    Row,
    RunnerConfig,
    SamplingParams,
    StepPlan,
    StepTimeline,
)
from runnerd_torch.attention import PagedAttention
from runnerd_torch.devices.base import Device
from runnerd_torch.execution import StepExecutor
from runnerd_torch.graphs import GraphSupport, StepParts
from runnerd_torch.handle import FailureLatch, TorchStepHandle, assemble_output
from runnerd_torch.inputs import SlotArrays
from runnerd_torch.loading import LoadedModel
from runnerd_torch.models import KVCache, LayerSpec
from runnerd_torch.sampling import Sampler, SampleRow, Truncate


class StepLauncher:
    """Launches steps on an initialised KV cache.

    Args:
        config: What the operator chose.
        device: The chip.
        loaded: The model on it.
        attention: The paged attention.
        num_blocks: Blocks of the KV cache, allocated here.
        max_logprobs: Most alternatives a request may ask for.
        graphs: How steps are captured; None: they are not.
        truncate: The chip's own top-k and top-p; None: exact ones.
    """

    def __init__(
        self,
        config: RunnerConfig,
        device: Device,
        loaded: LoadedModel,
        attention: PagedAttention,
        num_blocks: int,
        max_logprobs: int,
        graphs: GraphSupport | None = None,
        truncate: Truncate | None = None,
    ) -> None:
        self._config = config
        self._device = device
        self._num_blocks = num_blocks
        self._max_model_len = loaded.info.max_model_len
        self._vocab_size = loaded.info.vocab_size
        self._max_logprobs = max_logprobs
        self._latch = FailureLatch()
        self._unresolved: deque[TorchStepHandle] = deque()
        table_shape = (config.max_num_seqs, self._max_model_len)
        num_reserved = 0 if graphs is None else graphs.num_reserved_blocks
        caches = _allocate_caches(loaded, device, num_blocks + num_reserved, config.block_size)
        parts = StepParts(device, loaded.model, attention, caches, config.block_size, num_blocks, self._max_model_len)
        self._captured = None if graphs is None else graphs.wrap(parts)
        self._executor = StepExecutor(
            device=device,
            model=loaded.model if self._captured is None else self._captured,
            attention=attention,
            caches=caches,
            block_size=config.block_size,
            sampler=Sampler(*table_shape, self._vocab_size, truncate, loaded.choose),
            token_table=device.zeros(table_shape, torch.int64),
        )
        self._start_empty()

    def launch(self, plan: StepPlan, begin_ns: int) -> TorchStepHandle:
        """Launch a step; settles the oldest one when ``max_in_flight`` are then unresolved.

        Args:
            plan: The step.
            begin_ns: When the caller's call began, ``time.monotonic_ns``.

        Raises:
            PlanError: The plan breaks the contract; nothing was changed.
            StepFailed: An earlier step failed.
        """
        self._latch.check()
        for admit in plan.admits:
            self._check_admit(admit)
        self._checker.apply(plan)
        try:
            handle = self._submit(plan, begin_ns)
        except Exception as error:
            # The plan is half applied; going on would give wrong tokens.
            self._latch.record(plan.step_id, error)
            self._latch.check()
            raise
        self._unresolved.append(handle)
        self._settle()
        return handle

    def warm_up(self, progress: Progress) -> None:
        """Capture graphs, run a prefill and a decode step with several kinds of sampling, then forget them.

        Args:
            progress: Told how many graphs are captured.

        Raises:
            RunnerUnavailable: Graphs cannot be captured.
            StepFailed: A step failed.
        """
        if self._captured is not None:
            capture = self._device.submit(partial(self._captured.capture, progress))
            capture.wait()
            capture.value()
        for plan in _warm_up_plans(self._config, self._num_blocks, self._max_model_len):
            self.launch(plan, time.monotonic_ns()).result()
        self._device.submit(self._executor.token_table.zero_).wait()
        self._start_empty()

    def _start_empty(self) -> None:
        self._slots = SlotArrays(self._config.max_num_seqs, self._max_model_len, self._config.block_size)
        self._checker = PlanChecker(
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            max_model_len=self._max_model_len,
            block_size=self._config.block_size,
            num_blocks=self._num_blocks,
            vocab_size=self._vocab_size,
        )

    def _submit(self, plan: StepPlan, begin_ns: int) -> TorchStepHandle:
        sampler = self._executor.sampler
        for release in plan.releases:
            sampler.release(release.slot)
        for admit in plan.admits:
            sampler.admit(admit)
        inputs = self._slots.build(plan)
        masks = {mask.slot: mask.allowed for mask in plan.masks}
        batch = sampler.plan([self._sample_row(row, masks.get(row.slot)) for row in plan.rows if row.sample])
        work = partial(self._executor.run, inputs, batch)
        launch = self._device.submit(partial(self._latch.run, plan.step_id, work))
        return TorchStepHandle(
            plan.step_id,
            launch,
            partial(assemble_output, plan.step_id, inputs, batch),
            self._latch,
            StepTimeline(
                host_begin_ns=begin_ns,
                host_end_ns=time.monotonic_ns(),
                graph="" if self._captured is None else self._captured.graph_use(inputs.num_rows, inputs.max_query_len),
            ),
        )

    def _settle(self) -> None:
        most = self._config.max_in_flight - 1
        while self._unresolved and (len(self._unresolved) > most or self._unresolved[0].done()):
            self._unresolved.popleft().settle()

    def _check_admit(self, admit: Admit) -> None:
        if admit.adapter_id is not None:
            raise PlanError(f"admit: slot {admit.slot} names adapter {admit.adapter_id!r}; this runner has no adapters")
        params = admit.sampling_params
        for name, asked in (
            ("num_logprobs", params.num_logprobs),
            ("num_prompt_logprobs", params.num_prompt_logprobs),
        ):
            if asked is not None and not 0 <= asked <= self._max_logprobs:
                raise PlanError(f"admit: slot {admit.slot}: {name} {asked}, expected 0 to {self._max_logprobs}")
        self._executor.sampler.check(admit)

    def _sample_row(self, row: Row, allowed: bytes | None) -> SampleRow:
        num_tokens = row.first_position + row.num_new_tokens
        return SampleRow(row.slot, row.epoch, self._slots.output_index(row.slot, num_tokens), allowed)


def _allocate_caches(loaded: LoadedModel, device: Device, num_blocks: int, block_size: int) -> tuple[KVCache, ...]:
    # Zeros, not garbage: a kernel may multiply slots that it masks out, and 0 times NaN is NaN.
    def allocate(layer: LayerSpec) -> torch.Tensor:
        return device.zeros((num_blocks, block_size, layer.num_kv_heads, layer.head_dim), loaded.shape.dtype)

    return tuple(KVCache(allocate(layer), allocate(layer)) for layer in loaded.model.layers)


def _warm_up_plans(config: RunnerConfig, num_blocks: int, max_model_len: int) -> list[StepPlan]:
    """Give a short prefill and a decode step of a few slots that sample in different ways."""
    length = min(config.block_size, max_model_len) - 2
    slots = range(min(4, config.max_num_seqs, num_blocks, config.max_num_batched_tokens))
    length = min(length, config.max_num_batched_tokens // len(slots))
    if length < 1:
        return [StepPlan(step_id=0)]
    ways = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.9),
    )
    return [
        StepPlan(
            step_id=0,
            admits=tuple(Admit(slot, 0, (0,) * length, length, ways[slot % len(ways)]) for slot in slots),
            grants=tuple(BlockGrant(slot, 0, (slot,)) for slot in slots),
            rows=tuple(Row(slot, 0, length, 0, sample=True) for slot in slots),
        ),
        StepPlan(step_id=1, rows=tuple(Row(slot, 0, 1, length, sample=True) for slot in slots)),
        StepPlan(step_id=2, releases=tuple(Release(slot, 0) for slot in slots)),
    ]
