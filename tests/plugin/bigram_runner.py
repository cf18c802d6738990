"""A runner in one file: says what a text file would say, from which byte follows which."""

import random
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

from runnerd_spi import (
    DoneStep,
    KVBudget,
    Lifecycle,
    ModelInfo,
    ModelLoadError,
    PlanChecker,
    RowOutput,
    RunnerCapabilities,
    RunnerConfig,
    RunnerPlugin,
    StepOutput,
    StepPlan,
    StepTimeline,
    check_config,
)

VOCAB_SIZE = 257  # a byte each, and the end
EOS = 256


class BigramRunner:
    def __init__(self, config: RunnerConfig) -> None:
        check_config("bigram", config, PLUGIN.capabilities)
        self.config, self.lifecycle = config, Lifecycle()

    def load(self, progress) -> ModelInfo:
        self.lifecycle.expect("load")
        if self.config.dtype not in ("auto", "float32"):
            raise ModelLoadError(f"dtype {self.config.dtype!r}, expected float32")
        try:
            text = Path(self.config.model).read_bytes()
        except OSError as error:
            raise ModelLoadError(f"{self.config.model}: {error.strerror}; give a text file") from error
        self.following = [Counter() for _ in range(VOCAB_SIZE)]
        for before, after in pairwise([*text, EOS]):
            self.following[before][after] += 1
        progress("counting", 1, 1)
        self.max_model_len = self.config.max_model_len or 2048
        self.lifecycle.done()
        return ModelInfo("bigram", "bigram", VOCAB_SIZE, self.max_model_len, (EOS,), "float32", 0, len(text), "CPU")

    def profile(self) -> KVBudget:
        self.lifecycle.expect("profile")
        self.lifecycle.done()
        return KVBudget(bytes_per_block=1, available_bytes=1 << 20)  # this model needs no KV cache

    def init_kv_cache(self, num_blocks: int) -> None:
        self.lifecycle.expect("init_kv_cache")
        if num_blocks < 1:
            raise ValueError(f"{num_blocks} KV blocks, expected 1 or more")
        self.checker = PlanChecker(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.config.block_size,
            num_blocks=num_blocks,
            vocab_size=VOCAB_SIZE,
        )
        self.requests = {}  # slot to the request's tokens, sampled ones included, and its Admit
        self.lifecycle.done()

    def warm_up(self) -> None:
        self.lifecycle.expect("warm_up")
        self.lifecycle.done()

    def execute_model(self, plan: StepPlan) -> DoneStep:
        begin = time.monotonic_ns()
        self.lifecycle.expect("execute_model")
        self.checker.apply(plan)
        output = self.run(plan)
        end = time.monotonic_ns()
        return DoneStep(output, StepTimeline(begin, end, begin, end, end))

    def run(self, plan: StepPlan) -> StepOutput:
        for release in plan.releases:
            del self.requests[release.slot]
        for admit in plan.admits:
            self.requests[admit.slot] = (list(admit.token_ids), admit)
        return StepOutput(plan.step_id, tuple(self.sample(row) for row in plan.rows))

    def sample(self, row) -> RowOutput:
        if not row.sample:
            return RowOutput()
        tokens, admit = self.requests[row.slot]
        params = admit.sampling_params
        counts = self.following[tokens[-1]] or Counter({ord(" "): 1})
        # What a token depends on: the request's seed and how many outputs it has, nothing else.
        draw = random.Random(f"{params.seed} {len(tokens) - admit.num_prompt_tokens}")
        if params.temperature == 0:
            token = max(counts, key=lambda one: (counts[one], -one))
        else:
            weights = [(count / max(counts.values())) ** (1 / params.temperature) for count in counts.values()]
            [token] = draw.choices(list(counts), weights)
        tokens.append(token)
        return RowOutput(token_id=token)

    def close(self) -> None:
        self.lifecycle.close()


PLUGIN = RunnerPlugin(
    name="bigram",
    description="which byte follows which in a text file",
    capabilities=RunnerCapabilities(
        max_in_flight=1,
        dtypes=("float32",),
        block_sizes=(16,),
        tokenizer="bytes",
        top_k="no",
        top_p="no",
        min_p="no",
    ),
    create=BigramRunner,
)
