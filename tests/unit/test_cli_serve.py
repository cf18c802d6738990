"""What ``runnerd serve`` does before and beside serving: the demo model, progress, its ready line."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from runnerd_service.cli import serve
from runnerd_service.cli.progress import ProgressReporter
from runnerd_service.cli.serve import ready_line, with_demo_model
from runnerd_service.config import EngineConfig, ServerConfig
from runnerd_service.errors import ConfigurationError
from runnerd_service.rpc.daemon import Ready


def test_without_a_model_the_demo_model_is_served_under_its_name() -> None:
    config = with_demo_model(ServerConfig())
    assert config.engine.model is not None
    assert config.engine.model.endswith(".gguf")
    assert config.served_model_name == "SmolLM2-135M-Instruct"
    assert with_demo_model(replace(ServerConfig(), served_model_name="mine")).served_model_name == "mine"


def test_without_a_model_and_the_demo_model_the_remedy_is_named(monkeypatch) -> None:
    monkeypatch.setattr(serve, "DEMO_PACKAGE", "no_such_package")
    with pytest.raises(ConfigurationError, match=r"pip install 'runnerd\[demo\]'"):
        with_demo_model(ServerConfig())


def test_a_named_model_and_a_runner_without_models_are_left_alone() -> None:
    named = ServerConfig(engine=EngineConfig(model="somewhere"))
    assert with_demo_model(named) is named
    sim = ServerConfig(engine=EngineConfig(runner="sim"))
    assert with_demo_model(sim) is sim


def test_progress_goes_to_the_log_in_quarters(caplog) -> None:
    with caplog.at_level(logging.INFO), ProgressReporter(bars=False) as progress:
        for done in range(101):
            progress("loading weights", done, 100)
        progress("warming up", 0, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "loading weights: 0 of 100",
        "loading weights: 25 of 100",
        "loading weights: 50 of 100",
        "loading weights: 75 of 100",
        "loading weights: 100 of 100",
        "warming up: 0 of 1",
    ]


def test_progress_draws_a_bar_for_each_stage_on_a_terminal(capsys) -> None:
    with ProgressReporter(bars=True) as progress:
        progress("loading weights", 0, 2)
        progress("loading weights", 2, 2)
        progress("warming up", 1, 1)
    bars = capsys.readouterr().err
    assert "loading weights: 100%" in bars
    assert "warming up: 100%" in bars


def test_the_ready_line_names_model_addresses_device_and_mode() -> None:
    ready = Ready("toy", ("127.0.0.1:5", "unix:/x"), "cpu", "cpu (2 threads)", 2)
    assert ready_line(ready).endswith("serving toy on 127.0.0.1:5 and unix:/x (cpu (2 threads), 2 steps in flight)")
    synchronous = replace(ready, runner="cuda", device="NVIDIA H100", max_in_flight=1)
    assert ready_line(synchronous).endswith("(cuda, NVIDIA H100, synchronous)")
