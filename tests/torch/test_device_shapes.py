"""The attention for accelerators needs no value that is on the device: it runs on tensors that have none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runnerd_torch.attention import AttentionMetadata, build_attention

META = torch.device("meta")
BLOCK_SIZE = 16


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("sliding_window", [None, 20])
@pytest.mark.parametrize(
    "rows",
    [[(1, 5)] * 3, [(7, 7)], [(4, 40), (1, 1), (1, 33), (9, 9), (1, 64)]],
    ids=["decodes", "a prompt", "a mixed step"],
)
def test_every_shape_follows_from_what_the_host_knows(
    rows: list[tuple[int, int]], sliding_window: int | None, softcap: float | None
) -> None:
    starts = np.cumsum([0, *(new for new, _ in rows)], dtype=np.int32)
    seq_lens = np.array([length for _, length in rows], np.int32)
    num_tokens = int(starts[-1])
    metadata = AttentionMetadata(
        query_start_loc=torch.empty(len(rows) + 1, dtype=torch.int32, device=META),
        seq_lens=torch.empty(len(rows), dtype=torch.int32, device=META),
        block_tables=torch.empty(len(rows), 4, dtype=torch.int32, device=META),
        slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=META),
        query_start_loc_cpu=starts,
        seq_lens_cpu=seq_lens,
        num_rows=len(rows),
        max_query_len=max(new for new, _ in rows),
        max_seq_len=int(seq_lens.max()),
        block_size=BLOCK_SIZE,
    )
    attention = build_attention("torch")
    caches = [torch.empty(20, BLOCK_SIZE, 2, 8, device=META) for _ in range(2)]
    new = torch.empty(num_tokens, 2, 8, device=META)
    attention.write(new, new, *caches, metadata)
    output = attention.forward(
        torch.empty(num_tokens, 4, 8, device=META), *caches, metadata, 0.3, sliding_window, softcap
    )
    assert output.shape == (num_tokens, 4, 8)
