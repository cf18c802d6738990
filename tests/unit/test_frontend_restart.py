"""Streams outlive their engine: what a reader gets is the same, however often the engine process dies meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from runnerd_service.config import EngineConfig, ServerConfig
from runnerd_service.errors import EngineFailed, NotReady, PoisonousRequest, RequestAborted
from runnerd_service.frontend.frontend import Frontend
from runnerd_service.frontend.types import Event, Finish, Generation, OutputChunk, PromptRecords, Started, TokenRecord

SECONDS = 60.0


@asynccontextmanager
async def serving(*, config: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Frontend]:
    """Serve the simulated runner with engine settings; those it does not know go to the runner as options."""
    known = {name: settings.pop(name) for name in tuple(settings) if name in EngineConfig.__dataclass_fields__}
    options = {name: str(value) for name, value in settings.items()}
    frontend = Frontend(
        ServerConfig(engine=EngineConfig(runner="sim", runner_options=options, **known), **(config or {}))
    )
    try:
        await frontend.start()
        yield frontend
    finally:
        await frontend.close()


def ask(prompt: str, **options: Any) -> Generation:
    """Ask for an output that can be repeated: its seed is fixed, and it ends by length unless told otherwise."""
    return Generation(prompt, **({"ignore_eos": True, "seed": 7, "tokens": True, "max_tokens": 60} | options))


class Reader:
    """Reads a generation in a task of its own and puts what it gives together."""

    def __init__(self, frontend: Frontend, generation: Generation) -> None:
        self.started: Started | None = None
        self.prompt: list[tuple[TokenRecord, ...]] = []
        self.texts: dict[int, str] = {}
        self.tokens: dict[int, list[TokenRecord]] = {}
        self.finishes: dict[int, Finish] = {}
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._read(frontend, generation))

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    async def whole(self) -> tuple[object, ...]:
        """All that the reader got, once the stream has ended well."""
        await asyncio.wait_for(asyncio.shield(self.task), SECONDS)
        return self.prompt, self.texts, self.tokens, self.finishes

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                assert not self.task.done(), "the stream ended before"
                self._changed.clear()
                await self._changed.wait()

    async def _read(self, frontend: Frontend, generation: Generation) -> None:
        async with aclosing(frontend.generate(generation)) as events:
            async for event in events:
                self._take(event)
                self._changed.set()

    def _take(self, event: Event) -> None:
        match event:
            case Started():
                self.started = event
            case PromptRecords():
                self.prompt.append(event.tokens)
            case OutputChunk():
                assert event.index not in self.finishes, "something followed a finish"
                self.texts[event.index] = self.texts.get(event.index, "") + event.text
                self.tokens.setdefault(event.index, []).extend(event.tokens)
                if event.finish is not None:
                    self.finishes[event.index] = event.finish


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - states and processes have no event to wait for
            await asyncio.sleep(0.005)


def kill(frontend: Frontend) -> None:
    assert frontend.engine_pid is not None
    os.kill(frontend.engine_pid, signal.SIGKILL)


async def gone(frontend: Frontend) -> None:
    """Kill the engine and wait until the front end has seen it."""
    before = frontend.num_engine_restarts
    kill(frontend)
    await eventually(lambda: frontend.num_engine_restarts > before)


async def back(frontend: Frontend) -> None:
    await eventually(lambda: frontend.state == "serving")


async def undisturbed(*generations: Generation, **settings: Any) -> list[tuple[object, ...]]:
    """What the generations give without a fault."""
    async with serving(**settings) as frontend:
        return [await Reader(frontend, generation).whole() for generation in generations]


KINDS = {
    "greedy": {"temperature": 0.0},
    "seeded": {},
    "several outputs": {"n": 3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.4},
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": 2},
    "min_tokens": {"ignore_eos": False, "min_tokens": 40, "logit_bias": {256: 20.0}},
    "an end by EOS": {"ignore_eos": False, "logit_bias": {256: 3.0}, "max_tokens": 500},
    "a stop string": {"stop": ["zzz", "qq"], "allowed_token_ids": tuple(b"zq"), "include_stop": True},
    "a stop string that never comes": {"stop": ["zzzzzzzzzzzzzzzzzzzzzzzzzzq!"], "allowed_token_ids": tuple(b"zq")},
    "characters of several tokens": {"allowed_token_ids": (0xC3, 0xA4, 0xE2, 0x82, 0xAC)},
    "banned words": {"bad_words": ["a", "bc"], "allowed_token_ids": tuple(b"abc ")},
}


@pytest.mark.parametrize("depth", [1, 2])
async def test_every_kind_of_request_goes_on_token_for_token(depth: int) -> None:
    generations = [ask(f"{index}: {name}", **options) for index, (name, options) in enumerate(KINDS.items())]
    expected = await undisturbed(*generations, max_in_flight=depth)
    async with serving(step_seconds=0.01, max_in_flight=depth) as frontend:
        readers = [Reader(frontend, generation) for generation in generations]
        for num_tokens in (20, 60):
            await readers[0].until(lambda least=num_tokens: readers[0].num_tokens >= least // 2)
            await gone(frontend)
        assert [await reader.whole() for reader in readers] == expected
        assert frontend.num_engine_restarts == 2
        assert frontend.num_live == 0
