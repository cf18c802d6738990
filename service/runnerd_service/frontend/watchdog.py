"""Sees that an engine with work makes no step any more. It ends nothing itself."""

from __future__ import annotations

import asyncio

from runnerd_service.engine.client import EngineClient

_MAX_INTERVAL_SECONDS = 1.0


async def wait_for_hang(client: EngineClient, timeout: float) -> bool:  # noqa: ASYNC109 # the engine's, not this wait's
    """Wait until the engine has had requests for ``timeout`` seconds without a sign of life.

    Returns:
        False when the engine failed in another way.
    """
    loop = asyncio.get_running_loop()
    interval = min(timeout / 4, _MAX_INTERVAL_SECONDS)
    num_signs, since = client.num_signs_of_life, loop.time()
    while client.failure is None:
        slept_at = loop.time()
        await asyncio.sleep(interval)
        now = loop.time()
        # This process may have stood still itself; what the engine sent meanwhile is yet to be read.
        overslept = now - slept_at > 2 * interval
        if overslept or not client.num_requests or client.num_signs_of_life != num_signs:
            num_signs, since = client.num_signs_of_life, now
        elif now - since >= timeout + interval:  # the work may have come at any time in the first interval
            return True
    return False
