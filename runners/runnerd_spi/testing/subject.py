"""The runner under test: how to make one, bring it up, and hand it one plan after the other."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from runnerd_spi.plan import Admit, BlockGrant, Release, Row, StepOutput, StepPlan, TokenMask
from runnerd_spi.runner import (
    ModelInfo,
    ModelRunner,
    OptionValue,
    RunnerCapabilities,
    RunnerConfig,
    RunnerPlugin,
    StepHandle,
    Support,
)

MAX_NUM_SEQS = 4
WAIT_SECONDS = 30.0
"""Longest wait for one step; a step of the kit's sizes that takes longer hangs."""

HISTORY_FEATURES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "min_tokens")


class Broken(Exception):
    """A rule does not hold; the message says what was seen and what was expected."""

    def __init__(self, message: str, trace: str = "", seed: int | None = None) -> None:
        super().__init__(message)
        self.trace = trace
        """The smallest trace that shows it, for people; empty when the message says it all."""
        self.seed = seed
        """Seed of the trace; None when no seed is involved."""


class NotChecked(Exception):
    """A rule does not apply to this runner, or the runner offers no way to provoke what it is about."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Take a progress report and do nothing."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The configuration the kit checks with: small, so that every limit is met."""

    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    num_blocks: int
    vocab_size: int
    chunked_prefill: bool = True
    grants_blocks: bool = True
    """Whether plans grant blocks; without, ``num_blocks`` is a number of positions."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A runner under test: its plug-in and what the author configured."""

    plugin: RunnerPlugin
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    """Converted values of the plug-in's options."""
    model: str | None = None
    dtype: str = "auto"

    @property
    def depths(self) -> range:
        """The numbers of steps in flight that it declares."""
        return range(self.plugin.capabilities.min_in_flight, self.plugin.capabilities.max_in_flight + 1)

    def serves(self, feature: str) -> bool:
        """Whether a capability is declared as served."""
        return self.support(feature) != "no"

    def support(self, feature: str) -> Support:
        """Give what is declared of a capability."""
        value: Support = getattr(self.plugin.capabilities, feature)
        return value

    def has_option(self, name: str) -> bool:
        """Whether the plug-in declares an option of this name."""
        return any(option.name == name for option in self.plugin.options)

    def config(self, depth: int | None = None, **options: OptionValue) -> RunnerConfig:
        """Give a configuration of the kit's sizes; ``options`` are added to the author's."""
        block_size = min(self.plugin.capabilities.block_sizes, key=lambda size: abs(size - 4))
        max_model_len = max(64, 2 * block_size + 16)
        chunked = self.serves("chunked_prefill")
        return RunnerConfig(
            max_num_seqs=MAX_NUM_SEQS,
            # A runner without chunked prefill is configured so that every prompt fits in a step.
            max_num_batched_tokens=max(24, block_size + 8) if chunked else max_model_len,
            block_size=block_size,
            model=self.model,
            dtype=self.dtype,
            max_model_len=max_model_len,
            max_in_flight=self.depths[0] if depth is None else depth,
            options={**self.options, **options},
        )

    def create(self, depth: int | None = None, **options: OptionValue) -> ModelRunner:
        """Build a runner; nothing is loaded yet."""
        return self.plugin.create(self.config(depth, **options))

    def open(self, depth: int | None = None, **options: OptionValue) -> Session:
        """Build a runner and bring it up; its KV cache holds a longest request for each slot."""
        return _bring_up(self.plugin, self.config(depth, **options))


@dataclass(slots=True)
class Launched:
    """A plan and its handle. ``output`` once it was asked for."""

    plan: StepPlan
    handle: StepHandle
    output: StepOutput | None = None

    def take(self) -> StepOutput:
        """Give the result, and see that it answers the plan."""
        if self.output is None:
            output = self.handle.result(WAIT_SECONDS)
            if output.step_id != self.plan.step_id or len(output.rows) != len(self.plan.rows):
                raise Broken(
                    f"step {self.plan.step_id} of {len(self.plan.rows)} rows was answered by step {output.step_id} of "
                    f"{len(output.rows)} rows"
                )
            self.output = output
        return self.output


class Session:
    """A runner that is up, and the books of who has which slot and block.

    Args:
        runner: Warmed up.
        config: Its configuration.
        info: What it loaded.
        num_blocks: Blocks of its KV cache.
        capabilities: What its plug-in declares.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: RunnerConfig,
        info: ModelInfo,
        num_blocks: int,
        capabilities: RunnerCapabilities,
    ) -> None:
        self.runner = runner
        self.config = config
        self.info = info
        self.sizes = Sizes(
            block_size=config.block_size,
            max_model_len=info.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_blocks=num_blocks,
            vocab_size=info.vocab_size,
            chunked_prefill=capabilities.chunked_prefill != "no",
            grants_blocks=capabilities.kv_memory == "blocks",
        )
        self.next_step_id = 0
        self.epochs = [0] * config.max_num_seqs
        """The next epoch of each slot."""
        self.free_slots = list(range(config.max_num_seqs))
        self.free_blocks = list(range(num_blocks))

    def launch(
        self,
        releases: tuple[Release, ...] = (),
        admits: tuple[Admit, ...] = (),
        grants: tuple[BlockGrant, ...] = (),
        rows: tuple[Row, ...] = (),
        masks: tuple[TokenMask, ...] = (),
    ) -> Launched:
        """Hand the next plan to the runner; grants are left out where it takes none."""
        grants = grants if self.sizes.grants_blocks else ()
        plan = StepPlan(
            step_id=self.next_step_id, releases=releases, admits=admits, grants=grants, rows=rows, masks=masks
        )
        handle = self.runner.execute_model(plan)
        self.next_step_id += 1
        return Launched(plan, handle)

    def take_epoch(self, slot: int) -> int:
        """Give a slot's next epoch, which is then used."""
        self.epochs[slot] += 1
        return self.epochs[slot] - 1

    def close(self) -> None:
        """End the runner."""
        self.runner.close()


def loaded_frameworks() -> frozenset[str]:
    """Give which of the large frameworks this process has imported."""
    known = ("torch", "torch_npu", "jax", "tensorflow", "mindspore", "onnxruntime", "llama_cpp", "transformers")
    return frozenset(name for name in known if name in sys.modules)


def _bring_up(plugin: RunnerPlugin, config: RunnerConfig) -> Session:
    runner = plugin.create(config)
    try:
        info = runner.load(no_progress)
        budget = runner.profile()
        num_blocks = config.max_num_seqs * -(-info.max_model_len // config.block_size)
        if budget.max_num_blocks is not None:
            num_blocks = min(num_blocks, budget.max_num_blocks)
        num_blocks = min(num_blocks, budget.available_bytes // budget.bytes_per_block)
        runner.init_kv_cache(num_blocks)
        runner.warm_up()
    except BaseException:
        runner.close()
        raise
    return Session(runner, config, info, num_blocks, plugin.capabilities)
