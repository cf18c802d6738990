"""Stands around every handler: reads its message, maps errors to statuses, ends streams cleanly.

Handlers raise; only this module aborts calls. Streaming handlers are async generators and are driven from here by
``context.write``: so a cancel reaches them as a close at once, not when the garbage collector finds them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError, Message

from runnerd_service.errors import FieldViolation, InvalidRequest, RequestAborted, RunnerdError
from runnerd_service.rpc.request_record import REQUEST_NAME
from runnerd_service.rpc.stall import StallLimit
from runnerd_service.rpc.status import is_internal, to_status
from runnerd_service.telemetry.logs import with_fields

logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
_Unary = Callable[[Any, _Context], Awaitable[Any]]
_Streaming = Callable[[Any, _Context], AsyncGenerator[Any, None]]
_Conversing = Callable[[AsyncIterator[Any], _Context], AsyncGenerator[Any, None]]
_Parse = Callable[[bytes], Message]
_Serialize = Callable[[Message], bytes]


class HandlerInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers.

    Args:
        max_message_bytes: Larger requests are refused by name, before their handler sees them.
        stall_timeout_seconds: A stream whose reader takes nothing for so long is ended; 0: never.
    """

    def __init__(self, max_message_bytes: int, stall_timeout_seconds: float = 0.0) -> None:
        self._max_message_bytes = max_message_bytes
        self._stall_timeout_seconds = stall_timeout_seconds

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Give the wrapped handler of the method."""
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: gRPC answers UNIMPLEMENTED
            return None
        # Without a deserializer of its own a handler gets the bytes: gRPC would answer UNKNOWN to those it cannot read.
        method, codec = handler_call_details.method, (None, handler.response_serializer)
        parse = cast(_Parse, handler.request_deserializer)
        # The stubs type handlers as the synchronous server's; an aio server has the asynchronous kinds.
        if handler.unary_unary is not None:
            unary = cast(_Unary, handler.unary_unary)
            return grpc.unary_unary_rpc_method_handler(self._unary(method, unary, parse), *codec)
        if handler.unary_stream is not None:
            streaming = cast(_Streaming, handler.unary_stream)
            codec = (None, _unless_bytes(cast(_Serialize, handler.response_serializer)))
            return grpc.unary_stream_rpc_method_handler(self._streaming(method, streaming, parse), *codec)
        conversing = cast(_Conversing, handler.stream_stream)
        return grpc.stream_stream_rpc_method_handler(cast(Any, self._conversing(method, conversing, parse)), *codec)

    def _unary(self, method: str, handler: _Unary, parse: _Parse) -> _Unary:
        async def call(data: bytes, context: _Context) -> Any:
            try:
                return await handler(self._read(data, parse), context)
            except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001 - the one place that maps all of them
                return await abort(method, error, context)

        return call

    def _streaming(self, method: str, handler: _Streaming, parse: _Parse) -> _Unary:
        async def call(data: bytes, context: _Context) -> None:
            try:
                async with (
                    StallLimit(self._stall_timeout_seconds) as limit,
                    aclosing(handler(self._read(data, parse), context)) as messages,
                ):
                    async for message in messages:
                        limit.begin()
                        try:
                            await context.write(message)
                        except grpc.aio.InternalError as error:  # gRPC's word for it, where it comes before the cancel
                            raise RequestAborted("the reader of the stream has left") from error
                        except asyncio.CancelledError:
                            if (stalled := limit.error) is not None:
                                await messages.athrow(stalled)  # the handler notes why it ends, and raises it
                            raise
                        limit.end()
            except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001
                await abort(method, error, context)

        return call

    def _conversing(self, method: str, handler: _Conversing, parse: _Parse) -> _Conversing:
        async def call(requests: AsyncIterator[bytes], context: _Context) -> AsyncGenerator[Any, None]:
            messages = (self._read(data, parse) async for data in requests)
            try:
                async with aclosing(handler(messages, context)) as answers:
                    async for answer in answers:
                        yield answer
            except Exception as error:  # noqa: BLE001
                await abort(method, error, context)

        return call

    def _read(self, data: bytes, parse: _Parse) -> Message:
        """Give the request that ``data`` holds.

        Raises:
            InvalidRequest: It is too large, or holds none.
        """
        size, limit = len(data), self._max_message_bytes
        if size > limit:
            problem = f"the message has {size} bytes, the server takes {limit}; send less, or raise --max-message-bytes"
        else:
            try:
                return parse(data)
            except DecodeError:
                problem = f"the {size} bytes are no such message; generate the client's code from protos/runnerd/v1"
        raise InvalidRequest(FieldViolation(parse(b"").DESCRIPTOR.name, problem))


def _unless_bytes(serialize: _Serialize) -> Callable[[Message | bytes], bytes]:
    """Let a handler give messages that are serialized already."""
    return lambda message: message if isinstance(message, bytes) else serialize(message)


async def abort(method: str, error: BaseException, context: _Context) -> None:
    """End the call with the status of ``error``.

    Raises:
        CancelledError: The call itself was cancelled; gRPC knows its status. Or there is nobody left to tell.
        AbortError: In all other cases.
    """
    try:
        if isinstance(error, grpc.aio.AbortError):  # the health service's own answer
            raise error
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise error
            # Something inside was cancelled, not the call: without a status the client would wait for ever.
            error = RequestAborted("the request was ended inside the server")
        assert isinstance(error, Exception)
        error_id = ""
        if is_internal(error):
            error_id = secrets.token_hex(6)
            traceback = None if isinstance(error, RunnerdError) else error
            name = REQUEST_NAME.get()
            logger.error(
                "error %s: %s%s failed: %s",
                error_id,
                method,
                f" of request {name}" if name else "",
                type(error).__name__,
                exc_info=traceback,
                extra=with_fields(request_id=name or None),
            )
        status = to_status(error, error_id)
        error.__traceback__ = None  # what gRPC raises refers to the error
        await context.abort(status.code, status.details, status.trailing_metadata)
    except grpc.aio.InternalError:  # the client left before anything of this was written
        raise asyncio.CancelledError from None
    finally:
        del error  # its traceback refers to this frame: only a collection of garbage would free the two
