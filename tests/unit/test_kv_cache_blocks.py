"""The block manager against a model of it: tables held by requests with known contents."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from runnerd_service.engine.kv_cache import (
    BlockManager,
    IntegrityError,
    chain_hash,
    max_request_tokens,
    num_blocks_for,
    root_hash,
)

NUM_BLOCKS = 12
SIZE = 2


def hashes_of(tokens: list[int], salt: str = "") -> list[bytes]:
    """Hashes of the full blocks, built from scratch."""
    parent, hashes = root_hash(None, salt), []
    for begin in range(0, len(tokens) - SIZE + 1, SIZE):
        parent = chain_hash(parent, tokens[begin : begin + SIZE])
        hashes.append(parent)
    return hashes


class BlockManagerMachine(RuleBasedStateMachine):
    """Requests come with tokens of a tiny alphabet, so that prefixes are shared often, publish, and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, SIZE)
        # Each with its tokens and its block table.
        self.held: list[tuple[list[int], list[int]]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit(self, tokens: list[int]) -> None:
        cached = self.blocks.match(hashes_of(tokens)[: (len(tokens) - 1) // SIZE])
        for index, block_id in enumerate(cached):
            assert self.content[block_id] == tuple(tokens[: (index + 1) * SIZE]), "a hit holds another prefix"
        missing = num_blocks_for(len(tokens), SIZE) - len(cached)
        if missing > self.blocks.num_free - self.blocks.num_free_among(cached):
            with pytest.raises(IntegrityError):
                self.blocks.allocate(self.blocks.num_free + 1)
            return
        self.blocks.share(cached)
        own = self.blocks.allocate(missing)
        in_use = {block_id for _, table in self.held for block_id in table}
        assert not in_use & set(own), "a block was given out while in use"
        for block_id in own:
            self.content.pop(block_id, None)
        self.held.append((tokens, cached + own))

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        if self.held:
            tokens, table = data.draw(st.sampled_from(self.held))
            for index, (block_id, one) in enumerate(zip(table, hashes_of(tokens), strict=False)):
                self.content[block_id] = tuple(tokens[: (index + 1) * SIZE])
                self.blocks.publish(block_id, one)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.held:
            _, table = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.blocks.free(table)

    @rule()
    def reset(self) -> None:
        self.blocks.reset_prefix_cache()
        assert self.blocks.match(hashes_of([0] * SIZE)) == []

    @invariant()
    def books_agree(self) -> None:
        self.blocks.check_integrity([table for _, table in self.held])
        holders = Counter(block_id for _, table in self.held for block_id in table)
        assert self.blocks.num_used == len(holders)
        assert self.blocks.num_free + self.blocks.num_used == NUM_BLOCKS


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def published(blocks: BlockManager, tokens: list[int], salt: str = "") -> list[int]:
    table = blocks.allocate(num_blocks_for(len(tokens), SIZE))
    for block_id, one in zip(table, hashes_of(tokens, salt), strict=False):
        blocks.publish(block_id, one)
    return table


def test_a_freed_prefix_is_found_until_its_blocks_are_needed() -> None:
    blocks = BlockManager(4, SIZE)
    table = published(blocks, [1, 2, 3, 4])
    blocks.free(table)
    assert blocks.match(hashes_of([1, 2, 3, 4])) == table
    blocks.allocate(4)
    assert blocks.match(hashes_of([1, 2, 3, 4])) == []


def test_the_prefix_freed_longest_ago_goes_first_and_its_end_before_its_beginning() -> None:
    blocks = BlockManager(4, SIZE)
    old, new = published(blocks, [1, 1, 1, 1]), published(blocks, [2, 2, 2, 2])
    blocks.free(old)
    blocks.free(new)
    assert blocks.allocate(3) == [old[1], old[0], new[1]]
    assert blocks.match(hashes_of([2, 2, 2, 2])) == [new[0]]


def test_blocks_without_a_prefix_are_used_before_cached_ones() -> None:
    blocks = BlockManager(3, SIZE)
    cached, blank = published(blocks, [1, 2]), blocks.allocate(2)
    blocks.free(cached)
    blocks.free(blank)
    assert set(blocks.allocate(2)) == set(blank)
    assert blocks.match(hashes_of([1, 2])) == cached


def test_a_prefix_is_not_shared_across_salts_and_adapters() -> None:
    blocks = BlockManager(4, SIZE)
    published(blocks, [1, 2], salt="tenant a")
    assert blocks.match(hashes_of([1, 2], salt="tenant b")) == []
    assert len({root_hash(None, ""), root_hash("", ""), root_hash("x", ""), root_hash(None, "x")}) == 4


def test_equal_tokens_after_different_beginnings_have_different_hashes() -> None:
    assert hashes_of([1, 2, 5, 6])[1] != hashes_of([3, 4, 5, 6])[1]


def test_freeing_a_block_twice_is_an_error() -> None:
    blocks = BlockManager(2, SIZE)
    table = blocks.allocate(1)
    blocks.free(table)
    with pytest.raises(IntegrityError, match="freed twice"):
        blocks.free(table)


def test_check_integrity_sees_a_lost_block() -> None:
    blocks = BlockManager(2, SIZE)
    blocks.allocate(1)
    with pytest.raises(IntegrityError, match="1 references, 0 tables"):
        blocks.check_integrity([])


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_num_blocks_for_rounds_up(num_tokens: int, expected: int) -> None:
    assert num_blocks_for(num_tokens, 16) == expected


def test_the_last_output_of_a_request_needs_no_block() -> None:
    assert max_request_tokens(num_blocks=4, block_size=16) == 65
