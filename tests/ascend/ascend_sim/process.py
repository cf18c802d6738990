"""Processes on simulated devices of their own: the options of a device are settled when its process starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

from ascend_sim.environment import cann_environment

SECONDS = 110
"""What takes longer hangs."""


@contextmanager
def simulated_process(
    num_processes: int = 1, *, task_queue: int = 1, **options: object
) -> Iterator[Callable[..., Any]]:
    """Give a function that calls a module's function in another process and gives what that returned or raised.

    Args:
        num_processes: How many calls can run at once.
        task_queue: TASK_QUEUE_ENABLE, torch_npu's own queue between the host and the device: 0, 1 or 2.
        options: Of the simulation: ``copy_us=2000``.
    """
    environment = cann_environment(**options) | {"TASK_QUEUE_ENABLE": str(task_queue)}
    with patch.dict(os.environ, environment), ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        yield lambda function, *arguments, **more: pool.submit(function, *arguments, **more).result(SECONDS)
