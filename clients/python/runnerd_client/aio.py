"""The asynchronous client: method for method the synchronous one."""
# ruff: noqa: ASYNC109 - a timeout is the call's deadline, which the server is told

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Self, TypeVar, Unpack
from weakref import WeakSet

import grpc

from runnerd.v1 import inference_pb2, inference_pb2_grpc, server_pb2, server_pb2_grpc
from runnerd.v1.generation_pb2 import GenerateRequest
from runnerd_client.channel import DEFAULT_ADDRESS, CallTerms, Connection, Tls, checked_timeout
from runnerd_client.errors import Circumstances, RequestCancelledError, RunnerdError, closed_error, from_rpc_error
from runnerd_client.requests import (
    Conversation,
    GenerateOptions,
    Prompt,
    duration,
    generate_request,
    tokenize_request,
)

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_StreamCall = grpc.aio.UnaryStreamCall[GenerateRequest, inference_pb2.StreamGenerateResponse]


class AsyncGenerationStream:
    """A running generation: iterate over its messages. Leaving it in any way cancels the call.

    ``async with client.stream(...) as stream: async for message in stream: ...``
    """

    def __init__(self, call: _StreamCall, circumstances: Circumstances) -> None:
        self._call = call
        self._circumstances = circumstances
        self._messages = aiter(call)
        self._cancelled = False
        self._error: RunnerdError | None = None

    def __aiter__(self) -> AsyncIterator[inference_pb2.StreamGenerateResponse]:
        return self

    async def __anext__(self) -> inference_pb2.StreamGenerateResponse:
        if self._error is not None:
            raise self._error
        try:
            message = await anext(self._messages)
        except grpc.RpcError as error:
            self._error = from_rpc_error(error, self._circumstances)
            raise self._error from None
        except asyncio.CancelledError:
            if _task_is_cancelled():
                raise
            self._error = _cancelled_call()
            raise self._error from None
        except StopAsyncIteration:
            if not self._cancelled:
                raise
            self._error = _cancelled_call()
            raise self._error from None
        self._circumstances = replace(self._circumstances, answered=True)
        return message

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    async def texts(self) -> AsyncIterator[str]:
        """Give the pieces of text of output 0 as they come."""
        async for message in self:
            if message.HasField("output") and message.output.index == 0 and message.output.text:
                yield message.output.text

    def cancel(self) -> None:
        """End the generation; no error if it has ended."""
        self._cancelled = self._call.cancel() or self._cancelled


