"""The help of `serve` shows the options of the runner that is named."""

from __future__ import annotations

import pytest

from runnerd_service.cli.main import main
from runnerd_sim.options import OPTIONS


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *arguments, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_the_options_of_the_named_runner_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(capsys, "--runner", "sim")
    assert "--max-num-seqs" in shown
    for option in OPTIONS:
        assert f"{option.name}={option.type.__name__}" in shown
        assert option.help in shown


def test_without_a_runner_the_settings_alone_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "options of runner" not in help_of(capsys)


def test_a_runner_that_is_not_there_is_told_below_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no runner called 'simm' is installed" in help_of(capsys, "--runner", "simm")
