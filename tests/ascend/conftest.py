"""These tests run on the simulated CANN: ``make test-ascend``, or ``python -m ascend_sim pytest tests/ascend``."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the calls that were made to tests/ascend/golden"
    )


# What torch_npu says of itself, of memory layouts, and of operations it takes to the CPU.
_WARNINGS = ("ignore:Cannot create tensor with internal format", "ignore::UserWarning:torch_npu")


def pytest_configure(config: pytest.Config) -> None:
    # Tokens are compared in float32, which the simulation computes as a CPU does; the contract's tests take this away.
    os.environ["ASCEND_SIM_ALLOW_FP32"] = "1"
    for one in _WARNINGS:
        config.addinivalue_line("filterwarnings", one)
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError as error:
        raise pytest.UsageError(f"these tests need the simulated CANN, run `make test-ascend`: {error}") from error


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, list[str]], None]:
    """Give a function that compares the calls of :func:`ascend_sim.interpreter.recorded_calls` with a file's lines.

    ``--update-golden`` writes the file instead; the change is then seen in the diff.
    """

    def compare(name: str, calls: list[str]) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(f"{call}\n" for call in calls))
        else:
            assert path.read_text().splitlines() == calls

    return compare
