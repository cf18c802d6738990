"""Depth, batch, chunks, preemption, prefix caching and restart change no token: the engine on the simulated runner."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerd_service.config import EngineConfig
from runnerd_service.engine.engine import Engine
from runnerd_service.engine.messages import AddRequest, Load, RequestOutput, Sampling
from runnerd_service.engine.setup import resolve, start_engine
from runnerd_spi import load_runner

EOS = 256


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

    def take(self, output: RequestOutput) -> None:
        assert self.finish is None, f"output after the finish: {output}"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        if output.prompt_logprobs:
            assert not self.prompt_logprobs, "prompt logprobs came twice"
            self.prompt_logprobs = output.prompt_logprobs
        self.finish, self.matched, self.error = output.finish, output.matched_token_id, output.error
        self.num_cached_tokens = output.num_cached_tokens

    def seen(self) -> tuple[object, ...]:
        """All that may not depend on how the request was run."""
        return self.token_ids, self.logprobs, self.prompt_logprobs, self.finish, self.matched, self.error


@contextmanager
def engine(depth: int, options: Mapping[str, str] | None = None, **sizes: int | bool) -> Iterator[Engine]:
    plugin = load_runner("sim")
    config = EngineConfig(
        runner="sim",
        max_in_flight=depth,
        runner_options={"kv_shadow": "true", "max_model_len": "64", "eos_bias": "1.5", **(options or {})},
        **{"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 4, **sizes},  # type: ignore[arg-type]
    )
    started = start_engine(resolve(config, plugin), plugin, lambda stage, done, total: None)
    try:
        yield started.engine
    finally:
        started.runner.close()


def collect(one: Engine, streams: dict[int, Stream], max_steps: int = 5000) -> None:
    for _ in range(max_steps):
        if not one.has_work:
            return
        for output in one.step():
            streams[output.uid].take(output)
    raise AssertionError("livelock")


def run(requests: Sequence[AddRequest], depth: int, **how: object) -> tuple[dict[int, Stream], Load]:
    """Run requests that arrive at once."""
    streams = {request.uid: Stream() for request in requests}
    with engine(depth, **how) as one:  # type: ignore[arg-type]
        for request in requests:
            one.add(request)
        collect(one, streams)
        one.check_integrity()
        return streams, one.load()


def samplings() -> st.SearchStrategy[Sampling]:
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.7, 1.3]),
        top_k=st.sampled_from([0, 5]),
        top_p=st.sampled_from([1.0, 0.9]),
        min_p=st.sampled_from([0.0, 0.05]),
        typical_p=st.sampled_from([1.0, 0.6]),
        seed=st.integers(0, 2**64 - 1),
        repetition_penalty=st.sampled_from([1.0, 1.5]),
        presence_penalty=st.sampled_from([0.0, 1.0]),
        frequency_penalty=st.sampled_from([0.0, 2.0]),
        min_tokens=st.sampled_from([0, 5]),
        num_logprobs=st.sampled_from([None, None, 0, 2]),
        num_prompt_logprobs=st.sampled_from([None, None, 1]),
    )


def prompts() -> st.SearchStrategy[tuple[int, ...]]:
    # Few different beginnings, so that prefixes are shared.
    return st.builds(
        lambda head, tail: tuple(head * 4 + tail)[:24],
        st.sampled_from([[1, 2], [1, 2, 3, 4], [9]]),
        st.lists(st.integers(0, 255), min_size=1, max_size=8),
    )


@st.composite
def traces(draw: st.DrawFn) -> list[tuple[str, AddRequest | int]]:
    """Adds, aborts (of the n-th request) and runs of steps."""
    events: list[tuple[str, AddRequest | int]] = []
    for uid in range(draw(st.integers(1, 7))):
        events.append(
            (
                "add",
                AddRequest(
                    uid,
                    draw(prompts()),
                    draw(samplings()),
                    draw(st.integers(1, 12)),
                    eos_token_ids=(EOS,),
                    stop_token_ids=draw(st.sampled_from([(), (101, 32)])),
                    priority=draw(st.integers(0, 2)),
                ),
            )
        )
        events.append(("steps", draw(st.integers(0, 5))))
        if draw(st.integers(0, 4)) == 0:
            events.append(("abort", draw(st.integers(0, uid))))
            events.append(("steps", draw(st.integers(0, 2))))
    return events


def play(events: list[tuple[str, AddRequest | int]], depth: int, **how: object) -> dict[int, Stream]:
    streams: dict[int, Stream] = {}
    aborted: dict[int, Stream] = {}
    with engine(depth, **how) as one:  # type: ignore[arg-type]
        for kind, what in events:
            match kind, what:
                case "add", AddRequest():
                    streams[what.uid] = Stream()
                    one.add(what)
                case "abort", int():
                    one.abort([what])
                    if what in streams:
                        aborted[what] = streams.pop(what)
                case "steps", int():
                    for _ in range(what):
                        for output in one.step():
                            streams[output.uid].take(output)  # KeyError: an output of an aborted request
                        one.check_integrity()
        collect(one, streams)
        one.check_integrity()
        load = one.load()
        assert (load.num_running, load.num_waiting, load.num_used_blocks, load.num_unresolved_steps) == (0, 0, 0, 0)
    for stream in streams.values():
        assert stream.finish is not None
    return streams | aborted


@settings(max_examples=25, deadline=None)
@given(
    events=traces(),
    depth=st.integers(1, 4),
    num_blocks=st.sampled_from([9, 12, 64]),
    max_num_seqs=st.sampled_from([1, 2, 4]),
    budget=st.sampled_from([4, 7, 32]),
    prefix_caching=st.booleans(),
)
def test_any_trace_gives_each_request_what_it_gets_alone(
    events: list[tuple[str, AddRequest | int]],
    depth: int,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    prefix_caching: bool,
) -> None:
    together = play(
        events,
        depth,
        options={"num_blocks": str(num_blocks)},
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
    )
    for kind, request in events:
        if kind == "add" and isinstance(request, AddRequest):
            alone = run([request], 1)[0][request.uid]
            shared = together[request.uid]
            if shared.finish is None:  # aborted on the way
                assert shared.token_ids == alone.token_ids[: len(shared.token_ids)]
            else:
                assert shared.seen() == alone.seen()


def a_request(uid: int, prompt: str, max_tokens: int, **sampling: object) -> AddRequest:
    return AddRequest(uid, tuple(prompt.encode()), Sampling(seed=uid, **sampling), max_tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_preemption_loses_doubles_and_changes_no_token(depth: int) -> None:
    requests = [a_request(uid, f"request number {uid}", 24, num_logprobs=2) for uid in range(4)]
    roomy, _ = run(requests, 1)
    tight, load = run(requests, depth, options={"num_blocks": "17"})
    assert load.num_preemptions > 0
    assert {uid: stream.seen() for uid, stream in tight.items()} == {
        uid: stream.seen() for uid, stream in roomy.items()
    }
    # A token that was in flight at the preemption is not generated again.
    assert load.generation_tokens == sum(len(stream.token_ids) for stream in tight.values())


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_prompt_logprobs_come_once_and_whole_whatever_the_chunks_and_preemptions(depth: int) -> None:
    requests = [a_request(uid, f"the long prompt of {uid}", 16, num_prompt_logprobs=1) for uid in range(4)]
    roomy, _ = run(requests, 1, max_num_batched_tokens=128)
    tight, load = run(requests, depth, options={"num_blocks": "16"}, max_num_batched_tokens=5)
    assert load.num_preemptions > 0
    for uid, request in enumerate(requests):
        assert len(tight[uid].prompt_logprobs) == len(request.prompt_token_ids) - 1
        assert tight[uid].seen() == roomy[uid].seen()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_request_preempted_in_the_middle_of_its_prompt_keeps_the_prompt_logprobs_it_has(depth: int) -> None:
    requests = [a_request(0, "abc", 20), a_request(1, "x" * 24, 3, num_prompt_logprobs=1)]
    roomy, _ = run(requests, 1)
    # The first grows by three blocks while the second is prefilled two tokens at a time.
    tight, load = run(requests, depth, options={"num_blocks": "8"}, max_num_seqs=2, max_num_batched_tokens=3)
    assert load.num_preemptions == 1
    for uid in (0, 1):
        assert tight[uid].seen() == roomy[uid].seen()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_sent", [0, 1, 7, 14, 15])
def test_a_request_goes_on_after_the_outputs_of_a_former_engine(depth: int, num_sent: int) -> None:
    request = a_request(3, "tell me", 15, temperature=1.0, frequency_penalty=1.0)
    whole = run([request], 1)[0][3]
    assert len(whole.token_ids) == 15
    sent = tuple(whole.token_ids[:num_sent])
    rest = run([msgspec.structs.replace(request, output_token_ids=sent)], depth)[0][3]
    assert list(sent) + rest.token_ids == whole.token_ids
    assert rest.finish == "length"


def test_a_request_whose_former_outputs_end_with_eos_is_finished_at_once() -> None:
    request = AddRequest(1, (1, 2), Sampling(), 9, eos_token_ids=(EOS,), output_token_ids=(5, EOS))
    stream = run([request], 2)[0][1]
    assert (stream.token_ids, stream.finish, stream.matched) == ([], "eos", EOS)


def test_a_second_request_with_the_same_prompt_finds_its_prefix_and_says_so() -> None:
    streams = {1: Stream(), 2: Stream(), 3: Stream()}
    with engine(2) as one:
        for uid, salt in ((1, ""), (2, ""), (3, "other tenant")):
            one.add(AddRequest(uid, tuple(range(18)), Sampling(), 3, cache_salt=salt))
            collect(one, streams)
        load = one.load()
    assert [streams[uid].num_cached_tokens for uid in (1, 2, 3)] == [0, 16, 0]
    assert (load.prefix_cache_hits, load.prefix_cache_queries) == (16, 54)
    assert streams[1].seen() == streams[2].seen() == streams[3].seen()


def test_a_reset_prefix_cache_is_not_hit() -> None:
    streams = {1: Stream(), 2: Stream()}
    with engine(2) as one:
        one.add(AddRequest(1, tuple(range(18)), Sampling(), 1))
        collect(one, streams)
        assert one.reset_prefix_cache() == "4"
        one.add(AddRequest(2, tuple(range(18)), Sampling(), 1))
        collect(one, streams)
    assert streams[2].num_cached_tokens == 0


def test_a_request_that_wants_prompt_logprobs_skips_the_prefix_cache() -> None:
    streams = {1: Stream(), 2: Stream()}
    with engine(2) as one:
        for uid in (1, 2):
            one.add(AddRequest(uid, tuple(range(18)), Sampling(num_prompt_logprobs=0), 1))
            collect(one, streams)
    assert streams[2].num_cached_tokens == 0
    assert len(streams[2].prompt_logprobs) == 17
