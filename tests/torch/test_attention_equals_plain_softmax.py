"""Both implementations of paged attention against plain softmax attention in float64 over contiguous keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerd_torch.attention import AttentionMetadata, PagedAttention, build_attention

# Relative to values of order 1: what rounding the output to the dtype and summing in another order allow.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Row:
    cached: int
    new: int


@dataclass(frozen=True)
class Case:
    rows: tuple[Row, ...]
    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None
    softcap: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """Random tensors of a case: each row's whole sequence, and the paged cache before the step's write."""

    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata


def make_step(case: Case) -> Step:
    """Scatter the cached tokens of each row over random blocks; all other slots hold NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    kv_shape = (case.num_kv_heads, case.head_dim)

    def random(length: int, heads: int) -> torch.Tensor:
        return torch.randn(length, heads, case.head_dim, generator=generator).to(case.dtype)

    queries = [random(row.new, case.num_kv_heads * case.group) for row in case.rows]
    keys = [random(row.cached + row.new, case.num_kv_heads) for row in case.rows]
    values = [random(row.cached + row.new, case.num_kv_heads) for row in case.rows]
    blocks_of_row = [math.ceil((row.cached + row.new) / case.block_size) for row in case.rows]
    num_blocks = sum(blocks_of_row) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    key_cache = torch.full((num_blocks, case.block_size, *kv_shape), math.nan, dtype=case.dtype)
    value_cache = key_cache.clone()
    block_tables = torch.zeros(len(case.rows), max(blocks_of_row) + 1, dtype=torch.int32)
    slot_mapping: list[int] = []
    for index, row in enumerate(case.rows):
        blocks = [free.pop() for _ in range(blocks_of_row[index])]
        block_tables[index, : len(blocks)] = torch.tensor(blocks)
        positions = range(row.cached + row.new)
        slots = [blocks[p // case.block_size] * case.block_size + p % case.block_size for p in positions]
        key_cache.flatten(0, 1)[slots[: row.cached]] = keys[index][: row.cached]
        value_cache.flatten(0, 1)[slots[: row.cached]] = values[index][: row.cached]
        slot_mapping += slots[row.cached :]
    lengths = torch.tensor([0] + [row.new for row in case.rows])
    query_start_loc = lengths.cumsum(0).int()
    seq_lens = torch.tensor([row.cached + row.new for row in case.rows], dtype=torch.int32)
    metadata = AttentionMetadata(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=block_tables,
        slot_mapping=torch.tensor(slot_mapping, dtype=torch.int64),
        query_start_loc_cpu=query_start_loc.numpy(),
        seq_lens_cpu=seq_lens.numpy(),
        num_rows=len(case.rows),
        max_query_len=max(row.new for row in case.rows),
        max_seq_len=max(row.cached + row.new for row in case.rows),
        block_size=case.block_size,
    )
    return Step(queries, keys, values, key_cache, value_cache, metadata)


def run(attention: PagedAttention, case: Case, step: Step) -> torch.Tensor:
    new_keys = torch.cat([key[row.cached :] for key, row in zip(step.keys, case.rows, strict=True)])
    new_values = torch.cat([value[row.cached :] for value, row in zip(step.values, case.rows, strict=True)])
    attention.write(new_keys, new_values, step.key_cache, step.value_cache, step.metadata)
    query = torch.cat(step.queries)
    scale = case.head_dim**-0.5
    caches = (step.key_cache, step.value_cache)
    return attention.forward(query, *caches, step.metadata, scale, case.sliding_window, case.softcap)


def plain_softmax(case: Case, step: Step) -> torch.Tensor:
    outputs = []
    for row, query, key, value in zip(case.rows, step.queries, step.keys, step.values, strict=True):
        heads_of_key = key.double().repeat_interleave(case.group, 1)
        heads_of_value = value.double().repeat_interleave(case.group, 1)
        scores = torch.einsum("qhd,khd->hqk", query.double(), heads_of_key) * case.head_dim**-0.5
        if case.softcap is not None:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        query_position = torch.arange(row.cached, row.cached + row.new)[:, None]
        key_position = torch.arange(row.cached + row.new)[None]
        visible = key_position <= query_position
        if case.sliding_window is not None:
            visible &= key_position > query_position - case.sliding_window
        probabilities = scores.masked_fill(~visible, -math.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", probabilities, heads_of_value))
    return torch.cat(outputs)


def check(attention: PagedAttention, case: Case) -> None:
    step = make_step(case)
    output = run(attention, case, step)
    assert output.dtype == case.dtype
    assert output.is_contiguous()
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(output.double(), plain_softmax(case, step), rtol=tolerance, atol=tolerance)


rows = st.lists(
    st.one_of(
        st.builds(Row, cached=st.integers(0, 300), new=st.just(1)),
        st.builds(Row, cached=st.just(0), new=st.integers(1, 150)),
        st.builds(Row, cached=st.integers(1, 200), new=st.integers(2, 70)),
    ),
    min_size=1,
    max_size=5,
).map(tuple)
cases = st.builds(
    Case,
    rows=rows,
    block_size=st.sampled_from([1, 4, 16, 128]),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    head_dim=st.sampled_from([16, 64, 80, 128]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    sliding_window=st.one_of(st.none(), st.integers(1, 250)),
    softcap=st.sampled_from([None, None, 1.5, 50.0]),
    seed=st.integers(0, 2**16),
)


@pytest.fixture(scope="module", params=["torch", "native"])
def attention(request: pytest.FixtureRequest) -> PagedAttention:
    return build_attention(request.param)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases)
def test_attention_over_pages_equals_plain_softmax_attention(attention: PagedAttention, case: Case) -> None:
    check(attention, case)


@pytest.mark.parametrize(
    "case",
    [
        Case(rows=(Row(0, 1),)),
        Case(rows=(Row(2500, 1), Row(63, 1), Row(64, 1), Row(65, 1))),
        Case(rows=(Row(0, 513),)),
        Case(rows=(Row(0, 1), Row(0, 49)), group=1),
        Case(rows=(Row(700, 130), Row(0, 2)), sliding_window=64),
        Case(rows=(Row(100, 1), Row(50, 20)), sliding_window=1),
        Case(rows=(Row(10, 1), Row(3, 5)), num_kv_heads=1, group=71, head_dim=64),
        Case(rows=(Row(200, 1), Row(30, 40)), head_dim=256, num_kv_heads=1, group=8, softcap=30.0),
        Case(rows=(Row(20, 1), Row(30, 7)), head_dim=20),
        Case(rows=(Row(20, 1), Row(30, 7)), head_dim=264, num_kv_heads=1, group=1),
    ],
    ids=lambda case: f"{len(case.rows)}rows-{case.rows[0].cached}+{case.rows[0].new}-dim{case.head_dim}",
)
def test_attention_equals_plain_softmax_attention_at_the_edges(attention: PagedAttention, case: Case) -> None:
    check(attention, case)


def test_slots_that_are_not_written_keep_their_content(attention: PagedAttention) -> None:
    case = Case(rows=(Row(20, 1), Row(0, 9), Row(33, 4)), block_size=4)
    step = make_step(case)
    step.key_cache.copy_(torch.arange(step.key_cache.numel()).view_as(step.key_cache))
    step.value_cache.copy_(-step.key_cache)
    before = step.key_cache.flatten(0, 1).clone()
    run(attention, case, step)
    written = step.metadata.slot_mapping
    kept = torch.ones(before.shape[0], dtype=torch.bool).index_fill(0, written, value=False)
    assert torch.equal(step.key_cache.flatten(0, 1)[kept], before[kept])
    assert torch.equal(step.value_cache.flatten(0, 1)[kept], -before[kept])
    new_keys = torch.cat([key[row.cached :] for key, row in zip(step.keys, case.rows, strict=True)])
    new_values = torch.cat([value[row.cached :] for value, row in zip(step.values, case.rows, strict=True)])
    assert torch.equal(step.key_cache.flatten(0, 1)[written], new_keys)
    assert torch.equal(step.value_cache.flatten(0, 1)[written], new_values)
