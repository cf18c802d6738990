"""Calls that the documents of Ascend's fused kernels forbid are refused with a reason, and their neighbours pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_sim.environment import cann_environment
from contract_calls import CASES

PROGRAM = Path(__file__).with_name("contract_calls.py")


def make_calls(*names: str, **options: object) -> tuple[dict[str, str | None], str]:
    """Make calls in a process of their own; without torch_npu's queue, which would give errors to a later call."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ASCEND_SIM_")}
    finished = subprocess.run(
        [sys.executable, PROGRAM, *names],
        env=environment | cann_environment(**options) | {"TASK_QUEUE_ENABLE": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.stdout, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1]), finished.stderr


@pytest.fixture(scope="module")
def refusals() -> dict[str, str | None]:
    return make_calls(*CASES)[0]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refusal is not None])
def test_a_call_that_breaks_a_rule_is_refused(name, refusals):
    assert CASES[name].refusal in (refusals[name] or "accepted")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refusal is None])
def test_its_neighbour_is_accepted(name, refusals):
    assert refusals[name] is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a block outside the cache", "has a block outside the cache of 6"),
        ("a slot outside the cache", "a slot is outside the cache of 768"),
        ("a slot below the cache", "a slot is outside the cache of 768"),
        ("a slot twice", "two tokens have one slot"),
        ("a top-k of 0", "k is [0, 3], expected 1 to 99"),
        ("a top-k above the vocabulary", "k is [3, 100], expected 1 to 99"),
        ("a top-k above 1024", "k is [3, 1025], expected 1 to 1024"),
    ],
)
def test_what_no_chip_checks_fails_the_device(name, reason):
    refusals, stderr = make_calls(name)
    assert "507015" in (refusals[name] or "accepted")
    assert reason in stderr


def test_float32_attention_passes_only_where_a_test_allows_it():
    name = "attention: float32"
    assert make_calls(name, allow_fp32=1)[0] == {name: None}
    assert list(make_calls(name)[0].values()) != [None]
