"""torch.distributed on the backend hccl, between two processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import sim_programs as programs
from ascend_sim.process import simulated_process


def test_two_ranks_exchange_tensors(tmp_path):
    file = str(tmp_path / "rendezvous")
    with simulated_process(2, devices=2, copy_us=1000) as run, ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda rank: run(programs.collectives, rank, 2, file), range(2)))
    for rank, results in enumerate(found):
        assert results == {
            "sum": [3.0] * 4,
            "max": [1, 5],
            "gather": [0.0, 0.0, 1.0, 1.0],
            "broadcast": [5, 5, 5],
            "scatter": [2.0 * rank],
        }
