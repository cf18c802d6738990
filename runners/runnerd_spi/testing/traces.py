"""Traces: what requests arrive, leave, are preempted and how they are computed. Plain data, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from random import Random

from runnerd_spi.plan import SamplingParams
from runnerd_spi.testing.subject import Sizes, Subject

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    prompt: tuple[int, ...]
    num_outputs: int
    params: SamplingParams = GREEDY
    arrival: int = 0
    """Step at which it may be admitted first."""
    cancel_after: int | None = None
    """Leaves once so many of its rows were launched, with whatever is in flight."""
    preempt_after: int | None = None
    """Leaves once so many of its rows were launched, and comes back when they have settled."""
    dry_rows: bool = False
    """Before each row that samples comes the same row without ``sample``."""
    shares_with: int | None = None
    """Earlier request whose computed blocks it takes over, as far as their prompts agree."""
    given: tuple[int, ...] = ()
    """Outputs it has already when it arrives, from a runner that is gone; ``num_outputs`` come on top."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What is run. The same trace gives the same plans each time."""

    depth: int
    requests: tuple[TraceRequest, ...]
    chunk: int = 1 << 30
    """Most tokens of one row."""
    settle_early: bool = False
    """Ask for each result at once, instead of as late as the depth allows."""
    seed: int | None = None
    """What it was drawn from; None for one made by hand."""


def prompt_of(random: Random, sizes: Sizes, length: int) -> tuple[int, ...]:
    """Draw a prompt."""
    return tuple(random.randrange(sizes.vocab_size) for _ in range(length))


def random_trace(seed: int, subject: Subject, sizes: Sizes) -> Trace:
    """Draw a trace within what the runner declares and the sizes allow."""
    random = Random(seed)
    num_requests = random.randint(1, 6)
    longest = min(sizes.max_model_len // 2, 3 * sizes.block_size + 8)
    heads = [prompt_of(random, sizes, min(length, longest // 2)) for length in (0, sizes.block_size + 1)]
    requests = []
    for index in range(num_requests):
        prompt = random.choice(heads) + prompt_of(random, sizes, random.randint(1, max(1, longest // 2)))
        num_outputs = random.randint(1, min(10, sizes.max_model_len - len(prompt) - 1))
        params = random_params(random, subject, sizes, num_outputs)
        # Shared positions are not computed, so there would be no log-probabilities of them.
        can_share = index > 0 and params.num_prompt_logprobs is None and subject.serves("prefix_caching")
        requests.append(
            TraceRequest(
                prompt,
                num_outputs,
                params,
                arrival=random.choice((0, 0, 1, 2, 5)),
                cancel_after=random.randint(0, num_outputs) if random.random() < 0.15 else None,
                preempt_after=random.randint(1, num_outputs) if random.random() < 0.2 else None,
                dry_rows=random.random() < 0.15 and subject.serves("chunked_prefill"),
                shares_with=random.randrange(index) if can_share and random.random() < 0.4 else None,
            )
        )
    return Trace(
        depth=random.choice(subject.depths),
        requests=tuple(requests),
        chunk=random.choice((1, 3, 7, 1 << 30)) if subject.serves("chunked_prefill") else 1 << 30,
        settle_early=random.random() < 0.2,
        seed=seed,
    )


def random_params(random: Random, subject: Subject, sizes: Sizes, num_outputs: int) -> SamplingParams:
    """Draw sampling parameters of those that are served."""
    some = tuple(random.randrange(sizes.vocab_size) for _ in range(3))
    choices: dict[str, tuple[object, ...]] = {
        "top_k": (1, 3, 20),
        "top_p": (0.4, 0.9),
        "min_p": (0.02, 0.3),
        "typical_p": (0.3, 0.9),
        "repetition_penalty": (1.4, 0.8),
        "presence_penalty": (1.5, -1.0),
        "frequency_penalty": (2.0, -0.5),
        "logit_bias": ({some[0]: 4.0, some[1]: -100.0},),
        "allowed_token_ids": (tuple(range(0, sizes.vocab_size, 2)),),
        "bad_words": (((some[0],), (some[1], some[2])),),
        "min_tokens": (random.randint(1, num_outputs),),
        "logprobs": (0, min(3, subject.plugin.capabilities.max_logprobs)),
        "prompt_logprobs": (0, min(2, subject.plugin.capabilities.max_logprobs)),
    }
    drawn: dict[str, object] = {
        FIELD_OF.get(feature, feature): random.choice(values)
        for feature, values in choices.items()
        if random.random() < 0.25 and subject.serves(feature)
    }
    if "min_tokens" in drawn:
        drawn["stop_token_ids"] = some
    drawn["temperature"] = random.choice((0.0, 0.7, 1.3)) if subject.serves("temperature") else 0.0
    drawn["seed"] = random.getrandbits(64)
    return SamplingParams(**drawn)  # type: ignore[arg-type]  # the table above has the fields' types


FIELD_OF = {"bad_words": "bad_words_token_ids", "logprobs": "num_logprobs", "prompt_logprobs": "num_prompt_logprobs"}
"""Capability to the field of SamplingParams that asks for it, where the names differ."""


def simpler(trace: Trace) -> list[Trace]:
    """Give the traces that are one step simpler, the boldest first."""
    found = []
    for index in range(len(trace.requests)):
        if len(trace.requests) > 1:
            found.append(_without(trace, index))
    for index, request in enumerate(trace.requests):
        found += [_with(trace, index, one) for one in _simpler_requests(request)]
    if trace.depth > 1:
        found.append(replace(trace, depth=trace.depth - 1))
    if trace.chunk < 1 << 30:
        found.append(replace(trace, chunk=1 << 30))
    if trace.settle_early:
        found.append(replace(trace, settle_early=False))
    return found


def _simpler_requests(request: TraceRequest) -> list[TraceRequest]:
    found = []
    if request.num_outputs > 1:
        found += [replace(request, num_outputs=request.num_outputs // 2)]
        found += [replace(request, num_outputs=request.num_outputs - 1)]
    if len(request.prompt) > 1:
        found += [replace(request, prompt=request.prompt[: len(request.prompt) // 2])]
        found += [replace(request, prompt=request.prompt[1:]), replace(request, prompt=request.prompt[:-1])]
    if request.cancel_after is not None:
        found.append(replace(request, cancel_after=None))
    if request.preempt_after is not None:
        found.append(replace(request, preempt_after=None))
    if request.shares_with is not None:
        found.append(replace(request, shares_with=None))
    if request.dry_rows:
        found.append(replace(request, dry_rows=False))
    if request.arrival:
        found += [replace(request, arrival=0), replace(request, arrival=request.arrival - 1)]
    for one in fields(SamplingParams):
        neutral = getattr(_NEUTRAL, one.name)
        if getattr(request.params, one.name) != neutral:
            found.append(replace(request, params=replace(request.params, **{one.name: neutral})))
    return found


_NEUTRAL = SamplingParams(temperature=0.0)


def _with(trace: Trace, index: int, request: TraceRequest) -> Trace:
    requests = list(trace.requests)
    requests[index] = request
    return replace(trace, requests=tuple(requests))


def _without(trace: Trace, index: int) -> Trace:
    kept = []
    for position, request in enumerate(trace.requests):
        if position == index:
            continue
        shares = request.shares_with
        if shares is not None:
            shares = None if shares == index else shares - (shares > index)
        kept.append(replace(request, shares_with=shares))
    return replace(trace, requests=tuple(kept))
