"""What the benchmarks share: the machine and its load, process trees, a running daemon, tables and results."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

READY = re.compile(r"serving .* on (\S+:\d+)")
RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Give processor, cores and load averages of this machine."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    cores = len(os.sched_getaffinity(0))
    return {"cpu": cpu, "cores": cores, "load_average": os.getloadavg(), "python": platform.python_version()}


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used since boot, time stolen by its host included."""
    fields = [int(one) for one in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf("SC_CLK_TCK")


def process_tree(pid: int) -> list[int]:
    """Give ``pid`` and its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{entry}/stat").read_text()
                children.setdefault(int(stat[stat.rindex(")") + 2 :].split()[1]), []).append(int(entry))
    tree, todo = [], [pid]
    while todo:
        tree.append(todo.pop())
        todo += children.get(tree[-1], [])
    return tree


def cpu_seconds(pid: int) -> float:
    """CPU seconds, user and system, that one process has used."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mib(pids: Sequence[int]) -> float:
    """Sum of the peak resident sizes (VmHWM) in MiB; a page that two processes share counts twice."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM"):
                    total += int(line.split()[1])
    return total / 1024


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running daemon."""

    process: subprocess.Popen[str]
    address: str


@contextlib.contextmanager
def daemon(
    *arguments: str,
    program: Sequence[str] = ("-m", "runnerd_service"),
    log: IO[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Daemon]:
    """Run ``runnerd serve`` on a free port until the block ends.

    Args:
        arguments: Of ``serve``.
        program: Python's arguments up to ``serve``.
        log: Where its log goes; None: where ours does.
        environment: Variables beside those of this process.
    """
    command = [sys.executable, *program, "serve", "--port", "0", "--log-level", "warning", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | (environment or {})
    )
    assert process.stdout is not None
    # Python ends at once on SIGTERM; the daemon would be left behind.
    former = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        for line in process.stdout:
            if found := READY.search(line):
                yield Daemon(process, found[1])
                break
        else:
            raise SystemExit(f"the daemon ended with code {process.wait()}: {' '.join(command)}")
    finally:
        process.terminate()
        process.wait(timeout=60)
        signal.signal(signal.SIGTERM, former)


def random_prompts(vocab_size: int, length: int, count: int, seed: int) -> list[list[int]]:
    """Draw prompts of token ids, different for each seed, so that no run hits a prefix cached by another."""
    source = random.Random(seed)
    return [[source.randrange(100, vocab_size) for _ in range(length)] for _ in range(count)]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Give median, 90th and 99th percentile and mean."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"p50": statistics.median(ordered), "p90": at(0.9), "p99": at(0.99), "mean": statistics.fmean(ordered)}


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out rows as a Markdown table."""
    cells = [[f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(lines)


def save(name: str, result: dict[str, Any], folder: Path | None = None) -> Path:
    """Write a result beside earlier ones, or to ``folder``, and give its path."""
    folder = folder or RESULTS
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
