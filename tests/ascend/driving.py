"""Runners on tiny models for the tests of the Ascend runner: the drivers and traces of ``tests/torch``, on an NPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import torch
import transformers

from runnerd_service.engine.engine import Engine, EngineLimits
from runnerd_service.engine.messages import AddRequest
from runnerd_spi import ModelRunner, OptionValue, RunnerConfig, RunnerPlugin
from runnerd_torch.ascend.plugin import ASCEND
from runnerd_torch.plugin import CPU

BLOCK_SIZE = 128
MAX_MODEL_LEN = 448
VOCAB_SIZE = 160
FLOAT32: dict[str, OptionValue] = {"allow_float32": True, "attention": "fused"}
"""What lets the tests compare tokens exactly: the simulation computes in float32, which no chip's attention takes."""

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Wide enough that the highest logit stands out of rounding.
    "initializer_range": 0.3,
}
FAMILIES = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "mistral": "MistralConfig"}


def _tests_of_torch(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "torch" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"tests_torch_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


torch_driving = _tests_of_torch("conftest")
traces = _tests_of_torch("test_async_traces")


def make_checkpoint(folder: Path, config_class: str, **settings: Any) -> Path:
    """Write a random model, the same one each time."""
    path = folder / config_class
    defaults = TINY | ({"sliding_window": None} if config_class == "MistralConfig" else {})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**(defaults | settings)))
    with torch.no_grad():
        # Biases of 0 and norms of 1 would hide that one of them was forgotten.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(path)
    return path


def prompts_of(lengths: list[int]) -> list[list[int]]:
    """Give random prompts, the same each time."""
    dice = Random(7)
    return [[dice.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@contextmanager
def open_driver(
    plugin: RunnerPlugin, model: Path, options: dict[str, OptionValue], num_blocks: int = 24, **settings: Any
) -> Iterator[Any]:
    """Open a runner and give the driver of ``tests/torch`` for it."""
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "block_size": BLOCK_SIZE, "dtype": "float32"}
    defaults["max_model_len"] = MAX_MODEL_LEN
    config = RunnerConfig(model=str(model), options=options, **(defaults | settings))
    runner = started(plugin, config, num_blocks)
    try:
        yield torch_driving.Driver(runner, config, num_blocks)
    finally:
        runner.close()


def started(plugin: RunnerPlugin, config: RunnerConfig, num_blocks: int) -> ModelRunner:
    """Give a runner that is warmed up."""
    runner = plugin.create(config)
    runner.load(lambda stage, done, total: None)
    runner.profile()
    runner.init_kv_cache(num_blocks)
    runner.warm_up()
    return runner


def open_npu(model: Path, options: dict[str, OptionValue] | None = None, **settings: Any) -> Any:
    """Open the Ascend runner in float32."""
    return open_driver(ASCEND, model, FLOAT32 | (options or {}), **settings)


def open_cpu(model: Path, **settings: Any) -> Any:
    """Open the CPU runner with the same sizes."""
    return open_driver(CPU, model, {"num_threads": 1, "attention": "torch", "linear": "torch"}, **settings)


def random_trace(seed: int) -> Any:
    """Give a trace of requests whose prompts fill several blocks."""
    random = Random(seed)
    max_num_seqs = random.choice((2, 3, 4))
    num_requests = random.randint(3, 6)
    return traces.Trace(
        seed=seed,
        depth=1 + seed % 4,
        num_blocks=random.choice((4, 5, 16)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=random.choice((48, 200, 512)),
        prefix_caching=random.random() < 0.7,
        early_share=random.choice((0.0, 0.3, 1.0)),
        arrivals=tuple((_random_request(random, uid), random.choice((0, 1, 3))) for uid in range(num_requests)),
        aborts=tuple(uid for uid in range(num_requests) if random.random() < 0.1),
    )


def _random_request(random: Random, uid: int) -> AddRequest:
    head = random.choice(((), tuple(3 + place % 150 for place in range(BLOCK_SIZE))))
    # Near the end of a block, so that decoding asks for another one.
    length = random.choice((1, 60, BLOCK_SIZE - 6, BLOCK_SIZE - 4, 2 * BLOCK_SIZE - 6))
    prompt = head + tuple(random.choices(range(3, VOCAB_SIZE), k=length))
    max_tokens = random.randint(1, 16)
    return AddRequest(
        uid,
        prompt,
        traces.random_sampling(random, max_tokens),
        max_tokens,
        eos_token_ids=random.choice(((), (2,))),
        stop_token_ids=random.choice(((), tuple(range(20, 30)))),
        priority=random.choice((0, 0, -1, 3)),
    )


@contextmanager
def open_engine(
    plugin: RunnerPlugin, trace: Any, model: Path, options: dict[str, OptionValue], *, enforce_eager: bool
) -> Iterator[Engine]:
    """Open an engine on a runner whose steps are seen done when the trace says so."""
    config = RunnerConfig(
        trace.max_num_seqs,
        trace.max_num_batched_tokens,
        BLOCK_SIZE,
        model=str(model),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_in_flight=trace.depth,
        enforce_eager=enforce_eager,
        options=options,
    )
    runner = started(plugin, config, trace.num_blocks)
    try:
        limits = EngineLimits(
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=trace.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=trace.max_num_seqs,
            max_num_batched_tokens=trace.max_num_batched_tokens,
            max_in_flight=trace.depth,
            prefix_caching=trace.prefix_caching,
        )
        yield Engine(traces.ChosenRunner(runner, trace), limits)
    finally:
        runner.close()
