"""Random traces: whatever overlaps, each request gets byte for byte what it gets alone in a synchronous engine.

A trace is a function of its seed: arrivals, aborts, priorities, every sampling parameter, sizes, depth, and after
which call each step's result is seen to be there. That last one is the wrapper's doing (see ``ChosenHandle``), so the
schedule does not depend on the machine's speed, and a failing seed fails again.

Compared are tokens, log-probabilities of output and prompt, finish reason, matched id and error, and with them the
usage counts that follow from these. How many prompt tokens came from the prefix cache depends on what else ran when; it
is compared between two runs of one schedule only.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

import pytest

from runnerd_service.engine.engine import Engine, EngineLimits
from runnerd_service.engine.messages import AddRequest, Load, RequestOutput, Sampling
from runnerd_sim.plugin import SIM
from runnerd_spi import (
    ModelRunner,
    OptionValue,
    RunnerConfig,
    StepHandle,
    StepOutput,
    StepPlan,
    StepTimeline,
)

NUM_TRACES = 300
NUM_SLOW_TRACES = 10_000
TWICE_EVERY = 10
"""One trace in so many is played twice, to compare what depends on the schedule."""

EOS = 256
VOCAB_SIZE = 257
BLOCK_SIZE = 4
MAX_MODEL_LEN = 48
SOME_LETTERS = (EOS, 32, 97, 98, 101, 116, 122)

T = TypeVar("T")


@dataclass(frozen=True)
class Add:
    request: AddRequest


@dataclass(frozen=True)
class Abort:
    uid: int


@dataclass(frozen=True)
class Steps:
    count: int


@dataclass(frozen=True)
class Trace:
    seed: int
    depth: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    early_share: float
    """Share of the steps whose result is there before the engine needs the place."""
    step_seconds: float
    copy_seconds: float
    host_seconds: float
    events: tuple[Add | Abort | Steps, ...]

    @property
    def requests(self) -> list[AddRequest]:
        return [event.request for event in self.events if isinstance(event, Add)]


def random_trace(seed: int) -> Trace:
    random = Random(seed)
    max_num_seqs = random.choice((1, 2, 3, 4))
    events: list[Add | Abort | Steps] = []
    for uid in range(random.randint(1, 8)):
        events += [Add(random_request(random, uid)), Steps(random.choice((0, 0, 1, 2, 5)))]
        if random.random() < 0.2:
            events += [Abort(random.randint(0, uid)), Steps(random.randint(0, 2))]
    return Trace(
        seed=seed,
        depth=random.randint(1, 4),
        # 12 blocks hold one request of the greatest length.
        num_blocks=random.choice((12, 12, 15, 20, 64)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=random.choice((max_num_seqs, 5, 9, 48)),
        prefix_caching=random.random() < 0.7,
        early_share=random.choice((0.0, 0.0, 0.3, 1.0)),
        step_seconds=random.choice((0.0, 0.0, 0.0, 2e-4)),
        copy_seconds=random.choice((0.0, 0.0, 0.0, 4e-4)),
        host_seconds=random.choice((0.0, 0.0, 0.0, 2e-4)),
        events=tuple(events),
    )


def random_request(random: Random, uid: int) -> AddRequest:
    # Few beginnings, so that prefixes are shared.
    head = random.choice(((), (1, 2, 3, 4), (1, 2, 3, 4) * 3, (1, 2, 3, 4, 9, 9, 9, 9)))
    prompt = head + tuple(random.choices((7, 97, 101, 32), k=random.randint(1, 12)))
    max_tokens = random.randint(1, 20)
    return AddRequest(
        uid,
        prompt,
        random_sampling(random, max_tokens),
        max_tokens,
        eos_token_ids=random.choice(((), (EOS,), (EOS,))),
        stop_token_ids=random.choice(((), (), (101,), (116, 32))),
        priority=random.choice((0, 0, 0, -1, 3)),
        cache_salt=random.choice(("", "", "tenant")),
    )


def random_sampling(random: Random, max_tokens: int) -> Sampling:
    def sometimes(neutral: T, *others: T) -> T:
        return random.choice(others) if random.random() < 0.3 else neutral

    return Sampling(
        temperature=random.choice((0.0, 0.5, 1.0, 1.5)),
        top_k=sometimes(0, 1, 4, 40),
        top_p=sometimes(1.0, 0.5, 0.95),
        min_p=sometimes(0.0, 0.02, 0.3),
        typical_p=sometimes(1.0, 0.5, 0.9),
        seed=random.getrandbits(64),
        repetition_penalty=sometimes(1.0, 1.3, 0.8),
        presence_penalty=sometimes(0.0, 1.0, -1.0),
        frequency_penalty=sometimes(0.0, 2.0, -0.5),
        logit_bias=sometimes({}, {EOS: 3.0}, {97: 4.0, 101: 4.0, 32: -100.0}),
        # The last two leave nothing to choose sooner or later: those rows fail.
        allowed_token_ids=sometimes(None, SOME_LETTERS, SOME_LETTERS, (97, 98)),
        bad_words_token_ids=sometimes((), ((97,), (32, 116)), ((101, 101), (97, 98), (98, 97), (97, 97), (98, 98))),
        min_tokens=sometimes(0, random.randint(1, max_tokens)),
        num_logprobs=sometimes(None, 0, 3),
        num_prompt_logprobs=sometimes(None, 0, 2),
    )


class ChosenHandle:
    """A step that seems done when the trace says so. A result asked for is waited for, so nothing is invented."""

    def __init__(self, handle: StepHandle, is_early: bool) -> None:
        self._handle, self._is_early = handle, is_early

    @property
    def step_id(self) -> int:
        return self._handle.step_id

    @property
    def timeline(self) -> StepTimeline:
        return self._handle.timeline

    def done(self) -> bool:
        return self._is_early

    def result(self, timeout: float | None = None) -> StepOutput:
        return self._handle.result(timeout)


class ChosenRunner:
    """A runner whose steps are seen done when the trace says so."""

    def __init__(self, runner: ModelRunner, trace: Trace) -> None:
        self.load, self.profile, self.init_kv_cache = runner.load, runner.profile, runner.init_kv_cache
        self.warm_up, self.close = runner.warm_up, runner.close
        self._runner, self._random, self._early_share = runner, Random(trace.seed), trace.early_share

    def execute_model(self, plan: StepPlan) -> StepHandle:
        return ChosenHandle(self._runner.execute_model(plan), self._random.random() < self._early_share)


@contextmanager
def engine_of(trace: Trace) -> Iterator[Engine]:
    options: dict[str, OptionValue] = {
        "kv_shadow": True,
        "num_blocks": trace.num_blocks,
        "eos_bias": 1.0,
        "step_seconds": trace.step_seconds,
        "copy_seconds": trace.copy_seconds,
    }
    config = RunnerConfig(
        trace.max_num_seqs,
        trace.max_num_batched_tokens,
        BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_in_flight=trace.depth,
        options=options,
    )
    runner = ChosenRunner(SIM.create(config), trace)
    runner.load(lambda stage, done, total: None)
    runner.profile()
    runner.init_kv_cache(trace.num_blocks)
    runner.warm_up()
    limits = EngineLimits(
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=trace.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=trace.max_num_seqs,
        max_num_batched_tokens=trace.max_num_batched_tokens,
        max_in_flight=trace.depth,
        prefix_caching=trace.prefix_caching,
    )
    try:
        yield Engine(runner, limits)
    finally:
        runner.close()


@dataclass
class Stream:
    """What a client saw of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    prompt_logprobs: tuple[object, ...] = ()
    finish: str | None = None
    matched: int | None = None
    error: str = ""
    num_cached_tokens: int = 0
    aborted: bool = False

    def take(self, output: RequestOutput) -> None:
        assert self.finish is None, f"an output after the finish: {output}"
        assert not self.aborted, f"an output after the abort: {output}"
        assert not (output.prompt_logprobs and self.prompt_logprobs), "prompt logprobs came twice"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish, self.matched, self.error = output.finish, output.matched_token_id, output.error
        self.num_cached_tokens = output.num_cached_tokens

    def seen(self) -> tuple[object, ...]:
        """All that may not depend on how the request was run."""
        return self.token_ids, self.logprobs, self.prompt_logprobs, self.finish, self.matched, self.error


