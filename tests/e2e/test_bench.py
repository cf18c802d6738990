"""``runnerd bench`` against a real daemon: what it counts, writes and refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from runnerd_client import Client
from runnerd_service.cli.main import main

STEP_SECONDS = 0.002


@pytest.fixture(scope="module")
def address(module_daemon) -> str:
    return module_daemon("--runner-option", f"step_seconds={STEP_SECONDS}", "--max-num-seqs", "48").wait_until_ready()


@pytest.fixture
def bench(address, tmp_path, capsys):
    """Runs the command; gives exit code, result, output and errors."""

    def run(*arguments: str) -> tuple[int, dict | None, str, str]:
        results = tmp_path / "results"
        code = main(["bench", "--address", address, "--save-detailed", "--result-dir", str(results), *arguments])
        written = sorted(results.glob("*.json"))
        captured = capsys.readouterr()
        return code, json.loads(written[-1].read_text()) if written else None, captured.out, captured.err

    return run


def test_the_published_form_counts_every_token(bench, address, tmp_path) -> None:
    with Client(address) as client:
        before = client.load()
        form = ["--random-input-len", "64", "--random-output-len", "16", "--num-prompts", "48"]
        load = ["--max-concurrency", "48", "--temperature", "0", "--ignore-eos", "--metric-percentiles", "90"]
        picture = tmp_path / "bench.png"
        code, result, out, err = bench(*form, *load, "--goodput", "e2el:600000", "--plot", str(picture))
        after = client.load()
    assert code == 0
    # what is sent is told where no bar can be
    assert err == "runnerd: sending 1 (warm-up, up to 32 output tokens each)\nrunnerd: sending 48 (requests)\n"
    assert result["completed"] == result["num_prompts"] == result["max_concurrency"] == 48
    assert result["failed"] == 0
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (48 * 64, 48 * 16)
    assert after.generation_tokens - before.generation_tokens == 49 * 16  # and the warm-up
    assert after.prefix_cache_hits == before.prefix_cache_hits
    assert result["request_goodput"] == result["request_throughput"] > 0
    assert result["output_throughput"] * result["duration"] == pytest.approx(48 * 16)
    assert (result["input_lens"], result["output_lens"]) == ([64] * 48, [16] * 48)
    assert result["errors"] == [""] * 48
    # a token takes a step, and a step takes its time; no upper bound holds on a busy machine
    assert result["mean_e2el_ms"] >= 16 * STEP_SECONDS * 1e3
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p90")} <= result.keys()
    assert "P90 TPOT (ms):" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_no_more_requests_are_live_than_were_allowed(bench) -> None:
    form = ["--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "12", "--num-warmups", "0"]
    code, result, _, _ = bench(*form, "--max-concurrency", "3", "--request-rate", "500", "--ignore-eos")
    assert code == 0
    assert result["max_concurrent_requests"] <= 3
    assert result["request_rate"] == 500
    assert result["start_times"] == sorted(result["start_times"])


def test_the_same_seed_gives_the_same_texts(bench) -> None:
    form = ["--random-input-len", "8", "--random-output-len", "8", "--num-prompts", "4", "--temperature", "1"]

    def texts(seed: str) -> list[str]:
        return bench(*form, "--ignore-eos", "--seed", seed, "--result-filename", "result.json")[1]["generated_texts"]

    assert texts("1") == texts("1") != texts("2")


def test_prompts_come_from_a_file(bench, tmp_path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abc", "output_len": 3}\n{"prompt": "abcdef"}\n')
    dataset = ["--dataset-name", "custom", "--dataset-path", str(path), "--skip-chat-template", "--disable-shuffle"]
    code, result, _, err = bench(*dataset, "--num-prompts", "3", "--custom-output-len", "5", "--ignore-eos")
    assert code == 0
    assert (result["input_lens"], result["output_lens"]) == ([3, 6, 3], [3, 5, 3])
    assert "has 2 prompts for --num-prompts 3" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (r'{"prompt": "a\ud800"}', r"prompts.jsonl:1: prompt: '\ud800' is half a character"),
        (
            r'{"messages": [{"role": "user", "content": "\udfff"}]}',
            r"prompts.jsonl:1: messages[0].content: '\udfff' is half a character",
        ),
        (
            '{"prompt": "a", "output_len": 99999999999}',
            "output_len is 99999999999; expected a whole number from 1 to 2",
        ),
    ],
)
def test_what_no_request_can_hold_is_told_by_its_line(bench, tmp_path, line: str, message: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(line)
    code, result, _, err = bench("--dataset-name", "custom", "--dataset-path", str(tmp_path / "prompts.jsonl"))
    assert (code, result) == (2, None)
    assert message in err


def test_an_option_that_no_request_can_hold_is_told(bench) -> None:
    form = ["--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "2", "--num-warmups", "0"]
    code, result, _, err = bench(*form, "--cache-salt", "\udcff")
    assert (code, result["failed"]) == (1, 2)
    assert "2 failed: cache_salt is '\\udcff', which does not fit its field" in err


def test_requests_that_fail_are_counted_and_told(bench) -> None:
    form = ["--random-input-len", "9000", "--random-output-len", "4", "--num-prompts", "3", "--num-warmups", "0"]
    code, result, out, err = bench(*form)
    assert code == 1
    assert (result["completed"], result["failed"], result["mean_ttft_ms"]) == (0, 3, None)
    assert "Failed requests:                          3" in out
    assert "3 failed: INVALID_ARGUMENT: " in err


def test_two_results_are_compared(bench, tmp_path, capsys) -> None:
    form = ["--random-input-len", "8", "--random-output-len", "4", "--ignore-eos"]
    assert bench(*form, "--num-prompts", "2", "--result-filename", "a.json")[0] == 0
    assert bench(*form, "--num-prompts", "4", "--result-filename", "b.json")[0] == 0
    files = [str(tmp_path / "results" / name) for name in ("a.json", "b.json")]
    assert main(["bench", "--compare", *files]) == 0
    out = capsys.readouterr().out
    assert "differs: num_prompts: 2 / 4" in out
    assert "2.000" in next(line for line in out.splitlines() if line.startswith("total_output_tokens"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset-name", "custom"], "--dataset-path"),
        (["--dataset-path", "x"], "--dataset-name custom"),
        (["--plot", "no/such/folder/x.png"], "no/such/folder/x.png"),
        (["--random-range-ratio", "2"], "--random-range-ratio"),
        (
            ["--result-dir", "x", "--metadata", "a=b"],
            "--metadata, --result-dir: no result is written; add --save-result",
        ),
        (
            ["--num-prompts", "100", "--compare", "a", "b"],
            "--compare measures nothing: leave out --address, --num-prompts",
        ),
        (
            ["--compare", "a", "b", "--goodput", "ttft:1", "--ignore-eos"],
            "leave out --address, --goodput, --ignore-eos",
        ),
    ],
)
def test_what_cannot_be_done_has_exit_code_2(address, capsys, arguments: list[str], message: str) -> None:
    assert main(["bench", "--address", address, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_result_that_is_not_there_is_named(capsys) -> None:
    assert main(["bench", "--compare", "no-such.json", "no-such.json"]) == 2
    assert "no-such.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--request-rate", "0"],
        ["--metric-percentiles", "101"],
        ["--percentile-metrics", "x"],
        ["--goodput", "itl:3"],
        ["--max-concurrency", "0"],
        ["--metadata", "x"],
        ["--top-k", "-1"],
        ["--seed", "99999999999999999999"],
        ["--random-input-len", "99999999999"],
        ["--random-output-len", "99999999999"],
        ["--random-prefix-len", "99999999999"],
        ["--request-rate", "1e-300"],
        ["--burstiness", "inf"],
    ],
)
def test_a_wrong_value_is_told_by_its_flag(capsys, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments])
    assert exit_.value.code == 2
    assert f"{arguments[0]}: expected" in capsys.readouterr().err


def test_a_warm_up_is_short(bench, address) -> None:
    with Client(address) as client:
        before = client.load().generation_tokens
        form = ["--random-input-len", "8", "--random-output-len", "100", "--num-prompts", "1", "--num-warmups", "2"]
        assert bench(*form, "--ignore-eos")[0] == 0
        assert client.load().generation_tokens - before == 2 * 32 + 100


def test_what_finished_before_ctrl_c_is_reported_and_saved(address, tmp_path) -> None:
    path = tmp_path / "prompts.jsonl"
    lengths = [2] * 5 + [8000] * 3
    path.write_text("".join(f'{{"prompt": "abc", "output_len": {length}}}\n' for length in lengths))
    form = ["--dataset-name", "custom", "--dataset-path", str(path), "--disable-shuffle", "--ignore-eos"]
    saved = ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    command = [sys.executable, "-m", "runnerd_service", "bench", "--address", address]
    process = subprocess.Popen(
        [*command, *form, *saved, "--num-prompts", "8", "--num-warmups", "0", "--max-concurrency", "4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process, Client(address) as client:
        before = client.load().generation_tokens
        # the five short ones, and long enough for their answers to arrive
        while client.load().generation_tokens - before < 900 or client.load().num_running != 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        while client.load().num_running:  # what was live is cancelled
            time.sleep(0.01)
    assert process.returncode == 130
    assert "interrupted after 5 of 8 requests" in err
    assert "Traceback" not in err
    assert "Successful requests:                      5\n" in out
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["interrupted"] is True
    assert (result["completed"], result["failed"], result["output_lens"]) == (5, 0, [2] * 5)


def test_ctrl_c_in_the_warm_up_is_told(daemon) -> None:
    server = daemon("--runner-option", "step_seconds=1")
    command = [sys.executable, "-m", "runnerd_service", "bench", "--address", server.wait_until_ready()]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr is not None
        assert "warm-up" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert "interrupted in the warm-up; nothing was measured" in process.stderr.read()
    assert process.returncode == 130


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("runner", "length"), [("sim", 2048), ("cpu", 64)])
def test_the_published_form_runs_in_full_on_sim_and_scaled_on_a_real_model(
    module_daemon, demo_gguf, tmp_path, capsys, runner: str, length: int
) -> None:
    server = {"sim": ["--runner-option", "num_blocks=16384"], "cpu": ["--runner", "cpu", str(demo_gguf)]}[runner]
    address = module_daemon(*server, "--max-num-seqs", "48").wait_until_ready()
    form = ["--random-input-len", str(length), "--random-output-len", str(length), "--num-prompts", "48"]
    load = ["--max-concurrency", "48", "--temperature", "0", "--ignore-eos", "--metric-percentiles", "90"]
    path = tmp_path / "result.json"
    written = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", path.name]
    assert main(["bench", "--address", address, *form, *load, *written]) == 0
    result = json.loads(path.read_text())
    assert (result["completed"], result["failed"]) == (48, 0)
    assert result["total_input_tokens"] == result["total_output_tokens"] == 48 * length
    assert "P90 TPOT (ms):" in capsys.readouterr().out
