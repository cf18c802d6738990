"""Requests and outputs as the front end knows them; ``rpc`` converts them from and to protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from runnerd_service.guided.guide import Guide


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to render by the chat template. ``messages`` are plain dicts as templates expect them."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation as asked for; None means unset. Names and ranges follow ``generation.proto``."""

    prompt: str | Sequence[int] | ChatPrompt
    request_id: str | None = None
    add_special_tokens: bool | None = None
    truncation: Literal["none", "left", "right"] | None = None
    max_prompt_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    beam_width: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool | None = None
    ignore_eos: bool | None = None
    time_limit_seconds: float | None = None
    n: int | None = None
    text: bool | None = None
    tokens: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_prompt: bool | None = None
    skip_special_tokens: bool | None = None
    cumulative: bool = False
    pooling: str | None = None
    """How hidden states become a vector, when one was asked for."""
    guide: Guide | None = None
    """The form that the output must have."""
    priority: int | None = None
    model: str | None = None
    adapter: str | None = None
    cache_salt: str | None = None
    tenant: str = ""
    """On whose behalf; empty for nobody's in particular. Not of the request: who calls is known by other means."""
    deadline_seconds: float | None = None
    """Until the caller waits no more; None: it waits for any time. Of the call, not of the request."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """An alternative at a token's position."""

    id: int
    text: str
    logprob: float


class TokenRecord(msgspec.Struct, frozen=True, gc=False):
    """One token of an output or prompt; ``logprob``, ``rank`` and ``candidates`` only when asked for, cheap to make."""

    id: int
    text: str
    logprob: float | None = None
    rank: int | None = None
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """How an output ended."""

    reason: Literal["stop", "length", "time_limit", "guide"]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    eos_token_id: int | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted."""

    request_id: str
    seed: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PromptRecords:
    """Records of the prompt's tokens but the first."""

    tokens: tuple[TokenRecord, ...]


class OutputChunk(msgspec.Struct, frozen=True, gc=False):
    """More of one output; ``finish`` on its last chunk, exactly once. One is made for each message, so it is cheap."""

    index: int
    text: str
    tokens: tuple[TokenRecord, ...]
    finish: Finish | None = None


Event = Started | PromptRecords | OutputChunk
"""A stream of events: Started, perhaps PromptRecords, then OutputChunks until each index had its finish."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What GetModelInfo tells; ``capabilities`` by name, values "device", "host_sync" or "no"."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_parameters: int
    weights_bytes: int
    has_chat_template: bool
    capabilities: Mapping[str, str]
    max_logprobs: int
    max_n: int


ServerState = Literal["loading", "serving", "recovering", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class Tokenized:
    """What Tokenize tells: the ids, how the vocabulary spells each, and the most tokens a request may have."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    max_model_len: int
