"""What the service accepts from an operator, and what it refuses with which words."""

from dataclasses import replace
from typing import cast

import pytest

from runnerd_service.config import EngineConfig
from runnerd_service.engine.setup import resolve, start_engine
from runnerd_service.errors import ConfigurationError
from runnerd_spi import (
    KVBudget,
    ModelInfo,
    ModelRunner,
    Progress,
    RunnerCapabilities,
    RunnerConfig,
    RunnerOption,
    RunnerPlugin,
)


def never_create(config: RunnerConfig) -> ModelRunner:
    raise AssertionError("resolving a configuration creates no runner")


PLUGIN = RunnerPlugin(
    name="toy",
    description="",
    capabilities=RunnerCapabilities(
        max_in_flight=3, dtypes=("float32", "bfloat16"), block_sizes=(16, 32), needs_model=False
    ),
    create=never_create,
    options=(RunnerOption("speed", int, 5, "how fast"),),
)
SYNC = replace(PLUGIN, capabilities=replace(PLUGIN.capabilities, max_in_flight=1))
ASYNC_ONLY = replace(PLUGIN, capabilities=replace(PLUGIN.capabilities, min_in_flight=2))
NEEDS_MODEL = replace(PLUGIN, capabilities=replace(PLUGIN.capabilities, needs_model=True))


@pytest.mark.parametrize(
    ("plugin", "config", "depth"),
    [
        (PLUGIN, EngineConfig(), 2),
        (PLUGIN, EngineConfig(max_in_flight=3), 3),
        (PLUGIN, EngineConfig(max_in_flight=1), 1),
        (PLUGIN, EngineConfig(async_execution="off"), 1),
        (PLUGIN, EngineConfig(async_execution="required"), 2),
        (PLUGIN, EngineConfig(async_execution="required", max_in_flight=3), 3),
        (SYNC, EngineConfig(), 1),
        (SYNC, EngineConfig(async_execution="off"), 1),
        (ASYNC_ONLY, EngineConfig(), 2),
    ],
)
def test_the_depth_follows_mode_and_runner(plugin: RunnerPlugin, config: EngineConfig, depth: int) -> None:
    resolved = resolve(config, plugin)
    assert resolved.runner_config.max_in_flight == depth
    assert resolved.async_effective == (depth > 1)


def test_running_synchronously_because_the_runner_must_is_warned_of_once() -> None:
    assert resolve(EngineConfig(), SYNC).warnings == (
        "runner 'toy' runs synchronously: it keeps one step in flight at most",
    )
    assert resolve(EngineConfig(async_execution="off"), SYNC).warnings == ()
    assert resolve(EngineConfig(), PLUGIN).warnings == ()


