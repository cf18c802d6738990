"""The gRPC services: each method converts, calls the front end, converts back. Errors are raised, never returned."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from runnerd.v1 import generation_pb2, inference_pb2, inference_pb2_grpc, server_pb2, server_pb2_grpc
from runnerd_service.config import ServerConfig
from runnerd_service.errors import FieldViolation, InvalidRequest
from runnerd_service.frontend.frontend import Frontend
from runnerd_service.frontend.stream import RequestStream
from runnerd_service.frontend.types import Generation
from runnerd_service.rpc import convert, replies, stream_messages
from runnerd_service.rpc.access import CALLER
from runnerd_service.rpc.request_record import FINISH_REASONS, OUTCOMES, Observers, RequestRecord
from runnerd_service.rpc.runners import describe_runners
from runnerd_service.rpc.unknown_fields import check_known
from runnerd_service.telemetry.tracing import RequestTracer
from runnerd_spi import SPI_VERSION

logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
_Request = TypeVar("_Request", bound=Message)
_Result = TypeVar("_Result")

_LARGE_BYTES = 64 * 1024
"""Larger requests take milliseconds to convert, and more: that is done in a thread."""
_MANY_TOKENS = 10_000
LAST_ERROR_FOR_USERS = "the engine failed; administrators are told how"


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generation, abort and the tokenizer.

    Args:
        frontend: Serves the generations.
        tracer: Traces them.
    """

    def __init__(self, frontend: Frontend, tracer: RequestTracer) -> None:
        self._frontend = frontend
        self._observers = Observers(frontend.request_stats, tracer)
        frontend.request_stats.expect(OUTCOMES, FINISH_REASONS)

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: _Context
    ) -> inference_pb2.GenerateResponse:
        """Gather all events and answer once."""
        generation = replace(await _generation(request, context), cumulative=False)
        collector = replies.Collector()
        async with self._begun(generation, "Generate", context) as (stream, record):
            while (event := await stream.next_event()) is not None:
                record.note(event)
                collector.add(event)
        return collector.response()

    async def StreamGenerate(  # type: ignore[override] # its messages are serialized already
        self, request: generation_pb2.GenerateRequest, context: _Context
    ) -> AsyncGenerator[bytes, None]:
        """Send a message per event."""
        async with self._begun(await _generation(request, context), "StreamGenerate", context) as (stream, record):
            while (event := await stream.next_event()) is not None:
                record.note(event)
                yield stream_messages.serialized(event)

    async def Abort(self, request: inference_pb2.AbortRequest, context: _Context) -> inference_pb2.AbortResponse:
        """End a live request."""
        check_known(request)
        if not request.request_id:
            raise InvalidRequest(FieldViolation("request_id", "is empty; give the name of the request to end"))
        caller = CALLER.get()
        # Administrators may end anybody's.
        tenant = None if caller.is_admin else caller.tenant
        return inference_pb2.AbortResponse(aborted=self._frontend.abort(request.request_id, tenant))

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: _Context
    ) -> inference_pb2.TokenizeResponse:
        """Give the token ids of a prompt."""
        prompt = await _converted(convert.tokenize_prompt, request)
        tokenized = await self._frontend.tokenize(prompt, convert.add_special_tokens(request))
        if len(tokenized.ids) <= _MANY_TOKENS:
            return replies.tokens(tokenized)
        return await asyncio.to_thread(replies.tokens, tokenized)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: _Context
    ) -> inference_pb2.DetokenizeResponse:
        """Give the text of token ids."""
        text = await self._frontend.detokenize(tuple(request.ids), convert.skip_special_tokens(request))
        return inference_pb2.DetokenizeResponse(text=text)

    @asynccontextmanager
    async def _begun(
        self, generation: Generation, method: str, context: _Context
    ) -> AsyncGenerator[tuple[RequestStream, RequestRecord], None]:
        """Give the generation's events, and what is to be told of each; check at the end that they were whole."""
        metadata, model_name = context.invocation_metadata() or (), self._frontend.model_name
        record = RequestRecord(generation, method, metadata, self._observers, model_name)
        try:
            async with self._frontend.open(generation, record.times) as stream:
                yield stream, record
            record.finish()
        except Exception as error:
            record.fail(error)
            raise
        finally:
            record.close(context.time_remaining())


async def _generation(request: generation_pb2.GenerateRequest, context: _Context) -> Generation:
    """Give the generation that is asked for, with what the call says beside it."""
    generation, caller = await _converted(convert.to_generation, request), CALLER.get()
    least = caller.min_priority
    if least is not None and (generation.priority or 0) < least:
        got = "nothing, which is 0" if generation.priority is None else str(generation.priority)
        raise InvalidRequest(FieldViolation("priority", f"got {got}, this server takes {least} or more from its users"))
    return replace(generation, tenant=caller.tenant, deadline_seconds=context.time_remaining())


