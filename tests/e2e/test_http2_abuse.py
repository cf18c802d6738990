"""Clients that break HTTP/2 or gRPC: the daemon stays, the streams of others go on, and nothing is left of them.

Frames are written by hand: a library would refuse most of them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import hpack
import pytest

from runnerd.v1.generation_pb2 import GenerateRequest
from runnerd_client import Client
from runnerd_service.config import ServerConfig
from runnerd_service.rpc.server import max_calls

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
INITIAL_WINDOW_SIZE = 4
REFUSED_STREAM = 7
CALLS = max_calls(ServerConfig())
SECONDS = 30
WITNESS = {"seed": 3, "max_tokens": 40, "ignore_eos": True}

pytestmark = pytest.mark.timeout(180)


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack("!I", len(payload))[1:] + bytes((kind, flags)) + struct.pack("!I", stream) + payload


def headers(*extra: tuple[str | bytes, str | bytes], method: str = "StreamGenerate") -> bytes:
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/runnerd.v1.InferenceService/{method}"),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *extra,
    ]
    encoded: bytes = hpack.Encoder().encode(fields)
    return encoded


def message(*, length: int | None = None, compressed: int = 0, max_tokens: int = 5000) -> bytes:
    request = GenerateRequest(text="x")
    request.stopping.max_tokens = max_tokens
    request.stopping.ignore_eos = True
    packed = request.SerializeToString()
    return struct.pack("!BI", compressed, len(packed) if length is None else length) + packed


def call(stream: int, body: bytes, flags: int = END_STREAM) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, headers()) + frame(DATA, flags, stream, body)


@dataclass
class Peer:
    """A connection whose bytes are ours."""

    socket: socket.socket
    _unread: bytes = b""

    def send(self, data: bytes) -> None:
        """Send for as long as the server listens."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Give kind and payload of the server's frames until it closes the connection."""
        with contextlib.suppress(ConnectionResetError):
            while True:
                while len(self._unread) >= 9 and len(self._unread) >= 9 + (size := int.from_bytes(self._unread[:3])):
                    kind, payload = self._unread[3], self._unread[9 : 9 + size]
                    self._unread = self._unread[9 + size :]
                    yield kind, payload
                part = self.socket.recv(65536)
                if not part:
                    return
                self._unread += part

    def wait_for_a_frame(self) -> None:
        next(self.frames(), None)

    def wait_until_closed(self) -> None:
        for _ in self.frames():
            pass

    def status(self) -> int:
        """Give the grpc-status of the first call that ends."""
        decoder = hpack.Decoder()
        for kind, payload in self.frames():
            if kind == HEADERS:
                for name, value in decoder.decode(payload):
                    if name == "grpc-status":
                        return int(value)
            assert kind != GOAWAY, payload
        raise AssertionError("the connection was closed before the call ended")


class Abused:
    """The daemon and how to reach it."""

    def __init__(self, address: str, pid: int, log: Callable[[], str]) -> None:
        self.address = address
        self.pid = pid
        self.log = log

    @contextlib.contextmanager
    def raw(self) -> Iterator[Peer]:
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
            yield Peer(connection)

    @contextlib.contextmanager
    def http2(self, *settings: tuple[int, int]) -> Iterator[Peer]:
        payload = b"".join(struct.pack("!HI", *one) for one in settings)
        with self.raw() as peer:
            peer.send(PREFACE + frame(SETTINGS, payload=payload))
            next(kind for kind, _ in peer.frames() if kind == SETTINGS)
            peer.send(frame(SETTINGS, ACK))  # only now do the server's limits hold
            yield peer

    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@pytest.fixture(scope="module")
def abused(module_daemon) -> Abused:
    server = module_daemon("--runner-option", "step_seconds=0.01", "--no-prefix-caching")
    return Abused(server.wait_until_ready(), server.process.pid, server.log)


@pytest.fixture(scope="module")
def expected(abused: Abused) -> str:
    with Client(abused.address, timeout=SECONDS) as client:
        return client.generate("witness", **WITNESS).outputs[0].text


