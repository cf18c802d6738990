"""What the machine gives this process: cores, memory, and native number formats.

Reads what Linux shows in its files, cgroup limits included, so that a container's share counts and not the whole
machine. Elsewhere it gives what the standard library knows. It knows nothing of torch.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """Give the number of cores this process may use: its affinity, bounded by the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _words(root / "sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, max(1, math.ceil(int(quota[0]) / int(quota[1]))))
    return cores


def memory_bytes(root: Path = _ROOT) -> tuple[int, int]:
    """Give (total, available) bytes of memory for this process, bounded by its cgroup (version 2 or 1)."""
    total, available = _meminfo(root)
    for limit_file, usage_file, stat_key in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "inactive_file"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "sys/fs/cgroup/memory/memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        limit, usage = _words(root / limit_file), _words(root / usage_file)
        if not limit or not usage or limit[0] == "max" or int(limit[0]) >= total:
            continue
        # Cached file pages count as usage but are given back on demand.
        reclaimable = _table((root / usage_file).with_name("memory.stat")).get(stat_key, 0)
        total = int(limit[0])
        available = min(available, total - int(usage[0]) + reclaimable)
    return total, max(available, 0)


def has_native_bfloat16(root: Path = _ROOT) -> bool:
    """Whether the CPU multiplies bfloat16 itself; without that torch converts each operand, slower than float32."""
    flags = set(_words(root / "proc/cpuinfo"))
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def has_native_float16(root: Path = _ROOT) -> bool:
    """Whether the CPU multiplies float16 itself."""
    flags = set(_words(root / "proc/cpuinfo"))
    return bool(flags & {"avx512_fp16", "amx_fp16", "asimdhp"})


def _meminfo(root: Path) -> tuple[int, int]:
    table = _table(root / "proc/meminfo")
    if "MemTotal" in table:
        return table["MemTotal"] * 1024, table.get("MemAvailable", table["MemTotal"]) * 1024
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # No figure of what is free: half is a guess that leaves room for others.
    return total, total // 2


def _table(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.replace(":", " ").split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
