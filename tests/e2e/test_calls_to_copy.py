"""The calls of docs/clients.md work as they are printed."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from google.rpc.error_details_pb2 import BadRequest

from runnerd_client import Client

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
ADDRESS = "127.0.0.1:50051"
CALLS = [
    call
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for call in re.split(r"^(?=buf )", block, flags=re.MULTILINE)
    if call.startswith("buf ")
]
ENDS = ["50051", "GetModelInfo", "StreamGenerate", "Generate", "Generate", "Check", "GetLoad", "Watch", "Generate"]
PLAIN, SECURE = CALLS[: len(ENDS)], CALLS[len(ENDS) :]
WATCH = PLAIN[-2]
WATCH_PROGRAM, BALANCING_PROGRAM = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SECURITY_PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
TOKEN = "a-token-0123456789"


@pytest.fixture(scope="module")
def address(module_daemon) -> str:
    return module_daemon().wait_until_ready()


def command_of(call: str, address: str) -> list[str]:
    """Give a printed call with the server's address in the printed one's place."""
    buf = shutil.which("buf", path=str(Path(sys.executable).parent))
    assert buf is not None
    assert ADDRESS in call or "--unix-socket" in call
    return ["sh", "-c", call.replace(ADDRESS, address).replace("buf ", f"exec {buf} ", 1)]


def output_of(call: str, address: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a printed call to its end."""
    command = command_of(call, address)
    environment = os.environ | {"token": TOKEN}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60)


def run(call: str, address: str, folder: Path | None = None) -> tuple[int, list[dict], str]:
    """Run a printed call; give code, messages and errors."""
    done = output_of(call, address, folder)
    decoder, messages, rest = json.JSONDecoder(), [], done.stdout.strip()
    while rest:
        message, end = decoder.raw_decode(rest)
        messages.append(message)
        rest = rest[end:].strip()
    return done.returncode, messages, done.stderr


def test_the_page_has_the_calls_that_are_run_here() -> None:
    assert [re.search(r"(\w+)\s*$", call)[1] for call in CALLS] == [*ENDS, "GetLoad", "GetLoad"]


def test_calls_give_what_the_page_says(address) -> None:
    model, stream, chat, logprobs, health, load = [run(call, address) for call in PLAIN[1:-2]]
    services = output_of(PLAIN[0], address).stdout.split()
    assert {"runnerd.v1.InferenceService", "runnerd.v1.ModelService", "runnerd.v1.ServerService"} <= set(services)
    assert [code for code, _, _ in (model, stream, chat, logprobs, health, load)] == [0] * 6
    assert model[1][0]["name"] == "sim"
    assert "started" in stream[1][0]
    assert "finish" in stream[1][-1]["output"]
    assert chat[1][0]["outputs"][0]["finish"]["usage"]["completionTokens"] <= 32
    assert [len(token["candidates"]) for token in logprobs[1][0]["outputs"][0]["tokens"]] == [2, 2]
    assert health[1] == [{"status": "SERVING"}]
    assert load[1][0]["numBlocks"] > 0


def test_a_refusal_names_the_field(address) -> None:
    code, messages, errors = run(PLAIN[-1], address)
    assert code != 0
    assert messages == []
    refusal = json.loads(errors)
    assert refusal["code"] == "invalid_argument"
    assert refusal["message"].startswith("sampling.temperature: ")
    packed = next(one["value"] for one in refusal["details"] if one["type"] == "google.rpc.BadRequest")
    violations = BadRequest.FromString(base64.b64decode(packed + "==")).field_violations
    assert [violation.field for violation in violations] == ["sampling.temperature"]


def program(text: str, address: str) -> list[str]:
    """Give the command of a printed program."""
    assert ADDRESS in text
    return [sys.executable, "-c", text.replace(ADDRESS, address)]


def test_who_watches_is_told_of_each_change_until_the_server_ends(daemon) -> None:
    server = daemon()
    address = server.wait_until_ready()
    commands = [command_of(WATCH, address), program(WATCH_PROGRAM, address)]
    with ExitStack() as stack:
        watchers = [stack.enter_context(subprocess.Popen(one, stdout=subprocess.PIPE, text=True)) for one in commands]
        try:
            outputs = [iter(one.stdout or ()) for one in watchers]
            first = [next(line for line in output if "SERVING" in line) for output in outputs]
            with Client(address) as client:
                assert client.drain(0)
            then = [next(line for line in output if "SERVING" in line) for output in outputs]
            server.terminate()
            assert server.wait() == 0
            assert [one.wait(60) for one in watchers] == [0, 0]
        finally:
            for one in watchers:
                one.kill()
    assert ["NOT_SERVING" in line for line in first] == [False, False]
    assert ["NOT_SERVING" in line for line in then] == [True, True]


def test_a_channel_that_watches_sends_nothing_to_a_server_that_drains(daemon) -> None:
    address = daemon().wait_until_ready()
    command = program(BALANCING_PROGRAM, address)
    answered = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (answered.returncode, "num_blocks" in answered.stdout) == (0, True), answered.stderr
    with Client(address) as client:
        assert client.drain(0)
        assert client.load().num_blocks  # asked without watching, it answers
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode != 0
    assert "StatusCode.UNAVAILABLE" in refused.stderr


def test_calls_with_a_certificate_and_a_token_are_answered(module_daemon, tmp_path, monkeypatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    make = next(block for block in re.findall(r"^```sh\n(.*?)^```", SECURITY_PAGE, re.M | re.S) if "req -x509" in block)
    subprocess.run(["sh", "-ec", make], cwd=tmp_path, capture_output=True, timeout=60, check=True)
    (tmp_path / "tokens.toml").write_text(f'[[tokens]]\nname = "shell"\ntoken = "{TOKEN}"\n')
    (serve,) = re.findall(r"^runnerd serve (.*--auth-tokens.*)$", PAGE, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    # the address of TLS comes first, then the socket's
    address = module_daemon(*serve.split()).wait_until_ready()
    for call in SECURE:
        code, messages, errors = run(call, address, tmp_path)
        assert (code, errors) == (0, "")
        assert messages[0]["numBlocks"] > 0
        refused = run(call.replace('"authorization: Bearer $token"', "x: y"), address, tmp_path)
        assert refused[0] != 0
