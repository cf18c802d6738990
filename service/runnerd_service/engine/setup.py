"""Turns the operator's configuration into a runner's, or says why it cannot be served; then brings a runner up.

Only what changes nothing but speed falls back, and then with a warning. All else that is not served is refused.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from runnerd_service.config import EngineConfig
from runnerd_service.engine.engine import Engine, EngineLimits
from runnerd_service.engine.kv_cache import max_request_tokens
from runnerd_service.engine.messages import EngineReady
from runnerd_service.errors import ConfigurationError
from runnerd_spi import (
    InvalidOption,
    KVBudget,
    ModelInfo,
    ModelRunner,
    OptionValue,
    Progress,
    RunnerConfig,
    RunnerPlugin,
    Support,
    parse_options,
)

logger = logging.getLogger(__name__)

DEFAULT_MAX_IN_FLIGHT = 2
"""One step runs while the next is prepared; more hides jitter only."""


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The configuration that holds, checked against the runner's capabilities."""

    runner_config: RunnerConfig
    async_effective: bool
    """Whether steps overlap."""
    adaptive_depth: bool
    prefix_caching: bool
    chunked_prefill: bool
    lora: bool
    guided_decoding: bool
    guide_cache_size: int
    priority_ageing_seconds: float
    warnings: tuple[str, ...]
    """What fell back; to be logged once."""


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """A runner that is warmed up and the engine that drives it. Close the runner when done."""

    engine: Engine
    runner: ModelRunner
    ready: EngineReady


def resolve(config: EngineConfig, plugin: RunnerPlugin) -> ResolvedConfig:
    """Check a configuration against a runner's capabilities.

    Raises:
        ConfigurationError: It cannot be served; the message names the option, the reason and what to do.
    """
    _check_sizes(config)
    _check_unsupported(config, plugin)
    capabilities = plugin.capabilities
    block_size = capabilities.block_sizes[0] if config.block_size is None else config.block_size
    _check_model(config, plugin, block_size)
    max_in_flight = _max_in_flight(config, plugin)
    prefix_caching = config.prefix_caching and capabilities.prefix_caching != "no"
    warnings = []
    if config.async_execution == "auto" and config.max_in_flight is None and max_in_flight == 1:
        warnings.append(f"runner {plugin.name!r} runs synchronously: it keeps one step in flight at most")
    if config.prefix_caching and not prefix_caching:
        warnings.append(f"prefix caching is off: runner {plugin.name!r} does not serve it")
    return ResolvedConfig(
        runner_config=RunnerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=block_size,
            model=config.model,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_in_flight=max_in_flight,
            memory_bytes=config.memory_bytes,
            memory_fraction=config.memory_fraction,
            trust_remote_code=config.trust_remote_code,
            enforce_eager=config.enforce_eager,
            options=_options(config, plugin),
        ),
        async_effective=max_in_flight > 1,
        adaptive_depth=_adaptive_depth(config, plugin, max_in_flight),
        prefix_caching=prefix_caching,
        chunked_prefill=capabilities.chunked_prefill != "no",
        lora=capabilities.lora != "no",
        guided_decoding=capabilities.guided_decoding != "no" and max_in_flight == 1,
        guide_cache_size=config.guide_cache_size,
        priority_ageing_seconds=config.priority_ageing_seconds,
        warnings=tuple(warnings),
    )


def start_engine(resolved: ResolvedConfig, plugin: RunnerPlugin, progress: Progress) -> StartedEngine:
    """Load the model, size and allocate the KV cache, warm up.

    Raises:
        ConfigurationError: The loaded model or the memory does not go with the configuration.
        RunnerError: The runner cannot be used, or the model not be loaded.
    """
    plugin.check()
    config = resolved.runner_config
    progress(f"importing runner {plugin.name}", 0, 1)
    runner = plugin.create(config)
    try:
        progress(f"importing runner {plugin.name}", 1, 1)
        info = runner.load(progress)
        _check_prefill(resolved, info, plugin)
        progress("profiling", 0, 1)
        num_blocks = _num_blocks(runner.profile(), config, plugin)
        progress("profiling", 1, 1)
        max_model_len = _max_model_len(config, info, num_blocks)
        runner.init_kv_cache(num_blocks)
        progress("warming up", 0, 1)
        runner.warm_up()
        progress("warming up", 1, 1)
    except BaseException:
        runner.close()
        raise
    limits = EngineLimits(
        vocab_size=info.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_in_flight=config.max_in_flight,
        adaptive_depth=resolved.adaptive_depth,
        prefix_caching=resolved.prefix_caching,
        chunked_prefill=resolved.chunked_prefill,
        kv_memory=plugin.capabilities.kv_memory,
        lora=resolved.lora,
        guided_decoding=resolved.guided_decoding,
        guide_cache_size=resolved.guide_cache_size,
        priority_ageing_seconds=resolved.priority_ageing_seconds,
    )
    return StartedEngine(Engine(runner, limits), runner, _ready(info, limits))