@pytest.fixture
def witnessed(abused: Abused, expected: str) -> Iterator[Abused]:
    """Another client streams meanwhile; its stream is whole, and the daemon holds what it held before."""
    with Client(abused.address, timeout=SECONDS) as client:
        assert client.load().num_running == 0
        before = abused.num_descriptors()
        texts: list[str] = []
        begun = threading.Event()

        def read() -> None:
            for text in client.stream("witness", **WITNESS).texts():
                texts.append(text)
                begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(SECONDS)
        yield abused
        reader.join(SECONDS)
        assert "".join(texts) == expected
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            load = client.load()
            used = load.num_running, load.num_waiting, load.num_used_blocks, abused.num_descriptors() - before
            if not any(used[:3]) and used[3] <= 0:
                assert " ERROR " not in abused.log(), "what clients do is no error of the server's"
                assert "canary" not in abused.log()
                return
            time.sleep(0.05)
        raise AssertionError(f"left: running, waiting, blocks, descriptors {used}")


ATTACKS: dict[str, Callable[[Peer], None]] = {}


def attack(function: Callable[[Peer], None]) -> Callable[[Peer], None]:
    ATTACKS[function.__name__] = function
    return function


@attack
def garbage_instead_of_frames(peer: Peer) -> None:
    peer.send(bytes(range(256)) * 64)
    peer.wait_until_closed()


@attack
def a_reset_for_every_call(peer: Peer) -> None:
    for stream in range(1, 1001, 2):
        peer.send(call(stream, message()) + frame(RST_STREAM, 0, stream, struct.pack("!I", 8)))
    peer.send(call(1001, message(max_tokens=2)))
    peer.wait_for_a_frame()


@attack
def headers_that_never_end(peer: Peer) -> None:
    block = headers()
    peer.send(frame(HEADERS, END_STREAM, 1, block[:20]))
    peer.send(frame(CONTINUATION, 0, 1, block[20:30]))  # and then nothing


@attack
def continuations_without_end(peer: Peer) -> None:
    peer.send(frame(HEADERS, END_STREAM, 1, headers()))
    for number in range(3000):
        peer.send(frame(CONTINUATION, 0, 1, hpack.Encoder().encode([(f"x-{number}", "y" * 200)], huffman=False)))


@attack
def windows_that_stay_shut(peer: Peer) -> None:
    for stream in range(1, 21, 2):
        peer.send(call(stream, message()))
    next(kind for kind, _ in peer.frames() if kind == HEADERS)  # a call is served; nothing can be sent of it


@attack
def windows_that_stay_shut_and_streams_that_are_reset(peer: Peer) -> None:
    for stream in range(1, 21, 2):
        peer.send(call(stream, message()))
    next(kind for kind, _ in peer.frames() if kind == HEADERS)
    time.sleep(0.1)  # for the others to be served as well
    for stream in range(1, 21, 2):
        peer.send(frame(RST_STREAM, 0, stream, struct.pack("!I", 8)))
    peer.send(frame(PING, payload=bytes(8)))
    next(kind for kind, _ in peer.frames() if kind == PING)


@attack
def calls_that_end_without_a_message(peer: Peer) -> None:
    """Nothing answers them; the connection may have so many and no more."""
    streams = iter(range(1, 2**31, 2))
    ended = itertools.count()

    def send(count: int) -> None:
        for stream in itertools.islice(streams, count):
            peer.send(frame(HEADERS, END_HEADERS | END_STREAM, stream, headers()))

    send(CALLS + 40)
    for kind, payload in peer.frames():
        assert kind != GOAWAY, payload
        if kind == RST_STREAM and payload == struct.pack("!I", REFUSED_STREAM):
            return
        if kind == RST_STREAM:  # cancelled by gRPC, which takes calls up one by one
            send(1)
            assert next(ended) < 4 * CALLS
    raise AssertionError("the connection was closed")


@attack
def a_window_that_overflows(peer: Peer) -> None:
    peer.send(call(1, message()))
    for _ in range(2):
        peer.send(frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", 2**31 - 1)))
    peer.wait_for_a_frame()


@attack
def pings_without_end(peer: Peer) -> None:
    for number in range(3000):
        peer.send(frame(PING, payload=struct.pack("!Q", number)))
    assert any(kind in (PING, GOAWAY) for kind, _ in peer.frames())


@attack
def settings_without_end(peer: Peer) -> None:
    for number in range(3000):
        peer.send(frame(SETTINGS, payload=struct.pack("!HI", INITIAL_WINDOW_SIZE, 65535 + number)))
    peer.wait_for_a_frame()


@attack
def frames_where_none_may_be(peer: Peer) -> None:
    peer.send(frame(DATA, 0, 0, b"data of no stream") + frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4) + headers()))
    peer.wait_for_a_frame()


