"""What a step does on the device: gather the inputs, run the model, sample, write the tokens back.

Runs inside work submitted to the device's stream; it reads the step's own arrays and the device's tensors only, and
waits for nothing. It knows nothing of plans and handles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runnerd_torch.attention import AttentionMetadata, PagedAttention
from runnerd_torch.devices.base import Device
from runnerd_torch.inputs import StepArrays, StepInputs
from runnerd_torch.models import KVCache, PagedModel, StepAttention
from runnerd_torch.sampling import LogprobTensors, SampledTensors, Sampler, SamplingBatch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, in host memory once its launch is done."""

    sampled: SampledTensors | None
    """None: no row samples."""
    prompt: tuple[LogprobTensors, ...]
    """One for each prompt span."""


@dataclass(frozen=True, slots=True)
class StepExecutor:
    """The tensors and parts that all steps share. Only the stream touches them."""

    device: Device
    model: PagedModel
    attention: PagedAttention
    caches: tuple[KVCache, ...]
    block_size: int
    sampler: Sampler
    token_table: torch.Tensor
    """[max_num_seqs, max_model_len] int64: all tokens of each request, those not settled yet included."""

    def run(self, inputs: StepInputs, batch: SamplingBatch) -> StepResult:
        """Run one step."""
        table = self.token_table.view(-1)
        tensors, batch = self._put(inputs, batch)
        if len(tensors.admit_tokens):
            table.index_copy_(0, tensors.admit_places, tensors.admit_tokens)
        if not inputs.num_tokens:
            return StepResult(None, ())
        input_ids = table.index_select(0, tensors.input_places)
        attention = StepAttention(self.attention, self.caches, self._metadata(inputs, tensors))
        logits = self.model.forward(input_ids, tensors.positions, tensors.logits_index, attention)
        num_samples = len(inputs.sampled_rows)
        sampled = None
        if num_samples:
            chosen = self.sampler.sample(logits[:num_samples], batch, self.token_table)
            table.index_copy_(0, tensors.sample_places, chosen.token_ids)
            sampled = chosen.map(self.device.to_host)
        return StepResult(sampled, self._prompt_logprobs(inputs, tensors, logits[num_samples:]))

    def _put(self, inputs: StepInputs, batch: SamplingBatch) -> tuple[StepArrays[torch.Tensor], SamplingBatch]:
        if batch.packed is None:
            return StepArrays(*self.device.to_device(inputs.arrays)), batch
        *tensors, buffer = self.device.to_device((*inputs.arrays, batch.packed))
        # On the CPU it is the batch's own memory, and a new batch would be made for nothing.
        return StepArrays(*tensors), batch if buffer.device.type == "cpu" else batch.on(buffer)

    def _metadata(self, inputs: StepInputs, tensors: StepArrays[torch.Tensor]) -> AttentionMetadata:
        return AttentionMetadata(
            query_start_loc=tensors.query_start_loc,
            seq_lens=tensors.seq_lens,
            block_tables=tensors.block_tables,
            slot_mapping=tensors.slot_mapping,
            query_start_loc_cpu=inputs.arrays.query_start_loc,
            seq_lens_cpu=inputs.arrays.seq_lens,
            num_rows=inputs.num_rows,
            max_query_len=inputs.max_query_len,
            max_seq_len=inputs.max_seq_len,
            block_size=self.block_size,
        )

    def _prompt_logprobs(
        self, inputs: StepInputs, tensors: StepArrays[torch.Tensor], logits: torch.Tensor
    ) -> tuple[LogprobTensors, ...]:
        if not inputs.prompt_spans:
            return ()
        token_ids = self.token_table.view(-1).index_select(0, tensors.prompt_places)
        return tuple(
            self.sampler.prompt_logprobs(
                logits[span.begin : span.end], token_ids[span.begin : span.end], span.num_top
            ).map(self.device.to_host)
            for span in inputs.prompt_spans
        )
