"""Watches the daemon of a soak from outside: memory over time, outages, and what is held at rest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

Held = dict[str, dict[str, int]]

_SAMPLE_SECONDS = 1.0
_ANSWER_SECONDS = 30.0


def rss_mib(pid: int) -> float:
    """Resident memory of a process; 0 when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
    return 0.0


def slope_per_hour(samples: Sequence[tuple[float, float]]) -> float:
    """Least-squares slope of (seconds, value), per hour."""
    if len(samples) < 2:
        return 0.0
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return 3600 * sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


@dataclass(slots=True)
class Memory:
    """Samples of the daemon's processes, once a second."""

    front: list[tuple[float, float]] = field(default_factory=list)
    engine: list[tuple[float, float]] = field(default_factory=list)
    """Of whichever engine process there was."""

    async def sample(self, pid: int, began: float) -> None:
        """Take samples until cancelled."""
        while True:
            now = time.monotonic() - began
            self.front.append((now, rss_mib(pid)))
            engines = [rss_mib(child) for child in children(pid)]
            if engines and max(engines):
                self.engine.append((now, max(engines)))
            await asyncio.sleep(_SAMPLE_SECONDS)


def children(pid: int) -> list[int]:
    """Give the child processes."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(one) for one in path.read_text().split()]
    return found


class Probe:
    """Asks a daemon that runs by ``probe.py`` what it holds.

    Args:
        pid: The daemon's front process.
        path: The probe's file.
    """

    def __init__(self, pid: int, path: Path) -> None:
        self._pid = pid
        self._path = path

    async def held(self) -> Held:
        """Give what it holds now.

        Raises:
            TimeoutError: It does not answer.
        """
        self._path.unlink(missing_ok=True)
        os.kill(self._pid, signal.SIGUSR2)
        async with asyncio.timeout(_ANSWER_SECONDS):
            while not self._path.exists():  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.05)
        held: Held = json.loads(self._path.read_text())
        return held


def left_over(before: Held, after: Held) -> dict[str, int]:
    """Give what is held beyond ``before``, by name."""
    return {
        f"{kind} {name}": count - before[kind].get(name, 0)
        for kind, counts in after.items()
        for name, count in counts.items()
        if count > before[kind].get(name, 0)
    }
