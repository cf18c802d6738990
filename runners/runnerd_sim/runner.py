"""The simulated model runner: the SPI's order of calls over a device with a clock.

It keeps the host's view (life cycle, plan checks, unresolved steps) and launches; what a step computes is the
executor's, when it is ready is the device's.
"""

from __future__ import annotations

import time
from collections import deque
from enum import Enum
from functools import partial

import numpy as np

from runnerd_sim.device import Launch, SimDevice
from runnerd_sim.executor import Executor
from runnerd_sim.handle import SimStepHandle
from runnerd_sim.kv_cache import KVCache
from runnerd_sim.model import EOS_TOKEN_ID, VOCAB_SIZE, SimModel
from runnerd_sim.options import SimOptions
from runnerd_spi import (
    InvalidOption,
    KVBudget,
    LifecycleError,
    ModelInfo,
    ModelLoadError,
    PlanChecker,
    Progress,
    RunnerCapabilities,
    RunnerConfig,
    RunnerError,
    StepFailed,
    StepHandle,
    StepOutput,
    StepPlan,
)

_BYTES_PER_TOKEN = 8
"""What a position takes in the simulated KV cache."""
_LOAD_PARTS = 20


class _State(Enum):
    CREATED = "created"
    LOADED = "loaded"
    PROFILED = "profiled"
    KV_CACHE_READY = "KV cache initialized"
    READY = "ready"
    CLOSED = "closed"