def run_steps(engine: Engine, streams: dict[int, Stream], count: int, host_seconds: float = 0.0) -> None:
    for _ in range(count):
        if not engine.has_work:
            return
        outputs = engine.step()
        engine.check_integrity()
        for output in outputs:
            streams[output.uid].take(output)
        if host_seconds:
            time.sleep(host_seconds)


def play(trace: Trace) -> tuple[dict[int, Stream], Load]:
    streams: dict[int, Stream] = {}
    with engine_of(trace) as engine:
        for event in trace.events:
            match event:
                case Add(request):
                    streams[request.uid] = Stream()
                    engine.add(request)
                case Abort(uid):
                    engine.abort([uid])
                    streams[uid].aborted = streams[uid].finish is None
                case Steps(count):
                    run_steps(engine, streams, count, trace.host_seconds)
        run_steps(engine, streams, 3000)
        assert not engine.has_work, "livelock"
        load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_used_blocks, load.num_unresolved_steps) == (0, 0, 0, 0)
    return streams, load


def counts(load: Load) -> tuple[int, ...]:
    """All that is the same whenever a schedule is."""
    return (
        load.num_steps,
        load.num_preemptions,
        load.prefix_cache_queries,
        load.prefix_cache_hits,
        load.prompt_tokens,
        load.generation_tokens,
    )


