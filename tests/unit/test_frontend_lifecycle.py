"""The front end's states: loading, serving, draining, failed."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from runnerd_service.config import EngineConfig, ServerConfig
from runnerd_service.errors import ConfigurationError, EngineFailed, EngineStartFailed, NotReady
from runnerd_service.frontend.frontend import Frontend
from runnerd_service.frontend.states import StateBoard
from runnerd_service.frontend.tokenizer import load_tokenizer
from runnerd_service.frontend.types import Event, Generation, OutputChunk


def frontend_of(
    runner: str = "sim", model: str | None = None, max_engine_restarts: int = 5, **options: Any
) -> Frontend:
    texts = {name: str(value) for name, value in options.items()}
    engine = EngineConfig(runner=runner, model=model, runner_options=texts)
    return Frontend(ServerConfig(engine=engine, max_engine_restarts=max_engine_restarts))


async def events_of(frontend: Frontend, generation: Generation) -> list[Event]:
    async with aclosing(frontend.generate(generation)) as stream:
        return [event async for event in stream]


async def test_states_are_told_from_loading_to_the_end() -> None:
    frontend = frontend_of()
    seen: list[str] = []

    async def follow() -> None:
        async for state in frontend.states():
            seen.append(state)

    follower = asyncio.create_task(follow())
    await asyncio.sleep(0)
    await frontend.start()
    await asyncio.sleep(0)
    assert await frontend.drain(1.0)
    await frontend.close()
    await asyncio.wait_for(follower, 5)

    assert seen == ["loading", "serving", "draining"]


async def test_progress_of_the_start_is_told() -> None:
    frontend = frontend_of(load_seconds=0.05)
    told: list[tuple[str, int, int]] = []
    try:
        await frontend.start(lambda stage, done, total: told.append((stage, done, total)))
    finally:
        await frontend.close()

    assert ("loading weights", 20, 20) in told


async def test_nothing_is_served_while_the_model_loads() -> None:
    frontend = frontend_of(load_seconds=0.5)
    starting = asyncio.create_task(frontend.start())
    await asyncio.sleep(0.05)
    try:
        for attempt in (events_of(frontend, Generation("x")), frontend.tokenize("x"), frontend.detokenize((1,))):
            with pytest.raises(NotReady, match="loading") as refusal:
                await attempt
            assert refusal.value.retry_after_seconds is not None
        with pytest.raises(NotReady, match="loading"):
            frontend.describe_model()
        assert frontend.engine_ready is None
        await starting
        assert len(await events_of(frontend, Generation("x", max_tokens=1))) >= 2
        assert frontend.engine_ready is not None
    finally:
        await frontend.close()


async def test_start_that_is_cancelled_leaves_no_process() -> None:
    frontend = frontend_of(load_seconds=30)
    starting = asyncio.create_task(frontend.start())
    await asyncio.sleep(0.5)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await asyncio.wait_for(frontend.close(), 5)

    assert frontend.state != "serving"


@pytest.mark.parametrize(
    ("runner", "options", "error", "message"),
    [
        ("no-such-runner", {}, ConfigurationError, "no-such-runner"),
        ("sim", {"no_such_option": 1}, (ConfigurationError, EngineStartFailed), "no_such_option"),
        ("sim", {"step_seconds": "soon"}, (ConfigurationError, EngineStartFailed), "step_seconds"),
    ],
)
async def test_start_that_fails_says_why(runner: str, options: dict[str, Any], error: Any, message: str) -> None:
    frontend = frontend_of(runner, **options)

    with pytest.raises(error, match=message):
        await frontend.start()
    assert frontend.state == "failed"
    assert message in frontend.last_error
    with pytest.raises(NotReady, match="failed"):
        await events_of(frontend, Generation("x"))
    await frontend.close()


async def test_model_without_a_tokenizer_stops_the_start_before_the_weights_are_loaded(tmp_path: Any) -> None:
    frontend = frontend_of("cpu", str(tmp_path))

    with pytest.raises((ConfigurationError, EngineStartFailed)):
        await asyncio.wait_for(frontend.start(), 60)
    assert frontend.state == "failed"
    await frontend.close()


async def test_operators_template_that_is_missing_stops_the_start() -> None:
    frontend = Frontend(ServerConfig(engine=EngineConfig(runner="sim"), chat_template="/no/such/file"))

    with pytest.raises(ConfigurationError, match="/no/such/file"):
        await frontend.start()
    await frontend.close()


async def test_drain_lets_live_requests_finish_and_refuses_new_ones() -> None:
    frontend = frontend_of(step_seconds=0.002)
    await frontend.start()
    try:
        live = asyncio.create_task(events_of(frontend, Generation("x", max_tokens=50, tokens=True, ignore_eos=True)))
        await asyncio.sleep(0.02)
        draining = asyncio.create_task(frontend.drain(30.0))
        await asyncio.sleep(0)
        assert frontend.state == "draining"
        with pytest.raises(NotReady, match="shutting down"):
            await events_of(frontend, Generation("new"))
        assert frontend.describe_model().name == "sim"

        assert await draining
        events = await live
        assert sum(len(event.tokens) for event in events if isinstance(event, OutputChunk)) == 50
    finally:
        await frontend.close()


async def test_drain_that_takes_too_long_ends_the_live_requests_with_an_error() -> None:
    frontend = frontend_of(step_seconds=0.002)
    await frontend.start()
    try:
        live = asyncio.create_task(events_of(frontend, Generation("x", max_tokens=8000, ignore_eos=True)))
        await asyncio.sleep(0.05)

        assert not await frontend.drain(0.05)
        with pytest.raises(NotReady, match="shutting down"):
            await live
        assert frontend.num_live == 0
    finally:
        await frontend.close()


async def test_close_ends_live_requests_with_an_error() -> None:
    frontend = frontend_of(step_seconds=0.002)
    await frontend.start()
    live = asyncio.create_task(events_of(frontend, Generation("x", max_tokens=8000, ignore_eos=True)))
    await asyncio.sleep(0.05)

    await frontend.close()

    with pytest.raises(NotReady, match="shutting down"):
        await live
    with pytest.raises(NotReady):
        await events_of(frontend, Generation("x"))
    await frontend.close()


@pytest.mark.parametrize("option", ["crash_at_step", "fail_at_step"])
async def test_engine_that_fails_and_may_not_be_restarted_fails_its_requests_and_the_server(option: str) -> None:
    frontend = frontend_of(max_engine_restarts=0, **{option: 6})
    await frontend.start()
    try:
        live = [
            asyncio.create_task(events_of(frontend, Generation("x", max_tokens=8000, n=2, ignore_eos=True)))
            for _ in range(3)
        ]
        for one in live:
            with pytest.raises(EngineFailed):
                await asyncio.wait_for(one, 30)

        assert frontend.state == "failed"
        assert frontend.last_error
        assert frontend.num_live == 0
        load = frontend.load
        assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0)
        assert load.num_steps > 0  # the totals stay
        with pytest.raises(NotReady, match="the engine failed"):
            await events_of(frontend, Generation("x"))
    finally:
        await frontend.close()


async def test_follower_that_was_busy_sees_the_latest_state() -> None:
    board = StateBoard("loading")
    following = board.follow()

    assert await anext(following) == "loading"
    board.set("serving")
    board.set("draining")
    assert await anext(following) == "draining"
    board.close()
    with pytest.raises(StopAsyncIteration):
        await anext(following)


def test_a_model_that_does_not_exist_is_named_with_what_to_give() -> None:
    with pytest.raises(ConfigurationError, match="model '/no/such' does not exist; give the path of a model directory"):
        load_tokenizer("/no/such")
