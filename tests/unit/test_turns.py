"""Readers go on in order, a few in each turn of the event loop; under light load at once."""

import asyncio

from runnerd_service.frontend.turns import Turns


async def test_few_readers_go_on_at_once() -> None:
    turns = Turns(max_at_once=3)
    waiters = [turns.new_waiter() for _ in range(3)]
    for waiter in waiters:
        turns.call_up(waiter)
    assert all(waiter.done() for waiter in waiters)
    assert not turns.crowded


async def test_many_readers_go_on_in_order_a_few_in_a_turn() -> None:
    turns = Turns(max_at_once=3)
    waiters = [turns.new_waiter() for _ in range(8)]
    for waiter in waiters:
        turns.call_up(waiter)
    counts = []
    while not all(waiter.done() for waiter in waiters):
        assert turns.crowded
        done = [waiter.done() for waiter in waiters]
        assert done == sorted(done, reverse=True), "none goes before one that was called up earlier"
        counts.append(sum(done))
        await asyncio.sleep(0)
    assert counts == [3, 6]
    assert not turns.crowded


async def test_a_reader_that_comes_later_waits_behind_those_that_wait() -> None:
    turns = Turns(max_at_once=2)
    first, late = [turns.new_waiter() for _ in range(5)], turns.new_waiter()
    for waiter in first:
        turns.call_up(waiter)
    await asyncio.sleep(0)
    turns.call_up(late)
    await asyncio.sleep(0)
    assert [waiter.done() for waiter in (*first, late)] == [True] * 6
    await asyncio.sleep(0)
    again = [turns.new_waiter() for _ in range(2)]
    for waiter in again:
        turns.call_up(waiter)
    assert all(waiter.done() for waiter in again), "a new turn has begun, though nobody waited for it"


async def test_readers_that_have_left_take_nobodys_place() -> None:
    turns = Turns(max_at_once=1)
    stays, leaves, last = (turns.new_waiter() for _ in range(3))
    for waiter in (stays, leaves, last):
        turns.call_up(waiter)
    leaves.cancel()
    await asyncio.sleep(0)
    assert last.done()
    await asyncio.sleep(0)
    gone, next_one = turns.new_waiter(), turns.new_waiter()
    gone.cancel()
    for waiter in (gone, next_one):
        turns.call_up(waiter)
    assert next_one.done()
