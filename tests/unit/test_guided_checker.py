"""Guides are compiled in processes of their own: killed when they take too long, replaced when they die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from runnerd_service.guided.checker import NUM_PROCESSES, GuideChecker
from runnerd_service.guided.guide import Guide, GuideError, Vocabulary

BYTES = Vocabulary((*(bytes((one,)) for one in range(256)), b"<eos>"), (256,))
LARGE = Guide("choice", tuple(f"choice {number}" for number in range(9_000)))

Checkers = Callable[[float], GuideChecker]


@pytest.fixture
def checker() -> Iterator[Checkers]:
    """Makes checkers with a time-out, and closes them."""
    made: list[GuideChecker] = []

    def make(timeout: float) -> GuideChecker:
        made.append(GuideChecker(BYTES, timeout, cache_size=2))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert children() == []


def children() -> list[psutil.Process]:
    return [
        child for child in psutil.Process().children() if "runnerd_service.guided.process" in " ".join(child.cmdline())
    ]


def test_a_guide_that_takes_too_long_is_given_up_with_its_process(checker: Checkers) -> None:
    one = checker(0.0001)
    for _ in range(2):
        with pytest.raises(GuideError, match=r"took more than 0\.0001 seconds"):
            one.check(LARGE)
    assert children() == []


def test_a_process_that_somebody_killed_is_replaced(checker: Checkers) -> None:
    one = checker(60.0)
    assert one.check(Guide("regex", ("a",)))
    [process] = children()
    process.kill()
    process.wait(60)
    assert one.check(Guide("regex", ("b",)))
    [other] = children()
    assert other.pid != process.pid


def test_without_a_time_out_a_guide_may_take_any_time(checker: Checkers) -> None:
    assert checker(0.0).check(LARGE)


def test_verdicts_are_kept_good_and_bad(checker: Checkers) -> None:
    one = checker(60.0)
    good, bad = Guide("regex", ("a",)), Guide("regex", ("(",))
    grammar = one.check(good)
    with pytest.raises(GuideError, match="unclosed group"):
        one.check(bad)
    one.close()
    assert one.check(good) == grammar
    with pytest.raises(GuideError, match="unclosed group"):
        one.check(bad)
    assert children() == []


def test_many_threads_share_few_processes(checker: Checkers) -> None:
    one = checker(60.0)
    guides = [Guide("regex", (f"a{{{number}}}",)) for number in range(1, 13)]
    with ThreadPoolExecutor(6) as threads:
        grammars = list(threads.map(one.check, guides))
    assert len(set(grammars)) == len(guides)
    assert len(children()) <= NUM_PROCESSES
