"""A request's tokens follow from its history and parameters: depth, chunks, batches and preemption change nothing."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerd_sim.model import EOS_TOKEN_ID
from runnerd_sim.plugin import SIM
from runnerd_spi import (
    Admit,
    BlockGrant,
    OptionValue,
    Release,
    Row,
    RowOutput,
    RunnerConfig,
    SamplingParams,
    StepHandle,
    StepPlan,
    TokenLogprobs,
)

BLOCK_SIZE = 4
NUM_BLOCKS = 64
MAX_NUM_SEQS = 4
GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True)
class Job:
    """A request and how it is to be scheduled."""

    prompt: tuple[int, ...]
    params: SamplingParams = GREEDY
    num_outputs: int = 12
    arrival: int = 0
    chunks: tuple[int, ...] = ()
    """Sizes of the first prefill chunks; the rest is one."""
    preempted_at: frozenset[int] = frozenset()
    """Steps before which it is thrown out, to start again from its prompt and outputs."""


@dataclass
class Running:
    slot: int
    epoch: int
    num_tokens: int
    """Unresolved ones included."""
    chunks: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0


@dataclass
class Result:
    outputs: list[RowOutput] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By position of the prompt token."""

    @property
    def token_ids(self) -> list[int | None]:
        return [output.token_id for output in self.outputs]


