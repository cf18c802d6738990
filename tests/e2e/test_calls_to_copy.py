"""The calls of docs/clients.md work as they are printed."""

from __future__ import annotations

import base64
import json
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
METHODS = ["GetModelInfo", "StreamGenerate", "Generate", "Generate", "Check", "GetLoad", "Generate"]


@pytest.fixture(scope="module")
def address(module_daemon) -> str:
    return module_daemon().wait_until_ready()


def run(call: str, address: str) -> tuple[int, list[dict], str]:
    """Run a printed call with the server's address in the printed one's place; give code, messages and errors."""
    buf = shutil.which("buf", path=str(Path(sys.executable).parent))
    assert buf is not None
    assert ADDRESS in call
    printed = call.replace(ADDRESS, address).replace("buf ", f"{buf} ", 1)
    done = subprocess.run(["sh", "-c", printed], capture_output=True, text=True, check=False, timeout=60)
    decoder, messages, rest = json.JSONDecoder(), [], done.stdout.strip()
    while rest:
        message, end = decoder.raw_decode(rest)
        messages.append(message)
        rest = rest[end:].strip()
    return done.returncode, messages, done.stderr


def test_the_page_has_the_calls_that_are_run_here() -> None:
    assert [re.search(r"/(\w+)\s*$", call)[1] for call in CALLS] == METHODS


def test_calls_give_what_the_page_says(address) -> None:
    model, stream, chat, logprobs, health, load = [run(call, address) for call in CALLS[:-1]]
    assert [code for code, _, _ in (model, stream, chat, logprobs, health, load)] == [0] * 6
    assert model[1][0]["name"] == "sim"
    assert "started" in stream[1][0]
    assert "finish" in stream[1][-1]["output"]
    assert chat[1][0]["outputs"][0]["finish"]["usage"]["completionTokens"] <= 32
    assert [len(token["candidates"]) for token in logprobs[1][0]["outputs"][0]["tokens"]] == [2, 2]
    assert health[1] == [{"status": "SERVING"}]
    assert load[1][0]["numBlocks"] > 0


def test_a_refusal_names_the_field(address) -> None:
    code, messages, errors = run(CALLS[-1], address)
    assert code != 0
    assert messages == []
    refusal = json.loads(errors)
    assert refusal["code"] == "invalid_argument"
    assert refusal["message"].startswith("sampling.temperature: ")
    packed = next(one["value"] for one in refusal["details"] if one["type"] == "google.rpc.BadRequest")
    violations = BadRequest.FromString(base64.b64decode(packed + "==")).field_violations
    assert [violation.field for violation in violations] == ["sampling.temperature"]
