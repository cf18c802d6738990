"""The calls of docs/clients.md work as they are printed."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.rpc.error_details_pb2 import BadRequest

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
ADDRESS = "127.0.0.1:50051"
CALLS = [
    call
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for call in re.split(r"^(?=buf )", block, flags=re.MULTILINE)
    if call.startswith("buf ")
]
ENDS = ["50051", "GetModelInfo", "StreamGenerate", "Generate", "Generate", "Check", "GetLoad", "Generate"]
PLAIN, SECURE = CALLS[: len(ENDS)], CALLS[len(ENDS) :]
SECURITY_PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
TOKEN = "a-token-0123456789"


@pytest.fixture(scope="module")
def address(module_daemon) -> str:
    return module_daemon().wait_until_ready()


def output_of(call: str, address: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a printed call with the server's address in the printed one's place."""
    buf = shutil.which("buf", path=str(Path(sys.executable).parent))
    assert buf is not None
    assert ADDRESS in call or "--unix-socket" in call
    printed = call.replace(ADDRESS, address).replace("buf ", f"{buf} ", 1)
    environment = os.environ | {"token": TOKEN}
    command = ["sh", "-c", printed]
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
    model, stream, chat, logprobs, health, load = [run(call, address) for call in PLAIN[1:-1]]
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