class MiniEngine:
    """Plays jobs through a simulated runner, as many steps ahead of what it has read as the runner allows."""

    def __init__(self, jobs: Sequence[Job], max_in_flight: int, options: dict[str, OptionValue]) -> None:
        self.jobs = jobs
        self.results = [Result() for _ in jobs]
        self.max_in_flight = max_in_flight
        self.running: dict[int, Running] = {}
        self.free_blocks = list(range(NUM_BLOCKS))
        self.free_slots = list(range(MAX_NUM_SEQS))
        self.releases: list[Release] = []
        self.admits: list[Admit] = []
        self.grants: list[BlockGrant] = []
        self.in_flight: deque[tuple[StepHandle, list[tuple[int, Row]]]] = deque()
        self.num_plans = 0
        self.num_epochs = 0
        self.runner = SIM.create(
            RunnerConfig(
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=512,
                block_size=BLOCK_SIZE,
                max_model_len=64,
                max_in_flight=max_in_flight,
                options={"kv_shadow": True} | options,
            )
        )
        self.runner.load(lambda stage, done, total: None)
        self.runner.profile()
        self.runner.init_kv_cache(NUM_BLOCKS)
        self.runner.warm_up()

    def run(self) -> list[Result]:
        waiting = deque(sorted(range(len(self.jobs)), key=lambda index: self.jobs[index].arrival))
        step = 0
        while waiting or self.running or self.releases:
            for index in [one for one in self.running if step in self.jobs[one].preempted_at]:
                self.settle_all()
                self.leave(index)
                self.enter(index)
            while waiting and self.jobs[waiting[0]].arrival <= step and self.free_slots:
                self.enter(waiting.popleft())
            self.launch([(index, self.next_row(index)) for index in self.running])
            for index in [one for one in self.running if self.is_complete(one)]:
                self.leave(index)
            step += 1
        self.settle_all()
        self.runner.close()
        return self.results

    def enter(self, index: int) -> None:
        job, outputs = self.jobs[index], tuple(one.token_id or 0 for one in self.results[index].outputs)
        self.num_epochs += 1
        token_ids = job.prompt + outputs
        running = Running(self.free_slots.pop(0), self.num_epochs, len(token_ids), list(job.chunks))
        self.running[index] = running
        self.admits.append(Admit(running.slot, running.epoch, token_ids, len(job.prompt), job.params))

    def leave(self, index: int) -> None:
        running = self.running.pop(index)
        self.releases.append(Release(running.slot, running.epoch))
        self.free_slots.append(running.slot)
        # First to be used again, so that stale contents are met often.
        self.free_blocks = running.blocks + self.free_blocks

    def is_complete(self, index: int) -> bool:
        return self.running[index].num_tokens == len(self.jobs[index].prompt) + self.jobs[index].num_outputs

    def next_row(self, index: int) -> Row:
        running = self.running[index]
        left = running.num_tokens - running.num_computed
        count = min(running.chunks.pop(0), left) if running.chunks else left
        row = Row(running.slot, running.epoch, count, running.num_computed, count == left)
        running.num_computed += count
        running.num_tokens += row.sample
        missing = -(-running.num_computed // BLOCK_SIZE) - len(running.blocks)
        if missing:
            granted = [self.free_blocks.pop(0) for _ in range(missing)]
            running.blocks += granted
            self.grants.append(BlockGrant(running.slot, running.epoch, tuple(granted)))
        return row

    def launch(self, rows: list[tuple[int, Row]]) -> None:
        plan = StepPlan(
            self.num_plans,
            tuple(self.releases),
            tuple(self.admits),
            tuple(self.grants),
            tuple(row for _, row in rows),
        )
        self.num_plans += 1
        self.releases, self.admits, self.grants = [], [], []
        self.in_flight.append((self.runner.execute_model(plan), rows))
        if len(self.in_flight) >= self.max_in_flight:
            self.settle()

    def settle_all(self) -> None:
        while self.in_flight:
            self.settle()

    def settle(self) -> None:
        handle, rows = self.in_flight.popleft()
        step = handle.result(10.0)
        assert step.step_id == handle.step_id
        for (index, row), output in zip(rows, step.rows, strict=True):
            result = self.results[index]
            assert (output.token_id is not None) == row.sample
            assert output.failure is None
            for offset, record in enumerate(output.prompt_logprobs):
                position = row.first_position + offset + 1
                assert record.token_id == self.jobs[index].prompt[position]
                assert result.prompt_logprobs.setdefault(position, record) == record
            if row.sample:
                result.outputs.append(output._replace(prompt_logprobs=()))


def play(jobs: Sequence[Job], max_in_flight: int = 1, **options: OptionValue) -> list[Result]:
    return MiniEngine(jobs, max_in_flight, options).run()


def tokens_of(job: Job, **options: OptionValue) -> list[int | None]:
    return play([job], **options)[0].token_ids


def text_of(token_ids: Sequence[int | None]) -> str:
    return bytes(one for one in token_ids if one is not None and one != EOS_TOKEN_ID).decode()


tokens = st.lists(st.integers(0, 256), min_size=1, max_size=24).map(tuple)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.7, 1.0, 1.5)),
    top_k=st.sampled_from((0, 1, 20)),
    top_p=st.sampled_from((1.0, 0.8)),
    min_p=st.sampled_from((0.0, 0.05)),
    typical_p=st.sampled_from([1.0, 0.6]),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from((1.0, 1.3)),
    presence_penalty=st.sampled_from((0.0, 0.5)),
    frequency_penalty=st.sampled_from((0.0, -0.4, 0.9)),
    logit_bias=st.sampled_from(({}, {101: 4.0, 32: -3.0})),
    allowed_token_ids=st.sampled_from((None, tuple(range(97, 123)))),
    bad_words_token_ids=st.sampled_from(((), ((101,), (97, 98), (110, 111, 112)))),
    min_tokens=st.sampled_from((0, 5)),
    stop_token_ids=st.just((EOS_TOKEN_ID, 115)),
    num_logprobs=st.sampled_from((None, 0, 3)),
    num_prompt_logprobs=st.sampled_from((None, None, 0, 2)),
)
jobs = st.builds(
    Job,
    prompt=tokens,
    params=st.one_of(st.just(GREEDY), params),
    num_outputs=st.integers(1, 14),
    arrival=st.integers(0, 8),
    chunks=st.lists(st.integers(1, 9), max_size=4).map(tuple),
    preempted_at=st.frozensets(st.integers(1, 16), max_size=2),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(jobs, min_size=1, max_size=7), st.sampled_from((1, 2, 3, 4)), st.booleans())
def test_any_schedule_gives_what_each_request_gives_alone(trace: list[Job], max_in_flight: int, shadow: bool) -> None:
    together = play(trace, max_in_flight, kv_shadow=shadow)
    for job, result in zip(trace, together, strict=True):
        [alone] = play([replace(job, arrival=0, chunks=(), preempted_at=frozenset())])
        assert result == alone
        assert len(result.outputs) == job.num_outputs


PROMPT = tuple(b"It was a dark and stormy night")


@pytest.mark.parametrize("chunks", [(1,) * 29, (4, 4), (7, 1, 12), (29,)])
def test_chunked_prefill_gives_the_tokens_of_a_whole_one(chunks: tuple[int, ...]) -> None:
    assert tokens_of(Job(PROMPT, chunks=chunks)) == tokens_of(Job(PROMPT))


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_a_resumed_request_goes_on_with_the_same_tokens(seed: int) -> None:
    sampled = SamplingParams(seed=seed, frequency_penalty=0.5, num_logprobs=2)
    resumed = Job(PROMPT, sampled, preempted_at=frozenset((1, 2, 5, 9)))
    assert play([resumed], 4)[0] == play([Job(PROMPT, sampled)])[0]


