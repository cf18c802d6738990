"""The torch runners as the service finds them. Importing this module imports no framework."""

from __future__ import annotations

from importlib.util import find_spec

from runnerd_spi import (
    ModelRunner,
    RunnerCapabilities,
    RunnerConfig,
    RunnerOption,
    RunnerPlugin,
    RunnerUnavailable,
    check_config,
)
from runnerd_torch.ascend.environment import hide_unusable_torch_npu

MAX_LOGPROBS = 20
ALLOW_PICKLE = RunnerOption(
    "allow_pickle", bool, False, "read weights that are a pickle (pytorch_model.bin), by PyTorch's restricted reader"
)

_CPU_CAPABILITIES = RunnerCapabilities(
    max_in_flight=4,
    dtypes=("float32", "bfloat16", "float16"),
    block_sizes=(16, 8, 32, 64, 128, 4, 2, 1),
    shares_host_cores=True,
    typical_p="device",
    repetition_penalty="device",
    presence_penalty="device",
    frequency_penalty="device",
    logit_bias="device",
    allowed_token_ids="device",
    bad_words="device",
    min_tokens="device",
    logprobs="device",
    max_logprobs=MAX_LOGPROBS,
    prompt_logprobs="device",
    guided_decoding="host_sync",
)


def _check_cpu() -> None:
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise RunnerUnavailable(
            f"runner 'cpu' cannot be used: {' and '.join(missing)} not installed; pip install 'runnerd[cpu]'"
        )


def _create_cpu(config: RunnerConfig) -> ModelRunner:
    _check_cpu()
    check_config("cpu", config, _CPU_CAPABILITIES)
    hide_unusable_torch_npu()
    # torch takes seconds to import: only whoever creates a runner pays for it.
    from runnerd_torch.cpu import create_cpu_runner

    return create_cpu_runner(config)


CPU = RunnerPlugin(
    name="cpu",
    description="PyTorch on the host's cores: models from transformers over a paged KV cache",
    capabilities=_CPU_CAPABILITIES,
    create=_create_cpu,
    options=(
        RunnerOption("num_threads", int, 0, "threads of one operation; 0 takes the cores this process may use"),
        RunnerOption("attention", str, "auto", "paged attention kernel: auto, torch or native (compiled C++)"),
        RunnerOption("linear", str, "auto", "matrix products of fused models: auto, torch or native (compiled C++)"),
        RunnerOption(
            "model_impl",
            str,
            "auto",
            "model code: auto, transformers, fused or native (both for Llama-like models; native is compiled C++)",
        ),
        RunnerOption(
            "quantization",
            str,
            "none",
            "weights of the native decoder: none, int8 (half the bytes of bfloat16) or int4 (a third)",
        ),
        ALLOW_PICKLE,
    ),
    check=_check_cpu,
)
