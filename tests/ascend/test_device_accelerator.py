"""The accelerator device on the real torch_npu: rings and fences, streams, times, failures; and what lacks of each.

The device has no copies and kernels in no time: an error in the order of things would not show.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar
from unittest.mock import patch

import pytest

import device_programs as programs
from ascend_sim.environment import cann_environment

T = TypeVar("T")


@contextmanager
def process(**options: object) -> Iterator[Callable[..., object]]:
    """Give a function that runs programs in a process of its own, on a simulated device with these options."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with patch.dict(os.environ, cann_environment(**options) | {"TASK_QUEUE_ENABLE": str(options["task_queue"])}):
            pool.submit(int).result(120)  # starts the process
        yield lambda program, *arguments, **more: pool.submit(program, *arguments, **more).result(110)


@pytest.fixture(scope="module", params=[0, 1, 2], ids="task_queue_{}".format)
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., object]]:
    with process(copy_us=2000, op_us=300, task_queue=request.param) as run:
        yield run


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_steps_in_flight_give_their_own_results_and_no_launch_waits(run, depth: int) -> None:
    found = run(programs.run_steps, depth)
    assert found["right"] == [True] * programs.NUM_STEPS
    assert found["waits"] == dict.fromkeys(programs.WAITS, 0)


def test_more_steps_than_buffers_wait_for_a_buffer_and_are_right(run) -> None:
    found = run(programs.run_steps, programs.NUM_STEPS)
    assert found["right"] == [True] * programs.NUM_STEPS
    assert found["waits"]["synchronize_event"] > 0


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_staging_buffer_is_not_written_before_it_was_read(run, num_slots: int) -> None:
    assert all(run(programs.send_through_ring, num_slots, fenced=True))


def test_without_fences_a_staging_buffer_would_be_overwritten(run) -> None:
    assert not all(run(programs.send_through_ring, 1, fenced=False))


def test_memory_is_not_used_again_while_a_copy_reads_it(run) -> None:
    assert all(run(programs.copy_beside_reuse, recorded=True))


def test_without_record_stream_memory_would_be_used_again(run) -> None:
    assert not all(run(programs.copy_beside_reuse, recorded=False))


def test_a_result_is_not_there_before_the_launch_is_done(run) -> None:
    assert not run(programs.read_without_waiting)


def test_times_of_the_device_are_told_on_the_clock_of_the_host(run) -> None:
    found = run(programs.measure_times)
    assert found == dict.fromkeys(found, True)


def test_a_wait_and_a_close_end_in_time_and_leave_the_launch_valid(run) -> None:
    assert run(programs.wait_for_a_while) == {
        "done early": False,
        "waited early": False,
        "closed early": False,
        "waited": True,
        "done": True,
        "right": True,
        "closed": True,
        "closed again": True,
        "refused": "the device is closed",
    }


def test_launching_does_not_wait_for_a_device_that_stands_still(run) -> None:
    assert all(run(programs.launch_on_a_stopped_stream))


def test_a_step_that_fails_on_the_host_tells_so_in_its_turn_and_harms_no_other(run) -> None:
    assert run(programs.fail_on_the_host) == {
        "failed early": False,
        "error": "no such kernel",
        "before": True,
        "after": True,
        "closed": True,
    }


def test_peak_memory_is_what_was_held_at_once(run) -> None:
    peak = run(programs.measure_peak)
    assert 2 << 22 <= peak < 3 << 22


@pytest.mark.parametrize("task_queue", [0, 1])
def test_a_kernel_that_fails_ends_its_step_and_all_later_ones(task_queue: int) -> None:
    with process(fail="Add:5", op_us=300, task_queue=task_queue) as run:
        found = run(programs.fail_on_the_device)
    # What was done before can be read; nothing hangs.
    assert found["done"] == [True] * 8
    assert found["right"][:2] == [True, True]
    assert all(found["right"])
    assert found["errors"] >= 3
    assert found["closed"]