def test_the_seed_decides_the_tokens_and_greedy_ignores_it() -> None:
    first, again, other = (tokens_of(Job(PROMPT, SamplingParams(seed=seed))) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert tokens_of(Job(PROMPT, replace(GREEDY, seed=1))) == tokens_of(Job(PROMPT, replace(GREEDY, seed=2)))


def test_a_change_anywhere_in_the_prompt_changes_the_tokens() -> None:
    expected = tokens_of(Job(PROMPT))
    for position in range(len(PROMPT)):
        changed = (*PROMPT[:position], PROMPT[position] ^ 1, *PROMPT[position + 1 :])
        assert tokens_of(Job(changed)) != expected


def test_a_high_frequency_penalty_keeps_a_greedy_output_from_repeating_itself() -> None:
    token_ids = tokens_of(Job(PROMPT, replace(GREEDY, frequency_penalty=2.0, presence_penalty=2.0), num_outputs=30))
    plain = tokens_of(Job(PROMPT, num_outputs=30))
    assert len(set(token_ids)) > len(set(plain))


def test_a_repetition_penalty_sees_prompt_and_unresolved_outputs() -> None:
    # Among the letters alone, a penalty this high forbids whatever was seen until all were.
    alphabet = tuple(range(97, 123))
    harsh = replace(GREEDY, repetition_penalty=1e6, allowed_token_ids=alphabet)
    [result] = play([Job(tuple(b"abcdef"), harsh, num_outputs=20)], 4)
    assert sorted(one for one in result.token_ids if one is not None) == list(range(ord("g"), ord("z") + 1))


def test_a_script_is_said_as_utf8_bytes_then_eos_over_again() -> None:
    said = tokens_of(Job(PROMPT, num_outputs=20), script="Grüße")
    script = [*"Grüße".encode(), EOS_TOKEN_ID]
    assert said == (script * 3)[:20]
    assert tokens_of(Job(PROMPT, SamplingParams(seed=5), num_outputs=20), script="Grüße") == said


def test_a_script_gives_way_to_what_the_parameters_forbid() -> None:
    # The script says EOS at index 2; min_tokens asks for more.
    longer = replace(GREEDY, min_tokens=4, stop_token_ids=(EOS_TOKEN_ID,))
    said = tokens_of(Job(PROMPT, longer, num_outputs=6), script="ab")
    assert said[:2] == list(b"ab")
    assert said[2] != EOS_TOKEN_ID
    assert said[5] == EOS_TOKEN_ID


def test_a_script_continues_where_a_resumed_request_left_off() -> None:
    job = Job(PROMPT, num_outputs=11, preempted_at=frozenset((3, 7)))
    assert text_of(tokens_of(job, script="Hello world")) == "Hello world"


def test_eos_bias_ends_outputs_earlier() -> None:
    job = Job(PROMPT, num_outputs=30)
    assert EOS_TOKEN_ID not in tokens_of(job, eos_bias=-50.0)
    assert tokens_of(job, eos_bias=50.0)[0] == EOS_TOKEN_ID


def test_prompt_logprobs_come_once_for_each_prompt_token_but_the_first() -> None:
    asked = replace(GREEDY, num_prompt_logprobs=2)
    [whole] = play([Job(PROMPT, asked)])
    [chunked] = play([Job(PROMPT, asked, chunks=(1, 5, 1, 9))], 3)
    assert sorted(whole.prompt_logprobs) == list(range(1, len(PROMPT)))
    assert chunked == whole
    assert all(len(record.top) == 2 for record in whole.prompt_logprobs.values())
    assert play([Job(PROMPT)])[0].prompt_logprobs == {}


def test_a_prompt_of_one_token_has_no_prompt_logprobs() -> None:
    assert play([Job((65,), replace(GREEDY, num_prompt_logprobs=2))])[0].prompt_logprobs == {}


def test_logprobs_are_of_the_raw_logits() -> None:
    biased = replace(GREEDY, num_logprobs=1, logit_bias={ord("#"): 1000.0})
    [result] = play([Job(PROMPT, biased, num_outputs=1)])
    record = result.outputs[0].logprobs
    assert record is not None
    assert record.token_id == result.outputs[0].token_id == ord("#")
    assert record.rank > 1
    assert record.top[0][0] == tokens_of(Job(PROMPT, num_outputs=1))[0]
