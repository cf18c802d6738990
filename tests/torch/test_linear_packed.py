"""Packed projections equal torch's, and a row's bits depend on nothing but the row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerd_torch.linear import DenseLinear, PackedLinear, build_linear
from runnerd_torch.linear.packed import LinearKernel


@pytest.fixture(scope="module")
def kernel() -> LinearKernel:
    return LinearKernel()


def random_case(seed: int, num_rows: int, num_inputs: int, num_outputs: int, *, bias: bool):
    numbers = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_rows, num_inputs, generator=numbers)
    weight = torch.randn(num_outputs, num_inputs, generator=numbers)
    return inputs, weight, torch.randn(num_outputs, generator=numbers) if bias else None


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 99),
    num_rows=st.integers(0, 120),
    num_inputs=st.integers(1, 70),
    num_outputs=st.integers(1, 100),
    bias=st.booleans(),
)
def test_a_packed_projection_equals_torchs(kernel, seed, num_rows, num_inputs, num_outputs, bias):
    inputs, weight, bias_values = random_case(seed, num_rows, num_inputs, num_outputs, bias=bias)
    residual = torch.randn(num_rows, num_outputs)
    packed, dense = PackedLinear(kernel, weight, bias_values), DenseLinear(weight, bias_values)
    torch.testing.assert_close(packed(inputs), dense(inputs), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(
        packed.added_to(residual, inputs), dense.added_to(residual, inputs), atol=1e-4, rtol=1e-5
    )


def test_rows_of_the_weight_are_found_in_its_panels(kernel):
    _, weight, _ = random_case(1, 1, 30, 37, bias=False)
    indices = torch.tensor([36, 0, 15, 16, 36, 31])
    assert torch.equal(PackedLinear(kernel, weight, None).rows(indices), weight[indices])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("share_threads", [True, False])
def test_a_row_is_bitwise_the_same_in_every_batch(num_threads, share_threads):
    inputs, weight, bias = random_case(2, 110, 576, 1000, bias=True)
    packed = PackedLinear(LinearKernel(share_threads=share_threads), weight, bias)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = torch.cat([packed(row[None]) for row in inputs])
    torch.set_num_threads(num_threads)
    try:
        for begin, end in ((0, 110), (3, 8), (50, 73), (90, 108)):
            assert torch.equal(packed(inputs[begin:end]), alone[begin:end])
    finally:
        torch.set_num_threads(before)


def test_inputs_may_have_strides(kernel):
    inputs, weight, _ = random_case(3, 8, 20, 24, bias=False)
    wide = torch.randn(8, 60)
    wide[:, 20:40] = inputs
    packed = PackedLinear(kernel, weight, None)
    assert torch.equal(packed(wide[:, 20:40]), packed(inputs))
    assert torch.equal(packed(inputs.t().contiguous().t()), packed(inputs))


def test_shapes_and_dtypes_that_do_not_fit_are_refused(kernel):
    inputs, weight, _ = random_case(4, 2, 20, 24, bias=False)
    packed = PackedLinear(kernel, weight, None)
    with pytest.raises(ValueError, match="expected float32"):
        packed(inputs[:, :19])
    with pytest.raises(ValueError, match="expected float32"):
        packed(inputs.double())
    with pytest.raises(ValueError, match="residual"):
        packed.added_to(torch.zeros(1, 24), inputs)


def test_only_float32_is_packed():
    make = build_linear("native")
    weight = torch.randn(4, 4)
    assert isinstance(make(weight, None), PackedLinear)
    assert isinstance(make(weight.bfloat16(), None), DenseLinear)
    assert isinstance(build_linear("torch")(weight, None), DenseLinear)


def test_without_a_compiler_auto_falls_back_and_native_is_refused(monkeypatch, tmp_path):
    from runnerd_spi import RunnerUnavailable

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build_linear("auto") is DenseLinear
    with pytest.raises(RunnerUnavailable, match="choose linear torch"):
        build_linear("native")
