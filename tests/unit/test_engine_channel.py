"""The front process's end of the socket to the engine."""

import asyncio
import threading
from pathlib import Path

import zmq

from runnerd_service.engine.channel import FrontChannel


async def test_a_socket_that_does_not_end_holds_nobody_up() -> None:
    earlier = set(threading.enumerate())
    channel = FrontChannel(asyncio.get_running_loop(), lambda message: None)
    directory = Path(channel.address.removeprefix("ipc://")).parent
    # libzmq waits for all sockets of a context, as it does for a connection whose end it has missed.
    straggler = channel._context.socket(zmq.PAIR)
    try:
        channel.close()
        assert not directory.exists()
        ends = [thread for thread in threading.enumerate() if thread.name == "end of a socket"]
        [waiting] = [thread for thread in ends if thread not in earlier]
        assert waiting.is_alive()
    finally:
        straggler.close(linger=0)
    await asyncio.to_thread(waiting.join, 30)
    assert not waiting.is_alive()
