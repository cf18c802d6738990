"""Tenants: who a call is for, what one may have at once, and that none takes from, ends or learns of another."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from runnerd.v1 import inference_pb2_grpc
from runnerd.v1.generation_pb2 import GenerateRequest
from runnerd_client import (
    AlreadyExistsError,
    AsyncClient,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    RunnerdError,
    UnavailableError,
)
from runnerd_service.config import SecurityConfig, TenantConfig

WAIT = 30
BY_METADATA = SecurityConfig(tenant_metadata="x-tenant")
LONG = {"max_tokens": 5000, "ignore_eos": True}
BRIEF = {"max_tokens": 20, "ignore_eos": True}


class Callers:
    """Clients of one server, each for a tenant."""

    def __init__(self, live) -> None:
        self._live = live
        self._clients: dict[str, AsyncClient] = {}

    def __getitem__(self, tenant: str) -> AsyncClient:
        if tenant not in self._clients:
            self._clients[tenant] = AsyncClient(self._live.address, timeout=WAIT, metadata={"x-tenant": tenant})
        return self._clients[tenant]

    async def __aenter__(self) -> Callers:
        return self

    async def __aexit__(self, *_) -> None:
        for client in self._clients.values():
            await client.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def calm(serve_for_module):
    """A server with a tenant limit of two running outputs, and 5 ms for a token."""
    tenant = TenantConfig(max_running=2, max_waiting=3, max_waiting_tokens=1000)
    async with serve_for_module(security=BY_METADATA, tenant=tenant, options={"step_seconds": "0.005"}) as live:
        yield live


async def started(stream) -> None:
    assert (await anext(stream)).HasField("started")


async def begun(stream) -> None:
    async for message in stream:
        if message.HasField("output"):
            return


async def finished(stream) -> int:
    """Read a stream to its end; give the number of its tokens."""
    total = 0
    async for message in stream:
        if message.output.HasField("finish"):
            total += message.output.finish.usage.completion_tokens
    return total


async def test_what_a_tenant_may_not_run_waits_and_takes_no_place_of_others(calm, idle) -> None:
    async with Callers(calm) as callers:
        greedy = [callers["greedy"].stream("x", request_id=f"{n}", **LONG) for n in range(2)]
        for stream in greedy:
            await begun(stream)
        # Accepted, and held back: the last one first, for its priority.
        later = callers["greedy"].stream("x", **BRIEF)
        sooner = callers["greedy"].stream("x", n=2, priority=-1, **BRIEF)
        await started(later)
        await started(sooner)
        load = await calm.client.load()
        assert (load.num_running, load.num_waiting) == (2, 3)
        modest = await callers["modest"].generate("x", n=2, **BRIEF)
        assert len(modest.outputs) == 2
        with pytest.raises(OverloadedError, match="of tenant greedy that run or wait: 5; with 1 more, more than 3"):
            await callers["greedy"].generate("x")
        ends: list[str] = []

        async def noted(name: str, stream) -> None:
            assert await finished(stream) == 20 * (2 if name == "sooner" else 1)
            ends.append(name)

        waiting = [asyncio.create_task(noted("later", later)), asyncio.create_task(noted("sooner", sooner))]
        greedy[0].cancel()
        async with asyncio.timeout(WAIT):
            await asyncio.gather(*waiting)
        assert ends == ["sooner", "later"]
        greedy[1].cancel()
        await idle(calm)
        figures = calm.frontend.metrics().tenants
        assert (figures["modest"].num_requests, figures["modest"].generation_tokens) == (1, 40)
        assert (figures["greedy"].num_requests, figures["greedy"].num_refused) == (4, 1)
        assert (figures["greedy"].num_running, figures["greedy"].num_waiting) == (0, 0)
        assert figures["greedy"].prompt_tokens == 4


async def test_a_refusal_names_the_tenants_limit_and_when_to_retry(calm, idle) -> None:
    async with Callers(calm) as callers, grpc.aio.insecure_channel(calm.address) as channel:
        streams = [callers["a"].stream("x" * 400, request_id=f"{n}", **LONG) for n in range(2)]
        for stream in streams[:2]:
            await begun(stream)
        streams += [callers["a"].stream("x" * 400, **LONG) for _ in range(2)]
        for stream in streams[2:]:
            await started(stream)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceServiceStub(channel).Generate(
                GenerateRequest(text="x" * 400), metadata=(("x-tenant", "a"),), timeout=WAIT
            )
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = {one.TypeName(): one for one in rpc_status.from_call(caught.value).details}
        quota, retry = error_details_pb2.QuotaFailure(), error_details_pb2.RetryInfo()
        assert details["google.rpc.QuotaFailure"].Unpack(quota)
        assert quota.violations[0].subject == "tenant_max_waiting_tokens"
        assert details["google.rpc.RetryInfo"].Unpack(retry)
        assert retry.retry_delay.ToNanoseconds() > 0
        for stream in streams:
            stream.cancel()
        await idle(calm)


async def test_held_requests_end_as_any_other(calm, idle, eventually) -> None:
    async with Callers(calm) as callers:
        running = callers["a"].stream("x", n=2, **LONG)
        await begun(running)
        aborted = callers["a"].stream("x", request_id="held", **LONG)
        await started(aborted)
        assert await callers["a"].abort("held")
        with pytest.raises(RequestCancelledError):
            await finished(aborted)
        late = callers["a"].stream("x", timeout=0.3, **LONG)
        with pytest.raises(DeadlineError):
            await finished(late)
        async with callers["a"].stream("x", **LONG) as left:
            await started(left)

        async def none_waits() -> bool:
            return (await calm.client.load()).num_waiting == 0

        await eventually(none_waits)
        last = callers["a"].stream("x", **BRIEF)
        await started(last)
        running.cancel()
        assert await finished(last) == 20
        await idle(calm)


async def test_held_requests_outlive_an_engine_and_a_drain(serve, idle) -> None:
    tenant = TenantConfig(max_running=1)
    options = {"step_seconds": "0.01"}
    async with serve(security=BY_METADATA, tenant=tenant, options=options) as live, Callers(live) as callers:
        streams = [callers["a"].stream("x", max_tokens=30, ignore_eos=True) for _ in range(3)]
        await begun(streams[0])
        for stream in streams[1:]:
            await started(stream)
        os.kill(live.frontend.engine_pid, signal.SIGKILL)
        assert await finished(streams[0]) == 30
        draining = asyncio.create_task(live.frontend.drain(WAIT))
        assert [await finished(stream) for stream in streams[1:]] == [30, 30]
        assert await draining


async def test_held_requests_end_with_a_status_when_there_will_be_no_engine(serve) -> None:
    tenant, options = TenantConfig(max_running=1), {"step_seconds": "0.01"}
    config = {"security": BY_METADATA, "tenant": tenant, "max_engine_restarts": 0}
    async with serve(options=options, **config) as live, Callers(live) as callers:
        streams = [callers["a"].stream("x", **LONG)]
        await begun(streams[0])  # it is the one that runs
        streams += [callers["a"].stream("x", **LONG) for _ in range(2)]
        for stream in streams[1:]:
            await started(stream)
        os.kill(live.frontend.engine_pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(UnavailableError):
                await finished(stream)
        assert live.frontend.num_live == 0
        assert live.frontend.load.num_waiting == 0


@pytest.mark.parametrize("limit", ["max_running", "max_tokens"])
async def test_a_held_request_waits_no_longer_than_any_and_is_told_what_held_it(serve, idle, limit) -> None:
    config = {"tenant": TenantConfig(**{limit: 1}), "queue_timeout_seconds": 0.3, "security": BY_METADATA}
    async with serve(options={"step_seconds": "0.01"}, **config) as live, Callers(live) as callers:
        running = callers["a"].stream("x", **LONG)
        await begun(running)
        held = callers["a"].stream("x", **BRIEF)
        await started(held)
        flag = "--tenant-" + limit.replace("_", "-")
        with pytest.raises(OverloadedError, match=rf"no place of tenant a \(limit {flag}\) became free") as caught:
            await finished(held)
        assert caught.value.retry_after is not None
        async with grpc.aio.insecure_channel(live.address) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
                GenerateRequest(text="x"), metadata=(("x-tenant", "a"),), timeout=WAIT
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
        (quota,) = (one for one in rpc_status.from_call(refused.value).details if "QuotaFailure" in one.type_url)
        assert f"tenant_{limit}".encode() in quota.value
        running.cancel()
        await idle(live)


async def test_tokens_of_a_tenant_in_the_engine_are_bounded_and_one_output_always_runs(serve, idle) -> None:
    tenant = TenantConfig(max_tokens=100)
    options = {"step_seconds": "0.005"}
    async with serve(security=BY_METADATA, tenant=tenant, options=options) as live, Callers(live) as callers:
        large = callers["a"].stream("x", max_tokens=400, ignore_eos=True)  # more than the tenant may have
        await begun(large)
        small = callers["a"].stream("x", max_tokens=10, ignore_eos=True)
        await started(small)
        load = await live.client.load()
        assert (load.num_running, load.num_waiting) == (1, 1)
        assert (await callers["b"].generate("x", max_tokens=5, ignore_eos=True)).outputs
        assert (await finished(large), await finished(small)) == (400, 10)
        await idle(live)


async def test_request_ids_and_aborts_are_each_tenants_own(calm, idle) -> None:
    async with Callers(calm) as callers:
        one, other = (callers[name].stream("x", request_id="same", **LONG) for name in ("a", "b"))
        await begun(one)
        await begun(other)
        with pytest.raises(AlreadyExistsError):
            await callers["a"].generate("x", request_id="same")
        one.cancel()
        other.cancel()
        await idle(calm)


TOKENS = """
tokens = [
    {name = "a", token = "a-token-0123456789"},
    {name = "b", token = "b-token-0123456789", tenant = "other"},
    {name = "any", token = "any-token-0123456789", tenant = "*"},
    {name = "root", token = "root-token-0123456789", role = "admin"},
]
"""


async def test_a_tenant_is_what_the_token_says_and_cannot_be_claimed(serve, tmp_path, idle) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    security = SecurityConfig(auth_tokens=str(path), tenant_metadata="x-tenant", min_priority=0)

    def client(name: str, tenant: str | None = None) -> AsyncClient:
        named = {} if tenant is None else {"x-tenant": tenant}
        return AsyncClient(live.address, token=f"{name}-token-0123456789", metadata=named, timeout=WAIT)

    async with serve(security=security, options={"step_seconds": "0.01"}) as live:
        async with client("a", tenant="other") as a, client("b") as b, client("any", tenant="other") as other:
            running = b.stream("x", request_id="theirs", **LONG)
            await begun(running)
            assert not await a.abort("theirs")  # which is not its tenant, whatever it claims
            assert not await a.abort("none")
            assert await other.abort("theirs")
            with pytest.raises(RequestCancelledError):
                await finished(running)
            running = b.stream("x", request_id="theirs", **LONG)
            await begun(running)
            with pytest.raises(InvalidRequestError, match="takes 0 or more from its users"):
                await a.generate("x", priority=-1)
            async with client("root") as root:
                assert (await root.generate("x", max_tokens=1, priority=-1)).outputs
                assert await root.abort("theirs")
            with pytest.raises(RequestCancelledError):
                await finished(running)
            assert set(live.frontend.metrics().tenants) == {"other", "root"}
            async with client("any") as unnamed:  # whose limits count all the same
                await unnamed.generate("x", max_tokens=1)
            assert set(live.frontend.metrics().tenants) == {"other", "root", "any"}
        for wrong in ("a b", "", "x" * 65, "(others)"):
            async with client("any", tenant=wrong) as gateway:
                with pytest.raises(InvalidRequestError) as caught:
                    await gateway.generate("x")
                assert caught.value.violations[0].field == "metadata x-tenant"


@pytest.mark.parametrize("shared", [False, True])
async def test_what_a_tenant_has_cached_shows_to_others_only_where_that_is_asked_for(serve, shared: bool) -> None:
    security = SecurityConfig(tenant_metadata="x-tenant", share_prefixes=shared)
    async with serve(security=security, engine={"block_size": 4}) as live, Callers(live) as callers:

        async def cached(tenant: str, salt: str | None = None) -> int:
            answer = await callers[tenant].generate("a prompt of some length", max_tokens=1, cache_salt=salt)
            return answer.outputs[0].finish.usage.cached_tokens

        assert await cached("a") == 0
        assert await cached("a") > 0
        assert (await cached("b") > 0) is shared
        assert (await live.client.generate("a prompt of some length", max_tokens=1, cache_salt="a\0")).outputs[
            0
        ].finish.usage.cached_tokens == 0
        assert await cached("a", "salt") == 0


async def test_many_tenants_have_a_bounded_number_of_figures(serve) -> None:
    async with serve(security=BY_METADATA) as live:
        stub_metadata = [(("x-tenant", f"t{number}"),) for number in range(130)]
        async with grpc.aio.insecure_channel(live.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            request = GenerateRequest(text="x")
            request.stopping.max_tokens = 1
            for metadata in stub_metadata:
                await stub.Generate(request, metadata=metadata, timeout=WAIT)
        figures = live.frontend.metrics().tenants
        assert len(figures) == 101
        assert figures["(others)"].num_requests == 30


async def test_errors_of_one_tenant_leave_the_counters_of_others(calm, idle) -> None:
    async with Callers(calm) as callers:
        for number in range(20):
            with pytest.raises(RunnerdError):
                await callers["bad"].generate("x", n=0 if number % 2 else 10**6)
        assert await finished(callers["good"].stream("x", **BRIEF)) == 20
        await idle(calm)
        figures = calm.frontend.metrics().tenants
        assert figures["good"].num_requests == 1
        assert "bad" not in figures  # nothing of it was accepted, nor refused for want of room
