"""Random traces on the torch runner: each request gets what it gets alone in a synchronous engine.

Tokens, ends and errors are equal; log-probabilities are to 1e-4, because a matrix product over another number of rows
may add in another order. A trace is a function of its seed, its schedule included: after which call a step is seen to
be done is the trace's choice, not the machine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest

from runnerd_service.engine.engine import Engine, EngineLimits
from runnerd_service.engine.messages import AddRequest, Logprobs, RequestOutput, Sampling
from runnerd_spi import ModelRunner, RunnerConfig, StepHandle, StepOutput, StepPlan, StepTimeline
from runnerd_torch.plugin import CPU

NUM_TRACES = 24
VOCAB_SIZE = 160
EOS = 2
BLOCK_SIZE = 4
MAX_MODEL_LEN = 48

T = TypeVar("T")


@dataclass(frozen=True)
class Trace:
    seed: int
    depth: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    early_share: float
    """Share of the steps that are seen done before their place is needed."""
    arrivals: tuple[tuple[AddRequest, int], ...]
    """Each request, and how many steps follow before the next one."""
    aborts: tuple[int, ...]
    """Requests that are aborted when the last one has arrived."""


def random_trace(seed: int) -> Trace:
    random = Random(seed)
    max_num_seqs = random.choice((2, 3, 4))
    num_requests = random.randint(2, 6)
    return Trace(
        seed=seed,
        depth=1 + seed % 4,
        num_blocks=random.choice((12, 14, 64)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=random.choice((max_num_seqs, 7, 48)),
        prefix_caching=random.random() < 0.7,
        early_share=random.choice((0.0, 0.3, 1.0)),
        arrivals=tuple((random_request(random, uid), random.choice((0, 1, 3))) for uid in range(num_requests)),
        aborts=tuple(uid for uid in range(num_requests) if random.random() < 0.1),
    )


def random_request(random: Random, uid: int) -> AddRequest:
    head = random.choice(((), (5, 6, 7, 8), (5, 6, 7, 8, 9, 10, 11, 12)))
    prompt = head + tuple(random.choices(range(3, VOCAB_SIZE), k=random.randint(1, 9)))
    max_tokens = random.randint(1, 16)
    return AddRequest(
        uid,
        prompt,
        random_sampling(random, max_tokens),
        max_tokens,
        eos_token_ids=random.choice(((), (EOS,))),
        stop_token_ids=random.choice(((), tuple(range(20, 30)))),
        priority=random.choice((0, 0, -1, 3)),
    )


def random_sampling(random: Random, max_tokens: int) -> Sampling:
    def sometimes(neutral: T, *others: T) -> T:
        return random.choice(others) if random.random() < 0.3 else neutral

    return Sampling(
        temperature=random.choice((0.0, 0.7, 1.3)),
        top_k=sometimes(0, 4, 40),
        top_p=sometimes(1.0, 0.6, 0.95),
        min_p=sometimes(0.0, 0.05),
        typical_p=sometimes(1.0, 0.5, 0.9),
        seed=random.getrandbits(64),
        repetition_penalty=sometimes(1.0, 1.3, 0.8),
        presence_penalty=sometimes(0.0, 1.0),
        frequency_penalty=sometimes(0.0, 2.0, -0.5),
        logit_bias=sometimes({}, {EOS: 4.0}, {9: 5.0, 10: -100.0}),
        allowed_token_ids=sometimes(None, tuple(range(0, VOCAB_SIZE, 3)), (40, 41)),
        bad_words_token_ids=sometimes((), ((9,), (9, 9)), ((40, 40), (41, 40), (40, 41), (41, 41))),
        min_tokens=sometimes(0, random.randint(1, max_tokens)),
        num_logprobs=sometimes(None, 0, 3),
        num_prompt_logprobs=sometimes(None, 0, 2),
    )


class ChosenHandle:
    """A step that is seen done when the trace says so; a result asked for is waited for."""

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
def engine_of(trace: Trace, model: Path) -> Iterator[Engine]:
    config = RunnerConfig(
        trace.max_num_seqs,
        trace.max_num_batched_tokens,
        BLOCK_SIZE,
        model=str(model),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_in_flight=trace.depth,
        options={"num_threads": 1, "attention": "torch", "linear": "torch"},
    )
    runner = ChosenRunner(CPU.create(config), trace)
    try:
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
        yield Engine(runner, limits)
    finally:
        runner.close()


@dataclass
class Stream:
    """What a client saw of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    finish: str | None = None
    matched: int | None = None
    error: str = ""
    aborted: bool = False

    def take(self, output: RequestOutput) -> None:
        assert self.finish is None, f"an output after the finish: {output}"
        assert not self.aborted, f"an output after the abort: {output}"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.finish, self.matched, self.error = output.finish, output.matched_token_id, output.error


