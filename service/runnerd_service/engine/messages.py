"""What crosses the socket between the front process and the engine process: msgspec structs, packed with MessagePack.

One message per direction and step, not per token. Requests are named by ``uid``, an integer the front draws and never
uses twice. Nothing here knows text, gRPC or torch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from runnerd_service.guided.guide import Vocabulary

FinishKind = Literal["eos", "stop_token", "length", "guide", "failed"]
"""``eos``, ``stop_token``: see ``matched_token_id``. ``length``: max_tokens or max_model_len. ``guide``: it is
complete, and EOS cannot say so. ``failed``: ``error``."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """Field for field :class:`runnerd_spi.SamplingParams`, in types that MessagePack carries."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


class GuideGrammar(msgspec.Struct, frozen=True, array_like=True):
    """The form that an output must have, checked."""

    grammar: str
    """In the notation of :mod:`runnerd_service.guided.notation`."""
    field: str
    """Of the client's request, for errors."""


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Start a request. The engine answers with outputs that carry ``uid`` until one has ``finish``."""

    uid: int
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    """Most outputs in all, ``output_token_ids`` included; prompt + this <= max_model_len."""
    eos_token_ids: tuple[int, ...] = ()
    """Empty with ignore_eos."""
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    """Lower runs first."""
    arrival_ns: int = 0
    """When the front took it in, on the clock of ``time.monotonic_ns``; it ages from then on, on whatever engine."""
    cache_salt: str = ""
    adapter_id: str | None = None
    output_token_ids: tuple[int, ...] = ()
    """Outputs that a former engine gave already; the request goes on after them."""
    guide: GuideGrammar | None = None
    """The engine has been told the vocabulary."""


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Forget these requests; no further output of them is sent. Unknown uids are ignored: they have ended already."""

    uids: tuple[int, ...]


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Run one of the engine's utility methods; answered by :class:`Reply`."""

    call_id: int
    method: Literal["reset_prefix_cache", "check_integrity", "start_trace", "stop_trace", "recent_steps"]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Close the runner and exit."""


ToEngine = AddRequest | AbortRequests | Vocabulary | Call | Shutdown


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Field for field :class:`runnerd_spi.TokenLogprobs`."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class RequestOutput(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True, gc=False):
    """What a step gave one request. ``token_ids`` may be empty: a finish without a token, a part of the prompt.

    It holds no cycle, so the garbage collector, which would look at each one of each step, is kept away.
    """

    uid: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    """One per token when asked for, else empty."""
    prompt_logprobs: tuple[Logprobs, ...] = ()
    """One per prompt token but the first, once, whole, at the latest with the first token; empty unless asked for."""
    finish: FinishKind | None = None
    matched_token_id: int | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission; set from the first token on."""
    error: str = ""
    began_ns: int = 0
    """When its first step was scheduled, on the clock of ``time.monotonic_ns``; told once, else 0."""
    field: str = ""
    """Of the client's request that ``error`` is about; empty: of none."""


class BubbleSeconds(msgspec.Struct, frozen=True, array_like=True):
    """Time in which the device was idle although a request could have run, by what held it up."""

    inbox: float = 0.0
    schedule: float = 0.0
    prepare: float = 0.0
    update: float = 0.0
    send: float = 0.0
    copy: float = 0.0
    """The host waited for the output of the step before to arrive from the device."""
    other: float = 0.0
    """None of these, such as the time until a waiting host wakes up."""


class HostSeconds(msgspec.Struct, frozen=True, array_like=True):
    """Time that the engine's loop spent in its phases."""

    inbox: float = 0.0
    schedule: float = 0.0
    prepare: float = 0.0
    update: float = 0.0
    send: float = 0.0
    wait: float = 0.0
    """For a step on the device: the less of it, the closer the host is to being the bottleneck."""


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """Where the time of steps went, since the engine's start, in seconds."""

    device_busy: float = 0.0
    device_idle: float = 0.0
    """Between steps, while no request could have run."""
    bubble: BubbleSeconds = BubbleSeconds()
    host: HostSeconds = HostSeconds()


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Counters of the engine; the totals are since its start."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    num_blocks: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_unresolved_steps: int = 0
    times: StepTimes = StepTimes()
    num_graph_steps: int = 0
    """Steps that ran as captured graphs."""
    num_graph_misses: int = 0
    """Steps that could have, had a graph of their size been captured."""
    depth: int = 0
    """Steps that may be in flight now; 0 before the first report."""


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All that one step gave, and the load after it."""

    outputs: tuple[RequestOutput, ...]
    load: Load


class LoadProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Start-up goes on."""

    stage: str
    done: int
    total: int


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """Start-up is over; requests are served. Mirrors :class:`runnerd_spi.ModelInfo` and the effective configuration."""

    model_name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_parameters: int
    weights_bytes: int
    device: str
    num_blocks: int
    block_size: int
    max_in_flight: int


class EngineError(msgspec.Struct, frozen=True, tag="error"):
    """The engine cannot go on and exits. ``stage``: "start" (see ``kind``) or "step"."""

    stage: Literal["start", "step"]
    kind: str
    """Class name of the error: "ModelLoadError", "RunnerUnavailable", "StepFailed", ..."""
    message: str


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """Answer to a :class:`Call`."""

    call_id: int
    ok: bool
    message: str = ""


FromEngine = StepOutputs | LoadProgress | EngineReady | EngineError | Reply
