"""A TCP relay before the daemon, whose connections can be cut without a word: both ends see a reset, or the end."""

from __future__ import annotations

import asyncio
import random
import socket
import struct

_CHUNK_BYTES = 65_536
_LINGER_AT_ONCE = struct.pack("ii", 1, 0)


class Relay:
    """Relays connections to one address. Start it, close it.

    Args:
        target: ``host:port``.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._server: asyncio.Server | None = None
        self._closed = False
        self._connections: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}

    @property
    def address(self) -> str:
        """What clients connect to."""
        assert self._server is not None
        return "{}:{}".format(*self._server.sockets[0].getsockname())

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def close(self) -> None:
        """Stop, and cut what is connected."""
        assert self._server is not None
        self._closed = True
        self._server.close()
        tasks = list(self._connections)
        for task in tasks:
            self._cut(task)
        await asyncio.gather(*tasks, return_exceptions=True)

    def reset(self, source: random.Random) -> None:
        """Cut one of the connections, if there is one."""
        if self._connections:
            self._cut(source.choice(list(self._connections)))

    def cut_all(self, *, reset: bool) -> None:
        """Cut each connection: by a reset, or in order, though no HTTP/2 frame says so."""
        for task in list(self._connections):
            self._cut(task, reset=reset)

    def _cut(self, task: asyncio.Task[None], *, reset: bool = True) -> None:
        for writer in self._connections.pop(task, ()):
            if not reset:
                writer.close()
                continue
            end = writer.get_extra_info("socket")
            if end is not None and not writer.transport.is_closing():
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_AT_ONCE)  # a reset, not a goodbye
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        onward_reader, onward_writer = await asyncio.open_connection(*self._target)
        self._connections[task] = writer, onward_writer
        if self._closed:
            self._cut(task)
        await asyncio.gather(_copy(reader, onward_writer), _copy(onward_reader, writer), return_exceptions=True)
        self._cut(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
