"""Who goes first and who gives way: priorities, ageing, preemption; each step gets on, and nobody waits for ever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_bench import MAX_MODEL_LEN, SIZE, Bench, row_sizes

from runnerd_service.config import EngineConfig
from runnerd_service.engine.kv_cache import num_blocks_for
from runnerd_service.engine.messages import AddRequest, Sampling
from runnerd_service.engine.request import Status, order, rank_of
from runnerd_service.engine.setup import resolve, start_engine
from runnerd_service.frontend.ongoing import OngoingOutput, OngoingRequest
from runnerd_spi import load_runner

SECOND = 10**9


def test_waiting_is_worth_priority() -> None:
    bench = Bench(max_num_seqs=1, ageing_ns=10 * SECOND)
    bench.add(4, max_tokens=1, priority=2, arrival_ns=0)
    bench.add(4, max_tokens=1, priority=0, arrival_ns=19 * SECOND)
    bench.add(4, max_tokens=1, priority=0, arrival_ns=21 * SECOND)
    assert [list(row_sizes(bench.run())) for _ in range(3)] == [[1], [0], [2]]


def test_without_ageing_only_the_priority_counts() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(4, max_tokens=1, priority=2, arrival_ns=0)
    bench.add(4, max_tokens=1, priority=0, arrival_ns=10**6 * SECOND)
    assert [list(row_sizes(bench.run())) for _ in range(2)] == [[1], [0]]


@settings(deadline=None, derandomize=True)
@given(
    first=st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**62)),
    second=st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**62)),
    ageing_ns=st.integers(1, 3600 * SECOND),
    later_ns=st.integers(0, 2**62),
)
def test_the_order_of_two_requests_is_that_of_their_aged_priorities_at_any_time(
    first: tuple[int, int], second: tuple[int, int], ageing_ns: int, later_ns: int
) -> None:
    now = max(first[1], second[1]) + later_ns
    # priority - waited / ageing, without rounding
    aged = [priority * ageing_ns - (now - arrival_ns) for priority, arrival_ns in (first, second)]
    ranks = [rank_of(priority, arrival_ns, ageing_ns) for priority, arrival_ns in (first, second)]
    assert (aged[0] < aged[1]) == (ranks[0] < ranks[1])


@pytest.mark.parametrize("ageing_seconds", [0, 3])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    gap=st.integers(1, 8),
    prompt=st.integers(1, 10),
    max_tokens=st.integers(1, 8),
    num_blocks=st.integers(6, 12),
    max_num_seqs=st.integers(1, 3),
)
def test_a_request_is_served_within_a_known_time_whatever_comes_after_it(
    ageing_seconds: int, gap: int, prompt: int, max_tokens: int, num_blocks: int, max_num_seqs: int
) -> None:
    """A step takes a second; each second more requests of a better priority come than can be served."""
    bench = Bench(
        num_blocks=num_blocks, max_num_seqs=max_num_seqs, prefix_caching=False, ageing_ns=ageing_seconds * SECOND
    )
    # The server is full before it comes.
    for _ in range(max_num_seqs):
        bench.add(4, max_tokens=8)
    bench.run()
    low = bench.add(prompt, max_tokens, priority=gap)
    # Only so many may pass it; each takes 8 steps by itself, and all may have to be served before it, one by one.
    num_passing = max_num_seqs * (gap * ageing_seconds + 2)
    bound = 8 * (num_passing + 1) + 2 * (prompt + max_tokens)
    for second in range(bound):
        for _ in range(max_num_seqs):
            bench.add(4, max_tokens=8, arrival_ns=second * SECOND)
        bench.run()
        if low.status is Status.FINISHED:
            assert ageing_seconds
            return
    assert not ageing_seconds, f"not served after {bound} steps"


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2)), min_size=2, max_size=12),
    depth=st.integers(1, 4),
    budget=st.integers(4, 9),
    prefix_caching=st.booleans(),
)
def test_with_a_pool_that_holds_one_request_steps_get_on_and_who_comes_last_gives_way(
    requests: list[tuple[int, int, int]], depth: int, budget: int, prefix_caching: bool
) -> None:
    largest = max(prompt + max_tokens - 1 for prompt, max_tokens, _ in requests)
    bench = Bench(
        num_blocks=num_blocks_for(largest, SIZE), max_num_seqs=4, budget=budget, prefix_caching=prefix_caching
    )
    states = [bench.add([prompt % 2] * prompt, max_tokens, priority) for prompt, max_tokens, priority in requests]
    num_tokens = steps_without_token = num_steps = 0
    while bench.has_work:
        num_steps += 1
        assert num_steps < 4000, "livelock"
        running = [state for state in states if state.status is Status.RUNNING]
        step = bench.launch()
        stayed = [state for state in running if state.status is Status.RUNNING]
        for victim in running:
            if victim.status is Status.PREEMPTED:
                assert all(order(one) < order(victim) for one in stayed)
                assert stayed, "the first gave way to nobody"
        if step is not None and step.plan.rows:
            before, num_tokens = num_tokens, sum(state.num_tokens for state in states)
            steps_without_token = 0 if num_tokens > before else steps_without_token + 1
            # A prompt, or a preempted request that is computed again, takes that many steps.
            assert steps_without_token <= MAX_MODEL_LEN // budget + 1
        else:
            assert bench.launched, "nothing is launched, and nothing is waited for"
        if bench.launched and (step is None or len(bench.launched) >= depth):
            bench.settle()
    assert all(len(state.token_ids) == state.max_num_tokens for state in states)


@pytest.mark.parametrize(("ageing_seconds", "expected"), [(10.0, [1, 2]), (0.0, [2, 1])])
def test_the_engine_ages_requests_as_it_is_configured(ageing_seconds: float, expected: list[int]) -> None:
    plugin = load_runner("sim")
    config = EngineConfig(runner="sim", max_num_seqs=1, priority_ageing_seconds=ageing_seconds)
    started = start_engine(resolve(config, plugin), plugin, lambda stage, done, total: None)
    try:
        engine = started.engine
        engine.add(AddRequest(1, (1, 2), Sampling(), 1, priority=1, arrival_ns=0))
        engine.add(AddRequest(2, (3, 4), Sampling(), 1, priority=0, arrival_ns=11 * SECOND))
        outputs = [output.uid for _ in range(8) for output in engine.step()]
    finally:
        started.runner.close()
    assert outputs == expected


def test_a_request_keeps_its_age_on_the_next_engine() -> None:
    request = AddRequest(1, (1, 2), Sampling(), 4, arrival_ns=17)
    output = OngoingOutput(OngoingRequest(lambda error: None), request, lambda output: None)
    assert [output.admitted(engine_uid).arrival_ns for engine_uid in (5, 6)] == [17, 17]