@pytest.mark.parametrize(
    ("plugin", "config", "words"),
    [
        (SYNC, EngineConfig(async_execution="required"), ["--async-execution required", "one step", "choose", "auto"]),
        (SYNC, EngineConfig(max_in_flight=2), ["--max-in-flight is 2", "allows 1 at most"]),
        (PLUGIN, EngineConfig(max_in_flight=4), ["--max-in-flight is 4", "allows 3 at most"]),
        (PLUGIN, EngineConfig(async_execution="off", max_in_flight=2), ["--max-in-flight is 2", "off means 1"]),
        (PLUGIN, EngineConfig(async_execution="required", max_in_flight=1), ["--max-in-flight is 1", "needs 2"]),
        (ASYNC_ONLY, EngineConfig(async_execution="off"), ["asynchronously only", "auto", "another runner"]),
        (PLUGIN, EngineConfig(speculative_model="draft"), ["--speculative-model draft", "'toy'", "leave the option"]),
        (PLUGIN, EngineConfig(pipeline_parallel_size=2), ["--pipeline-parallel-size 2", "'toy'"]),
        (PLUGIN, EngineConfig(tensor_parallel_size=2), ["--tensor-parallel-size 2", "'toy'"]),
        (PLUGIN, EngineConfig(dtype="int8"), ["--dtype is int8", "auto, float32, bfloat16"]),
        (PLUGIN, EngineConfig(block_size=8), ["--block-size is 8", "16, 32"]),
        (PLUGIN, EngineConfig(max_num_seqs=0), ["--max-num-seqs is 0", "1 or more"]),
        (PLUGIN, EngineConfig(max_model_len=-1), ["--max-model-len is -1"]),
        (PLUGIN, EngineConfig(memory_bytes=0), ["--kv-cache-memory-bytes is 0"]),
        (PLUGIN, EngineConfig(max_num_batched_tokens=8, max_num_seqs=9), ["--max-num-batched-tokens is 8", "9"]),
        (PLUGIN, EngineConfig(memory_fraction=0.0), ["--memory-utilization is 0.0"]),
        (PLUGIN, EngineConfig(memory_fraction=1.1), ["--memory-utilization is 1.1"]),
        (PLUGIN, EngineConfig(runner_options={"sped": "1"}), ["no option 'sped'", "speed"]),
        (PLUGIN, EngineConfig(runner_options={"speed": "x"}), ["option speed", "int", "'x'"]),
        (NEEDS_MODEL, EngineConfig(), ["needs a model", "--model"]),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(plugin: RunnerPlugin, config: EngineConfig, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(config, plugin)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_runner_gets_what_the_operator_chose_and_the_defaults() -> None:
    config = EngineConfig(model="m", dtype="bfloat16", max_model_len=99, memory_bytes=5, enforce_eager=True)
    assert resolve(config, PLUGIN).runner_config == RunnerConfig(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        block_size=16,
        model="m",
        dtype="bfloat16",
        max_model_len=99,
        max_in_flight=2,
        memory_bytes=5,
        enforce_eager=True,
        options={"speed": 5},
    )


def test_prefix_caching_falls_back_with_a_warning() -> None:
    plugin = replace(PLUGIN, capabilities=replace(PLUGIN.capabilities, prefix_caching="no"))
    resolved = resolve(EngineConfig(), plugin)
    assert not resolved.prefix_caching
    assert resolved.warnings == ("prefix caching is off: runner 'toy' does not serve it",)
    assert resolve(EngineConfig(prefix_caching=False), plugin).warnings == ()


class Measured:
    """A runner that has been loaded; only its model and its memory are asked for."""

    def __init__(self, config: RunnerConfig, budget: KVBudget) -> None:
        self._config = config
        self._budget = budget
        self.closed = False

    def load(self, progress: Progress) -> ModelInfo:
        return ModelInfo("toy", "toy", 100, self._config.max_model_len or 64, (), "float32", 0, 0, "none")

    def profile(self) -> KVBudget:
        return self._budget

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("config", "available", "message"),
    [
        (
            EngineConfig(),
            99,
            "runner 'toy' has 99 bytes for the KV cache, but one block takes 100; raise --memory-utilization, or set "
            "--kv-cache-memory-bytes, or lower --max-num-batched-tokens",
        ),
        (
            EngineConfig(memory_bytes=99),
            99,
            "runner 'toy' has 99 bytes for the KV cache, but one block takes 100; raise --kv-cache-memory-bytes, which "
            "is 99",
        ),
        (
            EngineConfig(max_model_len=34),
            299,
            "the KV cache of 2 blocks of 16 tokens holds 33 tokens of one request, but --max-model-len is 34; lower "
            "it, or raise --memory-utilization, or set --kv-cache-memory-bytes",
        ),
        (
            EngineConfig(max_model_len=34, memory_bytes=299),
            299,
            "the KV cache of 2 blocks of 16 tokens holds 33 tokens of one request, but --max-model-len is 34; lower "
            "it, or raise --kv-cache-memory-bytes, which is 299",
        ),
    ],
)
def test_a_kv_cache_that_is_too_small_is_refused_with_the_options_that_help(
    config: EngineConfig, available: int, message: str
) -> None:
    runners: list[Measured] = []

    def create(runner_config: RunnerConfig) -> ModelRunner:
        runners.append(Measured(runner_config, KVBudget(100, available, None)))
        return cast("ModelRunner", runners[0])

    plugin = replace(PLUGIN, create=create)
    with pytest.raises(ConfigurationError) as caught:
        start_engine(resolve(config, plugin), plugin, lambda stage, done, total: None)
    assert str(caught.value) == message
    assert runners[0].closed
