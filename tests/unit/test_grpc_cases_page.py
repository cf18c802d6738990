"""The page of failure cases names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 14, 17, 18, 21, 23, 25, 26, 28, 29, 30, 31, 33, 35, 36, 37, 38, 40)


def rows() -> list[tuple[str, str, list[str]]]:
    """Give case, file and tests."""
    found = []
    for line in (ROOT / "docs" / "grpc-cases.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| G"):
            case, _, file, tests = (cell.strip() for cell in line.strip("|").split("|"))
            found.append((case, file.strip("`"), re.findall(r"`(\w+)`", tests)))
    return found


def test_each_case_is_in_the_page() -> None:
    assert list(dict.fromkeys(case for case, _, _ in rows())) == [f"G{number}" for number in CASES]


def test_each_test_that_is_named_exists() -> None:
    for case, file, tests in rows():
        text = (ROOT / "tests" / "e2e" / file).read_text(encoding="utf-8")
        assert tests, case
        assert [name for name in tests if f"def {name}(" not in text] == [], case
