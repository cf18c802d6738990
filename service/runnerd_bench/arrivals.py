"""When the requests of a benchmark are sent."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Give the seconds after the start at which each of ``count`` requests is due.

    Args:
        count: How many.
        request_rate: Requests a second on average; infinite: all at once.
        burstiness: Shape of the gamma distribution that the gaps come from; 1: exponential gaps, a Poisson process;
            less: more bursts; more: more even.
        seed: The same one gives the same times.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    source = np.random.default_rng(seed)
    gaps = source.gamma(burstiness, 1 / (request_rate * burstiness), count)
    times: list[float] = np.cumsum(gaps).tolist()
    return times
