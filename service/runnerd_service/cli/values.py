"""Turns the texts of settings into values. Each function raises ValueError that says what was expected."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

_T = TypeVar("_T")

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}
MAX_COUNT = 2**31 - 1
"""What clients are told travels as 32 bits, and so do positions and lengths in the runners."""
_MAX_BYTES = 2**63 - 1
_LEAST_SECONDS, _MOST_SECONDS = 1e-6, 1e9
"""Below, a time would be rounded to 0, which often means "no limit"; above, the timers end."""
_MAX_MESSAGE_BYTES = 1 << 30
"""Protobuf ends at 2 GiB, and so do gRPC's own limits, which are above ours."""
_METADATA_KEY = re.compile(r"[0-9a-z_.-]+")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", re.IGNORECASE)


def argument(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Make argparse show what ``parse`` expected."""

    def convert(value: str) -> _T:
        try:
            return parse(value)
        except ValueError as error:
            raise ArgumentTypeError(f"expected {error}, got {value!r}") from error

    return convert


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


def count(least: int, most: int = MAX_COUNT) -> Callable[[str], int]:
    """Take a whole number of at least ``least`` and at most ``most``."""

    def parse(value: str) -> int:
        try:
            parsed = int(value)
        except ValueError:
            parsed = least - 1
        if not least <= parsed <= most:
            raise ValueError(f"a whole number from {least} to {most}")
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


def positive_seconds(value: str) -> float:
    """Take a number of seconds above 0 that the timers can wait for."""
    parsed = _number(value)
    if not _LEAST_SECONDS <= parsed <= _MOST_SECONDS:
        raise ValueError(f"seconds from {_LEAST_SECONDS:f} to {_MOST_SECONDS:.0f}")
    return parsed


def seconds(value: str) -> float:
    """Take a number of seconds: 0, or one that the timers can tell from it and can wait for."""
    parsed = _number(value)
    if parsed != 0 and not _LEAST_SECONDS <= parsed <= _MOST_SECONDS:
        raise ValueError(f"seconds, 0 or from {_LEAST_SECONDS:f} to {_MOST_SECONDS:.0f}")
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
    number = 0.0 if match is None else float(match[1]) * _UNITS[(match[2] or "").lower()]
    if match is None or not 1 <= number < _MAX_BYTES:
        raise ValueError("a number of bytes below 2**63, such as 512MiB or 2GiB")
    return int(number)


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


def url(value: str) -> str:
    """Take the URL of a collector: with a scheme and a host."""
    try:
        parts = urlsplit(value.strip())
        _ = parts.port  # raises where it is none
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a URL, such as http://127.0.0.1:4317")
    return value.strip()


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
