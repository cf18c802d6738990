"""The simulated KV cache: each position of each block holds the history up to there, as a model's keys and values do.

What a row computes depends on what its blocks hold, so a prefix taken from a wrong block gives other tokens. With the
shadow on, every row's whole history is compared with the token table, and the first difference is an error that names
who wrote what. This module knows nothing of sampling, steps or the clock.
"""

from __future__ import annotations

import numpy as np

from runnerd_sim.model import Int64Array, UInt64Array, history_terms

_NOBODY = -1


class KVShadowError(Exception):
    """The blocks of a row do not hold its history."""


class BlockTable:
    """The KV blocks of one request.

    Args:
        slot: The request's slot.
        epoch: And its epoch.
        block_size: Tokens in a block.
    """

    __slots__ = ("block_ids", "block_size", "epoch", "slot")

    def __init__(self, slot: int, epoch: int, block_size: int) -> None:
        self.slot = slot
        self.epoch = epoch
        self.block_size = block_size
        self.block_ids: list[int] = []

    def index(self, position: int) -> int:
        """Give the place of a position in the cache."""
        return self.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def indices(self, begin: int, end: int) -> Int64Array:
        """Give the places of the positions from ``begin`` to before ``end``: ``[end - begin]``."""
        first = begin // self.block_size
        blocks = np.array(self.block_ids[first : (end - 1) // self.block_size + 1], dtype=np.int64)
        places = (blocks[:, None] * self.block_size + np.arange(self.block_size)).reshape(-1)
        return places[begin - first * self.block_size : end - first * self.block_size]


class KVCache:
    """Histories by block and offset.

    Args:
        num_blocks: Number of blocks.
        block_size: Tokens in a block.
        shadow: Keep who wrote each place, and check every read and every write.
    """

    def __init__(self, num_blocks: int, block_size: int, *, shadow: bool) -> None:
        num_places = num_blocks * block_size
        self.shadow = shadow
        # [num_places] uint64
        self.histories: UInt64Array = np.zeros(num_places, dtype=np.uint64)
        if shadow:
            # Each [num_places] int64: the token a place was written for, its position, and whose it was.
            self._tokens = np.full(num_places, _NOBODY, dtype=np.int64)
            self._positions = np.full(num_places, _NOBODY, dtype=np.int64)
            self._slots = np.full(num_places, _NOBODY, dtype=np.int64)
            self._epochs = np.full(num_places, _NOBODY, dtype=np.int64)
            # [num_blocks] int64: how many tables hold a block
            self._holders = np.zeros(num_blocks, dtype=np.int64)

    def hold(self, table: BlockTable, block_ids: tuple[int, ...]) -> None:
        """Append blocks to a request's table."""
        table.block_ids.extend(block_ids)
        if self.shadow:
            np.add.at(self._holders, list(block_ids), 1)

    def drop(self, table: BlockTable) -> None:
        """Note that a request left."""
        if self.shadow:
            np.subtract.at(self._holders, table.block_ids, 1)

    def extend(self, table: BlockTable, first_position: int, token_ids: Int64Array) -> UInt64Array:
        """Compute the histories of new tokens from what the blocks hold before them, and write them.

        Returns:
            ``[num_new_tokens]``: the history up to each of the new tokens.
        """
        positions = np.arange(first_position, first_position + len(token_ids), dtype=np.int64)
        histories: UInt64Array = np.cumsum(history_terms(positions, token_ids), dtype=np.uint64)
        if first_position:
            histories += self.histories[table.index(first_position - 1)]
        places = table.indices(first_position, first_position + len(token_ids))
        if self.shadow:
            self._check_write(table, places, histories, first_position)
            self._tokens[places] = token_ids
            self._positions[places] = positions
            self._slots[places] = table.slot
            self._epochs[places] = table.epoch
        self.histories[places] = histories
        return histories

    def check_history(self, table: BlockTable, token_ids: Int64Array) -> None:
        """Compare what the blocks hold with ``[num_tokens]`` tokens of the token table.

        Raises:
            KVShadowError: They differ; the message names the first place and its writer.
        """
        num_tokens = len(token_ids)
        places = table.indices(0, num_tokens)
        expected = np.cumsum(history_terms(np.arange(num_tokens, dtype=np.int64), token_ids), dtype=np.uint64)
        wrong = np.flatnonzero(self.histories[places] != expected)
        if len(wrong):
            position = int(wrong[0])
            raise KVShadowError(
                f"slot {table.slot} epoch {table.epoch} reads position {position}, token {int(token_ids[position])}, "
                f"but {self._describe(int(places[position]), table.block_size)}"
            )

    def _check_write(self, table: BlockTable, places: Int64Array, histories: UInt64Array, first_position: int) -> None:
        """Refuse to change what another request reads. Writing the same again is harmless."""
        shared = self._holders[places // table.block_size] > 1
        changed = shared & (self._positions[places] != _NOBODY) & (self.histories[places] != histories)
        if changed.any():
            which = int(changed.argmax())
            raise KVShadowError(
                f"slot {table.slot} epoch {table.epoch} writes position {first_position + which} into a block that "
                f"another request holds: {self._describe(int(places[which]), table.block_size)}"
            )

    def _describe(self, place: int, block_size: int) -> str:
        where = f"block {place // block_size} offset {place % block_size}"
        if self._positions[place] == _NOBODY:
            return f"{where} was never written"
        return (
            f"{where} holds the history that slot {self._slots[place]} epoch {self._epochs[place]} wrote "
            f"at position {self._positions[place]}, token {self._tokens[place]}"
        )
