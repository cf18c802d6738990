"""48 requests and the ways in which an engine may run them; none may change what one of them gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

import msgspec

from runnerd_service.config import EngineConfig
from runnerd_service.engine.engine import Engine
from runnerd_service.engine.messages import AddRequest, Load, Logprobs, RequestOutput, Sampling
from runnerd_service.engine.setup import resolve, start_engine
from runnerd_spi import load_runner

NUM_REQUESTS = 48
BLOCK_SIZE = 4
MAX_MODEL_LEN = 96
DEPTHS = (1, 2, 3, 4)

T = TypeVar("T")


@dataclass(frozen=True)
class Way:
    """How the requests are run. Without any of this: one after the other, each prompt in one step."""

    max_num_seqs: int = 1
    max_num_batched_tokens: int = MAX_MODEL_LEN
    num_blocks: int = 48 * MAX_MODEL_LEN // BLOCK_SIZE
    prefix_caching: bool = True
    num_steps_before_restart: int | None = None
    """After so many steps another engine goes on from the outputs that were settled."""
    preempts: bool = False
    """Whether the pool is so small that requests lose their slots."""


ALONE = Way(prefix_caching=False)
WAYS = {
    "batch of 48": Way(max_num_seqs=48, max_num_batched_tokens=512),
    "chunks of 1": Way(max_num_batched_tokens=1),
    "chunks of 7": Way(max_num_seqs=7, max_num_batched_tokens=7),
    "chunks of 64": Way(max_num_seqs=48, max_num_batched_tokens=64),
    "tiny pool": Way(max_num_seqs=8, max_num_batched_tokens=40, num_blocks=24, preempts=True),
    "restart": Way(max_num_seqs=48, max_num_batched_tokens=64, num_steps_before_restart=12),
}


@dataclass
class Stream:
    """What a client sees of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish: str | None = None
    matched: int | None = None
    error: str = ""

    def take(self, output: RequestOutput) -> None:
        assert self.finish is None, f"an output after the finish: {output}"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        if output.prompt_logprobs:
            assert not self.prompt_logprobs, "prompt logprobs came twice"
            self.prompt_logprobs = output.prompt_logprobs
        self.finish, self.matched, self.error = output.finish, output.matched_token_id, output.error

    def packed(self) -> bytes:
        """All of it, to the bit."""
        return msgspec.msgpack.encode(
            (self.token_ids, self.logprobs, self.prompt_logprobs, self.finish, self.matched, self.error)
        )


def requests_for(vocab_size: int, eos: int) -> list[AddRequest]:
    """Give the requests: greedy and drawn, each parameter alone or with others; some share a beginning."""
    random = Random(20)
    return [_request(random, uid, vocab_size, eos) for uid in range(NUM_REQUESTS)]


def _request(random: Random, uid: int, vocab_size: int, eos: int) -> AddRequest:
    head = tuple(range(10, 10 + random.choice((0, 0, 16, 33))))
    tail = tuple(random.choices(range(3, vocab_size), k=random.randint(1, 24)))
    max_tokens = random.randint(2, 24)
    return AddRequest(
        uid,
        head + tail,
        _sampling(random, max_tokens, vocab_size),
        max_tokens,
        eos_token_ids=random.choice(((), (eos,))),
        stop_token_ids=random.choice(((), tuple(range(40, 44)))),
        priority=random.choice((0, 0, 1)),
    )


def _sampling(random: Random, max_tokens: int, vocab_size: int) -> Sampling:
    def sometimes(neutral: T, *others: T) -> T:
        return random.choice(others) if random.random() < 0.25 else neutral

    return Sampling(
        temperature=random.choice((0.0, 0.7, 1.0, 1.3)),
        top_k=sometimes(0, 4, 40),
        top_p=sometimes(1.0, 0.6, 0.95),
        min_p=sometimes(0.0, 0.05),
        typical_p=sometimes(1.0, 0.5, 0.9),
        seed=random.getrandbits(64),
        repetition_penalty=sometimes(1.0, 1.3, 0.8),
        presence_penalty=sometimes(0.0, 1.0),
        frequency_penalty=sometimes(0.0, 2.0, -0.5),
        logit_bias=sometimes({}, {9: 5.0, 10: -100.0}),
        allowed_token_ids=sometimes(None, tuple(range(0, vocab_size, 3))),
        bad_words_token_ids=sometimes((), ((9,), (9, 9)), ((40, 40), (41, 40))),
        min_tokens=sometimes(0, random.randint(1, max_tokens)),
        num_logprobs=sometimes(None, 0, 3),
        num_prompt_logprobs=sometimes(None, 0, 2),
    )


@contextmanager
def engine(
    way: Way, depth: int, runner: str, model: str | None, options: dict[str, str], memory_bytes: int | None = None
) -> Iterator[Engine]:
    """Bring up an engine that runs requests that way."""
    plugin = load_runner(runner)
    config = EngineConfig(
        runner=runner,
        model=model,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=way.max_num_seqs,
        max_num_batched_tokens=way.max_num_batched_tokens,
        block_size=BLOCK_SIZE,
        memory_bytes=memory_bytes,
        prefix_caching=way.prefix_caching,
        max_in_flight=depth,
        adaptive_depth=False,
        runner_options=options,
    )
    started = start_engine(resolve(config, plugin), plugin, lambda stage, done, total: None)
    try:
        yield started.engine
    finally:
        started.runner.close()


def drive(one: Engine, requests: Sequence[AddRequest], streams: dict[int, Stream], max_steps: int) -> None:
    """Run requests that come at once, for some steps or to the end."""
    for request in requests:
        one.add(request)
    for _ in range(max_steps):
        if not one.has_work:
            break
        for output in one.step():
            streams[output.uid].take(output)
    one.check_integrity()


def run(
    requests: Sequence[AddRequest],
    way: Way,
    depth: int,
    runner: str,
    model: str | None,
    options: dict[str, str],
    memory_bytes: int | None = None,
) -> dict[int, Stream]:
    """Give what each request gets."""
    streams = {request.uid: Stream() for request in requests}
    if way.num_steps_before_restart is not None:
        with engine(way, depth, runner, model, options, memory_bytes) as first:
            drive(first, requests, streams, way.num_steps_before_restart)
        ended = sum(stream.finish is not None for stream in streams.values())
        begun = sum(bool(stream.token_ids) for stream in streams.values())
        assert 0 < ended < begun, "the restart is to find requests that ended, and some in the middle"
        requests = [_continued(one, streams[one.uid]) for one in requests if streams[one.uid].finish is None]
    with engine(way, depth, runner, model, options, memory_bytes) as last:
        drive(last, requests, streams, 100_000)
        load: Load = last.load()
    assert (load.num_running, load.num_waiting, load.num_used_blocks, load.num_unresolved_steps) == (0, 0, 0, 0)
    assert (load.num_preemptions > 0) == way.preempts
    return streams


def _continued(request: AddRequest, stream: Stream) -> AddRequest:
    """Give the request as the front end gives it to the next engine."""
    sampling = request.sampling
    if stream.prompt_logprobs or stream.token_ids:
        sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=None)
    return msgspec.structs.replace(request, sampling=sampling, output_token_ids=tuple(stream.token_ids))
