"""The example programs of the Go and the Java client do what they say."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.timeout(900)


def test_examples(native_client, daemons) -> None:
    script = "Grüße, 世界!"
    num_tokens = len(script.encode()) + 1  # bytes and EOS
    sim = ("--runner", "sim", "--log-level", "warning", "--runner-option", f"script={script}")
    address = daemons.start(*sim, "--runner-option", "step_seconds=0.005")

    assert native_client.example("health", address).startswith("SERVING\nsim: ")
    assert native_client.example("stream", address) == f"{script}\n[FINISH_REASON_STOP, {num_tokens} tokens]\n"
    assert native_client.example("chat", address, "Hello!\nAnd again?\n") == f"{script}\n{script}\n"
    cancelled = native_client.example("cancel", address)
    assert cancelled.startswith(script)
    assert cancelled.endswith("running: 0, KV blocks in use: 0\n")
    refused = native_client.example("errors", address)
    assert re.match(r"\w+ INVALID_REQUEST\n  sampling.temperature: .*\n  sampling.top_p: .*\n$", refused)
    late = native_client.example("deadline", address).splitlines()
    assert re.fullmatch("the call's deadline: DEADLINE_?EXCEEDED", late[0], re.IGNORECASE)
    assert re.fullmatch(r"stopping.time_limit: FINISH_REASON_TIME_LIMIT after \d+ tokens", late[1])