def run_steps(engine: Engine, streams: dict[int, Stream], count: int) -> None:
    for _ in range(count):
        if not engine.has_work:
            return
        for output in engine.step():
            streams[output.uid].take(output)
        engine.check_integrity()


OpenEngine = Callable[[Trace, Path], AbstractContextManager[Engine]]


def play(trace: Trace, model: Path, open_engine: OpenEngine = engine_of) -> tuple[dict[int, Stream], int]:
    """Give what each request got, and the number of preemptions."""
    streams = {request.uid: Stream() for request, _ in trace.arrivals}
    with open_engine(trace, model) as engine:
        for request, num_steps in trace.arrivals:
            engine.add(request)
            run_steps(engine, streams, num_steps)
        engine.abort(trace.aborts)
        for uid in trace.aborts:
            streams[uid].aborted = streams[uid].finish is None
        run_steps(engine, streams, 2000)
        assert not engine.has_work, "livelock"
        load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_used_blocks, load.num_unresolved_steps) == (0, 0, 0, 0)
    assert load.generation_tokens == sum(len(stream.token_ids) for stream in streams.values())
    return streams, load.num_preemptions


def values(records: list[Logprobs]) -> list[float]:
    return [logprob for record in records for logprob in (record.logprob, *(value for _, value in record.top))]


def check_stream(stream: Stream, expected: Stream) -> None:
    if stream.aborted:
        assert stream.token_ids == expected.token_ids[: len(stream.token_ids)]
        return
    assert stream.token_ids == expected.token_ids
    assert (stream.finish, stream.matched, stream.error) == (expected.finish, expected.matched, expected.error)
    for mine, theirs in ((stream.logprobs, expected.logprobs), (stream.prompt_logprobs, expected.prompt_logprobs)):
        assert [record.token_id for record in mine] == [record.token_id for record in theirs]
        assert [len(record.top) for record in mine] == [len(record.top) for record in theirs]
        assert values(mine) == pytest.approx(values(theirs), abs=1e-4)


@pytest.fixture(scope="module")
def model(make_checkpoint) -> Path:
    return make_checkpoint("LlamaConfig")


@pytest.fixture(scope="module")
def synchronous(model: Path) -> Iterator[Engine]:
    """One step in flight, one request at a time, its prompt in one step, room for all, no shared prefix."""
    with engine_of(Trace(0, 1, 64, 1, MAX_MODEL_LEN, False, 0.0, (), ()), model) as engine:
        yield engine


def test_overlapped_traces_give_each_request_what_it_gets_alone(model: Path, synchronous: Engine) -> None:
    num_preemptions = 0
    for seed in range(NUM_TRACES):
        trace = random_trace(seed)
        try:
            streams, preemptions = play(trace, model)
            num_preemptions += preemptions if trace.depth > 1 else 0
            for request, _ in trace.arrivals:
                alone = {request.uid: Stream()}
                synchronous.add(request)
                run_steps(synchronous, alone, 2000)
                check_stream(streams[request.uid], alone[request.uid])
        except Exception as error:
            error.add_note(f"to run it alone: random_trace({seed})\n{trace}")
            raise
    assert num_preemptions > 0
