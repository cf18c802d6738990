"""The llama.cpp runner as the service finds it. Importing this module loads no library."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from runnerd_spi import (
    ModelRunner,
    RunnerCapabilities,
    RunnerConfig,
    RunnerOption,
    RunnerPlugin,
    RunnerUnavailable,
    check_config,
)

XLLAMACPP_VERSION = "2026.10.11549"
"""The release whose structures ``library`` describes."""

CAPABILITIES = RunnerCapabilities(
    max_in_flight=2,
    # That of the keys and values. The weights stay as the file has them.
    dtypes=("float16", "float32"),
    block_sizes=(1,),
    kv_memory="tokens",
    shares_host_cores=True,
    prefix_caching="no",
    repetition_penalty="device",
    presence_penalty="device",
    frequency_penalty="device",
    logit_bias="device",
    allowed_token_ids="device",
    bad_words="device",
    min_tokens="device",
    logprobs="device",
    max_logprobs=20,
    prompt_logprobs="device",
    typical_p="device",
    guided_decoding="host_sync",
)


def check() -> None:
    """See whether the library that this runner was written for is installed.

    Raises:
        RunnerUnavailable: It is not.
    """
    remedy = f"pip install 'xllamacpp=={XLLAMACPP_VERSION}'"
    try:
        installed = version("xllamacpp")
    except PackageNotFoundError:
        raise RunnerUnavailable(
            f"runner 'llamacpp' cannot be used: xllamacpp, which brings llama.cpp, is not installed; {remedy}"
        ) from None
    if installed != XLLAMACPP_VERSION:
        raise RunnerUnavailable(
            f"runner 'llamacpp' cannot be used: xllamacpp {installed} is installed, and llama.cpp's structures differ "
            f"between releases; {remedy}"
        )


def create(config: RunnerConfig) -> ModelRunner:
    """Build a runner; the library is loaded with the model."""
    check()
    check_config("llamacpp", config, CAPABILITIES)
    from runnerd_llamacpp.runner import LlamaCppRunner

    return LlamaCppRunner(config)


LLAMACPP = RunnerPlugin(
    name="llamacpp",
    description="llama.cpp on the host's cores: GGUF models, with their quantised weights as they are",
    capabilities=CAPABILITIES,
    create=create,
    options=(
        RunnerOption("num_threads", int, 0, "threads of a step; 0 takes the cores this process may use"),
        RunnerOption("max_ubatch", int, 512, "most tokens that llama.cpp computes at once; more memory, less time"),
        RunnerOption("fail_at_step", int, None, "for tests: the step that fails"),
    ),
    check=check,
)
