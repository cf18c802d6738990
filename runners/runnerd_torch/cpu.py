"""Puts the CPU runner together."""

from __future__ import annotations

from functools import partial
from typing import TypeVar, get_args

from runnerd_spi import InvalidOption, RunnerConfig
from runnerd_torch.attention import AttentionKind, build_attention
from runnerd_torch.devices.cpu import CpuDevice
from runnerd_torch.linear import LinearKind, build_linear
from runnerd_torch.loading import ModelImpl
from runnerd_torch.plugin import MAX_LOGPROBS
from runnerd_torch.runner import TorchModelRunner

T = TypeVar("T")


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
        partial(build_attention, _choice(config, "attention", get_args(AttentionKind))),
        partial(build_linear, _choice(config, "linear", get_args(LinearKind))),
        MAX_LOGPROBS,
        _choice(config, "model_impl", get_args(ModelImpl)),
    )


def _choice(config: RunnerConfig, name: str, choices: tuple[T, ...]) -> T:
    asked = config.options.get(name, "auto")
    for choice in choices:
        if choice == asked:
            return choice
    raise InvalidOption(f"runner 'cpu': option {name} is {asked!r}, expected {', '.join(map(str, choices))}")
