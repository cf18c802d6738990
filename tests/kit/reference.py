"""A small correct runner: a hash of the history for a model, a thread for a device. The mutants change it in one place.

Its KV cache holds what a row's history hashes to, so that a wrong block gives wrong tokens.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from runnerd_spi import (
    Admit,
    FutureStep,
    KVBudget,
    Lifecycle,
    ModelInfo,
    ModelLoadError,
    PlanChecker,
    Row,
    RowOutput,
    RunnerCapabilities,
    RunnerConfig,
    RunnerOption,
    RunnerPlugin,
    SamplingParams,
    StepFailed,
    StepOutput,
    StepPlan,
    StepTimeline,
    TokenLogprobs,
    check_config,
)

VOCAB_SIZE = 24
DEVICE_SECONDS = 0.0003
MAX_LOGPROBS = 5

CAPABILITIES = RunnerCapabilities(
    max_in_flight=3,
    dtypes=("float32",),
    block_sizes=(4, 8),
    needs_model=False,
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
TOKEN_MEMORY_CAPABILITIES = replace(CAPABILITIES, kv_memory="tokens", block_sizes=(1,), prefix_caching="no")
OPTIONS = (RunnerOption("fail_at_step", int, None, "step that fails"),)


@dataclass(slots=True)
class Slot:
    """A request on the device."""

    params: SamplingParams
    num_prompt_tokens: int
    blocks: list[int] = field(default_factory=list)


class ReferenceRunner:
    """Keeps every rule."""

    capabilities = CAPABILITIES

    def __init__(self, config: RunnerConfig) -> None:
        self.check_config(config)
        self.config = config
        self.lifecycle = Lifecycle()
        self.slots: dict[int, Slot] = {}
        self.cause: BaseException | None = None
        self.unresolved: deque[FutureStep] = deque()
        self.device: ThreadPoolExecutor | None = None

    def check_config(self, config: RunnerConfig) -> None:
        check_config("reference", config, self.capabilities)

    # The host's side

    def load(self, progress) -> ModelInfo:
        self.lifecycle.expect("load")
        if self.config.model is not None:
            self.refuse_model()
        if self.config.dtype not in ("auto", "float32"):
            raise ModelLoadError(f"dtype {self.config.dtype!r}, expected float32")
        progress("hashing", 1, 1)
        self.max_model_len = self.config.max_model_len or 64
        self.lifecycle.done()
        return ModelInfo("reference", "hash", VOCAB_SIZE, self.max_model_len, (0,), "float32", 0, 0, "a thread")

    def refuse_model(self) -> None:
        raise ModelLoadError(f"model {self.config.model!r}: this runner takes none")

    def profile(self) -> KVBudget:
        self.lifecycle.expect("profile")
        self.lifecycle.done()
        return KVBudget(bytes_per_block=8, available_bytes=8 * 256)

    def init_kv_cache(self, num_blocks: int) -> None:
        self.lifecycle.expect("init_kv_cache")
        self.check_num_blocks(num_blocks)
        self.kv_cache = np.zeros(self.kv_cache_length(num_blocks), dtype=np.int64)
        self.tokens = np.zeros((self.config.max_num_seqs, self.table_length()), dtype=np.int64)
        self.checker = PlanChecker(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.config.block_size,
            num_blocks=num_blocks,
            vocab_size=VOCAB_SIZE,
            kv_memory=self.capabilities.kv_memory,
        )
        self.lifecycle.done()

    def kv_cache_length(self, num_blocks: int) -> int:
        return num_blocks * self.config.block_size

    def check_num_blocks(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"{num_blocks} blocks, expected 1 or more")

    def table_length(self) -> int:
        return self.max_model_len

    def warm_up(self) -> None:
        self.lifecycle.expect("warm_up")
        self.device = ThreadPoolExecutor(1)
        self.lifecycle.done()

    def execute_model(self, plan: StepPlan) -> FutureStep:
        begin = self.now()
        self.lifecycle.expect("execute_model")
        assert self.device is not None
        if self.cause is not None:
            raise StepFailed(f"step {plan.step_id} is not launched: {self.cause}", fatal=True) from self.cause
        self.check_plan(plan)
        handle = self.handle(plan.step_id, self.device.submit(self.run_step, plan, begin), begin)
        self.unresolved.append(handle)
        self.settle()
        return handle

    def now(self) -> int:
        return time.monotonic_ns()

    def check_plan(self, plan: StepPlan) -> None:
        self.checker.apply(plan)

    def handle(self, step_id: int, future: Future, begin: int) -> FutureStep:
        return FutureStep(step_id, future, begin)

    def settle(self) -> None:
        while self.unresolved and self.unresolved[0].done():
            self.unresolved.popleft()
        if len(self.unresolved) >= self.config.max_in_flight:
            self.unresolved.popleft().wait()

    def close(self) -> None:
        if self.lifecycle.close() and self.device is not None:
            self.device.shutdown()
            self.unresolved.clear()

    # The device's side

    def run_step(self, plan: StepPlan, host_begin: int) -> tuple[StepOutput, StepTimeline]:
        host_end = begin = self.now()
        if self.cause is not None:
            raise self.failure()
        if plan.step_id == self.config.options.get("fail_at_step"):
            self.cause = RuntimeError(f"step {plan.step_id} was told to fail")
            raise self.cause
        for release in plan.releases:
            self.release(release.slot)
        for admit in plan.admits:
            self.admit(admit)
        for grant in plan.grants:
            self.slots[grant.slot].blocks.extend(grant.block_ids)
        outputs = tuple(self.run_row(row, plan) for row in plan.rows)
        time.sleep(DEVICE_SECONDS)
        end = self.now()
        return StepOutput(plan.step_id, outputs), StepTimeline(host_begin, host_end, begin, end, end)

    def failure(self) -> BaseException:
        assert self.cause is not None
        return self.cause

    def release(self, slot: int) -> None:
        del self.slots[slot]

    def admit(self, admit: Admit) -> None:
        self.slots[admit.slot] = Slot(admit.sampling_params, admit.num_prompt_tokens)
        self.tokens[admit.slot, : len(admit.token_ids)] = admit.token_ids

    def run_row(self, row: Row, plan: StepPlan) -> RowOutput:
        slot, end = self.slots[row.slot], row.first_position + row.num_new_tokens
        prompt_logprobs: list[TokenLogprobs] = []
        for position in range(row.first_position, end):
            history = self.kv_cache[self.place(row.slot, position - 1)] if position else 0
            history = (int(history) * 1000003 + int(self.tokens[row.slot, position]) * 7919 + position) % (1 << 31)
            self.kv_cache[self.place(row.slot, position)] = history
            count = slot.params.num_prompt_logprobs
            if count is not None and position + 1 < slot.num_prompt_tokens:
                prompt_logprobs.append(record(logits_of(history), int(self.tokens[row.slot, position + 1]), count))
        if not row.sample:
            return self.output_without_sample(row, tuple(prompt_logprobs))
        return self.sample(row, slot, end, logits_of(history), tuple(prompt_logprobs), plan)

    def place(self, slot: int, position: int) -> int:
        size = self.config.block_size
        return self.slots[slot].blocks[position // size] * size + position % size

    def output_without_sample(self, row: Row, prompt_logprobs: tuple[TokenLogprobs, ...]) -> RowOutput:
        return RowOutput(prompt_logprobs=prompt_logprobs)

    def sample(self, row, slot, end, logits, prompt_logprobs, plan) -> RowOutput:
        history = self.tokens[row.slot, :end]
        scores = self.adjusted(
            self.masked(logits, row, plan), slot, row, self.seen_outputs(history[slot.num_prompt_tokens :]), history
        )
        token = self.choose(scores, slot.params, self.uniform(slot, row, end - slot.num_prompt_tokens, plan))
        if token is None:
            return RowOutput(failure="nothing is left to choose")
        self.write(row.slot, end, token)
        count = slot.params.num_logprobs
        logprobs = None if count is None else record(self.raw(logits, scores), token, count)
        return RowOutput(token_id=token, logprobs=self.shown(logprobs), prompt_logprobs=prompt_logprobs)

    def masked(self, logits: np.ndarray, row: Row, plan: StepPlan) -> np.ndarray:
        for mask in plan.masks:
            if mask.slot == row.slot:
                bits = np.unpackbits(np.frombuffer(mask.allowed, np.uint8), count=VOCAB_SIZE, bitorder="little")
                return np.where(bits, logits, -np.inf)
        return logits

    def write(self, slot: int, position: int, token: int) -> None:
        self.tokens[slot, position] = token

    def seen_outputs(self, outputs: np.ndarray) -> np.ndarray:
        return outputs

    def counts(self, slot: int, outputs: np.ndarray) -> np.ndarray:
        return np.bincount(outputs, minlength=VOCAB_SIZE)

    def raw(self, logits: np.ndarray, scores: np.ndarray) -> np.ndarray:
        return logits

    def shown(self, logprobs: TokenLogprobs | None) -> TokenLogprobs | None:
        return logprobs

    def uniform(self, slot: Slot, row: Row, index: int, plan: StepPlan) -> float:
        return random.Random(f"{slot.params.seed} {index}").random()

    def min_p(self, params: SamplingParams) -> float:
        return params.min_p

    def adjusted(self, logits, slot, row, outputs, history) -> np.ndarray:
        scores, params = logits.copy(), slot.params
        seen = np.bincount(np.concatenate([history[: slot.num_prompt_tokens], outputs]), minlength=VOCAB_SIZE) > 0
        factor = params.repetition_penalty
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / factor, scores[seen] * factor)
        counts = self.counts(row.slot, outputs)
        scores -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        for token, bias in params.logit_bias.items():
            scores[token] += bias
        if params.allowed_token_ids is not None:
            scores[np.setdiff1d(np.arange(VOCAB_SIZE), params.allowed_token_ids)] = -np.inf
        for *before, last in params.bad_words_token_ids:
            if len(outputs) >= len(before) and outputs[len(outputs) - len(before) :].tolist() == before:
                scores[last] = -np.inf
        if len(outputs) < params.min_tokens:
            scores[list(params.stop_token_ids)] = -np.inf
        return scores

    def choose(self, scores: np.ndarray, params: SamplingParams, uniform: float) -> int | None:
        best = int(scores.argmax())
        if scores[best] == -np.inf:
            return None
        if params.temperature == 0:
            return best
        weights = np.exp((scores - scores[best]) / params.temperature)
        order = np.argsort(-scores, kind="stable")
        if params.top_k:
            weights[order[params.top_k :]] = 0
        if params.top_p < 1:
            cumulative = weights[order].cumsum()
            weights[order[int(cumulative.searchsorted(params.top_p * cumulative[-1])) + 1 :]] = 0
        weights[weights < self.min_p(params)] = 0
        cumulative = weights.cumsum()
        return min(int(cumulative.searchsorted(uniform * cumulative[-1], side="right")), int(weights.nonzero()[0][-1]))


class TokenMemoryRunner(ReferenceRunner):
    """Places its keys and values itself."""

    capabilities = TOKEN_MEMORY_CAPABILITIES

    def kv_cache_length(self, num_blocks: int) -> int:
        return self.config.max_num_seqs * self.max_model_len

    def place(self, slot: int, position: int) -> int:
        return slot * self.max_model_len + position


def logits_of(history: int) -> np.ndarray:
    """``[VOCAB_SIZE]`` in [-2, 2)."""
    words = (np.uint64(history) ^ (np.arange(1, VOCAB_SIZE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))) * (
        np.uint64(0xBF58476D1CE4E5B9)
    )
    words ^= words >> np.uint64(31)
    words *= np.uint64(0x94D049BB133111EB)
    return (words >> np.uint64(40)).astype(np.float64) / (1 << 24) * 4 - 2


def record(logits: np.ndarray, token: int, count: int) -> TokenLogprobs:
    """The log-probability of a token and the most likely alternatives."""
    logprobs = logits - math.log(np.exp(logits).sum())
    order = np.argsort(-logprobs, kind="stable")[:count]
    top = tuple((int(one), float(logprobs[one])) for one in order)
    return TokenLogprobs(token, float(logprobs[token]), int((logprobs > logprobs[token]).sum()) + 1, top)


def plugin(runner: type[ReferenceRunner], capabilities: RunnerCapabilities = CAPABILITIES) -> RunnerPlugin:
    """A plug-in of this runner class."""
    return RunnerPlugin("reference", "for the tests of the kit", capabilities, runner, OPTIONS)


REFERENCE = plugin(ReferenceRunner)
TOKEN_MEMORY = plugin(TokenMemoryRunner, TOKEN_MEMORY_CAPABILITIES)
