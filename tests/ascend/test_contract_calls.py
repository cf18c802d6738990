"""Calls that the documents of Ascend's fused kernels forbid are refused with a reason, and their neighbours pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ascend_sim.ops  # noqa: F401 - registers the kernels
from ascend_sim.environment import cann_environment
from ascend_sim.registry import KERNELS
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


def test_what_no_chip_checks_fails_the_device():
    name = "a block outside the cache"
    refusals, stderr = make_calls(name)
    assert "507015" in (refusals[name] or "accepted")
    assert "has a block outside the cache of 6" in stderr


@pytest.mark.parametrize(
    ("slots", "reason"),
    [
        ([0, 768], "outside the cache of 768"),
        ([-1, 0], "outside the cache of 768"),
        ([5, 5], "two tokens have one slot"),
    ],
)
def test_a_kernel_fails_on_slots_that_no_chip_checks(slots, reason):
    cache, new = torch.zeros(6, 128, 2, 32), torch.zeros(2, 2, 32)
    write = KERNELS["ScatterPaKvCache"].function
    write(new, cache, torch.tensor([0, 767]), new, cache.clone())
    with pytest.raises(ValueError, match=reason):
        write(new, cache, torch.tensor(slots), new, cache.clone())


@pytest.mark.parametrize(("vocab_size", "k"), [(99, 0), (99, 100), (2000, 1025)])
def test_a_kernel_fails_on_a_top_k_out_of_range(vocab_size, k):
    logits = torch.zeros(1, vocab_size)
    limit = KERNELS["ApplyTopKTopP"].function
    limit(logits, None, torch.tensor([min(vocab_size, 1024)]), logits.clone())
    with pytest.raises(ValueError, match=f"expected 1 to {min(vocab_size, 1024)}"):
        limit(logits, None, torch.tensor([k]), logits.clone())


def test_float32_attention_passes_only_where_a_test_allows_it():
    name = "attention: float32"
    assert make_calls(name, allow_fp32=1)[0] == {name: None}
    assert list(make_calls(name)[0].values()) != [None]
