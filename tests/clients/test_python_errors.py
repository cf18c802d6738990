"""What the Python client says of calls that end otherwise than well, against real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Timer

import pytest

from runnerd_client import (
    AsyncClient,
    AsyncGenerationStream,
    Client,
    DeadlineError,
    InvalidRequestError,
    RequestCancelledError,
    RunnerdError,
    Tls,
    UnavailableError,
)

SIM = ("--runner", "sim", "--log-level", "warning")
SLOW = (*SIM, "--runner-option", "step_seconds=0.01")
LONG = {"max_tokens": 3000, "ignore_eos": True}
"""At SLOW's pace it outlives every test."""


def ended(call: Callable[[], object], kind: type[RunnerdError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


async def until_running(client: AsyncClient, count: int) -> None:
    while (await client.load()).num_running != count:  # noqa: ASYNC110 - the server tells no event
        await asyncio.sleep(0.01)


async def until_draining(client: AsyncClient) -> None:
    try:
        while True:
            await client.generate("x", max_tokens=1)
    except UnavailableError:
        return


async def read_to_the_end(stream: AsyncGenerationStream) -> None:
    async for _ in stream:
        pass


def test_a_connection_that_breaks_under_a_call_is_told_from_a_server_that_is_not_there(daemons) -> None:
    address = daemons.start(*SLOW)
    with Client(address, timeout=60) as client:
        with client.stream("x", **LONG) as stream:
            next(stream)
            killed = Timer(0.1, daemons.kill, [address])
            killed.start()
            with pytest.raises(UnavailableError, match=r"^the connection broke while the server answered") as caught:
                list(stream)
            killed.join()
        assert caught.value.reason == "CONNECTION_LOST"
        with pytest.raises(UnavailableError, match="refused") as caught:
            client.load()
        assert caught.value.reason == ""


async def test_a_server_that_ends_under_calls_is_named_as_that(daemons) -> None:
    address = daemons.start(*SLOW)
    async with AsyncClient(address, timeout=60) as client:
        unary = asyncio.create_task(client.generate("x", **LONG))
        recording = asyncio.create_task(client.capture_trace(60))
        async with client.stream("x", **LONG) as stream:
            await anext(stream)
            await until_running(client, 2)
            daemons.terminate(address)
            await until_draining(client)
            daemons.terminate(address)  # the second ends live requests, too
            for call in (read_to_the_end(stream), unary):
                with pytest.raises(UnavailableError, match=r"^the server is shutting down") as caught:
                    await call
                assert caught.value.reason == "NOT_READY"
            with pytest.raises(UnavailableError, match=r"^the server ended while it answered") as caught:
                await recording  # which is no request: the server says nothing of it
            assert caught.value.reason == "CONNECTION_LOST"


def test_a_deadline_says_whose_and_what_helps(daemons) -> None:
    with Client(daemons.start(*SLOW), timeout=60) as client:
        told = "the call's timeout of 0.2 s passed .*; give a longer timeout, or to a generation a time_limit"
        for call in (
            lambda: client.generate("x", timeout=0.2, **LONG),
            lambda: list(client.stream("x", timeout=0.2, **LONG)),
        ):
            with pytest.raises(DeadlineError, match=told):
                call()


def test_a_message_beyond_grpc_s_own_limit_says_what_helps(daemons) -> None:
    with Client(daemons.start(*SIM, "--max-message-bytes", "2000"), timeout=60) as client:
        told = ended(lambda: client.generate("x" * 3_000_000), InvalidRequestError)
    assert "send less, or ask the operator for a larger --max-message-bytes" in told


def test_a_server_that_wants_tls_or_a_certificate_is_guessed(daemons, files) -> None:
    address = daemons.start(*SIM, *files.mutual_tls_and_token)
    with Client(address, timeout=60, tls=Tls(ca=files.authority)) as client:
        told = ended(client.load, UnavailableError)
    assert told.endswith("perhaps the server wants a client's certificate: give Tls its cert and key")
    with Client(address, timeout=60) as client:
        assert ended(client.load, UnavailableError).endswith("perhaps the server wants tls")


async def test_a_call_that_the_client_itself_ends_is_no_cancelled_task(daemons) -> None:
    address = daemons.start(*SLOW)
    async with AsyncClient(address, timeout=60) as client:
        stream = client.stream("x", **LONG)
        await anext(stream)
        stream.cancel()
        for _ in range(2):
            with pytest.raises(RequestCancelledError):
                await anext(stream)
        unary = asyncio.create_task(client.generate("x", **LONG))
        reader = asyncio.create_task(read_to_the_end(client.stream("x", **LONG)))
        await until_running(client, 2)
    for task in (unary, reader):
        with pytest.raises(RequestCancelledError):
            await task
    for call in (client.load, lambda: client.generate("x")):
        with pytest.raises(RequestCancelledError, match="the client is closed"):
            await call()
    with pytest.raises(RequestCancelledError, match="the client is closed"):
        client.stream("x")


async def test_a_task_that_is_cancelled_stays_cancelled(daemons) -> None:
    async with AsyncClient(daemons.start(*SLOW), timeout=60) as client:
        for work in (lambda: client.generate("x", **LONG), lambda: read_to_the_end(client.stream("x", **LONG))):
            task = asyncio.create_task(work())
            await until_running(client, 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await work()
            await until_running(client, 0)


def test_a_closed_client_says_that_it_is_closed() -> None:
    client = Client("127.0.0.1:1")
    client.close()
    for call in (client.load, lambda: client.generate("x"), lambda: client.stream("x")):
        assert "the client is closed" in ended(call, RequestCancelledError)
