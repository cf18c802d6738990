"""The llama.cpp runner: the SPI's order of calls, and a worker thread that stands for a device's stream.

It keeps the host's view: life cycle, plan checks, unresolved steps. What a step computes is the executor's.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil

from runnerd_llamacpp.executor import Executor
from runnerd_llamacpp.library import MAX_SEQUENCES, Library, load_library
from runnerd_llamacpp.model import Context, Model, Span
from runnerd_spi import (
    FutureStep,
    InvalidOption,
    KVBudget,
    Lifecycle,
    ModelInfo,
    ModelLoadError,
    PlanChecker,
    Progress,
    RunnerConfig,
    StepFailed,
    StepOutput,
    StepPlan,
    StepTimeline,
)

_DEFAULT_DTYPE = "float16"
_DEFAULT_KV_BYTES = 4 << 30
"""Most that the KV memory takes unless it is told a size: other programs live on the host as well."""
_NUM_PROBE_POSITIONS = 256
"""The least that llama.cpp allocates."""


class LlamaCppRunner:
    """A GGUF model on the host's cores.

    Args:
        config: Within the plug-in's capabilities.

    Raises:
        InvalidOption: An option has a value that means nothing.
        RunnerUnavailable: The library is not there.
    """

    def __init__(self, config: RunnerConfig) -> None:
        self._num_threads = _option(config, "num_threads", default=0, least=0) or _usable_cores()
        self._max_ubatch = _option(config, "max_ubatch", default=512, least=1)
        self._config = config
        self._lifecycle = Lifecycle()
        self._library: Library = load_library()
        if config.max_num_seqs > MAX_SEQUENCES:
            raise InvalidOption(
                f"runner 'llamacpp': max_num_seqs {config.max_num_seqs}, but llama.cpp has {MAX_SEQUENCES} sequences "
                "at most; lower --max-num-seqs"
            )
        self._model: Model | None = None
        self._context: Context | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._unresolved: deque[FutureStep] = deque()
        self._cause: BaseException | None = None
        self._free_bytes = 0

    def load(self, progress: Progress) -> ModelInfo:
        """Read a GGUF file.

        Raises:
            ModelLoadError: It cannot be read or is not served, or the configuration does not go with it.
        """
        self._lifecycle.expect("load")
        config = self._config
        self._dtype = _DEFAULT_DTYPE if config.dtype == "auto" else config.dtype
        if self._dtype not in ("float16", "float32"):
            raise ModelLoadError(
                f"dtype {config.dtype!r}: keys and values are float16 or float32; the weights stay as the file has them"
            )
        if config.model is None:
            raise ModelLoadError("no model was given; give a GGUF file")
        self._free_bytes = psutil.virtual_memory().available
        model = Model(self._library, Path(config.model), progress)
        most = model.max_model_len
        self._max_model_len = most if config.max_model_len is None else config.max_model_len
        if not 1 <= self._max_model_len <= most:
            model.close()
            raise ModelLoadError(f"max_model_len {self._max_model_len}, expected 1 to {most}, what the model allows")
        self._model = model
        self._lifecycle.done()
        return ModelInfo(
            name=Path(config.model).stem,
            architecture=model.description(),
            vocab_size=model.vocab_size,
            max_model_len=self._max_model_len,
            eos_token_ids=model.end_token_ids(),
            dtype=self._dtype,
            num_parameters=model.num_parameters,
            weights_bytes=model.weights_bytes,
            device=f"cpu ({self._num_threads} threads)",
        )

    def profile(self) -> KVBudget:
        """Measure what the largest step needs, and give what is left of the host's memory."""
        self._lifecycle.expect("profile")
        assert self._model is not None
        config, model = self._config, self._model
        per_token = model.kv_bytes_per_token(self._dtype)
        available = config.memory_bytes
        if available is None:
            available = int(self._free_bytes * config.memory_fraction) - model.weights_bytes - self._step_bytes()
            available = min(available, _DEFAULT_KV_BYTES)
        self._lifecycle.done()
        # More positions than all slots fill at their longest would never be used at once.
        return KVBudget(per_token, max(available, 0), config.max_num_seqs * self._max_model_len)

    def init_kv_cache(self, num_blocks: int) -> None:
        """Allocate the KV memory.

        Raises:
            ValueError: ``num_blocks`` is below 1; nothing was changed.
            RunnerError: The memory cannot be had.
        """
        self._lifecycle.expect("init_kv_cache")
        assert self._model is not None
        if num_blocks < 1:
            raise ValueError(f"a KV memory of {num_blocks} positions, expected 1 or more")
        config = self._config
        self._context = self._new_context(num_blocks, config.max_num_seqs)
        self._checker = PlanChecker(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self._max_model_len,
            block_size=config.block_size,
            num_blocks=num_blocks,
            vocab_size=self._model.vocab_size,
            kv_memory="tokens",
        )
        self._executor = Executor(self._context, max_num_seqs=config.max_num_seqs, max_model_len=self._max_model_len)
        self._lifecycle.done()

    def warm_up(self) -> None:
        """Compute one token, so that the threads and the weights' pages are there."""
        self._lifecycle.expect("warm_up")
        assert self._context is not None
        self._context.compute([Span(0, 0, np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.bool_))])
        self._context.clear()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="llamacpp")
        self._lifecycle.done()

    def execute_model(self, plan: StepPlan) -> FutureStep:
        """Launch a step.

        Raises:
            PlanError: The plan breaks the contract; nothing was changed.
            StepFailed: An earlier step failed.
        """
        begin = time.monotonic_ns()
        self._lifecycle.expect("execute_model")
        assert self._worker is not None
        if self._cause is not None:
            raise StepFailed(f"step {plan.step_id} is not launched: {self._cause}", fatal=True) from self._cause
        self._checker.apply(plan)
        future = self._worker.submit(self._run, plan, begin, time.monotonic_ns())
        handle = FutureStep(plan.step_id, future, begin)
        self._unresolved.append(handle)
        while self._unresolved and self._unresolved[0].done():
            self._unresolved.popleft()
        if len(self._unresolved) >= self._config.max_in_flight:
            self._unresolved.popleft().wait()
        return handle

    def close(self) -> None:
        """Wait for launched steps and give everything back."""
        if not self._lifecycle.close():
            return
        if self._worker is not None:
            self._worker.shutdown()
        self._unresolved.clear()
        if self._context is not None:
            self._context.close()
        if self._model is not None:
            self._model.close()

    def _run(self, plan: StepPlan, host_begin: int, host_end: int) -> tuple[StepOutput, StepTimeline]:
        """Compute a step, on the worker."""
        if self._cause is not None:
            raise self._cause
        begin = time.monotonic_ns()
        try:
            if plan.step_id == self._config.options.get("fail_at_step"):
                _fail(plan.step_id)
            output = self._executor.run(plan)
        except Exception as error:
            self._cause = error
            raise
        end = time.monotonic_ns()
        return output, StepTimeline(host_begin, host_end, begin, end, end)

    def _step_bytes(self) -> int:
        """Measure what a context takes beside its KV memory, which is what its largest step needs.

        llama.cpp reserves that when a context is made, and touches it later: so it shows in the address space. Logits
        are added, for they may be asked of every position of a batch.
        """
        assert self._model is not None
        process = psutil.Process()
        before = process.memory_info().vms
        context = self._new_context(_NUM_PROBE_POSITIONS, 1)
        held = process.memory_info().vms - before
        context.close()
        return int(max(held, 0)) + self._config.max_num_batched_tokens * self._model.vocab_size * 4

    def _new_context(self, num_positions: int, num_sequences: int) -> Context:
        assert self._model is not None
        return Context(
            self._model,
            num_positions=num_positions,
            num_sequences=num_sequences,
            max_batch=self._config.max_num_batched_tokens,
            max_ubatch=self._max_ubatch,
            num_threads=self._num_threads,
            kv_dtype=self._dtype,
        )


def _fail(step_id: int) -> None:
    raise RuntimeError(f"step {step_id} was told to fail (option fail_at_step)")


def _option(config: RunnerConfig, name: str, *, default: int, least: int) -> int:
    value = config.options.get(name, default)
    if not isinstance(value, int) or value < least:
        raise InvalidOption(f"runner 'llamacpp': option {name} is {value!r}, expected {least} or more")
    return int(value)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