@pytest.fixture(scope="module")
def synchronous() -> Iterator[Engine]:
    """One step in flight, one request at a time, its prompt in one step, room for all, no shared prefix."""
    with engine_of(Trace(0, 1, 64, 1, MAX_MODEL_LEN, False, 0.0, 0.0, 0.0, 0.0, ())) as engine:
        yield engine


def check_trace(trace: Trace, synchronous: Engine) -> Load:
    streams, load = play(trace)
    for request in trace.requests:
        alone = {request.uid: Stream()}
        synchronous.add(request)
        run_steps(synchronous, alone, 3000)
        stream, expected = streams[request.uid], alone[request.uid]
        if stream.aborted:
            assert stream.token_ids == expected.token_ids[: len(stream.token_ids)]
            assert stream.logprobs == expected.logprobs[: len(stream.logprobs)]
        else:
            assert stream.seen() == expected.seen(), f"request {request.uid}"
    # What the engine counts is what clients were shown.
    assert load.generation_tokens == sum(len(stream.token_ids) for stream in streams.values())
    if trace.seed % TWICE_EVERY == 0:
        again, load_again = play(trace)
        assert again == streams
        assert counts(load_again) == counts(load)
    return load


def check_traces(seeds: range, synchronous: Engine) -> list[tuple[Trace, Load]]:
    checked = []
    for seed in seeds:
        trace = random_trace(seed)
        try:
            checked.append((trace, check_trace(trace, synchronous)))
        except Exception as error:
            error.add_note(f"to run it alone: check_trace(random_trace({seed}), synchronous)\n{trace}")
            raise
    return checked


def test_overlapped_traces_give_each_request_what_it_gets_alone(synchronous: Engine) -> None:
    checked = check_traces(range(NUM_TRACES), synchronous)
    # The traces are worth something only if they reach what could go wrong.
    overlapped = [(trace, load) for trace, load in checked if trace.depth > 1]
    assert sum(load.num_preemptions > 0 for _, load in overlapped) >= NUM_TRACES // 20
    assert sum(load.prefix_cache_hits > 0 for _, load in overlapped) >= NUM_TRACES // 20
    assert {trace.depth for trace, _ in checked} == {1, 2, 3, 4}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_overlapped_traces_give_each_request_what_it_gets_alone(synchronous: Engine) -> None:
    check_traces(range(NUM_TRACES, NUM_TRACES + NUM_SLOW_TRACES), synchronous)
