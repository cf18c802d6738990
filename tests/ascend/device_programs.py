"""What the tests of the accelerator device run, each in a process whose simulated copies and kernels take time.

They stand apart from the tests, because the delays of a simulated device are settled when its process starts.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import torch
import torch_npu  # noqa: F401 - makes the device known

from runnerd_torch.devices.accelerator import AcceleratorDevice
from runnerd_torch.devices.base import Launch
from runnerd_torch.devices.npu import NpuElapsedTime
from runnerd_torch.devices.staging import StagingRing

WAITS = ("synchronize_stream", "synchronize_device", "synchronize_event", "blocking_copy")
NUM_STEPS = 12
SECONDS = 60.0
"""What takes longer hangs."""


def open_device() -> AcceleratorDevice:
    torch.accelerator.set_device_index(0)
    return AcceleratorDevice(torch.device("npu", 0), "simulated", NpuElapsedTime())


def count_waits() -> dict[str, int]:
    """Give how often the host has waited for the device, by the call that made it wait."""
    count = ctypes.CDLL("libascendcl.so").ascend_sim_count
    count.restype = ctypes.c_long
    return {name: count(name.encode()) for name in WAITS}


@contextmanager
def closed_gate() -> Iterator[threading.Event]:
    """Stop the compute stream until the event is set, or the block is left."""
    opened = threading.Event()
    # The callback runs in the stream's thread.
    wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: opened.wait(SECONDS) and None)
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    assert ctypes.CDLL("libascendcl.so").aclrtLaunchHostFunc(stream, wait, None) == 0
    try:
        yield opened
    finally:
        opened.set()
        torch.npu.synchronize()


def step(device: AcceleratorDevice, number: int) -> tuple[torch.Tensor, ...]:
    """Give three results; each is known from the number."""
    places, factors = device.to_device([np.arange(4) + number, np.full((2, 3), number, np.float32)])
    return device.to_host(torch.add(places, 1)), device.to_host(torch.add(factors, factors)), device.to_host(factors)


def is_right(number: int, launch: Launch[tuple[torch.Tensor, ...]]) -> bool:
    places, doubled, factors = launch.value()
    right = places.tolist() == [number + one for one in range(1, 5)]
    return right and bool((doubled == 2 * number).all()) and bool((factors == number).all())


def run_steps(depth: int) -> dict[str, list[bool] | dict[str, int]]:
    """Run steps with ``depth`` of them in flight; give which were right, and how often a launch waited."""
    device = open_device()
    launches: list[Launch[tuple[torch.Tensor, ...]]] = []
    in_flight: deque[Launch[tuple[torch.Tensor, ...]]] = deque()
    waits = dict.fromkeys(WAITS, 0)
    for number in range(NUM_STEPS):
        before = count_waits()
        launches.append(device.submit(partial(step, device, number)))
        if number:  # the first one prepares
            waits = {name: waits[name] + count - before[name] for name, count in count_waits().items()}
        in_flight.append(launches[-1])
        if len(in_flight) >= depth:
            assert in_flight.popleft().wait(None)
    assert device.close(SECONDS)
    return {"right": [is_right(*pair) for pair in enumerate(launches)], "waits": waits}


class NoFence:
    """An event that lets everything pass."""

    def record(self, stream: torch.Stream) -> None:
        pass

    def query(self) -> bool:
        return True


def send_through_ring(num_slots: int, *, fenced: bool) -> list[bool]:
    """Send many arrays without waiting for one; give which of them arrived as they were."""
    device = open_device()
    new_event: Callable[[], torch.Event] = partial(torch.Event, device.torch_device) if fenced else NoFence
    ring = StagingRing(num_slots, device.torch_device, new_event)
    stream = torch.accelerator.current_stream()

    def send(number: int) -> torch.Tensor:
        return device.to_host(ring.send([np.full(100, number)], stream)[0])

    launches = [device.submit(partial(send, number)) for number in range(NUM_STEPS)]
    assert device.close(SECONDS)
    return [bool((launch.value() == number).all()) for number, launch in enumerate(launches)]


def copy_beside_reuse(*, recorded: bool) -> list[bool]:
    """Let each step's result be freed at once and its memory be wanted again; give which copies were right."""

    def ignore(tensor: torch.Tensor, stream: torch.Stream) -> None:
        pass

    device = open_device()
    with patch.object(torch.Tensor, "record_stream", torch.Tensor.record_stream if recorded else ignore):
        launches = [device.submit(partial(step, device, number)) for number in range(NUM_STEPS)]
    assert device.close(SECONDS)
    return [is_right(*pair) for pair in enumerate(launches)]


def read_without_waiting() -> bool:
    """Whether a result is there when its work was only submitted."""
    device = open_device()
    launch = device.submit(partial(step, device, 7))
    there = is_right(7, launch)
    assert device.close(SECONDS)
    return there


