"""Random traces on the Ascend runner: whatever overlaps, each request gets what the CPU runner gives it alone.

They run in a process of their own, in which copies and kernels take time: what reads too early reads garbage.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from driving import FLOAT32, make_checkpoint, open_engine, random_trace, traces
from runnerd_service.engine.engine import Engine
from runnerd_torch.ascend.plugin import ASCEND
from runnerd_torch.plugin import CPU

NUM_TRACES = 12
DELAYS = {"ASCEND_SIM_ALLOW_FP32": "1", "ASCEND_SIM_COPY_US": "500", "ASCEND_SIM_OP_US": "20"}


def open_npu_engine(enforce_eager: bool, trace: Any, model: Path) -> AbstractContextManager[Engine]:
    return open_engine(ASCEND, trace, model, FLOAT32, enforce_eager=enforce_eager)


def compare_all(model: Path, enforce_eager: bool) -> None:
    """Play the traces; each request is compared with itself alone in a synchronous engine on the CPU."""
    options = {"num_threads": 1, "attention": "torch", "linear": "torch"}
    # One step in flight, one request at a time, its prompt in one step, room for all, no shared prefix.
    lonely = traces.Trace(0, 1, 16, 1, 512, False, 0.0, (), ())
    num_preemptions = 0
    with open_engine(CPU, lonely, model, options, enforce_eager=True) as alone:
        for seed in range(NUM_TRACES):
            trace = random_trace(seed)
            try:
                streams, preemptions = traces.play(trace, model, partial(open_npu_engine, enforce_eager))
                num_preemptions += preemptions if trace.depth > 1 else 0
                for request, _ in trace.arrivals:
                    expected = {request.uid: traces.Stream()}
                    alone.add(request)
                    traces.run_steps(alone, expected, 2000)
                    traces.check_stream(streams[request.uid], expected[request.uid])
            except Exception as error:
                error.add_note(f"to run it alone: random_trace({seed})\n{trace}")
                raise
    assert num_preemptions > 0


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.timeout(600)
def test_overlapped_traces_give_each_request_what_it_gets_alone(tmp_path, enforce_eager):
    model = make_checkpoint(tmp_path, "Qwen3Config")
    program = (
        "from pathlib import Path; from test_runner_traces import compare_all; "
        f"compare_all(Path({str(model)!r}), {enforce_eager})"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | DELAYS,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
