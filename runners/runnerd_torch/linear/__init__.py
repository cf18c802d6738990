"""Projections with weights arranged for the device. Knows nothing of models, caches or steps."""

from runnerd_torch.linear.build import LinearKind, build_linear
from runnerd_torch.linear.interface import DenseLinear, Linear, LinearFactory
from runnerd_torch.linear.packed import PackedLinear

__all__ = ["DenseLinear", "Linear", "LinearFactory", "LinearKind", "PackedLinear", "build_linear"]
