"""The runner SPI: what a model runner is, and what the engine may ask of it, in which order.

Life of a runner: ``load -> profile -> init_kv_cache -> warm_up -> execute_model* -> close``. A call in a wrong state
raises :class:`~runnerd_spi.errors.LifecycleError` and changes nothing; ``close`` is legal always. All calls come from
one thread; only :class:`StepHandle` is shared between threads. This module knows nothing of the service that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from runnerd_spi.plan import StepOutput, StepPlan

SPI_VERSION = (1, 0)
"""(major, minor). A runner built for another major version is refused; a minor version only adds."""

Support = Literal["device", "host_sync", "no"]
"""``device``: served without a host wait. ``host_sync``: served, but the host waits. ``no``: refused by the service."""

KVMemory = Literal["blocks", "tokens"]
"""Who places keys and values: the engine, in ``blocks`` that it grants, or the runner, which counts ``tokens``."""

OptionValue = str | int | float | bool

GraphUse = Literal["", "replayed", "missed"]
"""Whether a step ran as a captured graph: ``missed`` is one of a kind that is captured, of a size that is not."""

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)``: stage is a short phrase ("loading weights"); done and total in its own unit."""


@dataclass(frozen=True, slots=True)
class RunnerCapabilities:
    """What a runner serves. Data: read without importing a framework or touching a device.

    The service checks each configuration and each request against it; what is ``no`` here is refused by name there.
    """

    max_in_flight: int
    """How many steps may be unresolved at once; 1 means synchronous only."""
    dtypes: tuple[str, ...]
    """Accepted ``--dtype`` values besides "auto": some of float32, bfloat16, float16."""
    block_sizes: tuple[int, ...]
    """Accepted KV block sizes in tokens; the first is the default."""
    tokenizer: Literal["model", "bytes"] = "model"
    """Where the tokenizer comes from: the model's files, or the built-in byte tokenizer (id = byte, 256 = EOS)."""
    needs_model: bool = True
    """False when ``model`` may be left out."""
    min_in_flight: int = 1
    """2 on a runner that cannot run synchronously."""
    shares_host_cores: bool = False
    """Whether the device is the host's own cores: what the host works while a step runs slows that step down."""
    chunked_prefill: Support = "device"
    prefix_caching: Support = "device"
    temperature: Support = "device"
    top_k: Support = "device"
    top_p: Support = "device"
    min_p: Support = "device"
    typical_p: Support = "no"
    seed: Support = "device"
    repetition_penalty: Support = "no"
    presence_penalty: Support = "no"
    frequency_penalty: Support = "no"
    logit_bias: Support = "no"
    allowed_token_ids: Support = "no"
    bad_words: Support = "no"
    min_tokens: Support = "no"
    logprobs: Support = "no"
    max_logprobs: int = 0
    """Most alternatives per token that may be asked for."""
    prompt_logprobs: Support = "no"
    guided_decoding: Support = "no"
    """Whether the masks of a plan hold. They are known when the step before is: at most ``host_sync``, and requests are
    guided only where ``max_in_flight`` is 1."""
    speculative_decoding: Support = "no"
    pipeline_parallel: Support = "no"
    tensor_parallel: Support = "no"
    lora: Support = "no"
    embeddings: Support = "no"
    multimodal: Support = "no"
    kv_memory: KVMemory = "blocks"
    """``tokens``: the runner has a KV memory of its own kind. Plans carry no grants; the engine sees to it that the
    positions of all admitted requests fit in the number that ``init_kv_cache`` got, and that is all it knows of them.
    Then ``block_sizes`` is ``(1,)`` and ``prefix_caching`` is ``no``."""


