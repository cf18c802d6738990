"""Requests whose beginnings are equal compute them once, also when they come while the first is still in prefill."""

from scheduler_bench import SIZE, Bench, row_sizes

from runnerd_service.engine.messages import Sampling
from runnerd_service.engine.request import Status

PROMPT = list(range(18))
"""Four full blocks and two tokens."""


def num_prompt_tokens_launched(bench: Bench, max_steps: int = 200) -> int:
    """Run to the end, two steps in flight; count the tokens of rows that are no decodes."""
    total = 0
    for _ in range(max_steps):
        if not bench.has_work:
            return total
        step = bench.launch()
        if step is not None:
            total += sum(row.num_new_tokens for row in step.plan.rows if row.num_new_tokens > 1)
        if bench.launched and (step is None or len(bench.launched) == 2):
            bench.settle()
    raise AssertionError("livelock")


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    bench = Bench(budget=64)
    requests = [bench.add(PROMPT) for _ in range(4)]
    assert row_sizes(bench.launch()) == {0: 18}
    bench.settle()
    assert row_sizes(bench.launch()) == {0: 1, 1: 2, 2: 2, 3: 2}
    assert {tuple(request.block_ids[:4]) for request in requests} == {tuple(requests[0].block_ids[:4])}
    assert len({block_id for request in requests for block_id in request.block_ids}) == 4 + len(requests)
    assert [request.num_cached_tokens for request in requests] == [0, 16, 16, 16]


def test_an_equal_prompt_is_waited_for_over_all_its_chunks() -> None:
    bench = Bench(budget=8)
    bench.add(PROMPT)
    follower = bench.add(PROMPT)
    assert [row_sizes(bench.run()) for _ in range(4)] == [{0: 8}, {0: 8}, {0: 2, 1: 2}, {0: 1, 1: 1}]
    assert follower.num_cached_tokens == 16


def test_only_the_common_beginning_is_waited_for() -> None:
    bench = Bench(budget=8)
    bench.add(PROMPT)
    bench.add([*PROMPT[:9], *[50] * 9])
    assert row_sizes(bench.launch()) == {0: 8}
    assert row_sizes(bench.launch()) == {0: 8}, "the common blocks are launched, but not settled"
    bench.settle()
    assert row_sizes(bench.launch()) == {0: 2, 1: 6}


def test_prompts_without_a_common_block_are_admitted_together() -> None:
    bench = Bench(budget=64)
    bench.add(PROMPT)
    bench.add([*PROMPT[: SIZE - 1], *[50] * 9])
    bench.add([50, *PROMPT[1:]])
    assert row_sizes(bench.launch()) == {0: 18, 1: 12, 2: 18}


def test_a_request_passes_those_that_wait_for_a_prefix() -> None:
    bench = Bench(budget=64)
    for prompt in (PROMPT, PROMPT, [50] * 6):
        bench.add(prompt)
    assert row_sizes(bench.launch()) == {0: 18, 2: 6}


def test_whoever_passes_leaves_a_slot_for_those_that_wait_for_a_prefix() -> None:
    bench = Bench(budget=64, max_num_seqs=3)
    for prompt in (PROMPT, PROMPT, [50] * 6, [60] * 6):
        bench.add(prompt)
    assert list(row_sizes(bench.launch())) == [0, 2]
    bench.settle()
    assert list(row_sizes(bench.launch())) == [0, 2, 1]


def test_whoever_passes_leaves_room_for_those_that_wait_for_a_prefix() -> None:
    # The first takes 5 blocks, its follower needs one of its own and a spare one, each request that runs another.
    bench = Bench(budget=64, num_blocks=9)
    for prompt in (PROMPT, PROMPT, [50] * 8):
        bench.add(prompt)
    assert list(row_sizes(bench.launch())) == [0]
    bench.settle()
    assert list(row_sizes(bench.launch())) == [0, 1]


def test_when_the_first_is_aborted_the_next_one_goes_on_from_what_had_settled() -> None:
    bench = Bench(budget=8)
    leader, follower, third = (bench.add(PROMPT) for _ in range(3))
    bench.run()
    bench.launch()
    bench.scheduler.finish(leader)
    assert row_sizes(bench.launch()) == {1: 8}, "the second chunk has not settled: it cannot be shared"
    assert follower.num_cached_tokens == 8
    bench.settle()
    bench.settle()
    assert row_sizes(bench.launch()) == {1: 2, 2: 2}
    assert third.num_cached_tokens == 16


