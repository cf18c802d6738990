"""Puts the CUDA runner together. Not run on hardware here: what it puts together is, but for the device itself."""

from __future__ import annotations

import os
from functools import partial
from typing import get_args

import torch

from runnerd_spi import InvalidOption, RunnerConfig
from runnerd_torch.attention import build_attention
from runnerd_torch.choices import chosen
from runnerd_torch.cuda.plugin import unavailable
from runnerd_torch.devices.accelerator import AcceleratorDevice
from runnerd_torch.linear import build_linear
from runnerd_torch.loading import ModelImpl
from runnerd_torch.plugin import MAX_LOGPROBS
from runnerd_torch.runner import TorchModelRunner


def create_cuda_runner(config: RunnerConfig) -> TorchModelRunner:
    """Give a runner on a GPU.

    Raises:
        InvalidOption: An option has a value that means nothing, or there is no such GPU.
        RunnerUnavailable: There is no GPU that can be used; the message holds the remedy.
    """
    model_impl = chosen("cuda", config, "model_impl", get_args(ModelImpl))
    return TorchModelRunner(
        config,
        open_device(int(config.options.get("device_index", 0))),
        partial(build_attention, "torch"),
        partial(build_linear, "torch"),
        MAX_LOGPROBS,
        model_impl,
    )


def open_device(device_index: int) -> AcceleratorDevice:
    """Open a GPU.

    Args:
        device_index: Among the visible ones.

    Raises:
        InvalidOption: There is no such GPU.
        RunnerUnavailable: CUDA finds none, or this one cannot be used.
    """
    count = torch.cuda.device_count()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not count:
        which = "" if shown is None else f" among CUDA_VISIBLE_DEVICES={shown}"
        raise unavailable(f"CUDA finds no GPU{which}; see whether `nvidia-smi` lists one, and whether the driver fits")
    if not 0 <= device_index < count:
        where = "this machine has" if shown is None else f"CUDA_VISIBLE_DEVICES={shown} shows"
        most = f"0 to {count - 1}" if count > 1 else "0"
        raise InvalidOption(f"runner 'cuda': option device_index is {device_index}, expected {most}; {where} {count}")
    try:
        torch.accelerator.set_device_index(device_index)
        name = torch.cuda.get_device_name(device_index)
    except RuntimeError as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise unavailable(
            f"GPU {device_index} cannot be opened: {reason}; see whether another process holds it (nvidia-smi)"
        ) from error
    return AcceleratorDevice(torch.device("cuda", device_index), f"{name} (cuda:{device_index})")
