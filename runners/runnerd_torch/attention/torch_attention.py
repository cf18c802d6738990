"""Paged attention in plain PyTorch: runs wherever PyTorch does and needs no compiler.

It gathers each row's keys and values into contiguous tensors. It knows nothing of models or of the native kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from runnerd_torch.attention.checks import check_cache, check_new_tokens, check_query
from runnerd_torch.attention.metadata import AttentionMetadata

# Decode rows are padded to the longest of their batch; the bound keeps that copy of the cache small.
MAX_GATHERED_TOKENS = 65_536


class TorchPagedAttention:
    """The implementation of :class:`~runnerd_torch.attention.interface.PagedAttention` without native code."""

    @property
    def name(self) -> str:
        """Name for logs and metrics."""
        return "torch"

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Store the step's new keys and values; see the interface."""
        check_cache(key_cache, value_cache, metadata)
        check_new_tokens("key", key, key_cache, metadata)
        check_new_tokens("value", value, key_cache, metadata)
        num_slots = key_cache.shape[0] * metadata.block_size
        slots = metadata.slot_mapping
        if _is_checked(slots) and bool(((slots < 0) | (slots >= num_slots)).any()):
            raise IndexError(f"slot_mapping holds a slot outside 0..{num_slots - 1}")
        key_cache.flatten(0, 1).index_copy_(0, slots, key)
        value_cache.flatten(0, 1).index_copy_(0, slots, value)

    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Give the attention of each new token over its sequence; see the interface."""
        check_cache(key_cache, value_cache, metadata)
        check_query(query, key_cache, metadata, sliding_window)
        window = metadata.max_seq_len if sliding_window is None else sliding_window
        layer = _Layer(query, key_cache.flatten(0, 1), value_cache.flatten(0, 1), metadata, scale, window, softcap)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        start = metadata.query_start_loc_cpu.tolist()
        seq_lens = metadata.seq_lens_cpu.tolist()
        for begin, end in _spans(start, seq_lens):
            if start[end] - start[begin] == end - begin:
                layer.decode(begin, end, start[begin], max(seq_lens[begin:end]), output)
            else:
                layer.prefill(begin, start[begin], start[end], seq_lens[begin], output)
        return output


@dataclass(frozen=True, slots=True)
class _Layer:
    """One call of ``forward``: what its rows share."""

    query: torch.Tensor
    # [num_slots, num_kv_heads, head_dim]
    keys: torch.Tensor
    values: torch.Tensor
    metadata: AttentionMetadata
    scale: float
    window: int
    softcap: float | None

    def decode(self, begin: int, end: int, first_token: int, max_seq_len: int, output: torch.Tensor) -> None:
        """Attend for the adjacent rows ``begin`` to ``end - 1`` with one new token each, padded to the longest."""
        num_rows = end - begin
        seq_lens = self.metadata.seq_lens[begin:end].long()[:, None]
        seen = seq_lens.clamp(max=self.window)
        column = torch.arange(min(max_seq_len, self.window), device=self.query.device)
        # Padding repeats the row's own last token: another slot could hold NaN, and 0 * NaN is NaN.
        positions = torch.minimum(seq_lens - seen + column, seq_lens - 1)
        slots = self._slots(self.metadata.block_tables[begin:end], positions)
        tokens = slice(first_token, first_token + num_rows)
        # [num_rows, num_kv_heads, group or padded length, head_dim]
        query = self.query[tokens].reshape(num_rows, self.keys.shape[1], -1, self.query.shape[2])
        key = self.keys[slots].transpose(1, 2)
        value = self.values[slots].transpose(1, 2)
        visible = (column < seen)[:, None, None, :]
        output[tokens] = self._attend(query, key, value, visible).flatten(1, 2)

    def prefill(self, row: int, begin: int, end: int, seq_len: int, output: torch.Tensor) -> None:
        """Attend for one row with several new tokens."""
        first_position = seq_len - (end - begin)
        first_key = max(0, first_position - self.window + 1)
        positions = torch.arange(first_key, seq_len, device=self.query.device)
        slots = self._slots(self.metadata.block_tables[row : row + 1], positions[None])[0]
        # [heads, tokens, head_dim]
        query = self.query[begin:end].transpose(0, 1)
        key = self.keys[slots].transpose(0, 1)
        value = self.values[slots].transpose(0, 1)
        # The kernel behind is_causal skips what is masked, so a mask is given only where it must be.
        causal = self.softcap is None and first_position == 0 and self.window >= seq_len
        visible = None if causal else self._visible(positions, first_position - first_key)
        if self.softcap is None or visible is None:
            result = F.scaled_dot_product_attention(
                query[None], key[None], value[None], visible, is_causal=causal, scale=self.scale, enable_gqa=True
            )
        else:
            query = query.reshape(key.shape[0], -1, *query.shape[1:])
            result = self._attend(query, key[:, None], value[:, None], visible).flatten(0, 1)[None]
        output[begin:end] = result[0].transpose(0, 1)

    def _visible(self, positions: torch.Tensor, num_before: int) -> torch.Tensor:
        # positions [keys], the first num_before of them older than this step -> [new tokens, keys]
        distance = positions[num_before:, None] - positions
        return (distance >= 0) & (distance < self.window)

    def _slots(self, block_tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # block_tables [n, max_blocks], positions [n, length] -> [n, length]
        block_size = self.metadata.block_size
        blocks = block_tables.long().gather(1, positions // block_size)
        num_blocks = self.keys.shape[0] // block_size
        if _is_checked(blocks) and bool(((blocks < 0) | (blocks >= num_blocks)).any()):
            raise IndexError(f"block_tables hold a block outside 0..{num_blocks - 1}")
        return blocks * block_size + positions % block_size

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        # Scores in half precision would round before the softmax, so all of it is done in float32 at least.
        dtype = torch.promote_types(query.dtype, torch.float32)
        scores = (query.to(dtype) * self.scale) @ key.to(dtype).transpose(-1, -2)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        probabilities = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return (probabilities @ value.to(dtype)).to(query.dtype)


def _is_checked(places: torch.Tensor) -> bool:
    """Whether places are compared with the cache; on an accelerator the host would have to wait for the answer."""
    return places.device.type == "cpu"


def _spans(start: list[int], seq_lens: list[int]) -> Iterator[tuple[int, int]]:
    """Cut the rows into spans: adjacent rows of one new token, as many as may be padded together, and single others.

    Adjacent, because then they are slices: an index of rows would have to be sent to the device.
    """
    begin = longest = 0
    for row, seq_len in enumerate(seq_lens):
        longest = max(longest, seq_len)
        is_decode = start[row + 1] - start[row] == 1
        if begin < row and (not is_decode or (row + 1 - begin) * longest > MAX_GATHERED_TOKENS):
            yield begin, row
            begin, longest = row, seq_len
        if not is_decode:
            yield row, row + 1
            begin, longest = row + 1, 0
    if begin < len(seq_lens):
        yield begin, len(seq_lens)
