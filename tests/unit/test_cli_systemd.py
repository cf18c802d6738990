"""What systemd is told: a real daemon and a real socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from runnerd_service.cli.systemd import notify

WAIT_SECONDS = 60


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    path = str(tmp_path / "notify")
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as receiver:
        receiver.bind(path)
        receiver.settimeout(WAIT_SECONDS)
        yield receiver, path


def until(receiver: socket.socket, wanted: str) -> list[str]:
    """Give the messages up to the first that begins with ``wanted``."""
    found: list[str] = []
    while not found or not found[-1].startswith(wanted):
        found.append(receiver.recv(4096).decode())
    return found


def test_a_daemon_tells_that_it_is_ready_that_it_lives_and_that_it_stops(listening) -> None:
    receiver, path = listening
    process = subprocess.Popen(
        [sys.executable, "-m", "runnerd_service", "serve", "--runner", "sim", "--port", "0", "--drain-seconds", "7"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "400000"},
    )
    try:
        before = until(receiver, "READY=1")
        assert before[-1] == "READY=1\nSTATUS=serving sim"
        assert set(before[:-1]) == {"WATCHDOG=1"}  # it lives while it loads
        until(receiver, "WATCHDOG=1")
        process.send_signal(signal.SIGTERM)
        assert until(receiver, "STOPPING=1")[-1] == "STOPPING=1\nSTATUS=live requests have 7 s to finish"
        assert process.wait(WAIT_SECONDS) == 0
    finally:
        process.kill()
        process.wait(WAIT_SECONDS)


def test_an_abstract_socket_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"runnerd-test-{os.getpid()}"
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as receiver:
        receiver.bind(f"\0{name}")
        receiver.settimeout(WAIT_SECONDS)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        assert notify("READY=1", "STATUS=x")
        assert receiver.recv(100) == b"READY=1\nSTATUS=x"


@pytest.mark.parametrize("address", ["", "vsock:2:1", "/no/such/folder/notify"])
def test_without_a_listener_nothing_is_told(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not notify("READY=1")
