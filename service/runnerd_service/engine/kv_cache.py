"""Who holds which KV block, and which blocks hold which prefix. It knows nothing of requests, steps or devices."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class IntegrityError(Exception):
    """The engine's own bookkeeping contradicts itself: a defect of the engine."""


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Give how many blocks the keys and values of ``num_tokens`` tokens take."""
    return -(-num_tokens // block_size)


def max_request_tokens(num_blocks: int, block_size: int) -> int:
    """Give the most tokens, prompt and output, that one request can have when it has all blocks to itself.

    The last output is never an input, so it needs no place. A request may ask for at most
    ``min(this, max_model_len)``.
    """
    return num_blocks * block_size + 1


def root_hash(adapter_id: str | None, cache_salt: str) -> bytes:
    """Give the hash that the blocks of a request chain from: what must agree besides the tokens."""
    return _digest(json.dumps([adapter_id, cache_salt]).encode())


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Give the 128-bit hash of a full block: of its tokens and, through ``parent``, of all before them."""
    return _digest(parent + array("q", token_ids).tobytes())


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class BlockManager:
    """Counts references to blocks and finds full blocks by the hash of the prefix that ends with them.

    A block without references is free. A free block that was published keeps its content until it is needed for
    something else; the one freed longest ago goes first.

    Args:
        num_blocks: Blocks there are; ids 0 to num_blocks - 1.
        block_size: Tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # [num_blocks]: how many block tables hold the block
        self._references = [0] * num_blocks
        self._free_blank = list(range(num_blocks - 1, -1, -1))
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that :meth:`allocate` can give, cached ones included."""
        return len(self._free_blank) + len(self._free_cached)

    @property
    def num_used(self) -> int:
        """Blocks in at least one block table."""
        return self.num_blocks - self.num_free

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Give the blocks of the longest published prefix; takes no reference."""
        block_ids = []
        for one in hashes:
            block_id = self._block_of_hash.get(one)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """Count the blocks without references: what :meth:`share` would take from :attr:`num_free`."""
        return sum(not self._references[block_id] for block_id in block_ids)

    def share(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to each of these published blocks."""
        for block_id in block_ids:
            if not self._references[block_id]:
                del self._free_cached[block_id]
            self._references[block_id] += 1

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks; the caller has seen that there are as many.

        Blocks that hold no cached prefix go first.
        """
        if count > self.num_free:
            raise IntegrityError(f"{count} blocks asked for, {self.num_free} free")
        block_ids = []
        for _ in range(count):
            if self._free_blank:
                block_id = self._free_blank.pop()
            else:
                block_id, _ = self._free_cached.popitem(last=False)
                del self._block_of_hash[self._hash_of_block.pop(block_id)]
            self._references[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Give back one reference to each block of a table."""
        # The end of a prefix is of less use than its beginning, so it is to be forgotten first.
        for block_id in reversed(block_ids):
            left = self._references[block_id] - 1
            if left < 0:
                raise IntegrityError(f"block {block_id} freed twice")
            self._references[block_id] = left
            if left:
                continue
            if block_id in self._hash_of_block:
                self._free_cached[block_id] = None
            else:
                self._free_blank.append(block_id)

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Let a full block be found by its hash. If another block is, that one stays and this one is never found."""
        if block_hash not in self._block_of_hash and block_id not in self._hash_of_block:
            self._block_of_hash[block_hash] = block_id
            self._hash_of_block[block_id] = block_hash

    def reset_prefix_cache(self) -> int:
        """Forget all published prefixes; requests that hold the blocks keep them. Gives how many were forgotten."""
        count = len(self._hash_of_block)
        self._block_of_hash.clear()
        self._hash_of_block.clear()
        self._free_blank.extend(self._free_cached)
        self._free_cached.clear()
        return count

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the books with the block tables that there are.

        Raises:
            IntegrityError: A block is lost, freed while in use, counted wrongly, or two hashes name one block.
        """
        held = Counter(block_id for table in tables for block_id in table)
        free = [*self._free_blank, *self._free_cached]
        for block_id in range(self.num_blocks):
            if self._references[block_id] != held[block_id]:
                counted = self._references[block_id]
                raise IntegrityError(f"block {block_id} has {counted} references, {held[block_id]} tables hold it")
        if len(free) != len(set(free)):
            raise IntegrityError("a block is free twice")
        if set(free) != {block_id for block_id in range(self.num_blocks) if not held[block_id]}:
            raise IntegrityError(f"{len(free)} blocks free, {len(held)} in tables, {self.num_blocks} in all")
        if any(block_id not in self._hash_of_block for block_id in self._free_cached):
            raise IntegrityError("a block is kept as cached, but has no hash")
        if {one: block_id for block_id, one in self._hash_of_block.items()} != self._block_of_hash:
            raise IntegrityError("hashes and blocks do not name each other")
