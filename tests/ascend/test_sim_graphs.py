"""Captured graphs on the simulated CANN, through NPUGraph."""

from __future__ import annotations

import pytest

import sim_programs as programs
from ascend_sim.process import simulated_process


@pytest.fixture(scope="module", params=[0, 1], ids="task_queue_{}".format)
def run(request):
    with simulated_process(copy_us=3000, op_us=300, task_queue=request.param) as run:
        yield run


def test_a_replay_computes_with_what_its_inputs_hold_then(run):
    assert run(programs.replay) == [[1.0, 1.0], [3.0, 5.0], [5.0, 9.0]]


def test_an_update_changes_the_lengths_that_a_captured_attention_sees(run):
    assert run(programs.replay_with_lengths, [5, 7], [130, 200])


def test_a_graph_that_reads_a_result_cannot_be_captured(run):
    with pytest.raises(RuntimeError):
        run(programs.capture_with_wait)
