"""Whatever an engine process prints is read in bounded lines, at a bounded pace, as text."""

from __future__ import annotations

import io

import pytest

from runnerd_service.engine.output import MAX_LINE_BYTES, MAX_LINES_PER_SECOND, read_lines


def test_lines_come_without_their_ends() -> None:
    assert list(read_lines(io.BytesIO(b"one\r\ntwo\n\nlast"))) == ["one", "two", "", "last"]


def test_a_line_without_an_end_is_cut() -> None:
    lines = list(read_lines(io.BytesIO(b"x" * (10 * MAX_LINE_BYTES + 1))))
    assert [len(line) for line in lines] == [MAX_LINE_BYTES] * 10 + [1]


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        (b"\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        (b"50%\r100%", "50%\\x0d100%"),
        (b"\xff\xfe\x00rubbish", "\ufffd\ufffd\\x00rubbish"),
        ("a tab\tand 東京".encode(), "a tab\tand 東京"),
        ("\u202eoverride".encode(), "\\x202eoverride"),
    ],
)
def test_what_cannot_be_printed_is_made_visible(printed: bytes, line: str) -> None:
    assert list(read_lines(io.BytesIO(printed))) == [line]


def test_a_flood_waits_for_its_reader() -> None:
    now, slept = [0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += round(seconds * 1e9)

    flood = io.BytesIO(b"again\n" * (3 * MAX_LINES_PER_SECOND))
    assert len(list(read_lines(flood, clock_ns=lambda: now[0], sleep=sleep))) == 3 * MAX_LINES_PER_SECOND
    assert slept == [1.0] * 3


def test_who_prints_little_never_waits() -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("waited")

    ticks = iter(range(0, 10**15, 10**9))
    quiet = io.BytesIO(b"a line\n" * 5000)
    assert len(list(read_lines(quiet, clock_ns=lambda: next(ticks), sleep=sleep))) == 5000