def _adaptive_depth(config: EngineConfig, plugin: RunnerPlugin, max_in_flight: int) -> bool:
    if config.adaptive_depth is None:
        return plugin.capabilities.shares_host_cores and max_in_flight > 1
    if config.adaptive_depth and max_in_flight == 1:
        raise ConfigurationError(
            f"--adaptive-depth: steps of runner {plugin.name!r} do not overlap with one step in flight, so there is "
            "nothing to adapt; leave the option out, or let 2 or more be in flight"
        )
    return config.adaptive_depth


def _check_sizes(config: EngineConfig) -> None:
    sizes = {
        "--max-num-seqs": config.max_num_seqs,
        "--max-num-batched-tokens": config.max_num_batched_tokens,
        "--max-model-len": config.max_model_len,
        "--kv-cache-memory-bytes": config.memory_bytes,
        "--max-in-flight": config.max_in_flight,
        "--pipeline-parallel-size": config.pipeline_parallel_size,
        "--tensor-parallel-size": config.tensor_parallel_size,
    }
    for option, size in sizes.items():
        if size is not None and size < 1:
            raise ConfigurationError(f"{option} is {size}, expected 1 or more")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigurationError(
            f"--max-num-batched-tokens is {config.max_num_batched_tokens}, below --max-num-seqs {config.max_num_seqs}: "
            "each running request needs one token per step; raise the former or lower the latter"
        )
    if not 0 < config.memory_fraction <= 1:
        raise ConfigurationError(f"--memory-utilization is {config.memory_fraction}, expected above 0 and at most 1")


def _check_unsupported(config: EngineConfig, plugin: RunnerPlugin) -> None:
    capabilities = plugin.capabilities
    asked: list[tuple[bool, str, Support, str]] = [
        (
            config.speculative_model is not None,
            f"--speculative-model {config.speculative_model}",
            capabilities.speculative_decoding,
            "speculative decoding",
        ),
        (
            config.pipeline_parallel_size > 1,
            f"--pipeline-parallel-size {config.pipeline_parallel_size}",
            capabilities.pipeline_parallel,
            "pipeline parallelism",
        ),
        (
            config.tensor_parallel_size > 1,
            f"--tensor-parallel-size {config.tensor_parallel_size}",
            capabilities.tensor_parallel,
            "tensor parallelism",
        ),
    ]
    for is_set, option, support, feature in asked:
        if is_set and support == "no":
            raise ConfigurationError(
                f"{option}: runner {plugin.name!r} does not serve {feature}; leave the option out, or choose a runner "
                f"whose capabilities list it (`runnerd runners` shows them)"
            )


def _check_model(config: EngineConfig, plugin: RunnerPlugin, block_size: int) -> None:
    if plugin.capabilities.needs_model and not config.model:
        raise ConfigurationError(
            f"runner {plugin.name!r} needs a model, none was given; pass --model with a model directory or GGUF file"
        )
    _check_among("--dtype", config.dtype, ("auto", *plugin.capabilities.dtypes), plugin)
    _check_among("--block-size", block_size, plugin.capabilities.block_sizes, plugin)


def _options(config: EngineConfig, plugin: RunnerPlugin) -> dict[str, OptionValue]:
    try:
        return parse_options(plugin, config.runner_options)
    except InvalidOption as error:
        raise ConfigurationError(str(error)) from error


