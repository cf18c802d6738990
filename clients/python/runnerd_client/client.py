"""The synchronous client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from runnerd.v1 import inference_pb2, inference_pb2_grpc, server_pb2, server_pb2_grpc
from runnerd_client.channel import DEFAULT_ADDRESS, CallTerms, Connection, Tls, checked_timeout
from runnerd_client.errors import Circumstances, closed_error, from_rpc_error
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


class _StreamCall(Protocol):
    """What is used of gRPC's call object, whose class is private."""

    def __next__(self) -> inference_pb2.StreamGenerateResponse: ...

    def cancel(self) -> bool: ...


class GenerationStream:
    """A running generation: iterate over its messages. Leaving it in any way cancels the call.

    ``with client.stream(...) as stream: for message in stream: ...``
    """

    def __init__(self, call: _StreamCall, circumstances: Circumstances) -> None:
        self._call = call
        self._circumstances = circumstances

    def __iter__(self) -> Iterator[inference_pb2.StreamGenerateResponse]:
        return self

    def __next__(self) -> inference_pb2.StreamGenerateResponse:
        try:
            message = next(self._call)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._circumstances) from None
        self._circumstances = replace(self._circumstances, answered=True)
        return message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    def texts(self) -> Iterator[str]:
        """Give the pieces of text of output 0 as they come."""
        for message in self:
            if message.HasField("output") and message.output.index == 0 and message.output.text:
                yield message.output.text

    def cancel(self) -> None:
        """End the generation; no error if it has ended."""
        self._call.cancel()


class Client:
    """A connection to a runnerd server. Safe to share between threads; close it, or use it as a context manager.

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
        self._timeout = checked_timeout(timeout)
        self._connection = connection = Connection(address, tls, token, metadata, plaintext_token)
        credentials = connection.credentials()
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=connection.options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=connection.options)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._model = server_pb2_grpc.ModelServiceStub(self._channel)
        self._server = server_pb2_grpc.ServerServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls that still run are cancelled."""
        self._closed = True
        self._channel.close()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> inference_pb2.GenerateResponse:
        """Generate and give the whole answer."""
        request = generate_request(prompt, options)
        return self._call(self._inference.Generate, request, timeout)

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> GenerationStream:
        """Generate and give the messages as they come."""
        request = generate_request(prompt, options)
        terms = self._terms(timeout)
        try:
            call = self._inference.StreamGenerate(request, **terms)
        except ValueError:
            if self._closed:  # by another thread, since the terms were made
                raise closed_error() from None
            raise
        return GenerationStream(call, self._circumstances(terms))

    def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """End a live request; its own call ends with RequestCancelledError. Gives whether it was live."""
        request = inference_pb2.AbortRequest(request_id=request_id)
        return self._call(self._inference.Abort, request, timeout).aborted

    def tokenize(
        self, prompt: str | Conversation, *, add_special_tokens: bool | None = None, timeout: float | None = None
    ) -> inference_pb2.TokenizeResponse:
        """Give the token ids of a prompt, as ``generate`` would see them."""
        return self._call(self._inference.Tokenize, tokenize_request(prompt, add_special_tokens), timeout)

    def detokenize(
        self, ids: Sequence[int], *, skip_special_tokens: bool | None = None, timeout: float | None = None
    ) -> str:
        """Give the text of token ids."""
        request = inference_pb2.DetokenizeRequest(ids=ids, skip_special_tokens=skip_special_tokens)
        return self._call(self._inference.Detokenize, request, timeout).text

    def model_info(self, *, timeout: float | None = None) -> server_pb2.GetModelInfoResponse:
        """Describe the served model."""
        return self._call(self._model.GetModelInfo, server_pb2.GetModelInfoRequest(), timeout)

    def server_info(self, *, timeout: float | None = None) -> server_pb2.GetServerInfoResponse:
        """Describe the server; answers while the model loads, too."""
        return self._call(self._server.GetServerInfo, server_pb2.GetServerInfoRequest(), timeout)

    def load(self, *, timeout: float | None = None) -> server_pb2.GetLoadResponse:
        """Give the present load."""
        return self._call(self._server.GetLoad, server_pb2.GetLoadRequest(), timeout)

    def runners(self, *, timeout: float | None = None) -> Sequence[server_pb2.RunnerInfo]:
        """List the runners that are installed at the server."""
        return self._call(self._server.ListRunners, server_pb2.ListRunnersRequest(), timeout).runners

    def capture_trace(self, seconds: float, *, timeout: float | None = None) -> server_pb2.CaptureTraceResponse:
        """Record the engine's steps for ``seconds``, at most 60; ``timeout`` is to be longer than that."""
        request = server_pb2.CaptureTraceRequest(duration=duration("seconds", seconds))
        return self._call(self._server.CaptureTrace, request, timeout)

    def reset_prefix_cache(self, *, timeout: float | None = None) -> int:
        """Forget all cached prefixes; gives how many KV blocks held one. Live requests go on."""
        request = server_pb2.ResetPrefixCacheRequest()
        return self._call(self._server.ResetPrefixCache, request, timeout).num_blocks

    def drain(self, seconds: float | None = None, *, timeout: float | None = None) -> bool:
        """Let the server refuse new requests and wait for the live ones; gives whether all ended by themselves.

        Args:
            seconds: Live requests that take longer are ended; None means the server's default.
            timeout: Of the call; it is to be longer than that.
        """
        request = server_pb2.DrainRequest(timeout=None if seconds is None else duration("seconds", seconds))
        return self._call(self._server.Drain, request, timeout).completed

    def _call(
        self, method: grpc.UnaryUnaryMultiCallable[_Request, _Response], request: _Request, timeout: float | None
    ) -> _Response:
        terms = self._terms(timeout)
        try:
            return method(request, **terms)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._circumstances(terms)) from None
        except ValueError:
            if self._closed:  # by another thread, since the terms were made
                raise closed_error() from None
            raise

    def _terms(self, timeout: float | None) -> CallTerms:
        if self._closed:
            raise closed_error()
        limit = self._timeout if timeout is None else checked_timeout(timeout)
        return {"timeout": limit, "metadata": self._connection.call_metadata()}

    def _circumstances(self, terms: CallTerms) -> Circumstances:
        return Circumstances(terms["timeout"], self._connection.if_closed)
