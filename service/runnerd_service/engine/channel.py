"""The front process's end of the socket to the engine. It carries messages and knows nothing of what they mean."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from runnerd_service.engine.messages import FromEngine, ToEngine

logger = logging.getLogger(__name__)

_SECONDS_AT_ONCE = 0.002
"""After which others have their turn in the loop: a step of a thousand requests takes as long to hand out."""


class FrontChannel:
    """A ZeroMQ socket in a private directory, read by the event loop.

    Args:
        loop: The running event loop.
        on_message: Called in the loop with each message, in order.

    Raises:
        OSError: The socket cannot be made.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_message: Callable[[FromEngine], None]) -> None:
        self._loop = loop
        self._on_message = on_message
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._drain_scheduled = False
        self._closed = False
        self._directory = Path(tempfile.mkdtemp(prefix="runnerd-"))  # mode 0700
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # The service limits what is under way; a full queue must stop neither process.
        self._socket.set_hwm(0)
        self.address = f"ipc://{self._directory}/engine"
        """What the engine process connects to."""
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self._remove()
            raise OSError(
                error.errno, f"cannot listen on {self.address}: {error}; set TMPDIR to a short path on a local disk"
            ) from error
        loop.add_reader(self._socket.fileno(), self.drain)

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks. With the engine process gone it is dropped: the end of that is told apart."""
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            logger.debug("no engine process to send to")
        # The descriptor announces a change once only, and sending takes note of changes too.
        self._schedule_drain()

    def drain(self) -> None:
        """Hand out the messages that are there; when there are many, the rest in the loop's next turn."""
        self._drain_scheduled = False
        end = time.monotonic() + _SECONDS_AT_ONCE
        while True:
            if self._closed:
                return
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(self._decoder.decode(data))
            if time.monotonic() > end:
                self._schedule_drain()
                return

    def close(self) -> None:
        """Close the socket, drop what is queued, remove the directory. Harmless when closed."""
        if not self._closed:
            self._loop.remove_reader(self._socket.fileno())
            self._remove()

    def _remove(self) -> None:
        self._closed = True
        self._socket.close(linger=0)
        # Once in some hundred times that a peer is killed, libzmq never sees the end of its connection, and this call
        # does not return. That must not stop the event loop: an engine that died would take all streams with it.
        threading.Thread(target=self._context.term, name="end of a socket", daemon=True).start()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self.drain)
