"""Stands around every handler: maps errors to statuses, checks message sizes, ends streams cleanly.

Handlers raise; only this module aborts calls. Streaming handlers are async generators and are driven from here by
``context.write``: so a cancel reaches them as a close at once, not when the garbage collector finds them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from runnerd_service.errors import FieldViolation, InvalidRequest, RequestAborted, RunnerdError
from runnerd_service.rpc.status import to_status

logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
_Unary = Callable[[Any, _Context], Awaitable[Any]]
_Streaming = Callable[[Any, _Context], AsyncGenerator[Any, None]]


class HandlerInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the unary-unary and unary-stream handlers; others (reflection) pass through.

    Args:
        max_message_bytes: Larger requests are refused by name, before their handler sees them.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Give the wrapped handler of the method."""
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: gRPC answers UNIMPLEMENTED
            return None
        method, codec = handler_call_details.method, (handler.request_deserializer, handler.response_serializer)
        # The stubs type handlers as the synchronous server's; an aio server has the asynchronous kinds.
        if handler.unary_unary is not None:
            unary = cast(_Unary, handler.unary_unary)
            return grpc.unary_unary_rpc_method_handler(self._unary(method, unary), *codec)
        if handler.unary_stream is not None:
            streaming = cast(_Streaming, handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(self._streaming(method, streaming), *codec)
        return handler

    def _unary(self, method: str, handler: _Unary) -> _Unary:
        async def call(request: Message, context: _Context) -> Any:
            try:
                self._check_size(request)
                return await handler(request, context)
            except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001 - the one place that maps all of them
                return await _abort(method, error, context)

        return call

    def _streaming(self, method: str, handler: _Streaming) -> _Unary:
        async def call(request: Message, context: _Context) -> None:
            try:
                self._check_size(request)
                async with aclosing(handler(request, context)) as messages:
                    async for message in messages:
                        await context.write(message)
            except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001
                await _abort(method, error, context)

        return call

    def _check_size(self, request: Message) -> None:
        size = request.ByteSize()
        if size > self._max_message_bytes:
            raise InvalidRequest(
                FieldViolation(
                    request.DESCRIPTOR.name,
                    f"the message has {size} bytes, the server takes {self._max_message_bytes}; send less, or raise "
                    "--max-message-bytes",
                )
            )


async def _abort(method: str, error: BaseException, context: _Context) -> None:
    """End the call with the status of ``error``.

    Raises:
        CancelledError: The call itself was cancelled; gRPC knows its status.
        AbortError: In all other cases.
    """
    if isinstance(error, grpc.aio.AbortError):  # the health service's own answer
        raise error
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise error
        # Something inside was cancelled, not the call: without a status the client would wait for ever.
        error = RequestAborted("the request was ended inside the server")
    assert isinstance(error, Exception)
    status = to_status(error)
    if not isinstance(error, RunnerdError):
        logger.error("%s failed", method, exc_info=error)
    await context.abort(status.code, status.details, status.trailing_metadata)
