"""The simulated runtime under the real torch_npu: order, waits, memory, failures. Each wait has its control."""

from __future__ import annotations

import pytest

import sim_programs as programs
from ascend_sim.process import simulated_process


@pytest.fixture(scope="module", params=[0, 1, 2], ids="task_queue_{}".format)
def run(request):
    with simulated_process(copy_us=2000, op_us=500, task_queue=request.param) as run:
        yield run


def test_the_wheels_own_kernel_reaches_the_simulated_one(run):
    assert run(programs.add_on_device) == [2.0, 2.0, 2.0]


def test_an_event_tells_when_a_result_is_on_the_host(run):
    assert run(programs.read_result, waits=True)


def test_without_the_event_the_result_is_not_there(run):
    assert not run(programs.read_result, waits=False)


def test_a_stream_that_waits_for_another_sees_its_results(run):
    assert run(programs.read_on_another_stream, waits=True)


def test_a_stream_that_does_not_wait_reads_too_early(run):
    assert not run(programs.read_on_another_stream, waits=False)


def test_two_staging_buffers_carry_two_values(run):
    assert run(programs.send_twice, 2)


def test_one_staging_buffer_is_overwritten_before_it_is_sent(run):
    assert not run(programs.send_twice, 1)


def test_recorded_memory_is_not_used_again_while_a_copy_reads_it(run):
    assert run(programs.free_while_read, recorded=True)


def test_memory_that_is_not_recorded_is_used_again_too_early(run):
    assert not run(programs.free_while_read, recorded=False)


def test_launches_do_not_wait_and_each_wait_is_counted(run):
    waits = run(programs.waits_of_a_step)
    assert waits["launch"] == 0
    assert waits["item"] >= 1
    assert waits["synchronize"] >= 1


def test_events_measure_the_time_of_kernels(run):
    assert run(programs.elapsed_ms) >= 10 * 0.5


def test_memory_that_nobody_wrote_is_garbage(run):
    assert run(programs.fresh_memory) == [0xA5] * 4


def test_the_environment_decides_what_devices_there_are():
    with simulated_process(devices=3, memory_mb=512, soc="Ascend910_9391") as run:
        found = run(programs.describe_devices)
        assert found == {"count": 3, "name": "Ascend910_9391", "total": 512 << 20, "free": 512 << 20}
        with pytest.raises(RuntimeError, match="out of memory"):
            run(programs.allocate, 600 << 20)
        run(programs.use_device, 2)
        with pytest.raises(RuntimeError, match="107001"):
            run(programs.use_device, 3)


@pytest.mark.parametrize("program", [programs.fail_then_read, programs.fail_then_wait_for_event])
def test_after_a_kernel_that_failed_every_wait_raises(program):
    with simulated_process(fail="aclnnAdds:2") as run:
        with pytest.raises(RuntimeError, match="507015"):
            run(program)
        with pytest.raises(RuntimeError, match="507015"):
            run(programs.add_on_device)


def test_the_log_has_a_line_for_each_call(tmp_path):
    path = tmp_path / "log"
    with simulated_process(log=path) as run:
        lines = run(programs.log_of_a_sum, str(path))
    assert lines[-1] == "aclnnInplaceAdds self=bfloat16(2,3) other=1 alpha=1"


def test_a_process_can_leave_while_its_device_works():
    with simulated_process(op_us=5000) as run:
        run(programs.exit_with_work_queued)
