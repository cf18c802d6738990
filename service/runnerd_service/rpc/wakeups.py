"""Lets gRPC wake the event loop once for many events.

For each event (a message is sent, a call begins) a thread of gRPC's writes a byte into a socket. Its callback in the
loop reads one byte a turn and takes all events that are there, so most bytes wake the loop for nothing: a turn with its
system calls for each message. Here all bytes that are there are read in one turn. Where gRPC no longer works like that,
nothing is changed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_MANY_BYTES = 4096


@contextmanager
def few_wakeups() -> Iterator[None]:
    """Read many bytes at once from the sockets that the running loop is given to watch in the block."""
    loop = asyncio.get_running_loop()
    add_reader = loop.add_reader

    def add(watched: Any, callback: Callable[..., Any], *arguments: Any) -> Any:
        if isinstance(watched, socket.socket):
            callback = _read_at_once(watched, callback)
        return add_reader(watched, callback, *arguments)

    loop.add_reader = add  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del loop.add_reader


def _read_at_once(watched: socket.socket, callback: Callable[..., Any]) -> Callable[..., None]:
    buffer = bytearray(_MANY_BYTES)

    def wake(*arguments: Any) -> None:
        try:
            num_bytes = watched.recv_into(buffer, _MANY_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        # The callback reads one byte itself. An event is there before its byte is.
        if num_bytes > 1:
            watched.recv_into(buffer, num_bytes - 1)
        callback(*arguments)

    return wake
