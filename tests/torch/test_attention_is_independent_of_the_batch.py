"""The native kernel gives a row the same bits whatever else is computed with it, and however."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerd_torch.attention import AttentionMetadata, PagedAttention, build_attention
from runnerd_torch.attention.native_attention import NativePagedAttention

BLOCK_SIZE = 16
MAX_SEQ_LEN = 700
NUM_KV_HEADS = 3


@pytest.fixture(scope="module")
def attention() -> PagedAttention:
    return build_attention("native")


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Sequences:
    """Full sequences in one cache; any row (sequence, first new position, end) of them can be asked for."""

    def __init__(self, num_sequences: int, group: int, head_dim: int, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_blocks = num_sequences * (MAX_SEQ_LEN // BLOCK_SIZE + 1)
        cache_shape = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, head_dim)
        self.key_cache = torch.randn(cache_shape, generator=generator).to(dtype)
        self.value_cache = torch.randn(cache_shape, generator=generator).to(dtype)
        self.blocks = torch.randperm(num_blocks, generator=generator).view(num_sequences, -1).int()
        query_shape = (num_sequences, MAX_SEQ_LEN, NUM_KV_HEADS * group, head_dim)
        self.queries = torch.randn(query_shape, generator=generator).to(dtype)

    def forward(
        self, attention: PagedAttention, rows: list[tuple[int, int, int]], window: int | None, softcap: float | None
    ) -> list[torch.Tensor]:
        query_lens = [end - begin for _, begin, end in rows]
        query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).int()
        seq_lens = torch.tensor([end for _, _, end in rows], dtype=torch.int32)
        metadata = AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=self.blocks[[sequence for sequence, _, _ in rows]],
            slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
            query_start_loc_cpu=query_start_loc.numpy(),
            seq_lens_cpu=seq_lens.numpy(),
            num_rows=len(rows),
            max_query_len=max(query_lens),
            max_seq_len=max(end for _, _, end in rows),
            block_size=BLOCK_SIZE,
        )
        query = torch.cat([self.queries[sequence, begin:end] for sequence, begin, end in rows])
        output = attention.forward(query, self.key_cache, self.value_cache, metadata, 0.1, window, softcap)
        return list(output.split(query_lens))


spans = st.tuples(st.integers(0, MAX_SEQ_LEN - 1), st.integers(1, 80)).map(
    lambda span: (span[0], min(span[0] + span[1], MAX_SEQ_LEN))
)
decodes = st.integers(0, MAX_SEQ_LEN - 1).map(lambda position: (position, position + 1))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    row_spans=st.lists(st.one_of(spans, decodes, decodes), min_size=2, max_size=6),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([8, 64, 80]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    window=st.one_of(st.none(), st.integers(1, 300)),
    softcap=st.sampled_from([None, 20.0]),
    seed=st.integers(0, 1000),
)
def test_row_has_the_same_bits_alone_and_in_a_batch_and_with_any_number_of_threads(
    attention: PagedAttention,
    row_spans: list[tuple[int, int]],
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    sequences = Sequences(len(row_spans), group, head_dim, dtype, seed)
    rows = [(sequence, begin, end) for sequence, (begin, end) in enumerate(row_spans)]
    torch.set_num_threads(2)
    together = sequences.forward(attention, rows, window, softcap)
    for num_threads in (1, 3, 16):
        torch.set_num_threads(num_threads)
        for row, expected in zip(rows, together, strict=True):
            (alone,) = sequences.forward(attention, [row], window, softcap)
            assert torch.equal(alone, expected), f"row {row} with {num_threads} threads"
        reordered = sequences.forward(attention, rows[::-1], window, softcap)[::-1]
        assert all(map(torch.equal, reordered, together))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_prompt_has_the_same_bits_whole_and_in_chunks(
    attention: PagedAttention, chunk: int, window: int | None
) -> None:
    torch.set_num_threads(2)
    sequences = Sequences(num_sequences=1, group=3, head_dim=64, dtype=torch.float32, seed=7)
    length = 333
    (whole,) = sequences.forward(attention, [(0, 0, length)], window, None)
    chunks = [(0, begin, min(begin + chunk, length)) for begin in range(0, length, chunk)]
    parts = [sequences.forward(attention, [row], window, None)[0] for row in chunks]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("num_new", [1, 30])
def test_nan_of_one_row_and_of_stale_slots_stays_out_of_other_rows(attention: PagedAttention, num_new: int) -> None:
    torch.set_num_threads(2)
    sequences = Sequences(num_sequences=3, group=2, head_dim=64, dtype=torch.float32, seed=3)
    rows = [(sequence, 200, 200 + num_new) for sequence in range(3)]
    before = sequences.forward(attention, rows, None, None)
    ill = sequences.blocks[1].long()
    sequences.key_cache[ill] = float("nan")
    sequences.value_cache[ill] = float("nan")
    # Sequence 0 goes up to position 200 + num_new - 1; what lies behind is stale.
    stale = sequences.blocks[0, (200 + num_new) // BLOCK_SIZE + 1 :].long()
    sequences.value_cache[stale] = float("nan")
    after = sequences.forward(attention, rows, None, None)
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[2], before[2])
    assert after[1].isnan().all()


def test_threads_of_the_kernel_give_the_same_bits_as_those_of_torch(attention: PagedAttention) -> None:
    torch.set_num_threads(4)
    sequences = Sequences(num_sequences=3, group=3, head_dim=64, dtype=torch.float32, seed=5)
    rows = [(0, 0, 100), (1, 650, 651), (2, 300, 340)]
    shared = sequences.forward(attention, rows, None, None)
    own = sequences.forward(NativePagedAttention(share_threads=False), rows, None, None)
    assert all(map(torch.equal, own, shared))
