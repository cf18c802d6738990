"""The users of a soak: each asks again and again, and reads, cancels, stalls or vanishes; every answer is compared."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
from soak_relay import Relay
from soak_requests import Comparison, Mismatch, Reference, check_unary

from runnerd.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from runnerd_client.errors import (
    CONNECTION_LOST,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    RunnerdError,
    UnavailableError,
    from_rpc_error,
)
from runnerd_client.requests import generate_request

_Stream = grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, inference_pb2.StreamGenerateResponse]

_HUNG_SECONDS = 300.0
"""No call may take longer, whatever happens to the server."""
_MAX_RETRY_SECONDS = 2.0
_FAILURES_KEPT = 50


@dataclass(slots=True)
class Tally:
    """What came of the calls of all users."""

    ended: dict[str, Counter[str]] = field(default_factory=dict)
    """By behaviour, then by how the call ended."""
    failures: list[str] = field(default_factory=list)
    num_failures: int = 0
    num_tokens: int = 0
    """Tokens that were compared."""
    num_open: int = 0
    """Calls under way."""

    def count(self, behaviour: str, end: str) -> None:
        """Count a call."""
        self.ended.setdefault(behaviour, Counter())[end] += 1

    def fail(self, what: str) -> None:
        """Note a fault of the server."""
        self.num_failures += 1
        if len(self.failures) < _FAILURES_KEPT:
            self.failures.append(what)


@dataclass(frozen=True, slots=True)
class World:
    """What the users share."""

    address: str
    relay: Relay
    references: Sequence[Reference]
    tally: Tally
    step_seconds: float


class User:
    """One of them, with a connection of its own.

    Args:
        world: What they share.
        seed: What it does comes of this.
    """

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._random = random.Random(seed)
        self._name = seed
        self._num_calls = 0
        self._channel = self._connect(world.address)
        self._behaviours: dict[Callable[[Reference], Awaitable[str]], int] = {
            self._read: 46,
            self._read_unary: 6,
            self._stall: 8,
            self._cancel: 14,
            self._deadline: 8,
            self._abort: 6,
            self._reconnect: 6,
            self._vanish: 4,
            self._ask_wrongly: 2,
        }

    async def run(self, end: float) -> None:
        """Go on until ``end`` (of ``time.monotonic``)."""
        tally = self._world.tally
        try:
            await asyncio.sleep(self._random.random())
            while time.monotonic() < end:
                (behaviour,) = self._random.choices(list(self._behaviours), list(self._behaviours.values()))
                reference = self._random.choice(self._world.references)
                name = behaviour.__name__.strip("_")
                tally.num_open += 1
                try:
                    tally.count(name, await behaviour(reference))
                except Mismatch as error:
                    tally.count(name, "wrong")
                    tally.fail(f"{name}: {error}: {reference.prompt!r} {reference.options}")
                except UnavailableError as error:
                    await self._refused(name, error)
                except RunnerdError as error:
                    tally.count(name, type(error).__name__)
                    tally.fail(f"{name}: {type(error).__name__} {error}")
                finally:
                    tally.num_open -= 1
        finally:
            await self._channel.close()

    async def _refused(self, name: str, error: UnavailableError) -> None:
        """Heed a refusal; everything else that is UNAVAILABLE is a fault."""
        if error.reason != "NOT_READY" or error.retry_after is None:
            self._world.tally.fail(f"{name}: {error.reason} {error}")
        self._world.tally.count(name, "refused")
        await asyncio.sleep(min(error.retry_after or 0.0, _MAX_RETRY_SECONDS) * (0.5 + self._random.random()))

    def _connect(self, address: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])

    def _request(self, reference: Reference) -> generation_pb2.GenerateRequest:
        self._num_calls += 1
        request_id = f"user {self._name} call {self._num_calls}"
        return generate_request(reference.prompt, {"request_id": request_id, **reference.options})  # type: ignore[typeddict-item]

    def _open(self, reference: Reference, channel: grpc.aio.Channel, seconds: float = _HUNG_SECONDS) -> _Stream:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return stub.StreamGenerate(self._request(reference), timeout=seconds)

    async def _follow(self, call: _Stream, comparison: Comparison, max_tokens: float = float("inf")) -> bool:
        """Read up to ``max_tokens``; give whether the stream has ended OK.

        Raises:
            Mismatch: Something is wrong, or the stream was accepted and ended UNAVAILABLE.
            RunnerdError: The call did not end OK.
        """
        try:
            while comparison.num_tokens < max_tokens:
                message = await call.read()
                if message is grpc.aio.EOF:
                    return True
                before = comparison.num_tokens
                comparison.add(message)
                self._world.tally.num_tokens += comparison.num_tokens - before
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            if isinstance(error, UnavailableError) and comparison.num_started:
                raise Mismatch(f"an accepted stream ended: {error}") from error
            raise error from None
        return False

    async def _read(self, reference: Reference) -> str:
        comparison = Comparison(reference)
        await self._follow(self._open(reference, self._channel), comparison)
        comparison.check_whole()
        return "whole"

    async def _read_unary(self, reference: Reference) -> str:
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        try:
            answer = await stub.Generate(self._request(reference), timeout=_HUNG_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        check_unary(reference, answer)
        self._world.tally.num_tokens += reference.num_tokens
        return "whole"

    async def _stall(self, reference: Reference) -> str:
        call, comparison = self._open(reference, self._channel), Comparison(reference)
        await self._follow(call, comparison, self._some_tokens(reference))
        await asyncio.sleep(self._random.uniform(1.0, 5.0))
        await self._follow(call, comparison)
        comparison.check_whole()
        return "whole"

    async def _cancel(self, reference: Reference) -> str:
        call = self._open(reference, self._channel)
        if self._random.random() < 0.3:  # at any moment of its admission
            await asyncio.sleep(self._random.random() * 0.02)
        else:
            await self._follow(call, Comparison(reference), self._some_tokens(reference))
        call.cancel()
        return "left"

    async def _deadline(self, reference: Reference) -> str:
        seconds = self._random.random() * reference.num_tokens * self._world.step_seconds + 0.01
        comparison = Comparison(reference)
        try:
            await self._follow(self._open(reference, self._channel, seconds), comparison)
        except DeadlineError:
            return "deadline"
        except OverloadedError:  # it could not have been met
            return "refused early"
        comparison.check_whole()
        return "whole"

    async def _abort(self, reference: Reference) -> str:
        call, comparison = self._open(reference, self._channel), Comparison(reference)
        await self._follow(call, comparison, self._some_tokens(reference))
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        name = f"user {self._name} call {self._num_calls}"
        try:
            await stub.Abort(inference_pb2.AbortRequest(request_id=name), timeout=_HUNG_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        try:
            await self._follow(call, comparison)
        except RequestCancelledError:
            return "aborted"
        comparison.check_whole()
        return "whole"

    async def _reconnect(self, reference: Reference) -> str:
        call = self._open(reference, self._channel)
        await self._follow(call, Comparison(reference), self._some_tokens(reference))
        await self._channel.close()
        self._channel = self._connect(self._world.address)
        return "left"

    async def _vanish(self, reference: Reference) -> str:
        """Lose the connection without a word, as by a reset."""
        async with self._connect(self._world.relay.address) as channel:
            call = self._open(reference, channel)
            try:
                await self._follow(call, Comparison(reference), self._some_tokens(reference))
            except (Mismatch, UnavailableError) as error:  # another one's reset may have met this connection
                lost = error.__cause__ if isinstance(error, Mismatch) else error
                if not isinstance(lost, UnavailableError) or lost.reason not in ("", CONNECTION_LOST):
                    raise
            self._world.relay.reset(self._random)
            call.cancel()
        return "left"

    async def _ask_wrongly(self, reference: Reference) -> str:
        request = self._request(reference)
        request.sampling.top_p = 7
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        try:
            await stub.Generate(request, timeout=_HUNG_SECONDS)
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            if isinstance(error, InvalidRequestError):
                return "refused by field"
            raise error from None
        raise Mismatch("a top_p of 7 was taken")

    def _some_tokens(self, reference: Reference) -> int:
        return self._random.randint(0, max(0, reference.num_tokens - 1))
