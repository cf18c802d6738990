"""A short ``make soak``: nothing is lost, wrong or left under users who misbehave and an engine that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.timeout(400)
def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    arguments = {"seconds": 8, "streams": 32, "kills": 3, "requests": 20, "max-tokens": 40, "step-seconds": 0.02}
    command = [sys.executable, "soak.py", "--results", str(tmp_path)]
    command += [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=350, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = tmp_path.glob("soak-*.json")
    result = json.loads(written.read_text())
    assert result["problems"] == []
    assert result["restarts"] == result["kills"] + 1 == 4
    assert result["calls"]["read"]["whole"] > 0
    assert result["tokens_compared"] > 0
