"""Stop strings found in pieces against a plain search of the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd_service.frontend.stop import StopChecker, StopMatch, StopStrings

LETTERS = st.text(alphabet="ab🙂", max_size=40)
STOPS = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=5), min_size=1, max_size=4)


def naive_match(text: str, stops: Sequence[str]) -> StopMatch | None:
    """The stop string that is complete first; of those complete at once, the longest."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    end, _, stop = min(found)
    return StopMatch(stop, end - len(stop), end)


def naive_safe(text: str, stops: Sequence[str]) -> int:
    """Where the longest end of ``text`` begins that is the beginning of a stop string."""
    return next(at for at in range(len(text) + 1) if any(stop.startswith(text[at:]) for stop in stops))


@given(text=LETTERS, stops=STOPS, size=st.integers(1, 7))
def test_match_in_pieces_is_the_match_in_the_whole(text: str, stops: list[str], size: int) -> None:
    checker = StopChecker(StopStrings(stops))
    match = None
    for at in range(0, len(text), size):
        match = checker.push(text[at : at + size])
        if match is not None:
            break

    assert match == naive_match(text, stops)


@given(text=LETTERS, stops=STOPS)
def test_exactly_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    checker = StopChecker(StopStrings(stops))
    seen = ""
    for character in text:
        seen += character
        if checker.push(character) is not None:
            return
        assert checker.num_safe == naive_safe(seen, stops)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("xxabcd", ["abcd", "bc"], StopMatch("bc", 3, 5)),
        ("xxabcd", ["cd", "abcd"], StopMatch("abcd", 2, 6)),
        ("aaab", ["aab"], StopMatch("aab", 1, 4)),
        ("a\nb", ["\n"], StopMatch("\n", 1, 2)),
        ("none", ["x"], None),
    ],
)
def test_stop_string_that_is_complete_first_wins(text: str, stops: list[str], expected: StopMatch | None) -> None:
    assert StopChecker(StopStrings(stops)).push(text) == expected


def test_text_without_a_first_character_is_not_held_back() -> None:
    checker = StopChecker(StopStrings(["###", "STOP"]))

    assert checker.push("a long text without any of them") is None
    assert checker.num_safe == 31
