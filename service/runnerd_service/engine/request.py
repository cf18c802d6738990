"""What the engine knows of one request. It decides nothing; the scheduler changes it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from runnerd_service.engine.kv_cache import chain_hash, root_hash
from runnerd_service.engine.messages import AddRequest, Logprobs, Sampling
from runnerd_spi import SamplingParams


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    """It has a slot and blocks."""
    PREEMPTED = "preempted"
    """It lost its slot and waits again; tokens in flight at that moment still count."""
    FINISHED = "finished"
    """Nothing of it is shown any more. It may still hold blocks that launched steps write to."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """Blocks that a request waits for instead of computing them: ``leader`` is filling them."""

    leader: RequestState
    epoch: int
    """The leader's when the wait began."""
    num_blocks: int
    """Leading blocks that both have in common."""

    @property
    def is_pending(self) -> bool:
        """Whether the leader still fills them."""
        leader = self.leader
        return (
            leader.epoch == self.epoch and leader.num_published_blocks < self.num_blocks <= leader.num_promised_blocks
        )


@dataclass(slots=True, eq=False)
class RequestState:
    """A request on its way. Two counts are kept apart: what is settled, and what is launched but unresolved."""

    uid: int
    rank: int
    """Lower goes first: the priority, and with ageing the time of arrival."""
    arrival: int
    """Order of arrival in this engine."""
    # Settled tokens: the prompt, then the outputs known to the host. No placeholder ever enters.
    token_ids: list[int]
    num_prompt_tokens: int
    max_num_tokens: int
    """Prompt and outputs at most."""
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    adapter_id: str | None
    # Hashes of the full blocks of token_ids, as far as computed; the first entry is the root.
    hashes: list[bytes]
    status: Status = Status.WAITING
    slot: int = -1
    epoch: int = -1
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Tokens whose computation is launched, from the first position on."""
    num_in_flight_tokens: int = 0
    """Launched samples that are not settled."""
    num_in_flight_rows: int = 0
    """Launched rows, sampling or not, that are not settled."""
    num_published_blocks: int = 0
    """Leading blocks that others may share."""
    num_promised_blocks: int = 0
    """Leading blocks that its prefill will have published; 0 without a slot."""
    publishes: bool = True
    """False once the prefix cache was reset: what it has computed since its admission is not to be found."""
    awaited: Awaited | None = None
    """What it waits for besides a slot and room."""
    was_admitted: bool = False
    began_ns: int = 0
    """When it was first admitted, until that is told; then 0."""
    num_cached_tokens: int = 0
    # Records of prompt tokens 1, 2, ... as far as settled.
    prompt_logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Settled tokens and those in flight."""
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def is_launched_to_the_end(self) -> bool:
        """Whether its last token by length is in flight, so that no further row may be launched."""
        return len(self.token_ids) + self.num_in_flight_tokens >= self.max_num_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether records of prompt tokens are still to be computed, which a cached prefix would leave out."""
        return self.sampling_params.num_prompt_logprobs is not None

    def take_prompt_logprobs(self) -> tuple[Logprobs, ...]:
        """Give the records once they are complete, and ask the runner for none from then on."""
        if len(self.prompt_logprobs) < self.num_prompt_tokens - 1:
            return ()
        records, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        self.sampling_params = replace(self.sampling_params, num_prompt_logprobs=None)
        return records

    def block_hash(self, index: int, block_size: int) -> bytes:
        """Give the hash of full block ``index``; all its tokens are settled."""
        hashes = self.hashes
        while len(hashes) <= index + 1:
            begin = (len(hashes) - 1) * block_size
            hashes.append(chain_hash(hashes[-1], self.token_ids[begin : begin + block_size]))
        return hashes[index + 1]


def order(request: RequestState) -> tuple[int, int]:
    """Give the sort key of who goes first: lower rank, then earlier arrival. It never changes."""
    return request.rank, request.arrival


def rank_of(priority: int, arrival_ns: int, ageing_ns: int) -> int:
    """Give the rank of a request: its priority, raised by one level for each ``ageing_ns`` that it has waited.

    All requests age alike, so the order of two of them is the same at any time, and known when they arrive: a request
    of priority p goes before whatever arrives with priority q more than ``(p - q) * ageing_ns`` after it.

    Args:
        priority: Lower goes first.
        arrival_ns: On a clock that all requests share.
        ageing_ns: Waiting time that is worth one level of priority; 0: waiting is worth nothing.
    """
    return priority * ageing_ns + arrival_ns if ageing_ns else priority


def request_from(message: AddRequest, arrival: int, max_model_len: int, ageing_ns: int = 0) -> RequestState:
    """Build the state of a request that has been validated."""
    num_prompt_tokens = len(message.prompt_token_ids)
    return RequestState(
        uid=message.uid,
        rank=rank_of(message.priority, message.arrival_ns, ageing_ns),
        arrival=arrival,
        token_ids=[*message.prompt_token_ids, *message.output_token_ids],
        num_prompt_tokens=num_prompt_tokens,
        max_num_tokens=min(num_prompt_tokens + message.max_tokens, max_model_len),
        sampling_params=_sampling_params(message.sampling, (*message.eos_token_ids, *message.stop_token_ids)),
        eos_token_ids=frozenset(message.eos_token_ids),
        stop_token_ids=frozenset(message.stop_token_ids),
        adapter_id=message.adapter_id,
        hashes=[root_hash(message.adapter_id, message.cache_salt)],
    )


def _sampling_params(sampling: Sampling, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words_token_ids=sampling.bad_words_token_ids,
        min_tokens=sampling.min_tokens,
        stop_token_ids=stop_token_ids,
        num_logprobs=sampling.num_logprobs,
        num_prompt_logprobs=sampling.num_prompt_logprobs,
    )
