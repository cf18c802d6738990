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


def run_benchmark(name: str, results: Path, *arguments: str, timeout: float = 100) -> tuple[dict[str, Any], str]:
    """Give the JSON that was written and what was printed."""
    command = [sys.executable, "-c", START, str(results), name, *arguments]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=timeout, check=False)
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
    arguments = ("--streams", "2", "--seconds", "0.3", "--repetitions", "1")
    result, printed = run_benchmark("frontend", tmp_path, *arguments)
    assert set(result["paces"]) == {"flat out", "50 tokens/s"}
    for results in result["paces"].values():
        assert set(results) == {"2"}
        for both in results.values():
            assert set(both) == {"runnerd", "bare grpc.aio"}
            assert both["bare grpc.aio"]["tokens_per_message"] == 1
            for measured in both.values():
                assert measured["messages_per_second"] > 0
                assert measured["front_cpu_us_per_message"] > 0
                assert measured["late_ms_p99"] >= measured["late_ms_p50"] > 0
    assert printed.count("| streams |") == 2


def test_accuracy_compares_each_variant_with_float32(tmp_path: Path) -> None:
    arguments = ["--serve-argument=--runner", "--serve-argument=sim", "--pieces=2", "--piece-len=16", "--prompt-len=4"]
    arguments += ["--output-len=4", "--variant", "same=--dtype auto"]
    arguments += ["--variant", "other=--dtype auto --runner-option eos_bias=9"]
    result, printed = run_benchmark("accuracy", tmp_path, *arguments)
    reference, same, other = (result["variants"][name] for name in ("float32", "same", "other"))
    assert reference["tokens"] == 2 * 15
    assert reference["perplexity"] == same["perplexity"] != other["perplexity"]
    assert same["agreement_percent"] == 100 > other["agreement_percent"]
    assert (same["equal_continuations"], same["mean_tokens_before_difference"]) == (2, 4)
    assert other["equal_continuations"] == 0
    assert printed.count("2 of 2") == 2


@pytest.mark.slow
def test_cpu_compares_variants_of_runnerd_with_a_peer_and_draws_them(tmp_path: Path) -> None:
    arguments = ["--engines", "transformers", "llamacpp", "--peers", str(tmp_path / "none"), "--threads", "1"]
    arguments += ["--weights", str(tmp_path / "weights"), "--rounds", "1", "--repetitions", "1"]
    result, printed = run_benchmark("cpu", tmp_path, *arguments, "--workloads", "1 x 128/128", timeout=600)
    (model,) = result["models"].values()
    assert model["weights"] == {"runnerd-bf16": "bf16", "transformers": "bf16"}
    work = model["workloads"]["1 x 128/128"]
    assert all(one["output_tokens_per_second"] > 0 for one in work["engines"].values())
    assert work["times_as_fast"]["runnerd-bf16"]["transformers"] > 0
    assert "drawn to" in printed
    (chart,) = tmp_path.glob("cpu-*.png")
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_serving_takes_turns_with_transformers(tmp_path: Path) -> None:
    arguments = ("--workloads", "1 x 128/128", "--repetitions", "1", "--threads", "1", "--dtype", "bfloat16")
    result, printed = run_benchmark("serving", tmp_path, *arguments, timeout=600)
    assert result["workloads"]["1 x 128/128"]["ratio"]["median"] > 0
    assert printed.count("1 x 128/128") >= 3


@pytest.mark.slow
def test_batch_invariance_compares_each_data_type(tmp_path: Path) -> None:
    arguments = ("--batch", "3", "--tokens", "3", "--dtypes", "float32", "--runner-option", "num_threads=1")
    result, printed = run_benchmark("batch_invariance", tmp_path, *arguments)
    assert result["dtypes"]["float32"]["requests_with_equal_answers"] == 3
    assert result["dtypes"]["float32"]["tokens_compared"] == 9
    assert "3 of 3" in printed