@dataclass(frozen=True, slots=True)
class RunnerOption:
    """An option of a runner's own, given as ``--runner-option name=value``; declared, to be checked and shown."""

    name: str
    type: type[str] | type[int] | type[float] | type[bool]
    default: OptionValue | None
    help: str


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """What the operator chose. Built once, validated against the capabilities, never changed."""

    max_num_seqs: int
    """Slots: requests that may be running at once."""
    max_num_batched_tokens: int
    """Most tokens in one plan."""
    block_size: int
    """Tokens in a KV block."""
    model: str | None = None
    """Path of a model directory or GGUF file."""
    dtype: str = "auto"
    max_model_len: int | None = None
    """Most tokens of a request, prompt and output; None means what the model allows."""
    max_in_flight: int = 1
    """Steps that may be unresolved; within the capabilities."""
    memory_bytes: int | None = None
    """Budget for the KV cache in bytes; None means ``memory_fraction`` decides."""
    memory_fraction: float = 0.9
    """Share of the device's free memory that weights, activations and KV cache may use; in (0, 1]."""
    trust_remote_code: bool = False
    enforce_eager: bool = False
    """No compiled or captured graphs."""
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    """Values of the runner's own options, converted to their declared types; unset ones hold their defaults."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What ``load`` found."""

    name: str
    architecture: str
    vocab_size: int
    """Token ids are in [0, vocab_size)."""
    max_model_len: int
    """Most tokens of a request: the configured value, or what the model allows."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The effective one."""
    num_parameters: int
    weights_bytes: int
    device: str
    """For people: "cpu (2 threads)", "NVIDIA H100"."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    """What ``profile`` measured."""

    bytes_per_block: int
    available_bytes: int
    """Memory that KV blocks may take."""
    max_num_blocks: int | None = None
    """A further limit of the runner's own; None for none."""


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """When a step's phases began and ended: ``time.monotonic_ns`` values; 0 where not known yet."""

    host_begin_ns: int = 0
    """``execute_model`` was entered."""
    host_end_ns: int = 0
    """All of the step was enqueued."""
    device_begin_ns: int = 0
    device_end_ns: int = 0
    ready_ns: int = 0
    """The output was readable by the host."""
    graph: GraphUse = ""


class StepHandle(Protocol):
    """A launched step. Safe to use from several threads."""

    @property
    def step_id(self) -> int:
        """The plan's step id."""
        ...

    @property
    def timeline(self) -> StepTimeline:
        """Complete once ``done()``."""
        ...

    def done(self) -> bool:
        """Whether ``result`` returns or raises at once."""
        ...

    def result(self, timeout: float | None = None) -> StepOutput:
        """Wait for the step and give its output; the same object each time.

        Args:
            timeout: Seconds to wait at most; None waits without limit.

        Raises:
            StepTimeout: The time is over. The handle stays valid: ask again.
            StepFailed: The step failed. When ``fatal``, every later step fails with the same root cause.
        """
        ...


class ModelRunner(Protocol):
    """A model on a device. See the module's text for the order of calls."""

    def load(self, progress: Progress) -> ModelInfo:
        """Read the weights and put them on the device.

        Raises:
            ModelLoadError: The model cannot be read or served; the message says why and what to do.
        """
        ...

    def profile(self) -> KVBudget:
        """Measure what a step of ``max_num_batched_tokens`` needs and give what is left for the KV cache."""
        ...

    def init_kv_cache(self, num_blocks: int) -> None:
        """Allocate ``num_blocks`` blocks, ids 0 to num_blocks - 1; positions, where ``kv_memory`` is ``tokens``."""
        ...

    def warm_up(self) -> None:
        """Run what would otherwise make the first requests slow. Leaves no trace in the token table."""
        ...

    def execute_model(self, plan: StepPlan) -> StepHandle:
        """Launch a step and give its handle; **a handle is resolved at the latest on the call that needs its place**.

        The plan's deltas are applied and the forward, the sampling and the copy of the sampled tokens to the host are
        enqueued; none of them is waited for. Inputs that are still unresolved are read on the device from the token
        table. If ``max_in_flight`` steps are then unresolved, the oldest is settled before this returns: with 2 this
        is the step before; with 1 it is this one, and the runner is synchronous. Effects and results are in order of
        step ids.

        Raises:
            PlanError: The plan breaks the contract (wrong step id, unknown slot or epoch, ...); nothing was changed.
            StepFailed: An earlier step failed fatally.
        """
        ...

    def close(self) -> None:
        """Give everything back. Legal in every state, idempotent, bounded in time; waits for launched work."""
        ...


@dataclass(frozen=True, slots=True)
class RunnerPlugin:
    """What an entry point of the group ``runnerd.runners`` names. Importing it must be cheap: no framework."""

    name: str
    description: str
    capabilities: RunnerCapabilities
    create: Callable[[RunnerConfig], ModelRunner]
    """Builds a runner; imports the framework here."""
    options: tuple[RunnerOption, ...] = ()
    check: Callable[[], None] = lambda: None
    """Cheap test that the runner could be used here.

    Raises:
        RunnerUnavailable: With the reason and the remedy (a package to install, a driver that is missing).
    """
    spi_version: tuple[int, int] = SPI_VERSION
