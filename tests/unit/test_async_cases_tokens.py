"""Failure cases of overlapped execution on the simulated runner: which tokens come out.

The cases are those of docs/async-cases.md; each test names its own. Every test runs under several timings: with one to
four steps in flight, a device or a copy that is slower than the host, and a host that is slower than the device.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from runnerd_service.engine.engine import Engine, EngineLimits
from runnerd_service.engine.messages import AddRequest, Load, RequestOutput, Sampling
from runnerd_service.frontend.output import OutputBuffer
from runnerd_service.frontend.preparation import PreparedRequest
from runnerd_service.frontend.stop import StopStrings
from runnerd_service.frontend.tokenizer import ByteTokenizer
from runnerd_service.frontend.types import Finish
from runnerd_sim.plugin import SIM
from runnerd_spi import ModelRunner, RunnerConfig, StepHandle, StepOutput, StepPlan, StepTimeline

EOS = 256
BLOCK_SIZE = 4
A, B = b"AB"


@dataclass(frozen=True)
class Timing:
    """Steps in flight, and who is slow."""

    depth: int
    step_seconds: float = 0.0
    copy_seconds: float = 0.0
    host_seconds: float = 0.0
    always_late: bool = False


SYNCHRONOUS = Timing(1)
TIMINGS = {
    "two in flight": Timing(2),
    "late copy": Timing(2, copy_seconds=0.005),
    "slow device": Timing(3, step_seconds=0.002),
    "slow device and late copy": Timing(4, step_seconds=0.001, copy_seconds=0.003),
    "slow host": Timing(4, host_seconds=0.001),
    "all that may be in flight": Timing(4, always_late=True),
}
OVERLAPPED = pytest.mark.parametrize("timing", TIMINGS.values(), ids=TIMINGS.keys())


@dataclass(frozen=True)
class Sizes:
    num_blocks: int = 256
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32
    max_model_len: int = 64
    script: str | None = None


class LateHandle:
    """A step that is not seen done before its result is asked for: as many are in flight as may be."""

    def __init__(self, handle: StepHandle) -> None:
        self._handle = handle

    @property
    def step_id(self) -> int:
        return self._handle.step_id

    @property
    def timeline(self) -> StepTimeline:
        return self._handle.timeline

    def done(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> StepOutput:
        return self._handle.result(timeout)


class PlanLog:
    """A runner that keeps the plans it hands on; ``always_late``: see :class:`LateHandle`."""

    def __init__(self, runner: ModelRunner, always_late: bool) -> None:
        self._always_late = always_late
        self.load, self.profile, self.init_kv_cache = runner.load, runner.profile, runner.init_kv_cache
        self.warm_up, self.close = runner.warm_up, runner.close
        self.plans: list[StepPlan] = []
        self._runner = runner

    def execute_model(self, plan: StepPlan) -> StepHandle:
        self.plans.append(plan)
        handle = self._runner.execute_model(plan)
        return LateHandle(handle) if self._always_late else handle


@contextmanager
def started(timing: Timing, sizes: Sizes) -> Iterator[tuple[Engine, PlanLog]]:
    options = {"kv_shadow": True, "num_blocks": sizes.num_blocks, "eos_bias": -50.0}
    options |= {"step_seconds": timing.step_seconds, "copy_seconds": timing.copy_seconds}
    if sizes.script is not None:
        options["script"] = sizes.script
    config = RunnerConfig(
        sizes.max_num_seqs,
        sizes.max_num_batched_tokens,
        BLOCK_SIZE,
        max_model_len=sizes.max_model_len,
        max_in_flight=timing.depth,
        options=options,
    )
    runner = PlanLog(SIM.create(config), timing.always_late)
    info = runner.load(lambda stage, done, total: None)
    runner.profile()
    runner.init_kv_cache(sizes.num_blocks)
    runner.warm_up()
    limits = EngineLimits(
        vocab_size=info.vocab_size,
        max_model_len=sizes.max_model_len,
        num_blocks=sizes.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_in_flight=timing.depth,
    )
    try:
        yield Engine(runner, limits), runner
    finally:
        runner.close()


@dataclass
class Run:
    """What came of requests that arrived at once."""

    outputs: dict[int, list[RequestOutput]] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    load: Load = field(default_factory=Load)

    def tokens(self, uid: int) -> list[int]:
        return [token_id for output in self.outputs[uid] for token_id in output.token_ids]

    def finish(self, uid: int) -> str | None:
        return self.outputs[uid][-1].finish

    def streams(self) -> dict[int, list[RequestOutput]]:
        """All that the clients saw, without what depends on the schedule."""
        return {uid: [replace_cached(output) for output in outputs] for uid, outputs in self.outputs.items()}


def replace_cached(output: RequestOutput) -> RequestOutput:
    return RequestOutput(
        output.uid,
        output.token_ids,
        output.logprobs,
        output.prompt_logprobs,
        output.finish,
        output.matched_token_id,
        error=output.error,
    )


def run(requests: Sequence[AddRequest], timing: Timing, sizes: Sizes) -> Run:
    result = Run({request.uid: [] for request in requests})
    with started(timing, sizes) as (engine, runner):
        for request in requests:
            engine.add(request)
        for _ in range(5000):
            if not engine.has_work:
                break
            for output in engine.step():
                assert not (result.outputs[output.uid] and result.finish(output.uid)), "an output after the finish"
                result.outputs[output.uid].append(output)
            engine.check_integrity()
            time.sleep(timing.host_seconds)
        result.plans, result.load = runner.plans, engine.load()
    load = result.load
    assert (load.num_running, load.num_waiting, load.num_used_blocks, load.num_unresolved_steps) == (0, 0, 0, 0)
    return result


def request(uid: int, prompt: str = "hello", max_tokens: int = 8, **sampling: object) -> AddRequest:
    params = {"temperature": 0.0, **sampling}
    return AddRequest(uid, tuple(prompt.encode()), Sampling(**params), max_tokens, eos_token_ids=(EOS,))  # type: ignore[arg-type]


def check_equal_to_synchronous(requests: Sequence[AddRequest], timing: Timing, sizes: Sizes) -> Run:
    expected = run(requests, SYNCHRONOUS, sizes)
    result = run(requests, timing, sizes)
    assert result.streams() == expected.streams()
    return result


# History


@OVERLAPPED
def test_a_penalty_sees_the_token_that_is_still_in_flight(timing: Timing) -> None:
    """A1, A3: the model wants A each time; A at t must count at t + 1."""
    sizes = Sizes(script="A" * 20)
    free, fined = request(1, max_tokens=6), request(2, max_tokens=6, repetition_penalty=1e6)
    result = check_equal_to_synchronous([free, fined], timing, sizes)
    assert result.tokens(1) == [A] * 6
    assert result.tokens(2)[0] == A
    assert A not in result.tokens(2)[1:]


@OVERLAPPED
@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_counts_of_outputs_include_the_token_that_is_still_in_flight(timing: Timing, penalty: str) -> None:
    """A1: A is wanted more than other letters, until it has come."""
    choice = {"allowed_token_ids": tuple(range(A, A + 26)), "logit_bias": {A: 4.0}}
    free, fined = request(1, max_tokens=20, **choice), request(2, max_tokens=20, **choice, **{penalty: 2.0})
    result = check_equal_to_synchronous([free, fined], timing, Sizes())
    assert result.tokens(1).count(A) > result.tokens(2).count(A) > 0


@OVERLAPPED
def test_a_bad_word_that_begins_with_the_token_in_flight_is_never_completed(timing: Timing) -> None:
    """A1: the model wants ABABAB; the word AB is banned, and so is AAA."""
    words = ((A, B), (A, A, A))
    result = check_equal_to_synchronous(
        [request(1, max_tokens=12, bad_words_token_ids=words)], timing, Sizes(script="AB" * 10)
    )
    text = bytes(result.tokens(1))
    assert b"A" in text
    assert b"AB" not in text
    assert b"AAA" not in text


@OVERLAPPED
def test_min_tokens_counts_the_tokens_that_are_still_in_flight(timing: Timing) -> None:
    """A1: EOS is wanted from the third token on and allowed from the sixth on: it comes sixth, not later."""
    result = check_equal_to_synchronous([request(1, max_tokens=20, min_tokens=5)], timing, Sizes(script="AB"))
    # The script says A, B, EOS over and over; the EOS at index 2 is banned, the one at index 5 is not.
    assert result.tokens(1)[:2] == [A, B]
    assert EOS not in result.tokens(1)[:5]
    assert result.tokens(1)[5] == EOS
    assert result.finish(1) == "eos"


@pytest.mark.parametrize("depth", [2, 4])
def test_a_thousand_steps_with_penalties_are_those_of_synchronous_execution(depth: int) -> None:
    """A4."""
    sizes = Sizes(num_blocks=512, max_model_len=1100)
    long = request(1, max_tokens=1000, temperature=1.0, seed=3, frequency_penalty=0.3, repetition_penalty=1.1)
    result = check_equal_to_synchronous([long], Timing(depth), sizes)
    assert len(result.tokens(1)) == 1000


# Finish conditions


@OVERLAPPED
@pytest.mark.parametrize("max_tokens", [1, 3, 4])
def test_max_tokens_n_launches_n_rows_and_the_finish_comes_with_the_last_token(timing: Timing, max_tokens: int) -> None:
    """A8, A10."""
    result = check_equal_to_synchronous([request(1, max_tokens=max_tokens)], timing, Sizes(script="never"))
    assert bytes(result.tokens(1)) == b"never"[:max_tokens]
    assert [output.finish for output in result.outputs[1]] == [None] * (max_tokens - 1) + ["length"]
    assert sum(row.sample for plan in result.plans for row in plan.rows) == max_tokens


@OVERLAPPED
@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_nothing_follows_eos_though_later_rows_are_in_flight(timing: Timing, length: int) -> None:
    """A11."""
    others = [request(uid, prompt=f"other {uid}", max_tokens=20, seed=uid, temperature=1.0) for uid in (2, 3)]
    first = request(1, max_tokens=20, logit_bias={EOS: 200.0}, min_tokens=length)
    result = check_equal_to_synchronous([first, *others], timing, Sizes())
    assert result.tokens(1)[-1] == EOS
    assert result.tokens(1).count(EOS) == 1
    assert len(result.tokens(1)) == length + 1
    assert (result.finish(1), result.outputs[1][-1].matched_token_id) == ("eos", EOS)


def test_a_stop_string_goes_before_an_eos_that_came_in_the_same_message() -> None:
    """A12: several tokens at once, as when a slow reader's are merged."""
    prepared = PreparedRequest(
        prompt_token_ids=(1,),
        prompt_text="",
        sampling=Sampling(),
        max_tokens=100,
        eos_token_ids=(EOS,),
        stop_token_ids=(),
        n=1,
        stops=StopStrings(("STOP",)),
        include_stop=False,
        wants_text=True,
        wants_tokens=False,
        skip_special_tokens=True,
        cumulative=False,
        priority=0,
        cache_salt="",
        time_limit_seconds=None,
    )
    buffer = OutputBuffer(0, prepared, ByteTokenizer())
    assert buffer.push(RequestOutput(1, (*b"say STOP", EOS), finish="eos", matched_token_id=EOS))
    chunk = buffer.take()
    assert chunk is not None
    assert chunk.text == "say "
    assert chunk.finish == Finish("stop", 1, 8, 0, stop_string="STOP")


