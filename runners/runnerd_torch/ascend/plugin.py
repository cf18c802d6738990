"""The Ascend runner as the service finds it. Importing this module imports no framework."""

from __future__ import annotations

from runnerd_spi import ModelRunner, RunnerCapabilities, RunnerConfig, RunnerOption, RunnerPlugin, check_config
from runnerd_torch.ascend.environment import check_environment
from runnerd_torch.plugin import ALLOW_PICKLE, MAX_LOGPROBS

_CAPABILITIES = RunnerCapabilities(
    max_in_flight=4,
    dtypes=("bfloat16", "float16", "float32"),
    # What the fused attention takes for prompts; the first is the default.
    block_sizes=(128, 256, 384, 512),
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


def _create(config: RunnerConfig) -> ModelRunner:
    check_environment()
    check_config("ascend", config, _CAPABILITIES)
    # torch takes seconds to import: only whoever creates a runner pays for it.
    from runnerd_torch.ascend.create import create_ascend_runner

    return create_ascend_runner(config)


ASCEND = RunnerPlugin(
    name="ascend",
    description="PyTorch on an Ascend NPU, by torch_npu and CANN: models from transformers over a paged KV cache",
    capabilities=_CAPABILITIES,
    create=_create,
    options=(
        RunnerOption("device_index", int, 0, "which of the visible NPUs"),
        RunnerOption("attention", str, "auto", "paged attention: auto, fused (CANN's kernel) or torch"),
        RunnerOption("model_impl", str, "auto", "model code: auto, transformers or fused (Llama-like models only)"),
        ALLOW_PICKLE,
        RunnerOption("max_graph_batch", int, 256, "largest batch of decodes that runs as a captured graph"),
        RunnerOption(
            "fused_top_k_top_p",
            bool,
            False,
            "top-k up to 1024, and top-p beside it, by CANN's kernel; a seed may then give other tokens than elsewhere",
        ),
        RunnerOption(
            "allow_float32", bool, False, "let the fused attention take float32, which only a simulated device does"
        ),
    ),
    check=check_environment,
)
