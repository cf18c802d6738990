"""What a peer engine's process says and hears: one JSON line each way. Imported by scripts of other environments.

The process prints ``{"version": ...}`` once it can generate. Each line it reads is ``{"prompts": [[id, ...], ...],
"output_len": n}``; it generates n tokens for each prompt, greedily and past EOS, all of them at once, and answers
``{"begin": t, "first": [t, ...], "last": [t, ...], "gaps_ms": [ms, ...]}``: seconds on one clock, for each prompt the
times of its first and its last token, and the times between two tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Job = Callable[[list[list[int]], int, "Times"], None]
"""Generates for the prompts so many tokens each, noting every token."""


class Times:
    """When each prompt got its tokens."""

    def __init__(self, num_prompts: int) -> None:
        self.begin = time.perf_counter()
        self._times: list[list[float]] = [[] for _ in range(num_prompts)]

    def note(self, index: int, num_tokens: int = 1) -> None:
        """Note that prompt ``index`` got tokens now."""
        self._times[index] += [time.perf_counter()] * num_tokens

    def as_json(self, output_len: int) -> str:
        """Give the answer; every prompt must have got its tokens."""
        counts = {len(times) for times in self._times}
        if counts != {output_len}:
            raise SystemExit(f"expected {output_len} tokens of each prompt, got {counts}")
        gaps = [1e3 * (b - a) for times in self._times for a, b in itertools.pairwise(times)]
        first, last = [times[0] for times in self._times], [times[-1] for times in self._times]
        return json.dumps({"begin": self.begin, "first": first, "last": last, "gaps_ms": gaps})


def arguments() -> argparse.Namespace:
    """Parse what every peer is given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    return parser.parse_args()


def answer(version: str, job: Job) -> None:
    """Answer until standard input ends."""
    print(json.dumps({"version": version}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        times = Times(len(asked["prompts"]))
        job(asked["prompts"], asked["output_len"], times)
        print(times.as_json(asked["output_len"]), flush=True)