# Preemption


def preempting(num_requests: int = 2, max_tokens: int = 24) -> list[AddRequest]:
    return [
        request(uid, f"prompt {uid}", max_tokens, temperature=1.0, seed=uid, num_logprobs=1, frequency_penalty=0.5)
        for uid in range(num_requests)
    ]


@OVERLAPPED
def test_a_preempted_request_goes_on_with_the_same_tokens_and_none_is_generated_twice(timing: Timing) -> None:
    """A15, A20: two requests, room for one and a half."""
    roomy = run(preempting(), SYNCHRONOUS, Sizes())
    result = run(preempting(), timing, Sizes(num_blocks=13))
    assert result.load.num_preemptions > 0
    assert result.streams() == roomy.streams()
    assert result.load.generation_tokens == 2 * 24
    # What was in flight at a preemption is kept, not dropped and sampled again.
    assert sum(row.sample for plan in result.plans for row in plan.rows) == 2 * 24


@pytest.mark.parametrize("num_in_flight", [1, 2, 3])
def test_tokens_in_flight_at_a_preemption_are_each_kept_once(num_in_flight: int) -> None:
    """A15, A18: with any number of frames in flight."""
    timing = Timing(num_in_flight + 1, always_late=True)
    roomy = run(preempting(max_tokens=12), SYNCHRONOUS, Sizes())
    num_before = -1
    streams: dict[int, list[int]] = {0: [], 1: []}
    with started(timing, Sizes(num_blocks=7)) as (engine, runner):
        for one in preempting(max_tokens=12):
            engine.add(one)
        while engine.has_work:
            in_flight = engine.load().num_unresolved_steps
            for output in engine.step():
                streams[output.uid] += output.token_ids
            if num_before < 0 and engine.load().num_preemptions:
                num_before = in_flight
        generated = engine.load().generation_tokens
    assert num_before == num_in_flight
    assert streams == {uid: roomy.tokens(uid) for uid in (0, 1)}
    assert generated == 24
    assert sum(row.sample for plan in runner.plans for row in plan.rows) == 24


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_request_that_is_left_out_of_steps_goes_on_with_the_right_token(depth: int) -> None:
    """A16: a running request waits for a block that a launched step is about to give back; others go on meanwhile."""
    requests = [
        request(1, "sixsix", 9, temperature=1.0, seed=1),
        request(2, "eight888", 3),
        request(3, "333", 12, temperature=1.0, seed=3),
    ]
    roomy = run(requests, SYNCHRONOUS, Sizes())
    result = run(requests, Timing(depth, always_late=True), Sizes(num_blocks=7))
    assert result.streams() == roomy.streams()
    assert any(num_steps_left_out(result.plans, epoch) for epoch in (0, 1, 2))


