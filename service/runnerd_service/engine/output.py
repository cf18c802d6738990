"""What the engine process prints, read so that it can do no harm: bounded lines, at a bounded pace, nothing but text.

A runner may print anything: megabytes without a line's end, terminal control codes, the same line for ever. It knows
nothing of processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import IO

MAX_LINE_BYTES = 2000
"""A longer line is cut into several."""
MAX_LINES_PER_SECOND = 1000
"""Whoever prints more waits for the reader: it is the engine that becomes slow, not who reads."""

_SECOND_NS = 1_000_000_000


def read_lines(
    stream: IO[bytes],
    *,
    clock_ns: Callable[[], int] = time.monotonic_ns,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """Give the lines of a stream to its end, without their ends, and with anything unprintable made visible."""
    begin, count = clock_ns(), 0
    while data := stream.readline(MAX_LINE_BYTES):
        yield _printable(data.decode(errors="replace").rstrip())
        count += 1
        if count < MAX_LINES_PER_SECOND:
            continue
        left = begin + _SECOND_NS - clock_ns()
        if left > 0:
            sleep(left / _SECOND_NS)
        begin, count = clock_ns(), 0


def _printable(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(one if one.isprintable() or one == "\t" else f"\\x{ord(one):02x}" for one in line)
