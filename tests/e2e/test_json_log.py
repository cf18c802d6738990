"""The log as JSON: every line of a daemon's standard error is an object, its engine's lines included."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from datetime import datetime

import pytest

from runnerd_client import Client, InternalError
from runnerd_service.telemetry.logs import JsonFormatter, with_fields

CANARY = "a prompt that nobody may see"


def test_every_line_is_an_object_and_a_request_has_its_figures(daemon) -> None:
    server = daemon("--log-format", "json", "--log-level", "debug", "--runner-option", "fail_row_token=FAIL")
    address = server.wait_until_ready()
    with Client(address) as client:
        client.generate(CANARY, request_id="mine\nyours", max_tokens=3, ignore_eos=True)
        with pytest.raises(InternalError):
            client.generate("FAIL", max_tokens=3)
    server.terminate()
    assert server.wait() == 0
    lines = [json.loads(line) for line in server.log().splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    assert all(datetime.fromisoformat(line["time"]).utcoffset() is not None for line in lines)
    told, failed = (line for line in lines if "outcome" in line)
    assert failed["outcome"] == "row_failed"  # the reason that its caller got
    assert told["request_id"] == r"mine\nyours"
    (error,) = (line for line in lines if line["level"] == "error")
    assert error["request_id"] == failed["request_id"]
    assert f"Generate of request {error['request_id']} failed: RowFailed" in error["message"]
    figures = {name: told[name] for name in ("outcome", "prompt_tokens", "cached_tokens", "output_tokens")}
    assert figures == {
        "outcome": "finished",
        "prompt_tokens": len(CANARY),
        "cached_tokens": 0,
        "output_tokens": 3,
    }
    assert 0 < told["seconds_to_first_token"] <= told["seconds"]
    assert not {"tenant", "trace_id"} & set(told)
    assert CANARY not in server.log()
    (ready,) = (line for line in lines if "addresses" in line)
    assert (ready["addresses"], ready["model"]) == ([address], "sim")
    assert ready["message"].startswith("runnerd ")


# What a runner, a library in Python or C, a thread and a child of the process may write.
OTHERS = """
import os, subprocess, sys, threading, warnings
from runnerd_service.rpc import daemon
from runnerd_service.cli.main import main

async def check(*_):
    warnings.warn("two\\nlines", stacklevel=1)
    print("plain, and", "printed", file=sys.stderr)
    os.write(2, b"as C writes: \\xff\\n")
    subprocess.run(["sh", "-c", "echo of a child >&2"], check=True)
    thread = threading.Thread(target=lambda: 1 / 0, name="careless")
    thread.start()
    thread.join()
    raise RuntimeError("a defect of ours")

daemon.Frontend.start = check
sys.exit(main(["serve", "--runner", "sim", "--port", "0", "--log-format", "json"]))
"""


def json_lines(*command: str, **environment: str) -> tuple[int, list[dict]]:
    """Give the exit code and the lines of standard error, each of which has to be an object."""
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]


def test_what_others_write_to_standard_error_becomes_lines_of_the_log() -> None:
    code, lines = json_lines("-c", OTHERS)
    assert code == 1
    told = {line["message"]: line for line in lines}
    assert any(message.endswith("UserWarning: two\nlines") for message in told)
    assert {"plain, and printed", "as C writes: \\xff", "of a child"} <= told.keys()
    assert "ZeroDivisionError" in told["the thread careless ended"]["exception"]
    assert told["RuntimeError"]["level"] == "critical"
    assert "a defect of ours" in told["RuntimeError"]["exception"]


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--runner", "nope", "--log-format", "json"], {}, "nope"),
        (["--runner", "cpu", "/no/such/model"], {"RUNNERD_LOG_FORMAT": "json"}, "/no/such/model"),
        (["--port", "x", "--log-format", "json"], {}, "--port: expected"),
    ],
)
def test_why_it_does_not_start_is_a_line_of_the_log(arguments, environment, message) -> None:
    code, lines = json_lines("-m", "runnerd_service", "serve", *arguments, **environment)
    assert code == 2
    assert lines[-1]["level"] == "critical"
    assert message in lines[-1]["message"]


def record(message: str, *arguments: object, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("a.logger", logging.WARNING, __file__, 1, message, arguments, None)
    vars(made).update(more)
    return made


def test_fields_stand_beside_the_message_and_replace_nothing() -> None:
    line = JsonFormatter().format(record("%d of\n%d", 1, 2, **with_fields(request_id="x", level="y", none=None)))
    assert "\n" not in line
    told = json.loads(line)
    assert told.pop("time").endswith("+00:00")
    assert told == {"level": "warning", "logger": "a.logger", "message": "1 of\n2", "request_id": "x"}


def test_an_exception_is_a_field_of_its_own() -> None:
    with pytest.raises(ValueError, match="abc") as caught:
        int("abc")
    error = caught.value
    line = JsonFormatter().format(record("failed", exc_info=(type(error), error, error.__traceback__)))
    assert "\n" not in line
    assert json.loads(line)["exception"].startswith("Traceback (most recent call last):\n")


def test_what_json_does_not_know_is_told_as_text() -> None:
    assert json.loads(JsonFormatter().format(record("x", **with_fields(path=CANARY.encode()))))["path"] == repr(
        CANARY.encode()
    )
