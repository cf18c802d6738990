"""What a step takes in, and when slots and blocks come back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_bench import SIZE, Bench, row_sizes

from runnerd_service.engine.request import RequestState, Status


def test_a_prompt_longer_than_the_budget_is_prefilled_in_chunks() -> None:
    bench = Bench(budget=8)
    bench.add(20, max_tokens=1)
    steps = [bench.launch() for _ in range(4)]
    assert [row_sizes(step) for step in steps[:3]] == [{0: 8}, {0: 8}, {0: 4}]
    assert [step.plan.rows[0].sample for step in steps[:3] if step] == [False, False, True]
    assert steps[3] is None


def test_running_decodes_come_before_prefill() -> None:
    bench = Bench(budget=8)
    bench.add(4)
    bench.run()
    bench.add(20)
    assert row_sizes(bench.run()) == {0: 1, 1: 7}
    assert row_sizes(bench.run()) == {0: 1, 1: 7}


def test_waiting_requests_are_admitted_in_order_of_arrival() -> None:
    bench = Bench(max_num_seqs=2)
    for _ in range(3):
        bench.add(4, max_tokens=2)
    assert list(row_sizes(bench.run())) == [0, 1]
    bench.run()
    assert list(row_sizes(bench.run())) == [2]


def test_a_lower_priority_value_goes_first() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(4, max_tokens=1, priority=1)
    bench.add(4, max_tokens=1, priority=0)
    assert [list(row_sizes(bench.run())) for _ in range(2)] == [[1], [0]]


def test_nobody_passes_a_waiting_request_that_lacks_room() -> None:
    bench = Bench(num_blocks=8)
    bench.add(16, max_tokens=9)
    bench.run()
    bench.add(24)
    bench.add(4)
    assert list(row_sizes(bench.run())) == [0]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_length_finish_launches_exactly_its_tokens(depth: int) -> None:
    bench = Bench()
    request = bench.add(4, max_tokens=5)
    num_rows = 0
    while not (request.status is Status.FINISHED and not bench.launched):
        step = bench.launch()
        num_rows += len(step.plan.rows) if step else 0
        if step is None or len(bench.launched) >= depth:
            bench.settle()
    assert num_rows == 5
    assert request.token_ids[4:] == [7] * 5


def test_the_request_of_lowest_priority_and_latest_arrival_is_preempted() -> None:
    bench = Bench(num_blocks=7, prefix_caching=False)
    first, second, third = bench.add(4), bench.add(4, priority=1), bench.add(4, priority=1)
    bench.run()
    assert {request.status for request in (first, second, third)} == {Status.RUNNING}
    while bench.scheduler.num_preemptions == 0:
        bench.run()
    assert [request.status for request in (first, second, third)] == [
        Status.RUNNING,
        Status.RUNNING,
        Status.PREEMPTED,
    ]


def test_a_preempted_request_keeps_its_tokens_in_flight_and_waits_for_them() -> None:
    bench = Bench(num_blocks=5, prefix_caching=False)
    first, second = bench.add(7), bench.add(8, max_tokens=4)
    bench.launch()  # blocks: 2 + 2, one is left
    bench.launch()  # the second needs a third block and takes the last
    bench.launch()  # the first needs one: the second is preempted with two tokens in flight
    assert second.status is Status.PREEMPTED
    assert second.num_in_flight_tokens == 2
    num_outputs_of_first = first.num_tokens
    assert bench.launch() is None, "its blocks are still written to"
    bench.settle()
    assert second.token_ids[8:] == [7]
    assert bench.launch() is None
    bench.settle()
    assert second.token_ids[8:] == [7, 7]
    assert second.num_in_flight_rows == 0
    assert second.block_ids == []
    bench.launch()
    assert first.num_tokens == num_outputs_of_first + 1


def test_nobody_is_preempted_for_blocks_that_the_next_settle_gives_back() -> None:
    bench = Bench(num_blocks=4)
    growing, ending = bench.add(7), bench.add(4, max_tokens=2)
    bench.launch()
    bench.launch()
    assert ending.is_launched_to_the_end
    assert bench.launch() is None
    bench.settle()
    bench.settle()
    assert list(row_sizes(bench.launch())) == [growing.uid]
    assert bench.scheduler.num_preemptions == 0


def test_blocks_of_a_finished_request_return_after_the_last_launched_step_of_it() -> None:
    bench = Bench()
    request = bench.add(4, eos=(7,))
    bench.launch()
    bench.launch()
    bench.settle()
    assert request.status is Status.FINISHED
    assert bench.blocks.num_used == 2
    bench.settle()
    assert bench.blocks.num_used == 0
    assert request.token_ids[4:] == [7], "the late row is dropped"


def test_a_slot_is_reused_in_the_plan_that_releases_it_with_a_higher_epoch() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(4, max_tokens=1)
    bench.run()
    bench.add(4, max_tokens=1)
    step = bench.launch()
    assert step is not None
    assert [release.epoch for release in step.plan.releases] == [0]
    assert [(admit.slot, admit.epoch) for admit in step.plan.admits] == [(0, 1)]


def test_only_settled_full_blocks_are_shared() -> None:
    bench = Bench(budget=32)
    prompt = list(range(10))
    bench.add(prompt)
    bench.launch()
    bench.add(prompt)
    assert row_sizes(bench.launch()) == {0: 1}, "the first prefill has not settled"
    bench.settle()
    assert row_sizes(bench.launch()) == {0: 1, 1: 2}
    assert bench.scheduler.prefix_cache_hits == 8


def test_a_block_is_not_shared_while_the_step_that_fills_it_is_in_flight() -> None:
    bench = Bench(budget=8)
    request = bench.add(list(range(16)))
    bench.launch()
    bench.launch()
    bench.settle()
    hashes = [request.block_hash(index, SIZE) for index in range(4)]
    assert bench.blocks.match(hashes) == request.block_ids[:2]
    bench.settle()
    assert bench.blocks.match(hashes) == request.block_ids[:4]


def test_a_request_is_admitted_only_with_a_spare_block_for_each_running_one() -> None:
    bench = Bench(num_blocks=6)
    bench.add(8, max_tokens=2)
    bench.run()
    bench.add(12)
    assert list(row_sizes(bench.run())) == [0], "3 blocks in use, 3 free: no spare one"
    assert list(row_sizes(bench.run())) == [1]


def test_a_prompt_that_is_cached_whole_computes_its_last_block() -> None:
    bench = Bench()
    prompt = list(range(8))
    bench.add(prompt, max_tokens=2)
    bench.run()
    bench.add(prompt, max_tokens=2)
    assert row_sizes(bench.run()) == {0: 1, 1: 4}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_traces_keep_every_plan_legal_and_end_with_everything_free(data: st.DataObject) -> None:
    depth = data.draw(st.integers(1, 4))
    num_blocks = data.draw(st.integers(5, 14))
    bench = Bench(
        num_blocks=num_blocks,
        max_num_seqs=data.draw(st.integers(1, 4)),
        budget=data.draw(st.integers(4, 12)),
        prefix_caching=data.draw(st.booleans()),
    )
    requests: list[RequestState] = []
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["add", "add", "abort", "launch", "launch", "settle", "eos", "fail", "reset"])):
            case "add":
                prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=10))
                requests.append(bench.add(prompt, data.draw(st.integers(1, 8)), data.draw(st.integers(0, 2)), (9,)))
            case "abort" if requests:
                bench.scheduler.finish(data.draw(st.sampled_from(requests)))
            case "launch" if len(bench.launched) < depth:
                bench.launch()
            case "settle" if bench.launched:
                bench.settle()
            case "eos" if bench.launched:
                bench.settle(9)
            case "fail" if bench.launched:
                bench.fail()
            case "reset":
                bench.scheduler.reset_prefix_cache()
                bench.scheduler.check_integrity()
    num_steps = 0
    while bench.has_work:
        num_steps += 1
        assert num_steps < 2000, "livelock"
        if bench.launch() is None or len(bench.launched) >= depth:
            bench.settle()
    assert bench.blocks.num_used == 0
    assert bench.checker.slots == {}
    assert all(request.num_in_flight_rows == 0 and request.num_in_flight_tokens == 0 for request in requests)
    assert all(len(request.token_ids) <= request.max_num_tokens for request in requests)
