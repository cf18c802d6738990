"""The kernels of the simulated libopapi: what each aclnn call takes and the function that computes it.

A kernel is a function on CPU tensors that alias the memory of the simulated device. It writes its outputs in place::

    @aclnn("RmsNorm", "tensor x, tensor gamma, double epsilon, tensor y, tensor rstd")
    def rms_norm(x, gamma, epsilon, y, rstd): ...

The signature is that of the C function ``aclnnRmsNormGetWorkspaceSize`` without its last two parameters. Kinds:

========== =================================== ==========================================================
kind       C type                              what the kernel gets
========== =================================== ==========================================================
``tensor`` ``const aclTensor*``                ``torch.Tensor``, or None for a null pointer
``tensors`` ``const aclTensorList*``           list of ``torch.Tensor``, or None
``scalar`` ``const aclScalar*``                ``int``, ``float``, ``bool`` or ``complex``, or None
``ints``   ``const aclIntArray*``              list of ``int``, or None
``floats`` ``const aclFloatArray*``            list of ``float``, or None
``bools``  ``const aclBoolArray*``             list of ``bool``, or None
``double`` ``double``                          ``float``
``float``  ``float``                           ``float``
``int64``  ``int64_t``                         ``int``
``uint64`` ``uint64_t``                        ``int``
``int32``  ``int32_t``                         ``int``
``int8``   ``int8_t``                          ``int``
``bool``   ``bool``                            ``bool``
``string`` ``const char*``                     ``str``, or None for a null pointer
========== =================================== ==========================================================

A check runs on the host, when the call is made, with the same arguments. It sees shapes and dtypes; it must not read
the elements, which an earlier kernel may still have to write. What it raises is what CANN would refuse::

    @check("RmsNorm")
    def check_rms_norm(x, gamma, epsilon, y, rstd): ...  # raises ContractError
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

KINDS = (
    "tensor",
    "tensors",
    "scalar",
    "ints",
    "floats",
    "bools",
    "double",
    "float",
    "int64",
    "uint64",
    "int32",
    "int8",
    "bool",
    "string",
)


class ContractError(ValueError):
    """What the call's documentation forbids; becomes the message of aclGetRecentErrMsg."""


@dataclass
class Kernel:
    """One aclnn call: the kinds and names of its parameters, its function and its checks."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    function: Callable[..., None]
    checks: list[Callable[..., None]] = field(default_factory=list)


KERNELS: dict[str, Kernel] = {}


def aclnn(name: str, signature: str) -> Callable[[F], F]:
    """Register the decorated function as the kernel of ``aclnn<name>``; several names may share one function."""
    parameters = tuple(_parameter(part) for part in signature.split(","))

    def register(function: F) -> F:
        if name in KERNELS:
            raise ValueError(f"aclnn{name} has two kernels")
        KERNELS[name] = Kernel(name, parameters, function)
        return function

    return register


def check(*names: str) -> Callable[[F], F]:
    """Register the decorated function as a check of these calls; their kernels must be registered before."""

    def register(function: F) -> F:
        for name in names:
            KERNELS[name].checks.append(function)
        return function

    return register


def _parameter(text: str) -> tuple[str, str]:
    kind, name = text.split()
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of parameter; there are {', '.join(KINDS)}")
    return kind, name
