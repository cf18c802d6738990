"""The gRPC services: each method converts, calls the front end, converts back. Errors are raised, never returned."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from runnerd.v1 import generation_pb2, inference_pb2, inference_pb2_grpc, server_pb2, server_pb2_grpc
from runnerd_service.config import ServerConfig
from runnerd_service.errors import FieldViolation, InvalidRequest
from runnerd_service.frontend.frontend import Frontend
from runnerd_service.frontend.types import Event, Generation, OutputChunk, Started
from runnerd_service.frontend.validation import MAX_NAME_CHARACTERS
from runnerd_service.rpc import convert, replies
from runnerd_service.rpc.access import CALLER
from runnerd_service.rpc.runners import describe_runners
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
    """

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: _Context
    ) -> inference_pb2.GenerateResponse:
        """Gather all events and answer once."""
        generation = replace(await _generation(request), cumulative=False)
        collector = replies.Collector()
        async with aclosing(self._events(generation)) as events:
            async for event in events:
                collector.add(event)
        return collector.response()

    async def StreamGenerate(
        self, request: generation_pb2.GenerateRequest, context: _Context
    ) -> AsyncGenerator[inference_pb2.StreamGenerateResponse, None]:
        """Send a message per event."""
        async with aclosing(self._events(await _generation(request))) as events:
            async for event in events:
                yield replies.stream_message(event)

    async def Abort(self, request: inference_pb2.AbortRequest, context: _Context) -> inference_pb2.AbortResponse:
        """End a live request."""
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

    async def _events(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """Give the front end's events, check that they are whole, and log how the request went."""
        record = _RequestRecord(generation)
        try:
            async with aclosing(self._frontend.generate(generation)) as events:
                async for event in events:
                    record.note(event)
                    yield event
            record.check_complete()
            record.outcome = "finished"
        except Exception as error:
            record.outcome = type(error).__name__
            raise
        finally:
            record.log()


class _RequestRecord:
    """What the log tells of a request: never its text."""

    def __init__(self, generation: Generation) -> None:
        self.outcome = "cancelled"
        self._request_id = generation.request_id or "(refused)"
        self._tenant = generation.tenant
        self._num_outputs = _num_outputs(generation)
        self._num_finished = self._prompt_tokens = 0
        self._completion_tokens: dict[int, int] = {}
        """By output index."""
        self._started = time.monotonic()

    def note(self, event: Event) -> None:
        if isinstance(event, Started):
            self._request_id, self._prompt_tokens = event.request_id, event.prompt_tokens
        elif isinstance(event, OutputChunk):
            self._num_finished += event.finish is not None
            self._completion_tokens[event.index] = event.num_tokens

    def check_complete(self) -> None:
        """Refuse to end a stream OK that is not whole.

        Raises:
            RuntimeError: An output has no finish, or more than one.
        """
        if self._num_finished != self._num_outputs:
            raise RuntimeError(f"{self._num_finished} of {self._num_outputs} outputs of {self._request_id} finished")

    def log(self) -> None:
        logger.info(
            "request %s%s %s: %d prompt tokens, %d output tokens, %.3f s",
            _printable(self._request_id),
            f" of {self._tenant}" if self._tenant else "",
            self.outcome,
            self._prompt_tokens,
            sum(self._completion_tokens.values()),
            time.monotonic() - self._started,
        )


def _printable(name: str) -> str:
    """Give a client's name as the log can hold it: within a line, and no longer than a name may be."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in name[:MAX_NAME_CHARACTERS])


async def _generation(request: generation_pb2.GenerateRequest) -> Generation:
    """Give the generation that is asked for, with the tenant of whoever asks."""
    return replace(await _converted(convert.to_generation, request), tenant=CALLER.get().tenant)


async def _converted(convert_request: Callable[[_Request], _Result], request: _Request) -> _Result:
    """Convert where it holds up nobody."""
    if request.ByteSize() <= _LARGE_BYTES:
        return convert_request(request)
    return await asyncio.to_thread(convert_request, request)


def _num_outputs(generation: Generation) -> int:
    return 1 if generation.n is None else generation.n


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
        return replies.load_info(self._frontend.load)

    async def ListRunners(
        self, request: server_pb2.ListRunnersRequest, context: _Context
    ) -> server_pb2.ListRunnersResponse:
        """List the installed runners."""
        runners = await asyncio.to_thread(describe_runners)  # imports plug-in modules
        return server_pb2.ListRunnersResponse(runners=[replies.runner_info(one) for one in runners])

    async def CaptureTrace(
        self, request: server_pb2.CaptureTraceRequest, context: _Context
    ) -> server_pb2.CaptureTraceResponse:
        """Record the engine's steps."""
        trace = await self._frontend.capture_trace(request.duration.ToNanoseconds() / 1e9)
        return server_pb2.CaptureTraceResponse(
            trace_json=trace.trace_json, num_steps=trace.num_steps, num_dropped_steps=trace.num_dropped_steps
        )

    async def ResetPrefixCache(
        self, request: server_pb2.ResetPrefixCacheRequest, context: _Context
    ) -> server_pb2.ResetPrefixCacheResponse:
        """Forget the cached prefixes."""
        return server_pb2.ResetPrefixCacheResponse(num_blocks=await self._frontend.reset_prefix_cache())
