"""Puts the CPU runner together."""

from __future__ import annotations

from functools import partial
from typing import get_args

from runnerd_spi import InvalidOption, RunnerConfig
from runnerd_torch.attention import AttentionKind, build_attention
from runnerd_torch.choices import chosen
from runnerd_torch.devices.cpu import CpuDevice
from runnerd_torch.linear import LinearKind, build_linear
from runnerd_torch.loading import ModelImpl
from runnerd_torch.plugin import MAX_LOGPROBS
from runnerd_torch.runner import TorchModelRunner


def create_cpu_runner(config: RunnerConfig) -> TorchModelRunner:
    """Give a runner on the host's cores.

    Raises:
        InvalidOption: An option has a value that means nothing.
    """
    num_threads = config.options.get("num_threads", 0)
    if not isinstance(num_threads, int) or num_threads < 0:
        raise InvalidOption(f"runner 'cpu': option num_threads is {num_threads!r}, expected 0 (all cores) or more")
    return TorchModelRunner(
        config,
        CpuDevice(num_threads or None),
        partial(build_attention, chosen("cpu", config, "attention", get_args(AttentionKind))),
        partial(build_linear, chosen("cpu", config, "linear", get_args(LinearKind))),
        MAX_LOGPROBS,
        chosen("cpu", config, "model_impl", get_args(ModelImpl)),
    )