def measure_times() -> dict[str, bool]:
    """Compare the times of steps in flight with each other and with the host's."""
    device = open_device()
    device.submit(partial(step, device, 0)).wait(SECONDS)
    begin_ns = time.monotonic_ns()
    launches = [device.submit(partial(step, device, number)) for number in range(4)]
    assert all(launch.begin_ns == launch.end_ns == 0 for launch in launches if not launch.done())
    for launch in launches:
        assert launch.wait(None)
    end_ns = time.monotonic_ns()
    times = [(launch.begin_ns, launch.compute_end_ns, launch.end_ns) for launch in launches]
    assert device.close(SECONDS)
    return {
        "each in order": all(begin <= computed <= copied for begin, computed, copied in times),
        "one after the other": all(one[1] <= other[0] for one, other in pairwise(times)),
        "within the host's": begin_ns <= times[0][0] and times[-1][2] <= end_ns,
        # Three copies for each step, and the next step does not wait for them.
        "copies last": all(copied - computed >= 3 * 2_000_000 for _, computed, copied in times),
        "copies overlap": times[1][0] < times[0][2],
    }


def wait_for_a_while() -> dict[str, object]:
    """Wait for work that cannot go on, then for the same when it can."""
    device = open_device()
    with closed_gate() as opened:
        launch = device.submit(partial(step, device, 3))
        found: dict[str, object] = {"done early": launch.done(), "waited early": launch.wait(0.05)}
        closed_early = device.close(0.05)
        opened.set()
        found |= {"closed early": closed_early, "waited": launch.wait(SECONDS), "done": launch.done()}
    found |= {"right": is_right(3, launch), "closed": device.close(SECONDS), "closed again": device.close(0.0)}
    try:
        device.submit(lambda: None)
    except RuntimeError as error:
        found["refused"] = str(error)
    return found


def launch_on_a_stopped_stream() -> list[bool]:
    """Launch as many steps as may be in flight while nothing of them can run."""
    device = open_device()
    device.submit(partial(step, device, 0)).wait(SECONDS)
    with closed_gate() as opened:
        launches = [device.submit(partial(step, device, number)) for number in range(4)]
        assert not any(launch.done() for launch in launches)
        opened.set()
        assert all(launch.wait(SECONDS) for launch in launches)
    assert device.close(SECONDS)
    return [is_right(*pair) for pair in enumerate(launches)]


def fail_on_the_host() -> dict[str, object]:
    """Let the enqueuing of a step fail; give what becomes of it, of the one before and of the one after."""
    device = open_device()

    def broken() -> torch.Tensor:
        device.to_host(device.to_device([np.arange(3)])[0])
        raise ArithmeticError("no such kernel")

    with closed_gate() as opened:
        before = device.submit(partial(step, device, 1))
        failed = device.submit(broken)
        after = device.submit(partial(step, device, 2))
        found: dict[str, object] = {"failed early": failed.done()}
        opened.set()
        assert all(launch.wait(SECONDS) for launch in (before, failed, after))
    try:
        failed.value()
    except ArithmeticError as error:
        found["error"] = str(error)
    return found | {"before": is_right(1, before), "after": is_right(2, after), "closed": device.close(SECONDS)}


def fail_on_the_device() -> dict[str, object]:
    """Let a kernel of the fifth step fail; give which steps can be read, and what the others say."""
    device = open_device()
    launches = [device.submit(partial(step, device, number)) for number in range(2)]
    assert all(launch.wait(SECONDS) for launch in launches)
    for number in range(2, 8):
        launches.append(device.submit(partial(step, device, number)))
        launches[-1].wait(None if number % 2 else SECONDS)
    found: dict[str, object] = {"done": [launch.done() for launch in launches], "right": [], "errors": 0}
    for number, launch in enumerate(launches):
        try:
            found["right"] = [*found["right"], is_right(number, launch)]
        except RuntimeError:
            found["errors"] += 1
    found["closed"] = device.close(SECONDS)
    return found


def measure_peak() -> int | None:
    """Give what is measured of work that holds two tensors of 4 MiB at once, and then a third."""
    device = open_device()
    held = torch.empty(1 << 23, dtype=torch.uint8, device=device.torch_device)

    def work() -> None:
        first = torch.empty(1 << 22, dtype=torch.uint8, device=device.torch_device)
        torch.empty(1 << 22, dtype=torch.uint8, device=device.torch_device)
        del first
        torch.empty(1 << 22, dtype=torch.uint8, device=device.torch_device)

    peak = device.peak_bytes(lambda: device.submit(work).wait(SECONDS) and None)
    assert held.numel() == 1 << 23
    assert device.close(SECONDS)
    return peak
