"""Random kills under random load: every stream that nobody ended is whole, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable
from contextlib import aclosing, suppress

import psutil
import pytest

from runnerd_service.config import EngineConfig, ServerConfig
from runnerd_service.errors import NotReady, RequestAborted
from runnerd_service.frontend.frontend import Frontend
from runnerd_service.frontend.types import Generation, OutputChunk, PromptRecords

SECONDS = 120.0
OPTIONS = {"step_seconds": "0.001", "num_blocks": "256"}
BLOWS = (
    (signal.SIGSEGV,),
    (signal.SIGSTOP,),
    (signal.SIGKILL,),
    (signal.SIGTERM, signal.SIGKILL),
    (signal.SIGKILL, signal.SIGKILL),
)
"""Signals that come one soon after the other."""


def drawn(draw: random.Random, number: int) -> Generation:
    """A request of any kind; repeatable."""
    options = {
        "n": draw.choice((1, 1, 1, 2, 4)),
        "temperature": draw.choice((0.0, 0.7, 1.3)),
        "logprobs": draw.choice((None, 0, 3)),
        "prompt_logprobs": draw.choice((None, None, 1)),
        "presence_penalty": draw.choice((None, 0.5)),
        "repetition_penalty": draw.choice((None, 1.2)),
        "stop": draw.choice(((), (), ("ab", "e"), ("no such text",))),
        "min_tokens": draw.choice((None, 10)),
        "ignore_eos": draw.choice((True, False)),
        "cumulative": draw.random() < 0.2,
        "priority": draw.choice((None, 0, 5)),
    }
    prompt = f"{number} " + "x" * draw.choice((0, 10, 100, 700))
    return Generation(prompt, seed=number, tokens=True, max_tokens=draw.randint(10, 150), **options)


async def read(frontend: Frontend, generation: Generation) -> object:
    """Give all that the stream told, put together."""
    prompt, texts, tokens, finishes = [], defaultdict(str), defaultdict(list), {}
    async with aclosing(frontend.generate(generation)) as events:
        async for event in events:
            if isinstance(event, PromptRecords):
                prompt.extend(event.tokens)
            if isinstance(event, OutputChunk):
                assert event.index not in finishes
                if generation.cumulative:
                    texts[event.index], tokens[event.index] = event.text, list(event.tokens)
                else:
                    texts[event.index] += event.text
                    tokens[event.index] += event.tokens
                if event.finish is not None:
                    finishes[event.index] = event.finish
    return prompt, dict(texts), dict(tokens), finishes


def config(max_num_seqs: int, max_in_flight: int) -> ServerConfig:
    engine = EngineConfig(
        "sim",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=128,
        max_in_flight=max_in_flight,
        prefix_caching=False,
        runner_options=OPTIONS,
    )
    return ServerConfig(
        engine=engine, max_engine_restarts=1000, engine_restart_backoff_seconds=0.0, step_timeout_seconds=2.0
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - states and processes have no event to wait for
            await asyncio.sleep(0.005)


async def until_served(frontend: Frontend, generation: Generation) -> object:
    while True:
        try:
            return await read(frontend, generation)
        except NotReady:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
async def test_streams_are_whole_whatever_happens_to_the_engine(seed: int) -> None:
    draw = random.Random(seed)
    settings = config(draw.choice((3, 8, 32)), draw.choice((1, 2, 3)))
    generations = [drawn(draw, number) for number in range(60)]
    frontend = Frontend(settings)
    await frontend.start()
    try:
        expected = [await read(frontend, generation) for generation in generations]
        await asyncio.sleep(0)
        gc.collect()
        num_tasks, num_files = len(asyncio.all_tasks()), psutil.Process().num_fds()

        todo = list(enumerate(generations))
        got: dict[int, object] = {}

        async def work(number: int, generation: Generation) -> None:
            got[number] = await until_served(frontend, generation)

        async def leave(number: int, generation: Generation) -> None:
            """Send it, and end it early in one of several ways."""
            how = draw.choice(("cancel", "abort", "time"))
            name = f"leaves {number}"
            limit = 0.05 if how == "time" else None
            twin = Generation(generation.prompt, request_id=name, seed=1, max_tokens=500, time_limit_seconds=limit)
            reading = asyncio.create_task(until_served(frontend, twin))
            await asyncio.sleep(draw.random() * 0.2)
            if how == "cancel":
                reading.cancel()
            if how == "abort":
                frontend.abort(name)
            for outcome in await asyncio.gather(reading, return_exceptions=True):
                assert not isinstance(outcome, Exception) or isinstance(outcome, RequestAborted)

        async def disturb() -> None:
            for _ in range(4):
                before = frontend.num_engine_restarts
                for number in draw.choice(BLOWS):
                    await until(lambda: frontend.engine_pid is not None)
                    await asyncio.sleep(draw.random() * 0.3)
                    if frontend.engine_pid is not None:
                        with suppress(ProcessLookupError):  # it is dying already
                            os.kill(frontend.engine_pid, number)
                # Without a pause a request may die often enough to be taken for the cause.
                await until(lambda least=before: frontend.num_engine_restarts > least and frontend.state == "serving")

        disturbing = asyncio.create_task(disturb())
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
            for number, generation in todo:
                group.create_task(work(number, generation))
                group.create_task(leave(number, generation))
                await asyncio.sleep(draw.random() * 0.05)
        async with asyncio.timeout(SECONDS):
            await disturbing
            while frontend.state != "serving" or frontend.load.num_unresolved_steps:
                await asyncio.sleep(0.01)
                if not frontend.load.num_running:  # a kill at the very end: the counters come with a step
                    await until_served(frontend, Generation("x", max_tokens=1))

        assert [got[number] for number, _ in todo] == expected
        load = frontend.load
        assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0)
        assert frontend.num_live == 0
        assert frontend.num_engine_restarts > 0
        assert frontend.metrics().num_poisonous == 0
        gc.collect()
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks + 1)
        await until(lambda: psutil.Process().num_fds() <= num_files + 2)  # the last engine's are closed by a thread
    finally:
        await frontend.close()