def test_when_the_step_of_the_first_fails_the_next_one_computes_the_prompt() -> None:
    bench = Bench(budget=64)
    leader, follower = bench.add(PROMPT), bench.add(PROMPT)
    bench.launch()
    bench.fail()
    assert leader.status is Status.FINISHED
    assert row_sizes(bench.launch()) == {1: 18}
    assert follower.num_cached_tokens == 0


def test_when_the_first_is_preempted_it_keeps_its_place_before_those_that_wait_for_it() -> None:
    bench = Bench(num_blocks=9, budget=6)
    growing = bench.add([50] * 7, max_tokens=20)
    bench.run()
    bench.run()
    leader, follower = bench.add(PROMPT, priority=1), bench.add(PROMPT, priority=1)
    seen: list[int] = []
    while bench.scheduler.num_preemptions == 0:
        seen += row_sizes(bench.run())
    assert follower.uid not in seen
    assert leader.status is Status.PREEMPTED
    num_steps = 0
    while bench.scheduler.has_requests:
        seen += row_sizes(bench.run())
        num_steps += 1
        assert num_steps < 200, "livelock"
    assert [len(one.token_ids) for one in (growing, leader, follower)] == [27, 26, 26]
    assert follower.num_cached_tokens == 16


def test_nobody_waits_for_a_request_that_comes_after_it_in_the_order() -> None:
    bench = Bench(budget=8)
    bench.add(PROMPT, priority=1)
    bench.launch()
    bench.add(PROMPT, priority=0)
    bench.add(PROMPT, priority=2)
    assert row_sizes(bench.launch()) == {0: 8}
    bench.settle()
    assert row_sizes(bench.launch()) == {0: 2, 1: 6}, "it shares what had settled and does not wait for the rest"


def test_a_request_that_wants_prompt_logprobs_waits_for_no_prefix() -> None:
    bench = Bench(budget=64)
    bench.add(PROMPT)
    bench.add(PROMPT, sampling=Sampling(num_prompt_logprobs=0))
    assert row_sizes(bench.launch()) == {0: 18, 1: 18}


def test_other_salts_and_adapters_share_nothing_in_prefill() -> None:
    bench = Bench(budget=64)
    requests = [
        bench.add(PROMPT, cache_salt=salt, adapter_id=name) for salt, name in (("", None), ("a", None), ("", "b"))
    ]
    assert row_sizes(bench.launch()) == {0: 18, 1: 18, 2: 18}
    assert len({block_id for request in requests for block_id in request.block_ids}) == 15


def test_without_prefix_caching_nobody_waits() -> None:
    bench = Bench(budget=64, prefix_caching=False)
    bench.add(PROMPT)
    bench.add(PROMPT)
    assert row_sizes(bench.launch()) == {0: 18, 1: 18}


def test_after_a_reset_in_mid_prefill_the_next_one_computes_the_prompt_and_nothing_old_is_found() -> None:
    bench = Bench(budget=8)
    leader, follower = bench.add(PROMPT), bench.add(PROMPT)
    bench.run()
    assert bench.scheduler.reset_prefix_cache() == 2
    bench.scheduler.check_integrity()
    held = list(leader.block_ids)
    assert row_sizes(bench.run()) == {0: 8}
    assert row_sizes(bench.run()) == {0: 2, 1: 6}
    assert leader.block_ids == held, "what is in use stays"
    while follower.status is not Status.FINISHED:
        bench.run()
    assert follower.num_cached_tokens == 0
    assert not set(held) & set(bench.blocks.match(leader.block_hash(index, SIZE) for index in range(4)))


def test_after_a_reset_nobody_waits_for_what_will_not_be_found() -> None:
    bench = Bench(budget=64)
    bench.add(PROMPT)
    bench.add(PROMPT)
    assert row_sizes(bench.launch()) == {0: 18}
    bench.scheduler.reset_prefix_cache()
    assert row_sizes(bench.launch()) == {0: 1, 1: 18}


def test_a_hundred_children_of_a_prompt_compute_it_once() -> None:
    bench = Bench(budget=64, num_blocks=64, max_num_seqs=8)
    for _ in range(100):
        bench.add(PROMPT, max_tokens=3)
    assert num_prompt_tokens_launched(bench) == len(PROMPT) + 99 * 2
    assert bench.blocks.num_used == 0
