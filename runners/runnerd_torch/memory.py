"""How many bytes the KV cache may take. Arithmetic only; it measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runnerd_spi import KVBudget, RunnerConfig
from runnerd_torch.devices.base import MemoryInfo
from runnerd_torch.models import LayerSpec


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that decide what a step needs."""

    layers: tuple[LayerSpec, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    weights_bytes: int
    max_model_len: int


def block_bytes(layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Give the bytes of one KV block over all layers."""
    return sum(2 * block_size * layer.num_kv_heads * layer.head_dim * dtype.itemsize for layer in layers)


def activation_bytes(shape: ModelShape, config: RunnerConfig) -> int:
    """Estimate from above what a full step holds beside weights and KV cache, where it cannot be measured.

    One layer's tensors at a time: the residual and its norms, query, key and value with their rotations, the two halves
    of the MLP; and for each row the logits in the model's dtype, in float32, and what sampling sorts.
    """
    heads = max(layer.num_heads * layer.head_dim for layer in shape.layers)
    per_token = (6 * shape.hidden_size + 6 * heads + 3 * shape.intermediate_size) * shape.dtype.itemsize
    rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    per_row = shape.vocab_size * (shape.dtype.itemsize + 4 + 4 + 8)
    return config.max_num_batched_tokens * per_token + rows * per_row


def kv_budget(
    shape: ModelShape, config: RunnerConfig, free_bytes: int, memory: MemoryInfo, step_bytes: int
) -> KVBudget:
    """Give the budget of the KV cache.

    ``memory_bytes`` is taken as it is. Otherwise the cache gets what ``memory_fraction`` of the memory that was free
    before the weights were read leaves beside weights and activations, at most the device's ``default_kv_bytes``.

    Args:
        shape: The model's sizes.
        config: The runner's configuration.
        free_bytes: The device's free memory before the weights were read.
        memory: The device's memory.
        step_bytes: What a step holds beside weights and KV cache, measured or estimated.
    """
    per_block = block_bytes(shape.layers, config.block_size, shape.dtype)
    if config.memory_bytes is not None:
        available = config.memory_bytes
    else:
        available = int(free_bytes * config.memory_fraction)
        available -= shape.weights_bytes + step_bytes
        if memory.default_kv_bytes is not None:
            available = min(available, memory.default_kv_bytes)
    # More blocks than all slots fill at their longest would never be used at once.
    max_num_blocks = config.max_num_seqs * -(-shape.max_model_len // config.block_size)
    return KVBudget(per_block, max(available, 0), max_num_blocks)
