"""Makes a :class:`SamplingBatch` of a step's rows: host work only, vectorised over the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from runnerd_spi import PlanError
from runnerd_torch.sampling.batch import (
    AllowedTokens,
    BadWords,
    Draws,
    LogitBias,
    LogprobRows,
    Penalties,
    SampleRow,
    SamplingBatch,
    TokenMasks,
)
from runnerd_torch.sampling.draw import WEIGHT_BITS
from runnerd_torch.sampling.packing import ArrayPacker, ArrayRef
from runnerd_torch.sampling.slots import Feature, IntArray, SlotTable
from runnerd_torch.sampling.uniforms import uniforms

MAX_TOP_K_CANDIDATES = 1024
"""Above this many candidates sorting everything is as cheap as selecting them."""

_NONE = np.empty(0, np.int64)
_BITS = np.left_shift(np.uint8(1), np.arange(8, dtype=np.uint8))

BoolArray = npt.NDArray[np.bool_]


def plan_batch(rows: Sequence[SampleRow], table: SlotTable, vocab_size: int) -> SamplingBatch:
    """Give the batch of ``rows``, in this order.

    Args:
        rows: At most one for each slot.
        table: The parameters of the slots.
        vocab_size: Width of the logits.

    Raises:
        PlanError: A row names a slot that belongs to another epoch.
    """
    slots = np.array([row.slot for row in rows], np.int64)
    _check_epochs(rows, slots, table)
    features = table.features[slots]
    masks = {index: row.allowed for index, row in enumerate(rows) if row.allowed is not None}
    if not masks and not features.any():
        return SamplingBatch(len(rows), None, None)
    indices = np.array([row.output_index for row in rows], np.int64)
    return _BatchPlan(slots, indices, features, masks, table, vocab_size).build()


def _check_epochs(rows: Sequence[SampleRow], slots: IntArray, table: SlotTable) -> None:
    epochs = np.array([row.epoch for row in rows], np.int64)
    (wrong,) = np.nonzero(table.epoch[slots] != epochs)
    if len(wrong):
        row = rows[int(wrong[0])]
        has = int(table.epoch[row.slot])
        raise PlanError(
            f"sample row: slot {row.slot} epoch {row.epoch}, but the slot is {'empty' if has < 0 else f'epoch {has}'}"
        )


class _BatchPlan:
    def __init__(
        self,
        slots: IntArray,
        indices: IntArray,
        features: IntArray,
        masks: Mapping[int, bytes],
        table: SlotTable,
        vocab_size: int,
    ) -> None:
        # each [num_rows]
        self._slots = slots
        self._indices = indices
        self._features = features
        self._present = int(np.bitwise_or.reduce(features))
        self._masked = masks
        self._num_tokens = table.num_prompt_tokens[slots] + indices
        self._table = table
        self._vocab_size = vocab_size
        self._packer = ArrayPacker()

    def build(self) -> SamplingBatch:
        masks = self._masks()
        id_order, top_k, full_sort = self._draws()
        penalties, logit_bias, allowed = self._penalties(), self._logit_bias(), self._allowed()
        banned, bad_words, logprobs = self._banned(), self._bad_words(), self._logprobs()
        packed = self._packer.pack()
        return SamplingBatch(
            num_rows=len(self._slots),
            packed=packed,
            buffer=torch.from_numpy(packed),
            masks=masks,
            penalties=penalties,
            logit_bias=logit_bias,
            allowed=allowed,
            banned=banned,
            bad_words=bad_words,
            id_order_draws=id_order,
            top_k_draws=top_k,
            sorted_draws=full_sort,
            logprobs=logprobs,
        )

    def _with(self, feature: Feature) -> IntArray:
        """Give the rows with ``feature``."""
        if not self._present & feature:
            return _NONE
        return np.flatnonzero(self._features & int(feature))

    def _rows_ref(self, rows: IntArray) -> ArrayRef | None:
        return None if len(rows) == len(self._slots) else self._packer.put(rows)

    def _masks(self) -> TokenMasks | None:
        if not self._masked:
            return None
        put = self._packer.put
        allowed = np.frombuffer(b"".join(self._masked.values()), np.uint8).reshape(len(self._masked), -1)
        return TokenMasks(put(np.array(list(self._masked), np.int64)), put(allowed), put(_BITS))

    def _penalties(self) -> Penalties | None:
        rows = self._with(Feature.PENALTIES)
        if not len(rows):
            return None
        put, table, slots = self._packer.put, self._table, self._slots[rows]
        repetition = table.repetition_penalty[slots][:, None]
        presence = table.presence_penalty[slots][:, None]
        frequency = table.frequency_penalty[slots][:, None]
        counts = bool(presence.any() or frequency.any())
        return Penalties(
            rows=put(rows),
            slots=put(slots),
            num_prompt_tokens=put(table.num_prompt_tokens[slots]),
            num_tokens=put(self._num_tokens[rows]),
            repetition=put(repetition) if (repetition != 1).any() else None,
            presence=put(presence) if counts else None,
            frequency=put(frequency) if counts else None,
            max_num_tokens=int(self._num_tokens[rows].max()),
        )

    def _logit_bias(self) -> LogitBias | None:
        rows = self._with(Feature.LOGIT_BIAS)
        if not len(rows):
            return None
        lists = [self._table.lists[slot] for slot in self._slots[rows].tolist()]
        places = self._places(rows, [one.bias_ids for one in lists])
        return LogitBias(self._packer.put(places), self._packer.put(np.concatenate([one.bias_values for one in lists])))

    def _allowed(self) -> AllowedTokens | None:
        rows = self._with(Feature.ALLOWED)
        if not len(rows):
            return None
        allowed = [self._table.lists[slot].allowed_ids for slot in self._slots[rows].tolist()]
        return AllowedTokens(self._packer.put(rows), self._packer.put(self._places(np.arange(len(rows)), allowed)))

    def _banned(self) -> ArrayRef | None:
        bad_words, min_tokens = self._with(Feature.BAD_WORDS), self._with(Feature.MIN_TOKENS)
        min_tokens = min_tokens[self._indices[min_tokens] < self._table.min_tokens[self._slots[min_tokens]]]
        banned = [self._table.lists[slot].banned_ids for slot in self._slots[bad_words].tolist()]
        banned += [self._table.lists[slot].stop_ids for slot in self._slots[min_tokens].tolist()]
        places = self._places(np.concatenate((bad_words, min_tokens)), banned)
        return self._packer.put(places) if len(places) else None

    def _bad_words(self) -> BadWords | None:
        # A word whose prefix is longer than the outputs cannot match yet, and must not reach into the prompt.
        words: list[tuple[int, BoolArray]] = []
        for row in self._with(Feature.BAD_WORDS).tolist():
            fits = self._table.lists[int(self._slots[row])].bad_prefix_lens <= self._indices[row]
            if fits.any():
                words.append((row, fits))
        if not words:
            return None
        lists = [self._table.lists[int(self._slots[row])] for row, _ in words]
        longest = max(one.bad_prefixes.shape[1] for one in lists)
        prefixes = [
            np.pad(one.bad_prefixes[fits], ((0, 0), (longest - one.bad_prefixes.shape[1], 0)), constant_values=-1)
            for one, (_, fits) in zip(lists, words, strict=True)
        ]
        last_ids = [one.bad_last_ids[fits] for one, (_, fits) in zip(lists, words, strict=True)]
        rows = np.array([row for row, _ in words], np.int64)
        row_of_word = np.repeat(rows, [len(ids) for ids in last_ids])
        return BadWords(
            slots=self._packer.put(self._slots[row_of_word]),
            num_tokens=self._packer.put(self._num_tokens[row_of_word]),
            places=self._packer.put(self._places(rows, last_ids)),
            prefixes=self._packer.put(np.concatenate(prefixes)),
        )

    def _draws(self) -> tuple[Draws | None, Draws | None, Draws | None]:
        rows = self._with(Feature.RANDOM)
        if not len(rows):
            return None, None, None
        top_k, top_p = self._table.top_k[self._slots[rows]], self._table.top_p[self._slots[rows]]
        small_k = (top_k > 0) & (top_k <= MAX_TOP_K_CANDIDATES)
        in_id_order = (top_k == 0) & (top_p >= 1)
        num_candidates = int(top_k[small_k].max()) if small_k.any() else None
        return (
            self._draw_group(rows[in_id_order], None),
            self._draw_group(rows[small_k], num_candidates),
            self._draw_group(rows[~small_k & ~in_id_order], None),
        )

    def _draw_group(self, rows: IntArray, num_candidates: int | None) -> Draws | None:
        if not len(rows):
            return None
        put, table, slots = self._packer.put, self._table, self._slots[rows]
        min_p, top_k, top_p = table.min_p[slots], table.top_k[slots], table.top_p[slots]
        typical_p = table.typical_p[slots]
        top_k[top_k == 0] = self._vocab_size
        return Draws(
            rows=self._rows_ref(rows),
            temperature=put(table.temperature[slots][:, None]),
            uniforms=put(uniforms(table.seed_state[slots], self._indices[rows])[:, None]),
            min_weight=put(np.floor(min_p * 2.0**WEIGHT_BITS).astype(np.int64)[:, None]) if min_p.any() else None,
            top_k=put(top_k[:, None]) if (top_k < self._vocab_size).any() else None,
            top_p=put(top_p[:, None]) if (top_p < 1).any() else None,
            typical_p=put(typical_p[:, None]) if (typical_p < 1).any() else None,
            num_candidates=num_candidates,
        )

    def _logprobs(self) -> LogprobRows | None:
        rows = self._with(Feature.LOGPROBS)
        if not len(rows):
            return None
        num_top = np.minimum(self._table.num_logprobs[self._slots[rows]], self._vocab_size)
        return LogprobRows(self._rows_ref(rows), tuple(rows.tolist()), tuple(num_top.tolist()))

    def _places(self, rows: IntArray, ids: Sequence[IntArray]) -> IntArray:
        """Give the places of ``ids[i]`` in row ``rows[i]`` of flattened logits."""
        if not len(rows):
            return _NONE
        return np.repeat(rows, [len(one) for one in ids]) * self._vocab_size + np.concatenate(ids)
