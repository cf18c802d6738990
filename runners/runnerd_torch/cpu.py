"""Puts the CPU runner together."""

from __future__ import annotations

from functools import partial
from typing import get_args

from runnerd_spi import InvalidOption, RunnerConfig
from runnerd_torch.attention import AttentionKind, build_attention
from runnerd_torch.devices.cpu import CpuDevice
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
    device = CpuDevice(num_threads or None)
    return TorchModelRunner(config, device, partial(build_attention, _attention_kind(config)), MAX_LOGPROBS)


def _attention_kind(config: RunnerConfig) -> AttentionKind:
    asked = config.options.get("attention", "auto")
    kinds: tuple[AttentionKind, ...] = get_args(AttentionKind)
    for kind in kinds:
        if kind == asked:
            return kind
    raise InvalidOption(f"runner 'cpu': option attention is {asked!r}, expected {', '.join(kinds)}")
