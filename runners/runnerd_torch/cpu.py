"""Puts the CPU runner together."""

from __future__ import annotations

from functools import partial
from typing import get_args

from runnerd_spi import InvalidOption, RunnerConfig
from runnerd_torch.attention import AttentionKind, build_attention
from runnerd_torch.choices import chosen
from runnerd_torch.decoder import DecoderBuilder, Quantization
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
    attention: AttentionKind = chosen("cpu", config, "attention", get_args(AttentionKind))
    linear: LinearKind = chosen("cpu", config, "linear", get_args(LinearKind))
    model_impl: ModelImpl = chosen("cpu", config, "model_impl", get_args(ModelImpl))
    return TorchModelRunner(
        config,
        CpuDevice(num_threads or None),
        partial(build_attention, attention),
        partial(build_linear, linear),
        MAX_LOGPROBS,
        model_impl,
        decoders=_decoders(config, attention, linear, model_impl),
    )


def _decoders(
    config: RunnerConfig, attention: AttentionKind, linear: LinearKind, model_impl: ModelImpl
) -> DecoderBuilder | None:
    quantization: Quantization = chosen("cpu", config, "quantization", get_args(Quantization), "none")
    others = {"attention": attention, "linear": linear, "model_impl": model_impl}
    against = [f"{name} {value}" for name, value in others.items() if value in ("torch", "transformers", "fused")]
    if not against:
        return DecoderBuilder(quantization, required=model_impl == "native")
    for name, value, needs_native in (
        ("model_impl", model_impl, model_impl == "native"),
        ("quantization", quantization, quantization != "none"),
    ):
        if needs_native:
            raise InvalidOption(
                f"runner 'cpu': option {name} {value} needs the native decoder, which {' and '.join(against)} "
                "leaves out; set those to auto"
            )
    return None