@attack
def a_frame_larger_than_any_may_be(peer: Peer) -> None:
    peer.send(call(1, message()))
    peer.send(b"\xff\xff\xff" + bytes((DATA, 0)) + struct.pack("!I", 1) + bytes(100_000))


@attack
def headers_that_cannot_be_decoded(peer: Peer) -> None:
    peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\xff" * 200))
    peer.wait_until_closed()


@attack
def metadata_that_is_no_text(peer: Peer) -> None:
    block = headers((b"x-canary", b"canary \xff\xfe"))
    peer.send(frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, END_STREAM, 1, message(max_tokens=2)))
    assert peer.status() == OK


@attack
def a_call_that_never_sends_its_message(peer: Peer) -> None:
    peer.send(frame(HEADERS, END_HEADERS, 1, headers()) + frame(DATA, 0, 1, message()[:7]))


@attack
def a_goodbye_in_the_middle(peer: Peer) -> None:
    peer.send(call(1, message()) + frame(GOAWAY, payload=struct.pack("!II", 1, 0)))
    peer.wait_for_a_frame()


@pytest.mark.parametrize(
    "preface",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(100)],
    ids=["tls", "http/1.1", "zeros"],
)
def test_a_connection_that_speaks_something_else_is_closed(witnessed: Abused, preface: bytes) -> None:
    with witnessed.raw() as peer:
        peer.send(preface)
        peer.wait_until_closed()


def test_connections_that_say_nothing_keep_nobody_out(witnessed: Abused) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(100):
            stack.enter_context(witnessed.raw()).send(PREFACE[: number % 20])
        with Client(witnessed.address, timeout=SECONDS) as client:
            assert client.generate("x", max_tokens=2, ignore_eos=True).outputs


@attack
def a_call_without_a_message(peer: Peer) -> None:
    peer.send(call(1, b""))


@attack
def a_message_that_is_cut(peer: Peer) -> None:
    peer.send(call(1, message(length=200)))


@pytest.mark.parametrize("name", ATTACKS)
def test_a_connection_that_breaks_the_rules_harms_no_other(witnessed: Abused, name: str) -> None:
    window = 0 if name.startswith("windows_that_stay_shut") else 65_535
    with witnessed.http2((INITIAL_WINDOW_SIZE, window)) as peer:
        ATTACKS[name](peer)


OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, INTERNAL = 0, 3, 8, 13


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (message(length=2**32 - 1), RESOURCE_EXHAUSTED),
        (message(length=1), INVALID_ARGUMENT),
        (message(compressed=1), INTERNAL),
        (message(compressed=7), INVALID_ARGUMENT),
        (message(max_tokens=2) * 3, OK),
    ],
    ids=["endless", "short", "compressed by nothing", "an unknown flag", "three: the first counts"],
)
def test_a_message_that_is_framed_wrongly_ends_with_a_status(witnessed: Abused, body: bytes, status: int) -> None:
    with witnessed.http2() as peer:
        peer.send(call(1, body))
        assert peer.status() == status


def test_metadata_beyond_the_limit_ends_with_a_status(witnessed: Abused) -> None:
    block = headers(*((f"x-{number}", "y" * 1000) for number in range(40)))
    parts = [block[begin : begin + 16_000] for begin in range(0, len(block), 16_000)]
    with witnessed.http2() as peer:
        peer.send(frame(HEADERS, 0, 1, parts[0]))
        for part in parts[1:-1]:
            peer.send(frame(CONTINUATION, 0, 1, part))
        peer.send(frame(CONTINUATION, END_HEADERS, 1, parts[-1]) + frame(DATA, END_STREAM, 1, message()))
        assert peer.status() == RESOURCE_EXHAUSTED


@pytest.mark.skipif(shutil.which("h2load") is None, reason="needs h2load, of Debian's nghttp2-client")
def test_a_thousand_calls_of_another_stack_on_ten_connections(witnessed: Abused, tmp_path) -> None:
    (tmp_path / "body").write_bytes(message(max_tokens=1))
    command = ["h2load", "-n", "1000", "-c", "10", "-m", "50", "-d", str(tmp_path / "body")]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    url = f"http://{witnessed.address}/runnerd.v1.InferenceService/StreamGenerate"
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=SECONDS * 4, check=True)
    assert "1000 succeeded, 0 failed, 0 errored, 0 timeout" in done.stdout
