"""The checklist for hardware runs to its end on the simulated NPU: it must not fail for reasons of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from driving import make_checkpoint

CHECKLIST = Path(__file__).parents[2] / "tools" / "ascend_checklist.py"


@pytest.mark.timeout(300)
def test_the_checklist_gives_a_report(tmp_path):
    model = make_checkpoint(tmp_path, "LlamaConfig", initializer_range=0.1)
    report = tmp_path / "report.json"
    finished = subprocess.run(
        [sys.executable, str(CHECKLIST), "--model", str(model), "--report", str(report)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = json.loads(report.read_text())
    assert [check["name"].split(":")[0].split(",")[0] for check in found["checks"]] == [
        "installation",
        "log-probabilities as on the CPU",
        "tokens do not depend on depth",
        "decode rates",
    ]
    assert found["environment"]["torch-npu"] == "2.13.0"
