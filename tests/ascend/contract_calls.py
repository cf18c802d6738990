"""Calls of the fused kernels that break one rule each, and neighbours that break none.

Run as a program it makes the calls that it is told by name and prints, as JSON, what each was refused with, or null.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 7, 4, 2, 32
NUM_BLOCKS, BLOCK_SIZE = 6, 128
BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INT8, INT32, INT64 = torch.int8, torch.int32, torch.int64


@dataclass(frozen=True)
class Case:
    """A call, and a part of the message that refuses it; None: it is accepted."""

    call: Callable[[], object]
    refusal: str | None = None


def npu(*shape: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    """Give zeros on the device."""
    return torch.zeros(shape, dtype=dtype).to("npu")


def attention(**changes: Any) -> Case:
    """Attend for a row that goes on, a whole one and one that decodes; dimensions by name, or arguments themselves."""
    refusal = changes.pop("refusal", None)
    heads, kv_heads = changes.pop("heads", NUM_HEADS), changes.pop("kv_heads", NUM_KV_HEADS)
    head_dim, block_size = changes.pop("head_dim", HEAD_DIM), changes.pop("block_size", BLOCK_SIZE)
    dtype = changes.pop("dtype", BFLOAT16)
    ends = changes.get("actual_seq_lengths", [2, 6, 7])
    num_tokens = changes.pop("num_tokens", NUM_TOKENS)

    def call() -> None:
        made = {name: value() if callable(value) else value for name, value in changes.items()}
        query = made.pop("query", None)
        torch.ops.npu.npu_fused_infer_attention_score(
            npu(num_tokens, heads, head_dim, dtype=dtype) if query is None else query,
            made.pop("key", None)
            if "key" in made
            else npu(NUM_BLOCKS, block_size, kv_heads * head_dim, dtype=made.pop("key_dtype", dtype)),
            npu(NUM_BLOCKS, block_size, kv_heads * head_dim, dtype=dtype),
            **{
                "block_table": npu(len(ends), 2, dtype=INT32),
                "atten_mask": npu(2048, 2048, dtype=INT8),
                "actual_seq_lengths": ends,
                "actual_seq_lengths_kv": [9, 4, 130][: len(ends)],
                "num_heads": heads,
                "num_key_value_heads": kv_heads,
                "input_layout": "TND",
                "block_size": block_size,
                "sparse_mode": 3,
            }
            | made,
        )

    return Case(call, refusal)


def decode(**changes: Any) -> Case:
    """Attend for three rows of one token each."""
    return attention(num_tokens=3, actual_seq_lengths=[1, 2, 3], **changes)


def write(refusal: str | None = None, **changes: Callable[[], Any] | str) -> Case:
    """Write the keys and values of some tokens."""

    def call() -> None:
        made = {name: value() if callable(value) else value for name, value in changes.items()}
        names = ("key", "value", "key_cache", "value_cache", "slot_mapping")
        token, cache = (NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM), (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        slots = torch.arange(NUM_TOKENS, dtype=INT32).to("npu")
        defaults = dict(zip(names, (npu(*token), npu(*token), npu(*cache), npu(*cache), slots), strict=True))
        arguments = [made.get(name, defaults[name]) for name in names]
        torch.ops.npu.npu_scatter_pa_kv_cache(*arguments, cache_mode=made.get("cache_mode", "Norm"))

    return Case(call, refusal)


def plain(op: str, *arguments: Any, refusal: str | None = None) -> Case:
    """Call an op; tensors are made when it is called."""

    def call() -> None:
        getattr(torch.ops.npu, op)(*(one() if callable(one) else one for one in arguments))

    return Case(call, refusal)


def of(*shape: int, dtype: torch.dtype = BFLOAT16) -> Callable[[], torch.Tensor]:
    """Give what makes a tensor later."""
    return lambda: npu(*shape, dtype=dtype)


def gaps(*shape: int, dtype: torch.dtype = BFLOAT16) -> Callable[[], torch.Tensor]:
    """Give what makes a tensor that is not contiguous later."""
    return lambda: npu(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


def numbers(*values: int, dtype: torch.dtype = INT32) -> Callable[[], torch.Tensor]:
    """Give what makes a vector later."""
    return lambda: torch.tensor(values, dtype=dtype).to("npu")


CASES = {
    "attention": attention(),
    "attention: float16": attention(dtype=FLOAT16),
    "attention: float32": attention(dtype=FLOAT32, refusal="query is float32, expected float16 or bfloat16"),
    "attention: heads of 16": attention(head_dim=16),
    "attention: heads of 24": attention(head_dim=24, refusal="heads of 24, expected a multiple of 16"),
    "attention: heads of 512": attention(head_dim=512),
    "attention: heads of 528": attention(head_dim=528, refusal="heads of 528, expected a multiple of 16 up to 512"),
    "attention: 64 heads to one": attention(heads=64, kv_heads=1),
    "attention: 65 heads to one": attention(heads=65, kv_heads=1, refusal="expected a multiple up to 64"),
    "attention: 256 heads": attention(heads=256, kv_heads=4),
    "attention: 257 heads": attention(heads=257, kv_heads=257, refusal="num_heads is 257, expected 1 to 256"),
    "attention: KV of 65024": attention(heads=127, kv_heads=127, head_dim=512),
    "attention: KV of 65536": attention(heads=128, kv_heads=128, head_dim=512, refusal="is 65536, expected 65535"),
    "attention: blocks of 512": attention(block_size=512),
    "attention: blocks of 640": attention(block_size=640, refusal="block_size is 640, expected a multiple of 128"),
    "attention: blocks of 64": attention(block_size=64, refusal="block_size is 64, expected a multiple of 128"),
    "decode: blocks of 80": decode(block_size=80),
    "decode: blocks of 72": decode(block_size=72, refusal="block_size is 72, expected a multiple of 16"),
    "attention: wide block table": attention(block_table=of(3, 9, dtype=INT32)),
    "attention: narrow block table": attention(
        block_table=of(3, 1, dtype=INT32), refusal="block_table is 1 wide, expected 2 for 130 tokens"
    ),
    "attention: int64 block table": attention(
        block_table=of(3, 2, dtype=INT64), refusal="block_table is int64, expected int32"
    ),
    "attention: flat block table": attention(
        block_table=of(6, dtype=INT32), refusal="block_table has 1 dimensions, expected 2"
    ),
    "attention: short block table": attention(
        block_table=of(2, 2, dtype=INT32), refusal="block_table has 2 rows, and actual_seq_lengths_kv 3"
    ),
    "attention: block table with gaps": attention(
        block_table=gaps(3, 2, dtype=INT32), refusal="block_table has strides (4, 2), expected a contiguous tensor"
    ),
    "attention: key of another dtype": attention(key_dtype=FLOAT16, refusal="key is torch.float16 and query"),
    "attention: bool mask": attention(atten_mask=of(2048, 2048, dtype=torch.bool)),
    "attention: small mask": attention(atten_mask=of(128, 128, dtype=INT8), refusal="atten_mask has shape (128, 128)"),
    "attention: float mask": attention(atten_mask=of(2048, 2048), refusal="atten_mask is bfloat16"),
    "attention: no mask": attention(atten_mask=None, refusal="atten_mask is missing, and sparse_mode is 3"),
    "attention: an empty row": attention(actual_seq_lengths=[2, 2, 7], actual_seq_lengths_kv=[9, 0, 130]),
    "attention: ends that fall": attention(actual_seq_lengths=[6, 2, 7], refusal="none before the last one"),
    "attention: ends short of the query": attention(
        actual_seq_lengths=[2, 5, 6], refusal="ends at 6, expected 7, the tokens of query"
    ),
    "attention: ends missing": attention(
        actual_seq_lengths=[], refusal="actual_seq_lengths is missing, and the layout is TND"
    ),
    "attention: lengths missing": attention(
        actual_seq_lengths_kv=None, refusal="actual_seq_lengths_kv is missing, and the cache is paged"
    ),
    "attention: too few lengths": attention(
        actual_seq_lengths_kv=[9, 4], refusal="actual_seq_lengths has 3 rows, and actual_seq_lengths_kv 2"
    ),
    "attention: a negative length": attention(
        actual_seq_lengths=[2, 2, 7], actual_seq_lengths_kv=[9, -1, 130], refusal="expected no negative length"
    ),
    "attention: a length below the new tokens": attention(
        actual_seq_lengths_kv=[9, 3, 130], refusal="row 1 has 4 new tokens, and actual_seq_lengths_kv says 3"
    ),
    "write": write(),
    "write: int64 slots": write(slot_mapping=numbers(*range(NUM_TOKENS), dtype=INT64)),
    "write: int16 slots": write(
        slot_mapping=numbers(*range(NUM_TOKENS), dtype=torch.int16), refusal="slot_mapping is int16, expected int32"
    ),
    "write: too few slots": write(slot_mapping=numbers(1, 2), refusal="slot_mapping has shape (2,), expected (7,)"),
    "write: key with gaps": write(
        key=gaps(NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM), refusal="key has strides (128, 64, 2), expected a contiguous"
    ),
    "write: value of another dtype": write(
        value=of(NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM, dtype=FLOAT16), refusal="value is torch.float16 and key"
    ),
    "write: cache of another dtype": write(
        key_cache=of(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=FLOAT16),
        refusal="key_cache is torch.float16 and key",
    ),
    "write: cache of other heads": write(
        key_cache=of(NUM_BLOCKS, BLOCK_SIZE, 1, HEAD_DIM), refusal="key_cache has shape (6, 128, 1, 32), expected"
    ),
    "write: the layout NZ": write(cache_mode="PA_NZ", refusal="cache_mode is 'PA_NZ'"),
    "rms_norm": plain("npu_rms_norm", of(7, 64), of(64), 1e-6),
    "rms_norm: short gamma": plain(
        "npu_rms_norm", of(7, 64), of(32), 1e-6, refusal="gamma has shape (32,), expected (64,)"
    ),
    "rms_norm: gamma of another dtype": plain(
        "npu_rms_norm", of(7, 64), of(64, dtype=FLOAT32), 1e-6, refusal="gamma is torch.float32 and x"
    ),
    "add_rms_norm": plain("npu_add_rms_norm", of(7, 64), of(7, 64), of(64), 1e-6),
    "add_rms_norm: other rows": plain(
        "npu_add_rms_norm", of(7, 64), of(6, 64), of(64), 1e-6, refusal="x2 has shape (6, 64), expected (7, 64)"
    ),
    "rotary_mul": plain("npu_rotary_mul", of(1, 7, 4, 64), of(1, 7, 1, 64), of(1, 7, 1, 64), "half"),
    "rotary_mul: heads of 894": plain("npu_rotary_mul", of(1, 7, 4, 894), of(1, 7, 1, 894), of(1, 7, 1, 894), "half"),
    "rotary_mul: heads of 896": plain(
        "npu_rotary_mul",
        of(1, 7, 4, 896),
        of(1, 7, 1, 896),
        of(1, 7, 1, 896),
        "half",
        refusal="heads of 896, expected an even number below 896",
    ),
    "rotary_mul: odd heads": plain(
        "npu_rotary_mul", of(1, 7, 4, 63), of(1, 7, 1, 63), of(1, 7, 1, 63), "half", refusal="heads of 63, expected"
    ),
    "rotary_mul: cos of other tokens": plain(
        "npu_rotary_mul", of(1, 7, 4, 64), of(1, 6, 1, 64), of(1, 6, 1, 64), "half", refusal="cos has shape (1, 6, 1"
    ),
    "swiglu": plain("npu_swiglu", of(7, 64), -1),
    "swiglu: odd": plain("npu_swiglu", of(7, 63), -1, refusal="63 elements in dimension -1, expected an even number"),
    "top_k_top_p": plain("npu_top_k_top_p", of(2, 99), of(2), numbers(1, 99)),
    "top_k_top_p: int64 k": plain(
        "npu_top_k_top_p", of(2, 99), of(2), numbers(1, 99, dtype=INT64), refusal="k is int64, expected int32"
    ),
    "top_k_top_p: p of another dtype": plain(
        "npu_top_k_top_p", of(2, 99), of(2, dtype=FLOAT32), numbers(1, 99), refusal="p is torch.float32 and logits"
    ),
    "top_k_top_p: p for one row": plain(
        "npu_top_k_top_p", of(2, 99), of(1), numbers(1, 99), refusal="p has shape (1,), expected (2,)"
    ),
    "top_k_top_p: neither": plain("npu_top_k_top_p", of(2, 99), None, None, refusal="p and k are both missing"),
}

AT_RUN_TIME = {"a block outside the cache": attention(block_table=lambda: npu(3, 2, dtype=INT32) + NUM_BLOCKS)}
"""What only the kernels see, when they run: the device then fails."""


def main() -> None:
    """Make the calls named by the arguments."""
    import torch_npu  # noqa: F401 - brings the device

    refusals: dict[str, str | None] = {}
    for name in sys.argv[1:]:
        try:
            (CASES | AT_RUN_TIME)[name].call()
            torch.accelerator.synchronize()
            refusals[name] = None
        except RuntimeError as error:
            refusals[name] = str(error)
    print(json.dumps(refusals))


if __name__ == "__main__":
    main()
