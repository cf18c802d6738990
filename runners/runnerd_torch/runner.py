"""The runner of the engine's plans on a torch device; synchronous and asynchronous are this one class.

It is composed of a device, an attention kernel and the parts that load and launch; a new chip brings its own device and
kernel, never a subclass. This module keeps the order of the calls and knows nothing of a step's insides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from runnerd_spi import KVBudget, LifecycleError, ModelInfo, Progress, RunnerConfig, StepPlan
from runnerd_torch.attention import PagedAttention
from runnerd_torch.decoder import DecoderBuilder
from runnerd_torch.devices.base import Device
from runnerd_torch.graphs import GraphSupport
from runnerd_torch.handle import TorchStepHandle
from runnerd_torch.launching import StepLauncher
from runnerd_torch.layer_ops import LayerOps, TorchLayerOps
from runnerd_torch.linear import LinearFactory
from runnerd_torch.loading import LoadedModel, ModelImpl, load_model
from runnerd_torch.memory import activation_bytes, kv_budget
from runnerd_torch.profiling import measure_step_bytes
from runnerd_torch.sampling import Truncate

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_SECONDS = 30.0
_ORDER = ("load", "profile", "init_kv_cache", "warm_up", "execute_model")


class TorchModelRunner:
    """A transformers model over a paged KV cache on one device.

    Args:
        config: What the operator chose.
        device: The chip; the runner closes it.
        build_attention: Gives the paged attention; may compile, so it is called by ``load``.
        build_linear: Gives the maker of the fused models' projections; the same holds.
        max_logprobs: Most alternatives a request may ask for.
        model_impl: Whose forward to run.
        layer_ops: What the fused models do between their projections; None takes plain PyTorch.
        fit_attention: Gives the attention for the loaded model: the built one, or another, or refuses the model.
        graphs: How steps are captured; None: they are not.
        truncate: The chip's own top-k and top-p; None: exact ones.
        decoders: Makes native decoders of the models they serve; None: there are none.
    """

    def __init__(
        self,
        config: RunnerConfig,
        device: Device,
        build_attention: Callable[[], PagedAttention],
        build_linear: Callable[[], LinearFactory],
        max_logprobs: int,
        model_impl: ModelImpl = "auto",
        layer_ops: LayerOps | None = None,
        fit_attention: Callable[[PagedAttention, LoadedModel], PagedAttention] | None = None,
        graphs: GraphSupport | None = None,
        truncate: Truncate | None = None,
        decoders: DecoderBuilder | None = None,
    ) -> None:
        self._config = config
        self._device = device
        self._build_attention = build_attention
        self._build_linear = build_linear
        self._max_logprobs = max_logprobs
        self._model_impl = model_impl
        self._layer_ops = layer_ops or TorchLayerOps()
        self._fit_attention = fit_attention
        self._graphs = graphs
        self._truncate = truncate
        self._decoders = decoders
        self._progress: Progress = _no_progress
        self._next_call = "load"
        self._closed = False
        self._free_bytes_before_load = 0
        self._attention: PagedAttention | None = None
        self._loaded: LoadedModel | None = None
        self._launcher: StepLauncher | None = None

    def load(self, progress: Progress) -> ModelInfo:
        """Read the weights and put them on the device.

        Raises:
            LifecycleError: The model is loaded already, or the runner is closed.
            ModelLoadError: The model cannot be read or served; ``load`` may be called again.
        """
        self._require("load")
        self._progress = progress
        self._free_bytes_before_load = self._device.memory().free_bytes
        progress("preparing kernels", 0, 3)
        self._attention = self._build_attention()
        progress("preparing kernels", 1, 3)
        make_linear = self._build_linear()
        progress("preparing kernels", 2, 3)
        if self._decoders is not None:
            self._decoders.prepare()
        progress("preparing kernels", 3, 3)
        self._loaded = load_model(
            self._config, self._device, progress, self._model_impl, make_linear, self._layer_ops, self._decoders
        )
        if self._fit_attention is not None:
            self._attention = self._fit_attention(self._attention, self._loaded)
        self._next_call = "profile"
        return self._loaded.info

    def profile(self) -> KVBudget:
        """Give what weights and activations leave for the KV cache.

        Raises:
            LifecycleError: The model is not loaded, this was called before, or the runner is closed.
            ModelLoadError: The largest step does not fit into the device's memory.
        """
        loaded, attention = self._require_loaded("profile")
        step_bytes = 0
        if self._config.memory_bytes is None:
            measured = measure_step_bytes(self._config, self._device, loaded, attention, self._max_logprobs)
            step_bytes = activation_bytes(loaded.shape, self._config) if measured is None else measured
        memory = self._device.memory()
        budget = kv_budget(loaded.shape, self._config, self._free_bytes_before_load, memory, step_bytes)
        if self._graphs is not None and self._config.memory_bytes is None:
            reserved = self._graphs.num_reserved_blocks * budget.bytes_per_block
            budget = replace(budget, available_bytes=max(budget.available_bytes - reserved, 0))
        self._next_call = "init_kv_cache"
        return budget

    def init_kv_cache(self, num_blocks: int) -> None:
        """Allocate ``num_blocks`` blocks.

        Raises:
            LifecycleError: ``profile`` was not called, this was called before, or the runner is closed.
            ValueError: There would be no block.
        """
        loaded, attention = self._require_loaded("init_kv_cache")
        if num_blocks < 1:
            raise ValueError(f"num_blocks {num_blocks}, expected at least 1; give the KV cache more memory")
        self._launcher = StepLauncher(
            self._config, self._device, loaded, attention, num_blocks, self._max_logprobs, self._graphs, self._truncate
        )
        self._next_call = "warm_up"

    def warm_up(self) -> None:
        """Capture graphs, run a prefill and a decode step, so that the first requests find everything built.

        Raises:
            LifecycleError: There is no KV cache, this was called before, or the runner is closed.
            RunnerUnavailable: Graphs cannot be captured.
            StepFailed: A step failed.
        """
        self._require_launcher("warm_up").warm_up(self._progress)
        self._next_call = "execute_model"

    def execute_model(self, plan: StepPlan) -> TorchStepHandle:
        """Launch a step and give its handle; settles the oldest step when ``max_in_flight`` are unresolved.

        Raises:
            LifecycleError: The runner is not warmed up, or closed.
            PlanError: The plan breaks the contract; nothing was changed.
            StepFailed: An earlier step failed.
        """
        begin_ns = time.monotonic_ns()
        return self._require_launcher("execute_model").launch(plan, begin_ns)

    def close(self) -> None:
        """Wait for launched work, at most half a minute, and give everything back."""
        if self._closed:
            return
        self._closed = True
        if not self._device.close(_CLOSE_TIMEOUT_SECONDS):
            logger.warning("work on %s did not end within %s s", self._device.description, _CLOSE_TIMEOUT_SECONDS)
        self._loaded = self._attention = self._launcher = None

    def _require(self, call: str) -> None:
        if self._closed:
            raise LifecycleError(f"{call} was called on a closed runner; create a new one")
        if self._next_call != call:
            raise LifecycleError(
                f"{call} was called, expected {self._next_call} next; the order is {', '.join(_ORDER)}"
            )

    def _require_loaded(self, call: str) -> tuple[LoadedModel, PagedAttention]:
        self._require(call)
        assert self._loaded is not None
        assert self._attention is not None
        return self._loaded, self._attention

    def _require_launcher(self, call: str) -> StepLauncher:
        self._require(call)
        assert self._launcher is not None
        return self._launcher


def _no_progress(_stage: str, _done: int, _total: int) -> None:
    return