class AsyncClient:
    """A connection to a runnerd server from one event loop; close it, or use it as an asynchronous context manager.

    Every method raises an error of :class:`runnerd_client.RunnerdError`'s tree when the call does not end OK, which
    includes RequestCancelledError once the client is closed. What cannot be sent at all is a ValueError or a TypeError
    that names the argument.

    Args:
        address: ``host:port`` or ``unix:/path``.
        timeout: Seconds that a call may take, unless the call says otherwise; None waits without limit.
        tls: How to speak TLS, and the client's certificate; None: no TLS.
        token: Bearer token, or what gives it at each call.
        metadata: Further metadata of each call, such as the one that names the tenant; bytes for ``-bin``.
        plaintext_token: Send the token without TLS to another machine, where something else protects the connection.

    Raises:
        ValueError: These do not go together: a token in the clear, TLS on a unix socket. Or one is not what gRPC
            carries: a token with its file's end of line, a key in capitals, an endless timeout.
        OSError: A file of ``tls`` cannot be read.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float | None = None,
        tls: Tls | None = None,
        token: str | Callable[[], str] | None = None,
        metadata: Mapping[str, str | bytes] | None = None,
        plaintext_token: bool = False,
    ) -> None:
        self._closed = False
        self._streams: WeakSet[AsyncGenerationStream] = WeakSet()
        self._timeout = checked_timeout(timeout)
        self._connection = connection = Connection(address, tls, token, metadata, plaintext_token)
        credentials = connection.credentials()
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=connection.options)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=connection.options)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._model = server_pb2_grpc.ModelServiceStub(self._channel)
        self._server = server_pb2_grpc.ServerServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls that still run are cancelled."""
        self._closed = True
        for stream in list(self._streams):  # gRPC 1.75 gives their readers no end, or one like that of a whole answer
            stream.cancel()
        await self._channel.close()

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> inference_pb2.GenerateResponse:
        """Generate and give the whole answer."""
        request = generate_request(prompt, options)
        return await self._call(self._inference.Generate, request, timeout)

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerationStream:
        """Generate and give the messages as they come."""
        request = generate_request(prompt, options)
        terms = self._terms(timeout)
        stream = AsyncGenerationStream(self._inference.StreamGenerate(request, **terms), self._circumstances(terms))
        self._streams.add(stream)
        return stream

    async def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """End a live request; its own call ends with RequestCancelledError. Gives whether it was live."""
        request = inference_pb2.AbortRequest(request_id=request_id)
        return (await self._call(self._inference.Abort, request, timeout)).aborted

    async def tokenize(
        self, prompt: str | Conversation, *, add_special_tokens: bool | None = None, timeout: float | None = None
    ) -> inference_pb2.TokenizeResponse:
        """Give the token ids of a prompt, as ``generate`` would see them."""
        return await self._call(self._inference.Tokenize, tokenize_request(prompt, add_special_tokens), timeout)

    async def detokenize(
        self, ids: Sequence[int], *, skip_special_tokens: bool | None = None, timeout: float | None = None
    ) -> str:
        """Give the text of token ids."""
        request = inference_pb2.DetokenizeRequest(ids=ids, skip_special_tokens=skip_special_tokens)
        return (await self._call(self._inference.Detokenize, request, timeout)).text

    async def model_info(self, *, timeout: float | None = None) -> server_pb2.GetModelInfoResponse:
        """Describe the served model."""
        return await self._call(self._model.GetModelInfo, server_pb2.GetModelInfoRequest(), timeout)

    async def server_info(self, *, timeout: float | None = None) -> server_pb2.GetServerInfoResponse:
        """Describe the server; answers while the model loads, too."""
        return await self._call(self._server.GetServerInfo, server_pb2.GetServerInfoRequest(), timeout)

    async def load(self, *, timeout: float | None = None) -> server_pb2.GetLoadResponse:
        """Give the present load."""
        return await self._call(self._server.GetLoad, server_pb2.GetLoadRequest(), timeout)

    async def runners(self, *, timeout: float | None = None) -> Sequence[server_pb2.RunnerInfo]:
        """List the runners that are installed at the server."""
        return (await self._call(self._server.ListRunners, server_pb2.ListRunnersRequest(), timeout)).runners

    async def capture_trace(self, seconds: float, *, timeout: float | None = None) -> server_pb2.CaptureTraceResponse:
        """Record the engine's steps for ``seconds``, at most 60; ``timeout`` is to be longer than that."""
        request = server_pb2.CaptureTraceRequest(duration=duration("seconds", seconds))
        return await self._call(self._server.CaptureTrace, request, timeout)

    async def reset_prefix_cache(self, *, timeout: float | None = None) -> int:
        """Forget all cached prefixes; gives how many KV blocks held one. Live requests go on."""
        request = server_pb2.ResetPrefixCacheRequest()
        return (await self._call(self._server.ResetPrefixCache, request, timeout)).num_blocks

    async def drain(self, seconds: float | None = None, *, timeout: float | None = None) -> bool:
        """Let the server refuse new requests and wait for the live ones; gives whether all ended by themselves.

        Args:
            seconds: Live requests that take longer are ended; None means the server's default.
            timeout: Of the call; it is to be longer than that.
        """
        request = server_pb2.DrainRequest(timeout=None if seconds is None else duration("seconds", seconds))
        return (await self._call(self._server.Drain, request, timeout)).completed

    async def _call(
        self, method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response], request: _Request, timeout: float | None
    ) -> _Response:
        terms = self._terms(timeout)
        try:
            return await method(request, **terms)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._circumstances(terms)) from None
        except asyncio.CancelledError:
            if _task_is_cancelled():
                raise
            raise _cancelled_call() from None

    def _terms(self, timeout: float | None) -> CallTerms:
        if self._closed:
            raise closed_error()
        limit = self._timeout if timeout is None else checked_timeout(timeout)
        return {"timeout": limit, "metadata": self._connection.call_metadata()}

    def _circumstances(self, terms: CallTerms) -> Circumstances:
        return Circumstances(terms["timeout"], self._connection.if_closed)


def _task_is_cancelled() -> bool:
    """Whether this task is asked to end: gRPC raises CancelledError also where only its call was cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _cancelled_call() -> RequestCancelledError:
    return RequestCancelledError("this client cancelled the call", code=grpc.StatusCode.CANCELLED)
