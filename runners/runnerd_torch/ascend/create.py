"""Puts the Ascend runner together."""

from __future__ import annotations

import logging
from functools import partial
from typing import Literal, get_args

from runnerd_spi import InvalidOption, ModelLoadError, RunnerConfig
from runnerd_torch.ascend.attention import FusedInferAttention, unserved_reason
from runnerd_torch.ascend.environment import check_graphs
from runnerd_torch.ascend.graphs import NpuGraphModel, batch_sizes, num_padding_blocks
from runnerd_torch.ascend.ops import AscendLayerOps, truncate
from runnerd_torch.ascend.startup import open_device
from runnerd_torch.attention import PagedAttention
from runnerd_torch.attention.torch_attention import TorchPagedAttention
from runnerd_torch.choices import chosen
from runnerd_torch.graphs import CapturedModel, GraphSupport, StepParts
from runnerd_torch.linear import build_linear
from runnerd_torch.loading import LoadedModel, ModelImpl
from runnerd_torch.plugin import MAX_LOGPROBS
from runnerd_torch.runner import TorchModelRunner

logger = logging.getLogger(__name__)

AttentionChoice = Literal["auto", "fused", "torch"]


def create_ascend_runner(config: RunnerConfig) -> TorchModelRunner:
    """Give a runner on an NPU.

    Raises:
        InvalidOption: An option has a value that means nothing.
        RunnerUnavailable: There is no NPU that can be used; the message holds the remedy.
    """
    attention = chosen("ascend", config, "attention", get_args(AttentionChoice))
    model_impl = chosen("ascend", config, "model_impl", get_args(ModelImpl))
    max_graph_batch = _max_graph_batch(config)
    if max_graph_batch:
        check_graphs()
    device = open_device(int(config.options.get("device_index", 0)))
    graphs = None
    if max_graph_batch:
        graphs = GraphSupport(
            num_padding_blocks(max_graph_batch, config.block_size),
            partial(_capture_model, batch_sizes(max_graph_batch)),
        )
    return TorchModelRunner(
        config,
        device,
        partial(FusedInferAttention, device.torch_device),
        partial(build_linear, "torch"),
        MAX_LOGPROBS,
        model_impl,
        AscendLayerOps(),
        partial(_fit_attention, config, attention),
        graphs,
        truncate if config.options.get("fused_top_k_top_p", False) else None,
    )


def _max_graph_batch(config: RunnerConfig) -> int:
    """Give the largest batch to capture; 0 for no graphs."""
    asked = int(config.options.get("max_graph_batch", 256))
    if asked < 1:
        raise InvalidOption(
            f"runner 'ascend': option max_graph_batch is {asked}, expected 1 or more; --enforce-eager runs no graphs"
        )
    return 0 if config.enforce_eager else min(asked, config.max_num_seqs)


def _fit_attention(
    config: RunnerConfig, choice: AttentionChoice, fused: PagedAttention, loaded: LoadedModel
) -> PagedAttention:
    """Give the fused attention where it serves the model; else plain PyTorch's, or refuse the model.

    Raises:
        ModelLoadError: The fused attention was asked for and does not serve the model.
    """
    if choice == "torch":
        return TorchPagedAttention()
    allow_float32 = bool(config.options.get("allow_float32", False))
    reason = unserved_reason(loaded.model.layers, loaded.shape.dtype, config.max_num_seqs, allow_float32=allow_float32)
    if not reason:
        return fused
    if choice == "fused":
        raise ModelLoadError(
            f"{loaded.info.name}: the fused attention does not serve it: {reason}; "
            "choose attention auto or torch, which is slower, or another --dtype where that is the reason"
        )
    logger.warning(
        "%s: the fused attention does not serve it: %s; falling back to plain PyTorch, which is slower and runs "
        "without graphs",
        loaded.info.name,
        reason,
    )
    return TorchPagedAttention()


def _capture_model(sizes: tuple[int, ...], parts: StepParts) -> CapturedModel | None:
    # Plain PyTorch's attention cuts a step by its lengths: what is captured once fits no other step.
    return NpuGraphModel(parts, sizes) if isinstance(parts.attention, FusedInferAttention) else None
