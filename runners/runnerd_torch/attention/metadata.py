"""What attention must know of one step: which tokens belong to which row, and where their keys and values lie.

Built once per step and shared by all layers. It knows nothing of models, layers or requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """The layout of one step; new tokens of a row are adjacent and in order.

    The tensors lie beside the KV cache. What ends in ``_cpu`` are the same numbers on the host, for kernels whose
    shapes or arguments follow from them: reading them from a device would make the host wait.

    Raises:
        ValueError: A tensor has a wrong dtype or shape. Values are checked where they are used.
    """

    # [num_rows + 1] int32: row r's new tokens are query_start_loc[r] .. query_start_loc[r + 1] - 1
    query_start_loc: torch.Tensor
    # [num_rows] int32: tokens of the row's request, the new ones of this step included
    seq_lens: torch.Tensor
    # [num_rows, max_blocks] int32, padded with 0: the block that holds positions i * block_size and on
    block_tables: torch.Tensor
    # [num_tokens] int64: block_id * block_size + offset of each new token
    slot_mapping: torch.Tensor
    # [num_rows + 1] int32, and [num_rows] int32
    query_start_loc_cpu: npt.NDArray[np.int32]
    seq_lens_cpu: npt.NDArray[np.int32]
    num_rows: int
    max_query_len: int
    max_seq_len: int
    block_size: int

    def __post_init__(self) -> None:
        _check("query_start_loc", self.query_start_loc, torch.int32, (self.num_rows + 1,))
        _check("seq_lens", self.seq_lens, torch.int32, (self.num_rows,))
        _check("block_tables", self.block_tables, torch.int32, (self.num_rows, -1))
        _check("slot_mapping", self.slot_mapping, torch.int64, (-1,))
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; expected at least 1")


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    fits = len(shape) == tensor.dim() and all(want in (-1, got) for want, got in zip(shape, tensor.shape, strict=True))
    if not fits or tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected {dtype} {shape} (-1: any size)")
