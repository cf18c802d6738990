"""``runnerd serve`` that also tells what its front process holds: on SIGUSR2 it writes that to a file, as JSON.

``python probe.py FILE serve ARGUMENTS``; the file is replaced as a whole.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

from runnerd_service.cli.main import main as runnerd

_MODULES = ("runnerd_service.", "grpc._cython")
_VALUES = "runnerd_service.engine.messages"
"""Of which some are kept for as long as they are the latest."""
_TCP_STATES = {"01": "established", "08": "close-wait", "0A": "listening"}


def held() -> dict[str, dict[str, int]]:
    """Count tasks that run, threads, open descriptors by kind, and objects of the service and of gRPC's server."""
    gc.unfreeze()  # what the daemon leaves out of collections is not listed, either
    gc.collect()
    tasks: Counter[str] = Counter()
    objects: Counter[str] = Counter()
    for one in gc.get_objects():
        kind = type(one)
        if isinstance(one, asyncio.Task):
            if not one.done():
                tasks[getattr(one.get_coro(), "__qualname__", str(one.get_coro()))] += 1
        elif str(kind.__module__).startswith(_MODULES) and kind.__module__ != _VALUES:
            objects[kind.__qualname__] += 1
    descriptors: Counter[str] = Counter()
    sockets = socket_kinds()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # the listing's own
            continue
        descriptors[sockets.get(target) or ("file" if target.startswith("/") else target.split(":")[0])] += 1
    threads = Counter(thread.name.rstrip("0123456789_-") for thread in threading.enumerate())
    return {"tasks": dict(tasks), "threads": dict(threads), "descriptors": dict(descriptors), "objects": dict(objects)}


def socket_kinds() -> dict[str, str]:
    """Give "tcp STATE" or "unix" for each socket of this network, named as its descriptor's link is."""
    kinds = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            kinds[f"socket:[{fields[9]}]"] = f"tcp {_TCP_STATES.get(fields[3], fields[3])}"
    for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]:
        kinds[f"socket:[{line.split()[6]}]"] = "unix"
    return kinds


def main() -> int:
    """Run the command that is given, with the probe in place."""
    path = Path(sys.argv[1])

    def write(_number: int, _frame: FrameType | None) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(held()))
        new.replace(path)

    signal.signal(signal.SIGUSR2, write)
    return runnerd(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
