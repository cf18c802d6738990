"""A runner that hangs, crashes or chatters harms its own process only, and is reported for what it did."""

from __future__ import annotations

from pathlib import Path

import pytest

from runnerd_spi.testing import IsolatedKit, Job, Unusable, broken_text
from runnerd_spi.testing.rules import BY_ID


def test_a_runner_that_hangs_is_reported_with_where_it_hangs() -> None:
    with IsolatedKit(Job("mutants:HANGS", limit=5.0)) as kit:
        result = kit.check(BY_ID["E2"])
        assert result.status == "broken"
        assert "hangs: no end after 5 seconds" in result.message
        assert "in execute_model" in result.message
        assert kit.check(BY_ID["L3"]).status == "holds"


def test_a_runner_that_ends_the_process_is_reported_with_its_last_words() -> None:
    job = Job("mutants:CRASHES")
    with IsolatedKit(job) as kit:
        result = kit.check(BY_ID["E2"])
    assert "ended with exit code 70" in result.message
    assert "reference: the driver is gone" in result.message
    assert "runnerd check-runner mutants:CRASHES --rule E2" in broken_text(result, job.command)


def test_what_a_runner_prints_is_not_taken_for_a_result() -> None:
    with IsolatedKit(Job("mutants:CHATTERS")) as kit:
        assert [kit.check(BY_ID[one]).status for one in ("L1", "E2", "E3")] == ["holds"] * 3


def test_a_module_is_looked_for_where_python_looks_before_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, error in (("first", "the one on the path"), ("here", "the one in the working directory")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "twice.py").write_text(f"raise ImportError({error!r})")
    (tmp_path / "here/only_here.py").write_text("raise ImportError('it is found')")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    with IsolatedKit(Job("twice:PLUGIN")) as kit, pytest.raises(Unusable, match="the one on the path"):
        kit.check(BY_ID["L1"])
    with IsolatedKit(Job("only_here:PLUGIN")) as kit, pytest.raises(Unusable, match="it is found"):
        kit.check(BY_ID["L1"])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module:PLUGIN", "no_such_module"),
        ("mutants:MUTANTS", "is a dict, expected a runnerd_spi.RunnerPlugin"),
        ("mutants:DOES_NOT_COME_UP", "no such device"),
        ("simm", "no runner called 'simm' is installed"),
    ],
)
def test_a_runner_that_cannot_be_checked_is_told_apart_from_a_broken_one(target: str, message: str) -> None:
    with IsolatedKit(Job(target)) as kit, pytest.raises(Unusable, match=message):
        kit.check(BY_ID["L1"])