def _check_among(option: str, value: object, accepted: tuple[object, ...], plugin: RunnerPlugin) -> None:
    if value not in accepted:
        names = ", ".join(map(str, accepted))
        raise ConfigurationError(f"{option} is {value}, but runner {plugin.name!r} accepts: {names}")


def _max_in_flight(config: EngineConfig, plugin: RunnerPlugin) -> int:
    """Choose how many steps may be unresolved."""
    least, most = plugin.capabilities.min_in_flight, plugin.capabilities.max_in_flight
    asked = config.max_in_flight
    if config.async_execution == "required" and most == 1:
        raise ConfigurationError(
            f"--async-execution required: runner {plugin.name!r} keeps one step in flight at most, so steps cannot "
            "overlap; choose a runner with max_in_flight above 1, or set --async-execution auto"
        )
    if config.async_execution == "off":
        if asked is not None and asked > 1:
            raise ConfigurationError(
                f"--max-in-flight is {asked}, but --async-execution off means 1; leave one of the two out"
            )
        depth = 1
    elif asked is None:
        depth = min(DEFAULT_MAX_IN_FLIGHT, most)
    else:
        depth = asked
    if depth > most:
        raise ConfigurationError(f"--max-in-flight is {depth}, but runner {plugin.name!r} allows {most} at most")
    if config.async_execution == "required" and depth == 1:
        raise ConfigurationError(
            "--max-in-flight is 1, but --async-execution required needs 2 or more; raise it or leave it out"
        )
    if depth < least:
        raise ConfigurationError(
            f"runner {plugin.name!r} runs asynchronously only, with {least} steps in flight or more, and {depth} was "
            f"asked for; set --async-execution auto and leave --max-in-flight out, or choose another runner"
        )
    return depth


def _check_prefill(resolved: ResolvedConfig, info: ModelInfo, plugin: RunnerPlugin) -> None:
    most = resolved.runner_config.max_num_batched_tokens
    if not resolved.chunked_prefill and most < info.max_model_len:
        raise ConfigurationError(
            f"runner {plugin.name!r} computes a prompt in one step, but --max-num-batched-tokens is {most} and the "
            f"model takes {info.max_model_len} tokens; raise the former or lower --max-model-len"
        )


def _num_blocks(budget: KVBudget, config: RunnerConfig, plugin: RunnerPlugin) -> int:
    num_blocks = budget.available_bytes // budget.bytes_per_block
    if budget.max_num_blocks is not None:
        num_blocks = min(num_blocks, budget.max_num_blocks)
    if num_blocks < 1:
        raise ConfigurationError(
            f"runner {plugin.name!r} has {budget.available_bytes} bytes for the KV cache, but one block takes "
            f"{budget.bytes_per_block}; {_more_memory(config)}"
            + ("" if config.memory_bytes is not None else ", or lower --max-num-batched-tokens")
        )
    return num_blocks


def _more_memory(config: RunnerConfig) -> str:
    """Say how the KV cache gets larger. A size that was given is not the result of any other option."""
    if config.memory_bytes is not None:
        return f"raise --kv-cache-memory-bytes, which is {config.memory_bytes}"
    return "raise --memory-utilization, or set --kv-cache-memory-bytes"


def _max_model_len(config: RunnerConfig, info: ModelInfo, num_blocks: int) -> int:
    """Give the longest request that is served: what the model allows, if the KV cache holds it."""
    most = max_request_tokens(num_blocks, config.block_size)
    if info.max_model_len <= most:
        return info.max_model_len
    blocks = f"the KV cache of {num_blocks} blocks of {config.block_size} tokens holds {most} tokens of one request"
    if config.max_model_len is not None:
        raise ConfigurationError(
            f"{blocks}, but --max-model-len is {config.max_model_len}; lower it, or {_more_memory(config)}"
        )
    logger.warning("%s: max_model_len is lowered to that from the model's %d", blocks, info.max_model_len)
    return most


def _ready(info: ModelInfo, limits: EngineLimits) -> EngineReady:
    return EngineReady(
        model_name=info.name,
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        max_model_len=limits.max_model_len,
        eos_token_ids=info.eos_token_ids,
        dtype=info.dtype,
        num_parameters=info.num_parameters,
        weights_bytes=info.weights_bytes,
        device=info.device,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_in_flight=limits.max_in_flight,
    )
