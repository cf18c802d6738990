"""Tells systemd how the server is: units of ``Type=notify`` and ``WatchdogSec=``. Elsewhere it does nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)


def notify(*assignments: str) -> bool:
    """Send ``READY=1`` and the like; give whether somebody listens.

    The protocol is that of ``sd_notify(3)``: a datagram to the socket that ``$NOTIFY_SOCKET`` names.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):  # in the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(assignments).encode(), address)
    except OSError as error:
        logger.warning("systemd was not told %s: %s", assignments[0], error)
        return False
    return True


@asynccontextmanager
async def keep_watchdog_fed() -> AsyncIterator[None]:
    """Tell systemd that the event loop turns, twice in the time that it allows, until the block ends."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    is_ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    if not (microseconds.isdecimal() and int(microseconds) and is_ours):
        yield
        return
    feeding = asyncio.create_task(_feed(int(microseconds) * 1e-6 / 2))
    try:
        yield
    finally:
        feeding.cancel()


async def _feed(seconds: float) -> None:
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(seconds)
