"""Runs the kernels. Imported by ``libopapi.so`` itself, in whatever process uses it."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import ascend_sim.contract  # noqa: F401 - registers the kernels and their checks
from ascend_sim.registry import KERNELS, ContractError, Kernel

_NULL, _TENSOR, _INTEGER, _DOUBLE, _SCALAR, _INTEGERS, _FLOATS, _TENSORS, _STRING = range(9)
_DTYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    9: torch.int64,
    11: torch.float64,
    12: torch.bool,
    27: torch.bfloat16,
}
_ACL_DTYPE_OF_INTEGER = frozenset(_DTYPES) - {0, 1, 11, 27}

MakeTensor = Callable[[int, torch.dtype, int, list[int], list[int]], torch.Tensor]


def dtype_of(acl_dtype: int) -> torch.dtype:
    """Give torch's name of an ``aclDataType``; kernels get those as numbers."""
    return _DTYPES[acl_dtype]


def _view(pointer: int, dtype: torch.dtype, offset: int, sizes: list[int], strides: list[int]) -> torch.Tensor:
    if 0 in sizes:
        return torch.empty(sizes, dtype=dtype)
    extent = offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = (ctypes.c_char * (extent * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides, offset)


def _meta(_: int, dtype: torch.dtype, offset: int, sizes: list[int], strides: list[int]) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")


def _unpack(words: tuple[int, ...], make_tensor: MakeTensor) -> list[Any]:
    values: list[Any] = []
    at = 0
    while at < len(words):
        value, at = _unpack_one(words, at, make_tensor)
        values.append(value)
    return values


def _unpack_one(words: tuple[int, ...], at: int, make_tensor: MakeTensor) -> tuple[Any, int]:
    kind = words[at]
    at += 1
    if kind == _NULL:
        return None, at
    if kind == _TENSOR:
        pointer, dtype, offset, rank = words[at : at + 4]
        at += 4
        sizes, strides = list(words[at : at + rank]), list(words[at + rank : at + 2 * rank])
        return make_tensor(pointer, _DTYPES[dtype], offset, sizes, strides), at + 2 * rank
    if kind == _INTEGER:
        return words[at], at + 1
    if kind == _DOUBLE:
        return _double(words[at]), at + 1
    if kind == _SCALAR:
        return _number(words[at], words[at + 1]), at + 2
    count = words[at]
    at += 1
    if kind == _INTEGERS:
        return list(words[at : at + count]), at + count
    if kind == _FLOATS:
        return [_double(word) for word in words[at : at + count]], at + count
    if kind == _TENSORS:
        items = []
        for _ in range(count):
            item, at = _unpack_one(words, at, make_tensor)
            items.append(item)
        return items, at
    assert kind == _STRING
    num_words = -(-count // 8)
    return struct.pack(f"{num_words}q", *words[at : at + num_words])[:count].decode(), at + num_words


def _double(bits: int) -> float:
    (value,) = struct.unpack("d", struct.pack("q", bits))
    return float(value)


def _number(acl_dtype: int, bits: int) -> float | int | bool:
    if acl_dtype == 12:
        return bool(bits & 1)
    raw = struct.pack("q", bits)
    dtype = _DTYPES[acl_dtype]
    value = torch.frombuffer(bytearray(raw[: dtype.itemsize]), dtype=dtype).item()
    return int(value) if acl_dtype in _ACL_DTYPE_OF_INTEGER else float(value)


class _Interpreter:
    def __init__(self) -> None:
        self._kernels = sorted(KERNELS.values(), key=lambda one: one.name)
        self._thread = threading.local()
        self._log_path = os.environ.get("ASCEND_SIM_LOG")
        self._fail_name, _, count = os.environ.get("ASCEND_SIM_FAIL", "").removeprefix("aclnn").partition(":")
        self._fail_at = int(count or 0)
        self._calls: Counter[str] = Counter()
        # Calls repeat: the allocator gives the same memory again, and a decode step asks for the same shapes.
        self._arguments = lru_cache(maxsize=8192)(lambda packed: _unpack(_words(packed), _view))
        self.recordings: list[list[str]] = []

    def check(self, op: int, packed: bytes) -> bytes | None:
        """Log a call and check its contract; give what is wrong, or None."""
        one = self._kernels[op]
        if not (self._log_path or self.recordings or one.checks):
            return None
        arguments = _unpack(_words(packed), _meta)
        if self._log_path or self.recordings:
            self._log(one, arguments)
        try:
            for check in one.checks:
                check(*arguments)
        except ContractError as error:
            return f"aclnn{one.name}: {error}".encode()
        return None

    def run(self, op: int, packed: bytes) -> int:
        """Run a kernel; give 0, or 1 if it failed."""
        one = self._kernels[op]
        if not getattr(self._thread, "is_ready", False):
            torch.set_num_threads(1)
            torch.set_grad_enabled(False)
            self._thread.is_ready = True
        if one.name == self._fail_name:
            self._calls[one.name] += 1
            if self._calls[one.name] == self._fail_at:
                return 1
        try:
            one.function(*self._arguments(packed))
        except Exception:  # noqa: BLE001 - whatever a kernel raises is a failure of the device
            print(f"simulated kernel of aclnn{one.name} failed:", file=sys.stderr)
            traceback.print_exc()
            return 1
        return 0

    def _log(self, kernel: Kernel, arguments: list[Any]) -> None:
        named = zip(kernel.parameters, arguments, strict=True)
        line = f"aclnn{kernel.name} " + " ".join(f"{name}={describe(value)}" for (_, name), value in named)
        for recording in self.recordings:
            recording.append(line)
        if self._log_path:
            with Path(self._log_path).open("a") as file:
                file.write(f"{line}\n")


def describe(value: Any) -> str:
    """Give an argument as the log shows it."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(describe, value))}]"
    if value is None or isinstance(value, (int, float, str)):
        return str(value)
    shape = ",".join(map(str, value.shape))
    strides = "" if value.is_contiguous() else f" strides {','.join(map(str, value.stride()))}"
    return f"{str(value.dtype).removeprefix('torch.')}({shape}{strides})"


_CHECK = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
_RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)


def _words(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"{len(packed) // 8}q", packed)


def _install(interpreter: _Interpreter) -> tuple[object, ...]:
    wrong: list[ctypes.Array[ctypes.c_char]] = []

    def check(op: int, pointer: int, count: int) -> int:
        found = interpreter.check(op, ctypes.string_at(pointer, 8 * count))
        if found is None:
            return 0
        wrong[:] = [ctypes.create_string_buffer(found)]
        return ctypes.addressof(wrong[0])

    def run(op: int, pointer: int, count: int) -> int:
        return interpreter.run(op, ctypes.string_at(pointer, 8 * count))

    callbacks = _CHECK(check), _RUN(run)
    ctypes.CDLL("libopapi.so").ascend_sim_register(*callbacks)
    return callbacks


_INTERPRETER = _Interpreter()
_CALLBACKS = _install(_INTERPRETER)
"""Held for as long as the process lives: the libraries call them."""


@contextmanager
def recorded_calls() -> Iterator[list[str]]:
    """Give the list of the aclnn calls that this process makes in the block, as the log shows them.

    Both ends wait for the device, so that no call is still in torch_npu's own queue.
    """
    calls: list[str] = []
    torch.accelerator.synchronize()
    _INTERPRETER.recordings.append(calls)
    try:
        yield calls
        torch.accelerator.synchronize()
    finally:
        _INTERPRETER.recordings.remove(calls)
