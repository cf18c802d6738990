"""The benchmarks run from end to end and report every part. Nothing here looks at how fast anything was."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# Results go to a folder of the test's own, not beside those of real runs.
START = """
import importlib, pathlib, sys, common
common.RESULTS = pathlib.Path(sys.argv.pop(1))
importlib.import_module(sys.argv.pop(1)).main()
"""


def run_benchmark(name: str, results: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Give the JSON that was written and what was printed."""
    command = [sys.executable, "-c", START, str(results), name, *arguments]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (written,) = results.glob(f"{name}-*.json")
    return json.loads(written.read_text()), done.stdout


def test_overlap_reports_each_part_for_each_depth_and_batch(tmp_path: Path) -> None:
    arguments = ("--quick", "--skip-cpu", "--steps", "5", "--repetitions", "1", "--depths", "2", "--batches", "1", "3")
    result, printed = run_benchmark("overlap", tmp_path, *arguments)
    assert set(result["machine"]) == {"cpu", "cores", "load_average", "python"}
    assert set(result["idle"]["depths"]) == {"1", "2"}
    assert all(set(one["depths"]) == {"1", "2"} for one in result["tpot"].values())
    assert set(result["host"]) == {"1", "3"}
    for one in result["host"].values():
        phases = one["us"]
        assert all(phases[name] > 0 for name in ("drain", "schedule", "execute", "settle", "send"))
        assert phases["engine"] < phases["all"]
    assert "cpu" not in result
    assert [title in printed for title in ("Idle device", "TPOT, simulated", "Host cost")] == [True, True, True]


def test_frontend_reports_cost_for_each_pace_number_of_streams_and_server(tmp_path: Path) -> None:
    arguments = ("--streams", "2", "--tokens", "32", "--repetitions", "1", "--quick")
    result, printed = run_benchmark("frontend", tmp_path, *arguments)
    assert set(result["paces"]) == {"flat out", "50 tokens/s"}
    for results in result["paces"].values():
        assert set(results) == {"2"}
        for both in results.values():
            assert set(both) == {"runnerd", "bare grpc.aio"}
            assert both["bare grpc.aio"]["tokens_per_message"] == 1
            for measured in both.values():
                assert measured["messages_per_second"] > 0
                assert measured["late_ms_p99"] >= measured["late_ms_p50"] > 0
    assert printed.count("| streams |") == 2


@pytest.mark.slow
def test_batch_invariance_compares_each_data_type(tmp_path: Path) -> None:
    arguments = ("--batch", "3", "--tokens", "3", "--dtypes", "float32", "--runner-option", "num_threads=1")
    result, printed = run_benchmark("batch_invariance", tmp_path, *arguments)
    assert result["dtypes"]["float32"]["requests_with_equal_answers"] == 3
    assert result["dtypes"]["float32"]["tokens_compared"] == 9
    assert "3 of 3" in printed
