"""Random traces on the Ascend runner: whatever overlaps, each request gets what the CPU runner gives it alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from driving import FLOAT32, make_checkpoint, open_engine, random_trace, traces
from runnerd_service.engine.engine import Engine
from runnerd_torch.ascend.plugin import ASCEND
from runnerd_torch.plugin import CPU

pytestmark = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format:UserWarning")

NUM_TRACES = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models"), "Qwen3Config")


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Engine]:
    """One step in flight, one request at a time, its prompt in one step, room for all, no shared prefix."""
    options = {"num_threads": 1, "attention": "torch", "linear": "torch"}
    trace = traces.Trace(0, 1, 16, 1, 512, False, 0.0, (), ())
    with open_engine(CPU, trace, model, options, enforce_eager=True) as engine:
        yield engine


def open_npu_engine(enforce_eager: bool, trace: Any, model: Path) -> AbstractContextManager[Engine]:
    return open_engine(ASCEND, trace, model, FLOAT32, enforce_eager=enforce_eager)


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.timeout(600)
def test_overlapped_traces_give_each_request_what_it_gets_alone(model, alone, enforce_eager):
    num_preemptions = 0
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