class SimModelRunner:
    """A model runner without a model. Its tokens are a function of each request's history and parameters alone.

    Args:
        config: What the operator chose.
        capabilities: What the plug-in declares; the configuration must be within it.
        close_seconds: How long ``close`` waits for launched work; a device that needs longer is given up.

    Raises:
        InvalidOption: An option or a configured value is out of range.
    """

    def __init__(self, config: RunnerConfig, capabilities: RunnerCapabilities, *, close_seconds: float = 5.0) -> None:
        _check_config(config, capabilities)
        self._config = config
        self._close_seconds = close_seconds
        self._options = SimOptions.from_mapping(config.options)
        self._state = _State.CREATED
        self._model: SimModel | None = None
        self._max_model_len = 0
        self._num_blocks = 0
        self._checker: PlanChecker | None = None
        self._executor: Executor | None = None
        self._device: SimDevice | None = None
        self._unresolved: deque[SimStepHandle] = deque()

    def load(self, progress: Progress) -> ModelInfo:
        """Pretend to read weights for ``load_seconds``.

        Raises:
            ModelLoadError: A model was given, or max_model_len or dtype is none of the simulated model's.
        """
        self._expect("load", _State.CREATED)
        config, limit = self._config, self._options.max_model_len
        if config.model is not None:
            raise ModelLoadError(f"model {config.model!r}: the simulated runner takes none; leave it out")
        if config.dtype not in ("auto", "float32"):
            raise ModelLoadError(f"dtype {config.dtype!r}, the simulated model has float32; use --dtype auto")
        max_model_len = limit if config.max_model_len is None else config.max_model_len
        if not 1 <= max_model_len <= limit:
            raise ModelLoadError(
                f"max_model_len {max_model_len}, the simulated model takes 1 to {limit}; "
                "lower it or raise the runner option max_model_len"
            )
        for part in range(_LOAD_PARTS):
            progress("loading weights", part, _LOAD_PARTS)
            time.sleep(self._options.load_seconds / _LOAD_PARTS)
        progress("loading weights", _LOAD_PARTS, _LOAD_PARTS)
        self._model = SimModel(self._options.eos_bias, self._options.script)
        self._max_model_len = max_model_len
        self._state = _State.LOADED
        return ModelInfo(
            name="sim",
            architecture="hash of the history" if self._options.script is None else "script",
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            eos_token_ids=(EOS_TOKEN_ID,),
            dtype="float32",
            num_parameters=0,
            weights_bytes=0,
            device="simulated device",
        )

    def profile(self) -> KVBudget:
        """Give the capacity that the option ``num_blocks`` and the configured memory leave."""
        self._expect("profile", _State.LOADED)
        bytes_per_block = self._config.block_size * _BYTES_PER_TOKEN
        available = self._config.memory_bytes
        if available is None:
            available = self._options.num_blocks * bytes_per_block
        self._state = _State.PROFILED
        return KVBudget(bytes_per_block, available, self._options.num_blocks)

    def init_kv_cache(self, num_blocks: int) -> None:
        """Allocate the simulated KV cache.

        Raises:
            RunnerError: ``num_blocks`` is not within 1 and the option ``num_blocks``; nothing was changed.
        """
        self._expect("init_kv_cache", _State.PROFILED)
        if not 1 <= num_blocks <= self._options.num_blocks:
            raise RunnerError(
                f"{num_blocks} KV blocks, the simulated device has room for 1 to {self._options.num_blocks}"
            )
        self._num_blocks = num_blocks
        self._state = _State.KV_CACHE_READY

    def warm_up(self) -> None:
        """Start the device."""
        self._expect("warm_up", _State.KV_CACHE_READY)
        assert self._model is not None
        config = self._config
        self._checker = PlanChecker(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self._max_model_len,
            block_size=config.block_size,
            num_blocks=self._num_blocks,
            vocab_size=VOCAB_SIZE,
        )
        self._executor = Executor(
            self._model,
            KVCache(self._num_blocks, config.block_size, shadow=self._options.kv_shadow),
            max_num_seqs=config.max_num_seqs,
            max_model_len=self._max_model_len,
            block_size=config.block_size,
            fail_row_token=self._options.fail_row_token,
            crash_row_token=self._options.crash_row_token,
        )
        self._model.logits(np.zeros(config.max_num_seqs, dtype=np.uint64))
        self._device = SimDevice()
        self._state = _State.READY

    def execute_model(self, plan: StepPlan) -> StepHandle:
        """Launch a step; settle the oldest when ``max_in_flight`` are unresolved.

        Raises:
            PlanError: The plan breaks the contract; nothing was changed.
            StepFailed: An earlier step failed fatally; nothing was changed.
        """
        host_begin_ns = time.monotonic_ns()
        self._expect("execute_model", _State.READY)
        assert self._checker is not None
        assert self._device is not None
        cause = self._device.failure
        if cause is not None:
            raise StepFailed(
                f"step {plan.step_id} is not launched, an earlier one failed: {cause}", fatal=True
            ) from cause
        self._checker.apply(plan)
        handle = SimStepHandle(plan.step_id, host_begin_ns)
        self._device.launch(self._build_launch(plan, handle))
        self._unresolved.append(handle)
        while self._unresolved and self._unresolved[0].done():
            self._unresolved.popleft()
        if len(self._unresolved) >= self._config.max_in_flight:
            # A failure is not raised here: it belongs to that step's handle and to the calls after it.
            self._unresolved.popleft().wait()
        return handle

    def close(self) -> None:
        """Wait for launched work, at most ``close_seconds``, and end. Handles that are out stay readable."""
        if self._device is not None and self._state is not _State.CLOSED:
            self._device.close(self._close_seconds)
        self._state = _State.CLOSED
        self._unresolved.clear()
        self._model = self._executor = self._checker = self._device = None

    def _build_launch(self, plan: StepPlan, handle: SimStepHandle) -> Launch:
        assert self._executor is not None
        options = self._options
        seconds = 0.0
        if plan.rows:
            num_tokens = sum(row.num_new_tokens for row in plan.rows)
            seconds = options.step_seconds + options.seconds_per_row * len(plan.rows)
            seconds += options.seconds_per_token * num_tokens
        if plan.step_id == options.stall_at_step:
            seconds += options.stall_seconds
        compute = (
            partial(_fail, plan.step_id) if plan.step_id == options.fail_at_step else partial(self._executor.run, plan)
        )
        copy_ns = int(options.copy_seconds * 1e9)
        return Launch(handle, compute, int(seconds * 1e9), copy_ns, crash=plan.step_id == options.crash_at_step)

    def _expect(self, call: str, state: _State) -> None:
        if self._state is not state:
            raise LifecycleError(f"{call} called on a runner that is {self._state.value}, expected: {state.value}")


def _check_config(config: RunnerConfig, capabilities: RunnerCapabilities) -> None:
    low, high = capabilities.min_in_flight, capabilities.max_in_flight
    if not low <= config.max_in_flight <= high:
        raise InvalidOption(f"runner 'sim': max_in_flight {config.max_in_flight}, expected {low} to {high}")
    if config.block_size not in capabilities.block_sizes:
        sizes = ", ".join(map(str, sorted(capabilities.block_sizes)))
        raise InvalidOption(f"runner 'sim': block_size {config.block_size}, expected one of {sizes}")
    if config.max_num_seqs < 1 or config.max_num_batched_tokens < 1:
        raise InvalidOption(
            f"runner 'sim': max_num_seqs {config.max_num_seqs} and max_num_batched_tokens "
            f"{config.max_num_batched_tokens}, expected 1 or more"
        )


def _fail(step_id: int) -> StepOutput:
    raise RuntimeError(f"simulated device fault at step {step_id} (option fail_at_step)")
