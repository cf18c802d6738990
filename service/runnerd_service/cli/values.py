"""Turns the texts of settings into values. Each function raises ValueError that says what was expected."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}
_MAX_MESSAGE_BYTES = 1 << 30
"""Protobuf ends at 2 GiB, and so do gRPC's own limits, which are above ours."""
_METADATA_KEY = re.compile(r"[0-9a-z_.-]+")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", re.IGNORECASE)


def text(value: str) -> str:
    """Take a text that is not empty."""
    if not value.strip():
        raise ValueError("a text that is not empty")
    return value


def boolean(value: str) -> bool:
    """Take true or false."""
    lowered = value.strip().lower()
    if lowered in ("true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off"):
        return False
    raise ValueError("true or false")


def count(least: int, most: int | None = None) -> Callable[[str], int]:
    """Take a whole number of at least ``least`` and, unless None, at most ``most``."""

    def parse(value: str) -> int:
        try:
            parsed = int(value)
        except ValueError:
            parsed = least - 1
        if parsed < least or (most is not None and parsed > most):
            raise ValueError(f"a whole number from {least}" + ("" if most is None else f" to {most}"))
        return parsed

    return parse


def integer(value: str) -> int:
    """Take a whole number of 32 bits."""
    try:
        parsed = int(value)
    except ValueError:
        parsed = 2**31
    if not -(2**31) <= parsed < 2**31:
        raise ValueError("a whole number of 32 bits")
    return parsed


def seconds(value: str) -> float:
    """Take a number of seconds, 0 or more."""
    parsed = _number(value)
    if not parsed >= 0 or math.isinf(parsed):
        raise ValueError("seconds, 0 or more")
    return parsed


def share(value: str) -> float:
    """Take a share above 0, up to 1."""
    parsed = _number(value)
    if not 0 < parsed <= 1:
        raise ValueError("a share above 0, up to 1")
    return parsed


def byte_size(value: str) -> int:
    """Take a number of bytes: 1073741824, 512MiB, 2GiB, 1.5GB."""
    match = _SIZE.fullmatch(value.strip())
    size = 0 if match is None else int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    if size < 1:
        raise ValueError("a number of bytes, such as 512MiB or 2GiB")
    return size


def message_size(value: str) -> int:
    """Take a number of bytes that a gRPC message can have."""
    try:
        size = byte_size(value)
    except ValueError:
        size = 0
    if not 1 <= size <= _MAX_MESSAGE_BYTES:
        raise ValueError("a number of bytes up to 1GiB, such as 16MiB")
    return size


def metadata_size(value: str) -> int:
    """Take a number of bytes that the metadata of a call may have; gRPC's own takes several hundred."""
    try:
        size = byte_size(value)
    except ValueError:
        size = 0
    if not 2 * 1024 <= size <= 1024 * 1024:
        raise ValueError("a number of bytes from 2KiB to 1MiB, such as 16KiB")
    return size


def one_of(*choices: str) -> Callable[[str], str]:
    """Take one of ``choices``, in any case."""

    def parse(value: str) -> str:
        if value.lower() not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return value.lower()

    return parse


def names(value: str) -> tuple[str, ...]:
    """Take names with commas between them."""
    found = tuple(one.strip() for one in value.split(","))
    if not all(found):
        raise ValueError("names with commas between them")
    return found


def metadata_key(value: str) -> str:
    """Take a key of gRPC metadata that holds text."""
    key = value.strip().lower()
    if not _METADATA_KEY.fullmatch(key) or key.startswith(("grpc-", ":")) or key.endswith("-bin"):
        raise ValueError("a metadata key of text, such as x-tenant")
    if key == "authorization":
        raise ValueError("another metadata key: authorization holds the token")
    return key


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan
