"""The seam for captured graphs: a chip that can replay a step without its host cost wraps the model.

It knows no chip; how a graph is captured and replayed is the chip's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from runnerd_spi import GraphUse, Progress
from runnerd_torch.attention import PagedAttention
from runnerd_torch.devices.base import Device
from runnerd_torch.models import KVCache, PagedModel


@dataclass(frozen=True, slots=True)
class StepParts:
    """What all steps share."""

    device: Device
    model: PagedModel
    attention: PagedAttention
    caches: tuple[KVCache, ...]
    block_size: int
    num_blocks: int
    """Blocks that requests use; those behind them in the caches are reserved for the padding of graphs."""
    max_model_len: int


class CapturedModel(PagedModel, Protocol):
    """A model that replays graphs for the steps it has some for, and computes the others as ever."""

    def graph_use(self, num_rows: int, max_query_len: int) -> GraphUse:
        """Say how a step of ``num_rows`` rows, each of ``max_query_len`` new tokens at most, is computed."""
        ...

    def capture(self, progress: Progress) -> None:
        """Capture the graphs; inside work submitted to the device, before the first step.

        Raises:
            RunnerUnavailable: They cannot be captured; the message holds the remedy.
        """
        ...


@dataclass(frozen=True, slots=True)
class GraphSupport:
    """How a chip captures steps."""

    num_reserved_blocks: int
    """KV blocks that padding writes to and no request owns."""
    wrap: Callable[[StepParts], CapturedModel | None]
    """None: none of the model's steps can be captured, and all are launched operation by operation."""
