"""The small HTTP server: what it does when its answers do not come, and on IPv6."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing

import pytest

from runnerd_service.rpc import web
from runnerd_service.telemetry import status
from runnerd_service.telemetry.web import Answer, WebServer


async def others_end() -> None:
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that turns in a thread of its own."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    asyncio.run_coroutine_threadsafe(others_end(), made).result(30)
    made.call_soon_threadsafe(made.stop)
    thread.join(30)
    made.close()


@pytest.fixture
def blocked(loop: asyncio.AbstractEventLoop) -> Iterator[asyncio.AbstractEventLoop]:
    """The same, while a callback does not return."""
    released, entered = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        released.wait(60)

    loop.call_soon_threadsafe(block)
    assert entered.wait(30)
    yield loop
    released.set()


def test_a_loop_that_turns_is_alive(loop: asyncio.AbstractEventLoop) -> None:
    assert web._turns(loop)


def test_a_loop_that_stands_still_is_not_alive(
    blocked: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_ALIVE_SECONDS", 0.1)
    assert not web._turns(blocked)


async def steps() -> str:
    return '{"steps":[1]}'


def test_however_many_look_the_engine_is_asked_once(loop: asyncio.AbstractEventLoop) -> None:
    asked: list[int] = []

    async def counted() -> str:
        asked.append(1)
        return await steps()

    data = status.StatusData(lambda: {"x": 1}, counted, loop)
    answers = {data.answer().body for _ in range(20)}
    told = [json.loads(body) for body in answers]
    assert len(asked) == len(told) == 1
    assert (told[0]["server"], told[0]["steps"]) == ({"x": 1}, {"steps": [1]})


def test_the_page_gets_its_figures_while_the_engine_does_not_answer(
    blocked: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_ANSWER_SECONDS", 0.1)
    told = json.loads(status.StatusData(lambda: {"x": 1}, steps, blocked).answer().body)
    assert (told["server"], told["steps"]) == ({"x": 1}, None)


def test_it_listens_on_ipv6() -> None:
    try:
        with closing(socket.create_server(("::1", 0), family=socket.AF_INET6)):
            pass
    except OSError as error:
        pytest.skip(f"needs IPv6: {error}")
    with closing(WebServer("[::1]", 0, {"/": lambda: Answer(b"here")})) as server:
        assert server.url == f"http://[::1]:{server.port}"
        with urllib.request.urlopen(server.url, timeout=30) as answer:
            assert answer.read() == b"here"


def test_a_reader_that_says_nothing_holds_up_no_other() -> None:
    with closing(WebServer("127.0.0.1", 0, {"/": lambda: Answer(b"here")})) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(20)]
        with urllib.request.urlopen(server.url, timeout=30) as answer:
            assert answer.read() == b"here"
        for one in silent:
            one.close()


def test_a_connection_that_breaks_is_no_error(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture) -> None:
    with closing(WebServer("127.0.0.1", 0, {"/": lambda: Answer(b"x")})) as server:
        for sent in (b"", b"GET / HT"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                connection.sendall(sent)
        with urllib.request.urlopen(server.url, timeout=30) as answer:
            assert answer.read() == b"x"
    assert caplog.text == capfd.readouterr().err == ""
