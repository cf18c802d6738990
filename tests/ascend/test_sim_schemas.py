"""Every call of a torch_npu operator in the product fits the schema that the wheel registers, and its shapes.

A call is found in the source, so one that no test runs is checked too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch_npu  # noqa: F401 - registers the operators
from torch._subclasses.fake_tensor import FakeTensorMode

import runnerd_torch

ROOT = Path(runnerd_torch.__file__).parent
NAMESPACE = "torch.ops.npu."


def _operators() -> Iterator[tuple[str, ast.Call | None]]:
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text())
        called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(NAMESPACE):
                yield node.attr, called.get(id(node))


OPERATORS = list(_operators())


def test_the_product_calls_the_fused_kernels():
    assert {name for name, _ in OPERATORS} >= {
        "npu_rms_norm",
        "npu_add_rms_norm",
        "npu_rotary_mul",
        "npu_swiglu",
        "npu_scatter_pa_kv_cache",
        "npu_fused_infer_attention_score",
    }


@pytest.mark.parametrize(("name", "call"), OPERATORS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(OPERATORS)])
def test_a_call_fits_the_schema_of_the_wheel(name, call):
    schema = getattr(torch.ops.npu, name).default._schema
    if call is None:
        return  # named, and called later; that it exists is what can be seen here
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    given = positional[: len(call.args)] + [keyword.arg for keyword in call.keywords]
    assert len(call.args) <= len(positional)
    assert set(given) <= {argument.name for argument in schema.arguments}
    assert len(given) == len(set(given))
    needed = {argument.name for argument in schema.arguments if not argument.has_default_value()}
    assert needed <= set(given)


def test_a_keyword_that_the_wheel_does_not_know_would_be_found():
    call = ast.parse("torch.ops.npu.npu_rms_norm(x, weight, eps=1e-6)", mode="eval").body
    with pytest.raises(AssertionError):
        test_a_call_fits_the_schema_of_the_wheel("npu_rms_norm", call)


def _shape(value: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(value.shape), value.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_wheels_shape_functions_give_what_the_runner_expects(dtype):
    ops = torch.ops.npu
    tokens, width, heads, kv_heads, head_dim = 6, 64, 4, 2, 16
    with FakeTensorMode(), torch.device("npu:0"):
        hidden = torch.empty(tokens, width, dtype=dtype)
        weight = torch.empty(width, dtype=dtype)
        assert _shape(ops.npu_rms_norm(hidden, weight, 1e-6)[0]) == ((tokens, width), dtype)
        normed, _, added = ops.npu_add_rms_norm(hidden, hidden, weight, 1e-6)
        assert _shape(normed) == _shape(added) == ((tokens, width), dtype)
        query = torch.empty(1, tokens, heads, head_dim, dtype=dtype)
        angles = torch.empty(1, tokens, 1, head_dim, dtype=dtype)
        assert _shape(ops.npu_rotary_mul(query, angles, angles, "half")) == (tuple(query.shape), dtype)
        assert _shape(ops.npu_swiglu(torch.empty(tokens, 2 * width, dtype=dtype), -1)) == ((tokens, width), dtype)
        cache = torch.empty(8, 128, kv_heads * head_dim, dtype=dtype)
        output, _ = ops.npu_fused_infer_attention_score(
            query[0],
            cache,
            cache,
            atten_mask=torch.empty(2048, 2048, dtype=torch.int8),
            actual_seq_lengths=[4, 6],
            actual_seq_lengths_kv=[4, 130],
            block_table=torch.empty(2, 2, dtype=torch.int32),
            num_heads=heads,
            num_key_value_heads=kv_heads,
            scale=0.25,
            input_layout="TND",
            block_size=128,
            sparse_mode=3,
        )
        assert _shape(output) == ((tokens, heads, head_dim), dtype)