async def _converted(convert_request: Callable[[_Request], _Result], request: _Request) -> _Result:
    """Convert where it holds up nobody."""
    if request.ByteSize() <= _LARGE_BYTES:
        return convert_request(request)
    return await asyncio.to_thread(convert_request, request)


class ModelServicer(server_pb2_grpc.ModelServiceServicer):
    """Describes the served model.

    Args:
        frontend: Knows the model.
    """

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def GetModelInfo(
        self, request: server_pb2.GetModelInfoRequest, context: _Context
    ) -> server_pb2.GetModelInfoResponse:
        """Describe the model and what it serves."""
        check_known(request)
        return replies.model_info(self._frontend.describe_model())


class ServerServicer(server_pb2_grpc.ServerServiceServicer):
    """Describes the server; answers in every state.

    Args:
        frontend: Knows state and load.
        config: What the operator chose.
    """

    def __init__(self, frontend: Frontend, config: ServerConfig) -> None:
        self._frontend = frontend
        self._config = config
        self._started = time.monotonic()

    async def GetServerInfo(
        self, request: server_pb2.GetServerInfoRequest, context: _Context
    ) -> server_pb2.GetServerInfoResponse:
        """Describe configuration and state; what only the engine knows is 0 or empty until it is ready."""
        check_known(request)
        engine, ready = self._config.engine, self._frontend.engine_ready
        info = server_pb2.GetServerInfoResponse(
            version=version("runnerd"),
            spi_version=".".join(map(str, SPI_VERSION)),
            state=replies.server_state(self._frontend.state),
            runner=engine.runner,
            async_execution=engine.async_execution,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            uptime=replies.duration(time.monotonic() - self._started),
            last_error=self._last_error(),
            max_message_bytes=self._config.max_message_bytes,
            num_engine_restarts=self._frontend.num_engine_restarts,
            engine_pid=self._frontend.engine_pid or 0,
        )
        if ready is not None:
            info.device = ready.device
            info.max_in_flight = ready.max_in_flight
            info.async_effective = ready.max_in_flight > 1
            info.block_size = ready.block_size
            info.num_blocks = ready.num_blocks
        return info

    def _last_error(self) -> str:
        """Give the last error to administrators: it may name files and hold lines of the engine's log."""
        error = self._frontend.last_error
        return error if CALLER.get().is_admin or not error else LAST_ERROR_FOR_USERS

    async def GetLoad(self, request: server_pb2.GetLoadRequest, context: _Context) -> server_pb2.GetLoadResponse:
        """Give the engine's counters."""
        check_known(request)
        info, ready = replies.load_info(self._frontend.load), self._frontend.engine_ready
        if ready is not None and not info.num_blocks:  # no step has told it yet
            info.num_blocks = ready.num_blocks
        return info

    async def ListRunners(
        self, request: server_pb2.ListRunnersRequest, context: _Context
    ) -> server_pb2.ListRunnersResponse:
        """List the installed runners."""
        check_known(request)
        runners = await asyncio.to_thread(describe_runners)  # imports plug-in modules
        return server_pb2.ListRunnersResponse(runners=[replies.runner_info(one) for one in runners])

    async def CaptureTrace(
        self, request: server_pb2.CaptureTraceRequest, context: _Context
    ) -> server_pb2.CaptureTraceResponse:
        """Record the engine's steps."""
        check_known(request)
        trace = await self._frontend.capture_trace(convert.to_seconds("duration", request.duration))
        return server_pb2.CaptureTraceResponse(
            trace_json=trace.trace_json, num_steps=trace.num_steps, num_dropped_steps=trace.num_dropped_steps
        )

    async def ResetPrefixCache(
        self, request: server_pb2.ResetPrefixCacheRequest, context: _Context
    ) -> server_pb2.ResetPrefixCacheResponse:
        """Forget the cached prefixes."""
        check_known(request)
        return server_pb2.ResetPrefixCacheResponse(num_blocks=await self._frontend.reset_prefix_cache())

    async def Drain(self, request: server_pb2.DrainRequest, context: _Context) -> server_pb2.DrainResponse:
        """Refuse new requests and wait for the live ones."""
        check_known(request)
        seconds = self._config.drain_seconds
        if request.HasField("timeout"):
            seconds = convert.to_seconds("timeout", request.timeout)
        if seconds < 0:
            raise InvalidRequest(FieldViolation("timeout", f"got {seconds:g} s, expected 0 or more"))
        logger.warning("draining by an administrator's call: live requests have %g s to finish", seconds)
        try:
            return server_pb2.DrainResponse(completed=await self._frontend.drain(seconds))
        except asyncio.CancelledError:
            logger.warning("the administrator's call has left; the drain goes on, and its %g s hold", seconds)
            raise
