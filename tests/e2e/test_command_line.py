"""``runnerd generate``, ``info`` and ``runners``: what they print and which exit code they give."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager

import pytest

from runnerd_client import Client
from runnerd_service.cli.main import main


@pytest.fixture(scope="module")
def address(module_daemon) -> str:
    return module_daemon("--runner-option", "script=one two three", "--served-model-name", "toy").wait_until_ready()


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """Run the command in this process; give exit code, output and errors."""
    try:
        code = main(arguments)
    except SystemExit as exit_:  # argparse
        code = exit_.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_generate_streams_the_text(address, capsys) -> None:
    assert run(capsys, "generate", "--address", address, "hello") == (0, "one two three\n", "")


def test_generate_reads_the_prompt_from_stdin(address, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("five!"))
    code, out, _ = run(capsys, "generate", "--address", address, "--raw", "--json", "-")
    assert code == 0
    assert json.loads(out.splitlines()[0])["started"]["prompt_tokens"] == 5


def test_generate_takes_the_address_from_the_environment(address, capsys, monkeypatch) -> None:
    monkeypatch.setenv("RUNNERD_ADDRESS", address)
    assert run(capsys, "generate", "hello")[:2] == (0, "one two three\n")


def test_generate_json_prints_an_event_a_line(address, capsys) -> None:
    arguments = [
        "--raw",
        "--json",
        "--seed",
        "7",
        "--n",
        "2",
        "--max-tokens",
        "5",
        "--logprobs",
        "1",
        "--request-id",
        "r",
    ]
    code, out, _ = run(capsys, "generate", "--address", address, *arguments, "hello")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert events[0] == {"started": {"request_id": "r", "seed": "7", "prompt_tokens": 5}}
    chunks = [event["output"] for event in events[1:]]
    for index in (0, 1):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["text"] for chunk in mine) == "one t"
        assert all(len(token["candidates"]) == 1 for chunk in mine for token in chunk["tokens"])
        assert ["finish" in chunk for chunk in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1]["finish"]["reason"] == "FINISH_REASON_LENGTH"


def test_generate_prints_several_outputs_one_after_the_other(address, capsys) -> None:
    code, out, _ = run(capsys, "generate", "--address", address, "--n", "2", "--stop", " three", "hello")
    assert code == 0
    assert sorted(re.findall(r"--- output (\d) ---\none two\n", out)) == ["0", "1"]


def test_generate_prints_logprobs_a_token_a_line(address, capsys) -> None:
    code, out, _ = run(capsys, "generate", "--address", address, "--logprobs", "1", "--max-tokens", "3", "hello")
    assert code == 0
    assert [line.split("\t")[0] for line in out.splitlines()] == ["'o'", "'n'", "'e'"]
    assert re.fullmatch(r"'o'\t-?\d+\.\d{4}\trank \d+\t'.*' -?\d+\.\d{4}", out.splitlines()[0])


def test_generate_prints_statistics_to_stderr(address, capsys) -> None:
    code, out, err = run(capsys, "generate", "--address", address, "--stats", "--raw", "hello")
    assert (code, out) == (0, "one two three\n")
    assert re.search(r"5 prompt tokens, 14 output tokens, TTFT [\d.]+ ms, .*[\d.]+ tokens/s", err)


def prompt_tokens(capsys, address: str, *arguments: str) -> int:
    code, out, _ = run(capsys, "generate", "--address", address, "--json", *arguments, "hello")
    assert code == 0
    return json.loads(out.splitlines()[0])["started"]["prompt_tokens"]


def test_a_prompt_is_a_conversation_where_the_model_has_a_template_unless_raw_is_asked_for(address, capsys) -> None:
    assert prompt_tokens(capsys, address, "--raw") == 5
    in_a_conversation = prompt_tokens(capsys, address)
    assert in_a_conversation == prompt_tokens(capsys, address, "--chat") > 5
    assert prompt_tokens(capsys, address, "--system", "be brief") > in_a_conversation + len("be brief")
    code, _, err = run(capsys, "generate", "--address", address, "--raw", "--system", "x", "hello")
    assert code == 2
    assert "--system" in err


def test_a_refused_request_has_exit_code_4(address, capsys) -> None:
    code, out, err = run(capsys, "generate", "--address", address, "--top-p", "7", "hello")
    assert (code, out) == (4, "")
    assert err.startswith("runnerd: sampling.top_p")


def test_a_value_that_fits_no_field_has_exit_code_2(address, capsys) -> None:
    assert run(capsys, "generate", "--address", address, "--max-tokens", "-1", "hello")[0] == 2
    assert run(capsys, "generate", "--address", address, "--max-tokens", "many", "hello")[0] == 2


def test_no_server_has_exit_code_3_and_says_what_to_do(capsys) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for command in (("generate", "--raw", "x"), ("info",), ("drain",)):
        code, _, err = run(capsys, *command, "--address", address)
        assert (code, err.count("\n")) == (3, 1)
        assert f"no server answers at {address}" in err
        assert "runnerd serve" in err


@pytest.fixture(scope="module")
def slow_address(module_daemon) -> str:
    return module_daemon("--runner-option", "step_seconds=0.05").wait_until_ready()


def test_a_timeout_has_exit_code_1(slow_address, capsys) -> None:
    code, out, err = run(capsys, "generate", "--address", slow_address, "--timeout", "0.5", "--ignore-eos", "hello")
    assert code == 1
    assert not out or out.endswith("\n")  # the error begins a line of its own
    assert "runnerd: the call took longer than --timeout 0.5; give more seconds" in err


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1", "1e300", "soon"])
def test_a_timeout_that_is_none_is_refused(capsys, seconds: str) -> None:
    code, _, err = run(capsys, "info", "--timeout", seconds)
    assert code == 2
    assert f"--timeout: expected seconds from 0.000001 to 1000000000, got '{seconds}'" in err


@pytest.mark.parametrize(
    ("arguments", "token", "part"),
    [
        (["--address", "10.0.0.7:50051"], "x", "give --tls or --tls-ca, or --plaintext-token where"),
        (["--tls-cert", "client.pem"], "", "--tls-cert and --tls-key go together"),
        (["--tls-key", "client.key"], "", "--tls-cert and --tls-key go together"),
        (["--address", "unix:/x", "--tls"], "", "leave out --tls"),
        ([], "x\ny", "$RUNNERD_TOKEN: token"),
    ],
)
def test_connections_that_cannot_be_made_are_told_by_their_flags(capsys, monkeypatch, arguments, token, part) -> None:
    monkeypatch.setenv("RUNNERD_TOKEN", token)
    for command in (("generate", "hi"), ("drain",)):
        code, _, err = run(capsys, *command, *arguments)
        assert code == 2
        assert part in err
        assert "plaintext_token" not in err


def test_a_value_after_a_switch_is_explained(capsys) -> None:
    for value in ("false", "True", "off"):
        code, _, err = run(capsys, "serve", "--runner", "sim", "--prefix-caching", value)
        assert code == 2
        assert f"{value!r} was taken as MODEL" in err
        assert "--no-prefix-caching" in err


def test_outputs_that_a_broken_stream_cuts_are_shown(slow_address, capsys) -> None:
    options = ["--n", "2", "--ignore-eos", "--timeout", "5"]
    code, out, _ = run(capsys, "generate", "--address", slow_address, *options, "hello")
    assert code == 1
    assert re.findall("^--- .* ---$", out, re.MULTILINE) == [
        "--- output 0 (incomplete) ---",
        "--- output 1 (incomplete) ---",
    ]


def wait_until_idle(address: str) -> None:
    with Client(address) as client:
        deadline = time.monotonic() + 20
        while client.load().num_running:
            assert time.monotonic() < deadline, "the generation went on without its client"
            time.sleep(0.02)


@contextmanager
def generating(address: str):
    """Give a ``runnerd generate`` that has printed its first characters."""
    options = ["--address", address, "--max-tokens", "5000", "--ignore-eos"]
    command = [sys.executable, "-m", "runnerd_service", "generate", *options, "x"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    try:
        assert process.stdout.read(1)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_cancels_the_generation_and_has_exit_code_130(slow_address) -> None:
    with generating(slow_address) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == b""
    wait_until_idle(slow_address)


def test_a_reader_of_the_output_that_leaves_ends_the_generation(slow_address) -> None:
    with generating(slow_address) as process:
        process.stdout.close()
        assert process.wait(20) == 1
        assert process.stderr.read() == b""
        process.stdout = None
    wait_until_idle(slow_address)


def test_generate_gives_the_form_that_was_asked_for(daemon, capsys, tmp_path) -> None:
    address = daemon("--async-execution", "off").wait_until_ready()
    (tmp_path / "schema.json").write_text('{"enum": ["é"]}', encoding="utf-8")
    command = ("generate", "--address", address, "--raw", "hello", "--ignore-eos")
    assert run(capsys, *command, "--regex", "(ab){3}") == (0, "ababab\n", "")
    assert run(capsys, *command, "--json-schema", str(tmp_path / "schema.json")) == (0, '"é"\n', "")
    code, out, _ = run(capsys, *command, "--choice", "yes", "--choice", "no")
    assert (code, out in ("yes\n", "no\n")) == (0, True)
    code, _, err = run(capsys, *command, "--json-schema", str(tmp_path / "none.json"))
    assert (code, "--json-schema" in err) == (2, True)
    code, _, err = run(capsys, *command, "--regex", "(")
    assert (code != 0, "guided_decoding.regex" in err) == (True, True)


def test_info_shows_model_server_and_load(address, capsys) -> None:
    code, out, _ = run(capsys, "info", "--address", address)
    assert code == 0
    assert re.findall(r"^\w+$", out, re.MULTILINE) == ["model", "server", "load"]  # from what one looks for first
    told = dict(re.findall(r"^  (\S+(?: \S+)*)  +(.*)$", out, re.MULTILINE))
    assert (told["name"], told["state"], told["running"]) == ("toy", "serving", "0")
    assert told["async_execution"].startswith("auto: ")
    assert "top_p" in told["serves"].split(", ")
    assert told["does not serve"].split(", ") == sorted(told["does not serve"].split(", "))
    assert all(told.values())
    assert "SUPPORT_" not in out
    code, out, _ = run(capsys, "info", "--address", address, "--json")
    described = json.loads(out)
    assert code == 0
    assert described["server"]["runner"] == "sim"
    assert described["model"]["vocab_size"] > 256
    assert described["model"]["capabilities"]["guided_decoding"] == "SUPPORT_HOST_SYNC"
    assert described["load"]["num_running"] == 0


def test_info_of_a_loading_server_has_no_model(module_daemon, capsys) -> None:
    address = module_daemon("--runner-option", "load_seconds=30").listening_address
    code, out, _ = run(capsys, "info", "--json", "--address", address)
    assert code == 0
    assert json.loads(out)["model"] is None
    assert json.loads(out)["server"]["state"] == "SERVER_STATE_LOADING"
    code, _, err = run(capsys, "generate", "--raw", "x", "--address", address)
    assert code == 3
    assert "loading" in err


def test_runners_lists_what_is_installed(capsys) -> None:
    code, out, _ = run(capsys, "runners")
    assert code == 0
    assert re.search(r"^sim: ", out, re.MULTILINE)
    assert "--runner-option step_seconds=" in out
    code, out, _ = run(capsys, "runners", "--json")
    runners = {runner["name"]: runner for runner in json.loads(out)}
    assert runners.keys() >= {"sim", "cpu"}
    assert runners["sim"]["capabilities"]["logprobs"] == "device"
    assert {option["name"] for option in runners["sim"]["options"]} >= {"step_seconds", "script"}


def test_the_server_lists_the_same_runners(address, capsys) -> None:
    described = {one["name"]: one for one in json.loads(run(capsys, "runners", "--json")[1])}
    with Client(address) as client:
        listed = {one.name: one for one in client.runners()}
    assert listed.keys() == described.keys()
    for name, runner in listed.items():
        assert runner.available == (not described[name]["unavailable_reason"])
        assert runner.max_in_flight == described[name]["max_in_flight"]
        assert set(runner.capabilities) == set(described[name]["capabilities"])


def test_help_documents_exit_codes_and_examples(capsys) -> None:
    for command in ((), ("serve",), ("generate",), ("runners",), ("info",)):
        code, out, _ = run(capsys, *command, "--help")
        assert code == 0
        assert "exit codes:" in out
        assert "examples:" in out


def test_wrong_usage_has_exit_code_2(capsys) -> None:
    for arguments in ((), ("nonsense",), ("serve", "--prot", "1"), ("generate", "--raw", "--chat", "x")):
        assert run(capsys, *arguments)[0] == 2


def test_the_version_is_printed(capsys) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert re.fullmatch(r"runnerd \d+\.\d+\.\d+\n", out)
