"""The random numbers of a request: one float64 per output, a pure function of (seed, output index).

A counter-based generator has no state to advance, so the composition of the batch, the depth of the pipeline,
preemption and a restart change nothing. The mixing is SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom
Number Generators", OOPSLA 2014): output i of seed s is ``mix(mix(s) + (i + 1) * gamma)``, its upper 53 bits read as a
fraction. The seed is mixed first so that neighbouring seeds start far apart on the common orbit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def seed_states(seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Give the start state of each seed's sequence; computed once per request."""
    return _mix(seeds)


def uniforms(states: npt.NDArray[np.uint64], output_indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Give one number in [0, 1) for each pair.

    Args:
        states: [n], of :func:`seed_states`.
        output_indices: [n], at least 0.
    """
    counters = output_indices.astype(np.uint64) + np.uint64(1)
    bits = _mix(states + counters * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # Arrays of uint64 wrap around, which is what the generator asks for.
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIER_1
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIER_2
    return values ^ (values >> np.uint64(31))
