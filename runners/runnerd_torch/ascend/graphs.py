"""Captured decode steps on Ascend: one NPUGraph for each batch size, replayed instead of launched kernel by kernel.

Source of the update: ``torch.npu.graph(..., auto_dispatch_capture=True)`` and ``NPUGraph.update``, by which torch_npu
gives the captured attention its lengths anew. It knows nothing of plans, requests or sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from runnerd_spi import GraphUse, Progress
from runnerd_torch.ascend.environment import unavailable
from runnerd_torch.attention import AttentionMetadata
from runnerd_torch.graphs import StepParts
from runnerd_torch.models import LayerSpec, StepAttention

logger = logging.getLogger(__name__)


def batch_sizes(most: int) -> tuple[int, ...]:
    """Give the batch sizes to capture: powers of two below ``most``, and ``most``."""
    return (*(1 << power for power in range((most - 1).bit_length())), most)


def num_padding_blocks(most: int, block_size: int) -> int:
    """Give how many KV blocks padded rows write to: each row of a batch up to ``most`` has a place of its own."""
    return -(-most // block_size)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a captured step reads; written before each replay. Rows behind the batch belong to padding."""

    # each [size] int64
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    # [size, max_blocks] int32
    block_tables: torch.Tensor

    def first(self, size: int) -> _Inputs:
        """Give the same memory for a smaller batch."""
        return _Inputs(self.input_ids[:size], self.positions[:size], self.slot_mapping[:size], self.block_tables[:size])


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: Any
    inputs: _Inputs
    # [size, vocab_size]
    logits: torch.Tensor
    read: tuple[torch.Tensor, ...]
    """What else the captured kernels read: their memory must not go to others."""


class NpuGraphModel:
    """A model whose decode steps are replayed.

    Args:
        parts: The model and what its steps share.
        sizes: Batch sizes to capture, ascending.
    """

    def __init__(self, parts: StepParts, sizes: Sequence[int]) -> None:
        self._parts = parts
        self._npu: Any = torch.get_device_module("npu")
        self._sizes = tuple(sizes)
        most, device = self._sizes[-1], parts.device
        max_blocks = -(-parts.max_model_len // parts.block_size)
        # Behind all blocks of requests: what padding writes there is read by no request.
        padding = torch.arange(most) + parts.num_blocks * parts.block_size
        self._padding_slots = padding.to(device.torch_device)
        self._inputs = _Inputs(
            input_ids=device.zeros((most,), torch.int64),
            positions=device.zeros((most,), torch.int64),
            slot_mapping=self._padding_slots.clone(),
            block_tables=device.zeros((most, max_blocks), torch.int32).fill_(parts.num_blocks),
        )
        self._graphs: dict[int, _Graph] = {}

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The attention layers."""
        return self._parts.model.layers

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._parts.model.vocab_size

    def graph_use(self, num_rows: int, max_query_len: int) -> GraphUse:
        """Say how a step is computed: those with one new token in each row are replayed, up to the largest size."""
        if max_query_len != 1:
            return ""
        return "replayed" if num_rows <= self._sizes[-1] else "missed"

    def capture(self, progress: Progress) -> None:
        """Capture a graph for each size, the largest first: the others then fit into its memory.

        Raises:
            RunnerUnavailable: The device refuses.
        """
        pool = self._npu.graph_pool_handle()
        try:
            for done, size in enumerate(reversed(self._sizes)):
                progress("capturing graphs", done, len(self._sizes))
                self._graphs[size] = self._capture(size, pool)
        except RuntimeError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise unavailable(f"no graph can be captured: {reason}; pass --enforce-eager to do without") from error
        progress("capturing graphs", len(self._sizes), len(self._sizes))

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_index: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Compute one step: by replay where each row has one new token, else as the model does."""
        metadata = attention.metadata
        if self.graph_use(metadata.num_rows, metadata.max_query_len) != "replayed":
            return self._parts.model.forward(input_ids, positions, logits_index, attention)
        size = next(one for one in self._sizes if metadata.num_rows <= one)
        logits = self._replay(self._graphs[size], size, input_ids, positions, metadata)
        # All rows sample but those whose prompt goes on; then the choice is left to the index.
        return logits if len(logits_index) == metadata.num_rows else logits.index_select(0, logits_index)

    def _capture(self, size: int, pool: Any) -> _Graph:
        parts, inputs = self._parts, self._inputs.first(size)
        metadata = self._captured_metadata(size, inputs)
        attention = StepAttention(parts.attention, parts.caches, metadata)
        logits_index = torch.arange(size, device=parts.device.torch_device)
        # Once without a graph: what a first call prepares must not be captured.
        parts.model.forward(inputs.input_ids, inputs.positions, logits_index, attention)
        graph = self._npu.NPUGraph()
        with self._npu.graph(graph, pool=pool, auto_dispatch_capture=True):
            logits = parts.model.forward(inputs.input_ids, inputs.positions, logits_index, attention)
        return _Graph(graph, inputs, logits, (logits_index, metadata.query_start_loc, metadata.seq_lens))

    def _replay(
        self,
        captured: _Graph,
        size: int,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        num_rows, inputs = metadata.num_rows, captured.inputs
        num_padded = size - num_rows
        inputs.input_ids[:num_rows].copy_(input_ids)
        inputs.positions[:num_rows].copy_(positions)
        inputs.slot_mapping[:num_rows].copy_(metadata.slot_mapping)
        inputs.block_tables[:num_rows, : metadata.block_tables.shape[1]].copy_(metadata.block_tables)
        if num_padded:
            # Nothing else of padding matters: it reads one token of whatever block it had, and nobody reads it.
            inputs.slot_mapping[num_rows:].copy_(self._padding_slots[:num_padded])
        # The lengths belong to this replay: they must not reach the graph before the one before has ended. The device
        # waits for that, not the host; and the replay waits, in each layer, for the layer's new lengths.
        update_stream = captured.graph.graph_dispatch_mode.update_stream
        update_stream.wait_stream(self._npu.current_stream())
        captured.graph.replay()
        lengths = [*metadata.seq_lens_cpu.tolist(), *[1] * num_padded]
        captured.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
        return captured.logits[:num_rows]

    def _captured_metadata(self, size: int, inputs: _Inputs) -> AttentionMetadata:
        starts = np.arange(size + 1, dtype=np.int32)
        lengths = np.ones(size, np.int32)
        device = self._parts.device.torch_device
        return AttentionMetadata(
            query_start_loc=torch.from_numpy(starts).to(device),
            seq_lens=torch.from_numpy(lengths).to(device),
            block_tables=inputs.block_tables,
            slot_mapping=inputs.slot_mapping,
            query_start_loc_cpu=starts,
            seq_lens_cpu=lengths,
            num_rows=size,
            max_query_len=1,
            max_seq_len=self._parts.max_model_len,
            block_size=self._parts.block_size,
        )
