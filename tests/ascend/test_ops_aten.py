"""Each simulated kernel gives, through the real torch_npu op, what PyTorch's CPU gives."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
import torch_npu  # noqa: F401 - brings the device

Tensor = torch.Tensor
BFLOAT16, FLOAT32, FLOAT64, INT32, INT64, BOOL = (
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.bool,
)
KINDS = ("plain", "transposed", "empty")


def random_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, low: int = 1, high: int = 9) -> Tensor:
    """Give a tensor that depends on its name alone; integers from low to below high."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if dtype == BOOL:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def inputs(kind: str, dtypes: tuple[torch.dtype, ...], high: int = 9) -> list[Tensor]:
    """Give matrices of 6 by 9: contiguous, transposed, or without rows."""
    made = []
    for place, dtype in enumerate(dtypes):
        shape = {"plain": (6, 9), "transposed": (9, 6), "empty": (0, 9)}[kind]
        tensor = random_tensor(f"{place}", shape, dtype, high=high)
        made.append(tensor.t() if kind == "transposed" else tensor)
    return made


def on_both(compute: Callable[..., Any], *arguments: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Compute on copies of the arguments, on the CPU and on the NPU; give what came out, in-place changes included."""

    def run(device: str) -> list[Tensor]:
        # clone keeps strides, and a copy to another device does for dense tensors
        copies = [one.clone().to(device) if isinstance(one, Tensor) else one for one in arguments]
        out = compute(*copies)
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        return [one.cpu() for one in (*outs, *(copy for copy in copies if isinstance(copy, Tensor)))]

    return run("cpu"), run("npu")


def assert_equal(compute: Callable[..., Any], *arguments: Any, tolerance: float = 0.0) -> None:
    expected, actual = on_both(compute, *arguments)
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance, equal_nan=True)


ELEMENTWISE = {
    "abs": torch.abs,
    "ceil": torch.ceil,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_ from": lambda x: x.clamp_(min=-0.5),
    "cos": torch.cos,
    "divide by number": lambda x: x / 3.0,
    "exp": torch.exp,
    "exp_": lambda x: x.exp_(),
    "floor": torch.floor,
    "gelu": F.gelu,
    "isnan": lambda x: torch.isnan(x.log()),
    "less than number": lambda x: x < 0,
    "log": lambda x: x.abs().log(),
    "log_softmax": lambda x: x.log_softmax(1),
    "minus number": lambda x: 1 - x,
    "neg": torch.neg,
    "not finite": lambda x: ~(x < torch.inf),
    "plus number": lambda x: x.add_(1.5),
    "power": lambda x: x.pow(2),
    "reciprocal": torch.reciprocal,
    "relu": F.relu,
    "roll": lambda x: x.roll(4, dims=-1),
    "rsqrt": lambda x: x.abs().rsqrt(),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sin": torch.sin,
    "softmax": lambda x: x.softmax(-1),
    "sqrt": lambda x: x.abs().sqrt(),
    "square": torch.square,
    "tanh": torch.tanh,
    "times number": lambda x: x * 2.5,
    "to bfloat16": lambda x: x.to(BFLOAT16),
    "to int64": lambda x: (x * 100).to(INT64),
    "tril": torch.tril,
    "triu": lambda x: torch.triu(x, 1),
}
# What a CPU rounds by the path it takes: vectors of neighbours in one way, single elements in another.
ROUNDED = {"cos", "exp", "exp_", "gelu", "log", "log_softmax", "rsqrt", "sigmoid", "silu", "sin", "softmax", "tanh"}
TOLERANCES = {FLOAT32: 1e-6, BFLOAT16: 2**-7, FLOAT64: 1e-12}
PAIRS = {
    "add": lambda x, y: x + y,
    "add_": lambda x, y: x.add_(y),
    "add scaled": lambda x, y: torch.add(x, y, alpha=2),
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "copy_": lambda x, y: x.copy_(y),
    "copy_ to columns": lambda x, y: x[:, :4].copy_(y[:, 4:8]),
    "divide": lambda x, y: x / y,
    "divide_": lambda x, y: x.div_(y),
    "equal": lambda x, y: x == y,
    "greater": lambda x, y: x > y,
    "greater or equal": lambda x, y: x >= y,
    "less": lambda x, y: x < y,
    "less or equal": lambda x, y: x <= y,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "multiply": lambda x, y: x * y,
    "multiply_": lambda x, y: x.mul_(y),
    "not equal": lambda x, y: x != y,
    "put together": lambda x, y: torch.cat((x, y), -1),
    "stack": lambda x, y: torch.stack((x, y)),
    "subtract": lambda x, y: x - y,
    "subtract_": lambda x, y: x.sub_(y),
    "where": lambda x, y: torch.where(x < y, x, y),
}
INTEGERS = {
    "and number": lambda x, y: x & 0x7F,
    "and_": lambda x, y: x.bitwise_and_(y),
    "clamp_ to": lambda x, y: x.clamp_(max=5),
    "floor divide": lambda x, y: x // y,
    "floor divide by number": lambda x, y: x // 2,
    "invert": lambda x, y: ~x,
    "or_": lambda x, y: x.bitwise_or_(y),
    "plus": lambda x, y: x + y,
    "plus number": lambda x, y: 1 + x,
    "remainder of number": lambda x, y: x % 4,
    "running sum": lambda x, y: x.cumsum(1),
    "shift left": lambda x, y: x.bitwise_left_shift_(3),
    "shift right": lambda x, y: (x - 5) >> 1,
    "times": lambda x, y: x * y,
    "where": lambda x, y: torch.where(x < y, x, y[:, :1]),
    "xor_": lambda x, y: x.bitwise_xor_(y),
}
LOGIC = {
    "all": lambda x, y: x.all(dim=1),
    "and": lambda x, y: x & y,
    "any": lambda x, y: x.any(dim=1),
    "logical and": torch.logical_and,
    "logical not": lambda x, y: torch.logical_not(x),
    "logical or": torch.logical_or,
    "not": lambda x, y: ~x,
    "or": lambda x, y: x | y,
    "sum": lambda x, y: x.sum(dim=1),
    "to int32": lambda x, y: x.to(INT32),
    "where numbers": lambda x, y: torch.where(x, -torch.inf, 0.0),
    "xor": lambda x, y: x ^ y,
}
# Rows have no equal elements, so that a choice is the same whatever order equals have.
REDUCTIONS = {
    "amax": lambda x: x.amax(1),
    "argmax": lambda x: x.argmax(dim=1),
    "argmax kept": lambda x: x.argmax(1, keepdim=True),
    "max along": lambda x: x.max(1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "running sum": lambda x: x.cumsum(1),
    "sort down": lambda x: x.sort(dim=1, descending=True, stable=True),
    "sort up": lambda x: x.sort(dim=1),
    "sum": lambda x: x.sum(1),
    "sum of all": lambda x: x.sum(),
    "topk": lambda x: x.topk(3, dim=1),
}
DTYPES = (FLOAT32, BFLOAT16, FLOAT64)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("kind", KINDS)
@by_dtype
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_an_elementwise_op_agrees(op, dtype, kind):
    assert_equal(ELEMENTWISE[op], *inputs(kind, (dtype,)), tolerance=TOLERANCES[dtype] if op in ROUNDED else 0.0)


@pytest.mark.parametrize("kind", KINDS)
@by_dtype
@pytest.mark.parametrize("op", PAIRS)
def test_an_op_of_two_is_exact(op, dtype, kind):
    assert_equal(PAIRS[op], *inputs(kind, (dtype, dtype)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [INT64, INT32], ids=str)
@pytest.mark.parametrize("op", INTEGERS)
def test_an_integer_op_is_exact(op, dtype, kind):
    assert_equal(INTEGERS[op], *inputs(kind, (dtype, dtype)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", LOGIC)
def test_a_logical_op_is_exact(op, kind):
    assert_equal(LOGIC[op], *inputs(kind, (BOOL, BOOL)))


@pytest.mark.parametrize("kind", ["plain", "transposed"])
@pytest.mark.parametrize(
    ("op", "dtype"),
    # torch_npu sorts no float64 in a stable way.
    [(op, dtype) for op in REDUCTIONS for dtype in DTYPES if (op, dtype) != ("sort down", FLOAT64)],
)
def test_a_reduction_is_exact(op, dtype, kind):
    (values,) = inputs(kind, (dtype,))
    order = random_tensor("order", (6, 9), FLOAT64).argsort(1)
    # Whole numbers, so that sums are exact in any order.
    assert_equal(REDUCTIONS[op], values.copy_(order - 4))


def test_mixed_dtypes_are_promoted_alike():
    whole, small, wide = inputs("plain", (INT32, BFLOAT16, FLOAT32))
    assert_equal(lambda x, y: x * y, whole, wide)
    assert_equal(lambda x, y: x + y, small, wide)
    assert_equal(lambda x, y: (x > 5) * y, whole, wide)
    assert_equal(lambda x, y: x.copy_(y), wide, small)


@by_dtype
def test_matrix_products_agree(dtype):
    # The last bit may differ where the order of a sum does.
    tolerance = 4 * TOLERANCES[dtype]
    left, bias = random_tensor("left", (6, 9), dtype), random_tensor("bias", (5,), dtype)
    weight = random_tensor("weight", (5, 9), dtype)
    assert_equal(F.linear, left, weight, tolerance=tolerance)
    assert_equal(F.linear, left, weight, bias, tolerance=tolerance)
    assert_equal(F.linear, left[None], weight, tolerance=tolerance)
    assert_equal(lambda x, y, z: torch.addmm(z, x, y.t()), left, weight, bias, tolerance=tolerance)
    assert_equal(lambda x, y: x @ y.t(), left, weight, tolerance=tolerance)
    batch = random_tensor("batch", (2, 6, 9), dtype)
    assert_equal(lambda x: x @ x.transpose(1, 2), batch, tolerance=tolerance)


def _indexed() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    values, whole = random_tensor("values", (6, 9), FLOAT32), random_tensor("whole", (6, 9), INT64)
    rows, places = torch.tensor([4, 0, 3]), random_tensor("places", (6, 3), INT64, low=0)
    counts, marks = torch.zeros(6, 9, dtype=INT32), torch.zeros(6, 9, dtype=BOOL)
    new, mask = random_tensor("new", (3, 9), FLOAT32), random_tensor("mask", (6, 9), BOOL)
    return {
        "arange": (lambda x: torch.arange(7, -1, -1, device=x.device), (values,)),
        "arange from": (lambda x: torch.arange(-3, 0, device=x.device), (values,)),
        "embedding": (lambda x, y: F.embedding(y, x), (values, rows)),
        "embedding of none": (lambda x, y: F.embedding(y[:0], x), (values, rows)),
        "fill": (lambda x: x[1:3].fill_(7), (values,)),
        "full": (lambda x: torch.full_like(x, -1), (values,)),
        "gather": (lambda x, y: x.gather(1, y), (values, places)),
        "gather of integers": (lambda x, y: x.gather(1, y), (whole, places)),
        "index": (lambda x, y: x[y], (values, rows)),
        "index by two": (lambda x, y: x[y[:, None], y[None]], (whole, rows)),
        "index_add_": (lambda x, y: x.view(-1).index_add_(0, y, y.to(x.dtype)), (values, rows)),
        "index_copy_": (lambda x, y, z: x.index_copy_(0, y, z), (values, rows, new)),
        "index_copy_ in a column": (lambda x, y: x[:, 2].index_copy_(0, y, y), (whole, rows)),
        "index_fill_": (lambda x, y: x.view(-1).index_fill_(0, y, -torch.inf), (values, rows)),
        "index_fill_ of marks": (lambda x, y: x.view(-1).index_fill_(0, y, True), (marks, rows)),
        "index_select": (lambda x, y: x.index_select(0, y), (values, rows)),
        "index_select of columns": (lambda x, y: x[:, :4].index_select(0, y), (whole, rows)),
        "masked_fill_": (lambda x, y: x.masked_fill_(y, -torch.inf), (values, mask)),
        "masked_fill_ of integers": (lambda x, y: x.masked_fill_(y, 0), (whole, mask)),
        "ones": (lambda x: torch.ones_like(x, dtype=BOOL), (values,)),
        "scatter_ a mark": (lambda x, y: x.scatter_(1, y, True), (marks, places)),
        "scatter_add_": (lambda x, y: x.scatter_add_(1, y, torch.ones_like(y, dtype=INT32)), (counts, places)),
        "zero_": (lambda x: x[:, 2:4].zero_(), (values,)),
    }


INDEXED = _indexed()


@pytest.mark.parametrize("op", INDEXED)
def test_an_indexed_op_is_exact(op):
    compute, arguments = INDEXED[op]
    assert_equal(compute, *arguments)


@pytest.mark.parametrize("right", [True, False])
def test_a_search_is_exact(right):
    sums = random_tensor("sums", (6, 9), INT64).cumsum(1)
    targets = torch.stack((sums[:, 0], sums[:, 4], sums[:, 8], sums[:, 2] + 1, sums[:, 0] * 0), 1)
    assert_equal(lambda x, y: torch.searchsorted(x, y, right=right), sums, targets)


def test_64_bits_are_kept():
    # Sums above 2**53 show a kernel that goes through a float.
    weights = torch.full((2, 5), 2**60 + 1, dtype=INT64)
    assert_equal(lambda x: x.cumsum(1), weights)
    assert_equal(lambda x: x.sort(1, descending=True), weights + torch.arange(5))
    assert_equal(lambda x: x.topk(2, dim=1).values, weights + torch.arange(5))
    assert_equal(lambda x: torch.searchsorted(x.cumsum(1), x[:, :1] * 2 - 1), weights)


def test_a_product_with_float64_is_one_of_float64():
    # What the sampler relies on, because torch_npu converts to float32 where it is asked for float64.
    totals = torch.tensor([[2**52 + 1], [2**40 + 3]])
    uniforms = torch.tensor([[1 - 2**-53], [0.3]], dtype=FLOAT64)
    assert_equal(lambda x, y: (x * y).to(INT64), uniforms, totals)
    assert_equal(lambda x, y: (x * y).ceil().to(INT64), uniforms, totals)
    assert totals.to("npu").to(FLOAT64).dtype == FLOAT32


def test_a_stable_sort_of_float64_is_refused_by_torch_npu_itself():
    with pytest.raises(RuntimeError, match="Input data type should not be float64"):
        torch.zeros(3, dtype=FLOAT64).to("npu").sort(stable=True)