def num_steps_left_out(plans: Sequence[StepPlan], epoch: int) -> int:
    """Steps without a row of a request between two that have one, while it keeps its slot."""
    has_row = [any(row.epoch == epoch for row in plan.rows) for plan in plans if plan.rows]
    first, last = has_row.index(True), len(has_row) - has_row[::-1].index(True)
    return has_row[first:last].count(False)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("num_blocks", [13, 64])
@pytest.mark.parametrize("budget", [4, 32])
def test_a_seed_gives_the_same_tokens_whatever_the_depth_the_chunks_and_the_preemptions(
    depth: int, num_blocks: int, budget: int
) -> None:
    """A44."""
    requests = [request(uid, "the same prompt", 20, temperature=1.2, seed=7) for uid in range(2)]
    expected = run(requests[:1], SYNCHRONOUS, Sizes()).tokens(0)
    result = run(
        requests, Timing(depth, copy_seconds=0.001), Sizes(num_blocks=num_blocks, max_num_batched_tokens=budget)
    )
    assert (result.load.num_preemptions > 0) == (num_blocks == 13)
    assert result.tokens(0) == result.tokens(1) == expected


# Side outputs


@OVERLAPPED
def test_logprobs_belong_to_their_rows_when_rows_ask_for_different_ones(timing: Timing) -> None:
    """A45: two, none, not asked for, prompt records as well, and prompts that are in the middle of a chunk."""
    prompts = ("short", "a prompt that takes several steps", "another long prompt of some length", "x")
    asked = ({"num_logprobs": 2}, {"num_logprobs": 0}, {"num_prompt_logprobs": 1}, {})
    requests = [request(uid, prompt, 10, **how) for uid, (prompt, how) in enumerate(zip(prompts, asked, strict=True))]
    result = check_equal_to_synchronous(requests, timing, Sizes(max_num_batched_tokens=7))
    for uid, num_top in ((0, 2), (1, 0)):
        records = [record for output in result.outputs[uid] for record in output.logprobs]
        assert [record.token_id for record in records] == result.tokens(uid)
        assert {len(record.top) for record in records} == {num_top}
        assert {record.rank for record in records} == {1}
    prompt_records = [record for output in result.outputs[2] for record in output.prompt_logprobs]
    assert [record.token_id for record in prompt_records] == list(prompts[2].encode())[1:]
    assert not any(output.logprobs for uid in (2, 3) for output in result.outputs[uid])


@OVERLAPPED
def test_a_mask_holds_for_every_token_and_never_for_another_row(timing: Timing) -> None:
    """A47: allowed ids and bans, with rows that come and go beside them."""
    allowed = (ord("Z"), A, B)
    requests = [request(uid, f"{uid}", 3 + uid, temperature=2.0, seed=uid) for uid in range(8)]
    requests += [request(9, "masked", 30, temperature=2.0, seed=9, allowed_token_ids=allowed)]
    result = check_equal_to_synchronous(requests, timing, Sizes(max_num_seqs=3))
    assert set(result.tokens(9)) == set(allowed)
    assert any(set(result.tokens(uid)) - set(allowed) for uid in range(8))
    # What a plan carries are real ids, at every time.
    admitted = [token_id for plan in result.plans for admit in plan.admits for token_id in admit.token_ids]
    assert 0 <= min(admitted) <= max(admitted) <= EOS
