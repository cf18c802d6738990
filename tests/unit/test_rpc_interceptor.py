"""Handlers that misbehave, behind the interceptor of a real server: every call ends, with the right status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest

from runnerd.v1.inference_pb2 import AbortRequest, AbortResponse
from runnerd_service.errors import DuplicateRequest
from runnerd_service.rpc.interceptor import HandlerInterceptor
from runnerd_service.rpc.status import UNKNOWN_ERROR_TEXT

SERVICE = "test.Service"


@asynccontextmanager
async def serving(
    handler: Callable,
    *,
    streams: bool = False,
    max_message_bytes: int = 1000,
    serialize: Callable | None = AbortRequest.SerializeToString,
) -> AsyncIterator:
    """Give the client's side of a method that ``handler`` serves."""
    make = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
    method = make(handler, AbortRequest.FromString, AbortResponse.SerializeToString)
    server = grpc.aio.server(interceptors=[HandlerInterceptor(max_message_bytes)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Method": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream if streams else channel.unary_unary
            yield call(f"/{SERVICE}/Method", serialize, AbortResponse.FromString)
    finally:
        await server.stop(0)


async def status_of(call: Awaitable) -> grpc.aio.AioRpcError:
    async with asyncio.timeout(10):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    return caught.value


async def test_an_unknown_error_is_hidden_and_logged_once_with_its_traceback(caplog) -> None:
    async def handler(request, context):
        raise ValueError("the password is 1234")

    with caplog.at_level(logging.INFO):
        async with serving(handler) as call:
            error = await status_of(call(AbortRequest()))
    error_id = error.details().split()[2].rstrip(";")
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, UNKNOWN_ERROR_TEXT.format(error_id=error_id))
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(logged) == 1
    assert logged[0].getMessage() == f"error {error_id}: /{SERVICE}/Method failed: ValueError"
    assert logged[0].exc_info is not None
    assert "1234" in str(logged[0].exc_info[1])


async def test_an_error_of_the_tree_in_the_middle_of_a_stream_ends_it(caplog) -> None:
    async def handler(request, context):
        yield AbortResponse(aborted=True)
        raise DuplicateRequest("twice")

    async with serving(handler, streams=True) as call:
        stream = call(AbortRequest())
        assert (await stream.read()).aborted
        error = await status_of(stream.read())
    assert (error.code(), error.details()) == (grpc.StatusCode.ALREADY_EXISTS, "twice")
    assert not caplog.records


@pytest.mark.parametrize("streams", [False, True])
async def test_a_cancel_inside_the_server_leaves_no_client_hanging(streams: bool) -> None:
    async def unary(request, context):
        raise asyncio.CancelledError

    async def streaming(request, context):
        yield AbortResponse()
        raise asyncio.CancelledError

    async with serving(streaming if streams else unary, streams=streams) as call:
        if streams:
            stream = call(AbortRequest())
            await stream.read()
            error = await status_of(stream.read())
        else:
            error = await status_of(call(AbortRequest()))
    assert error.code() is grpc.StatusCode.CANCELLED
    assert "inside the server" in error.details()


@pytest.mark.parametrize("ending", ["cancel", "deadline"])
@pytest.mark.parametrize("blocked_in", ["handler", "write"])
async def test_a_stream_that_its_client_leaves_is_closed_at_once(ending: str, blocked_in: str, caplog) -> None:
    seen = SimpleNamespace(closed=asyncio.Event())
    # Some fill the window of a client that does not read.
    padded = AbortResponse.FromString(AbortResponse(aborted=True).SerializeToString() + b"\x7a\xff\x7f" + b" " * 16383)

    async def handler(request, context):
        try:
            while True:
                yield padded
                if blocked_in == "handler":
                    await asyncio.Event().wait()
        finally:
            seen.closed.set()

    async with serving(handler, streams=True) as call:
        stream = call(AbortRequest(), timeout=0.3 if ending == "deadline" else None)
        assert (await stream.read()).aborted
        if ending == "cancel":
            await asyncio.sleep(0.3)  # long enough for the window to be full
            stream.cancel()
        async with asyncio.timeout(10):
            await seen.closed.wait()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_an_abort_of_the_handlers_own_keeps_its_status() -> None:
    async def handler(request, context):
        await context.abort(grpc.StatusCode.NOT_FOUND, "mine")

    async with serving(handler) as call:
        error = await status_of(call(AbortRequest()))
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "mine")


async def test_a_message_over_the_limit_does_not_reach_its_handler() -> None:
    seen = []

    async def handler(request, context):
        seen.append(len(request.request_id))
        return AbortResponse()

    async with serving(handler, max_message_bytes=100) as call:
        await call(AbortRequest(request_id="x" * 98))  # and two bytes of tag and length
        error = await status_of(call(AbortRequest(request_id="x" * 99)))
    assert seen == [98]
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "101 bytes, the server takes 100" in error.details()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("message", [b"\xff\xff\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe"])
async def test_bytes_that_are_no_message_are_refused_by_the_messages_name(
    caplog, message: bytes, streams: bool
) -> None:
    async def unary(request, context):
        raise AssertionError("not to be called")

    async def streaming(request, context):
        raise AssertionError("not to be called")
        yield

    async with serving(streaming if streams else unary, streams=streams, serialize=None) as call:
        waiting = call(message)
        error = await status_of(waiting.read() if streams else waiting)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith("AbortRequest: ")
    assert not [record for record in caplog.records if record.name.startswith("runnerd")]
