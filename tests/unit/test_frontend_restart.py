"""Streams outlive their engine: what a reader gets is the same, however often the engine process dies meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import psutil
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
    # What an output finds in the cache depends on which steps it came in between.
    settings = {"max_in_flight": depth, "prefix_caching": False}
    expected = await undisturbed(*generations, **settings)
    async with serving(step_seconds=0.01, **settings) as frontend:
        readers = [Reader(frontend, generation) for generation in generations]
        for num_tokens in (20, 60):
            await readers[0].until(lambda least=num_tokens: readers[0].num_tokens >= least // 2)
            await gone(frontend)
        assert [await reader.whole() for reader in readers] == expected
        assert frontend.num_engine_restarts == 2
        assert frontend.num_live == 0


async def test_a_request_whose_prompt_is_being_computed_is_computed_again() -> None:
    generation = ask("x" * 2000, prompt_logprobs=1, logprobs=1, n=2, max_tokens=10)
    [expected] = await undisturbed(generation, prefix_caching=False)
    async with serving(seconds_per_token=0.0005, prefix_caching=False) as frontend:
        reader = Reader(frontend, generation)
        await eventually(lambda: frontend.load.num_steps >= 2)  # of four, for the first output alone
        await gone(frontend)
        assert reader.num_tokens == 0
        assert await reader.whole() == expected


async def test_cached_tokens_are_those_of_the_first_admission() -> None:
    async with serving(step_seconds=0.01) as frontend:
        prompt = "the same beginning, which fills more than two blocks of sixteen"
        await Reader(frontend, ask(prompt, max_tokens=1)).whole()
        reader = Reader(frontend, ask(prompt, max_tokens=40))
        await reader.until(lambda: reader.num_tokens >= 2)
        await gone(frontend)
        await reader.whole()
        assert reader.finishes[0].cached_tokens == 48
        assert reader.finishes[0].completion_tokens == 40


async def test_requests_that_wait_for_a_place_keep_their_order() -> None:
    generations = [ask(f"{number}", max_tokens=20) for number in range(6)]
    expected = await undisturbed(*generations)
    ended: list[int] = []
    async with serving(step_seconds=0.005, max_num_seqs=1) as frontend:
        readers = []
        for number, generation in enumerate(generations):
            reader = Reader(frontend, generation)
            reader.task.add_done_callback(lambda _, number=number: ended.append(number))
            await eventually(lambda least=number: frontend.num_live > least)
            readers.append(reader)
        await readers[1].until(lambda: readers[1].num_tokens >= 5)
        await gone(frontend)
        assert [await reader.whole() for reader in readers] == expected
    assert ended == list(range(6))


@pytest.mark.parametrize("seed", range(4))
async def test_random_kills_change_nothing(seed: int) -> None:
    draw = random.Random(seed)
    generations = [
        ask(
            f"{number}: {'x' * draw.randrange(300)}", n=draw.randint(1, 3), max_tokens=draw.randint(1, 120), seed=number
        )
        for number in range(20)
    ]
    settings = {"num_blocks": 96, "max_num_seqs": 8, "max_num_batched_tokens": 64, "prefix_caching": False}
    expected = await undisturbed(*generations, **settings)
    async with serving(step_seconds=0.002, kv_shadow=True, config={"max_engine_restarts": 100}, **settings) as frontend:
        readers = [Reader(frontend, generation) for generation in generations]
        for _ in range(4):
            steps = frontend.load.num_steps + draw.randint(5, 60)
            await eventually(lambda least=steps: frontend.load.num_steps >= least or not frontend.num_live)
            if frontend.num_live:
                await gone(frontend)
                await back(frontend)
        assert [await reader.whole() for reader in readers] == expected
        await eventually(lambda: not frontend.load.num_unresolved_steps)
        load = frontend.load
        assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0)


async def test_an_outage_refuses_new_requests_and_says_when_to_come_back() -> None:
    async with serving(step_seconds=0.01, load_seconds=2.0) as frontend:
        reader = Reader(frontend, ask("x", max_tokens=30))
        await reader.until(lambda: reader.num_tokens >= 3)
        await gone(frontend)
        assert frontend.state == "recovering"
        with pytest.raises(NotReady, match="is being restarted") as refusal:
            await Reader(frontend, ask("new")).whole()
        assert refusal.value.retry_after_seconds is not None
        assert 1.0 <= refusal.value.retry_after_seconds < 10.0
        with pytest.raises(NotReady, match="is being restarted"):
            await frontend.capture_trace(1.0)
        assert (await frontend.tokenize("abc")).ids == (97, 98, 99)  # which needs no engine
        assert frontend.describe_model().name == "sim"
        assert (frontend.load.num_running, frontend.load.num_waiting) == (0, 1)
        assert frontend.engine_pid is None
        await back(frontend)
        await Reader(frontend, ask("new")).whole()
        await reader.whole()
        assert frontend.last_error == "EngineProcessDied: the engine process was killed by SIGKILL"
        assert frontend.metrics().engine_restarts == {"exit": 0, "signal": 1, "error": 0, "hang": 0, "start": 0}


async def test_requests_end_during_an_outage_as_at_any_time() -> None:
    async with serving(step_seconds=0.01, load_seconds=3.0) as frontend:
        names = ("aborted", "left", "out of time", "stays")
        readers = {
            name: Reader(frontend, ask(name, request_id=name, max_tokens=60, time_limit_seconds=limit))
            for name, limit in zip(names, (None, None, 2.0, None), strict=True)
        }
        for reader in readers.values():
            await reader.until(lambda reader=reader: reader.num_tokens >= 2)
        await gone(frontend)
        assert frontend.abort("aborted")
        with pytest.raises(RequestAborted):
            await readers["aborted"].whole()
        readers["left"].task.cancel()
        await asyncio.wait([readers["left"].task])
        await readers["out of time"].whole()
        assert readers["out of time"].finishes[0].reason == "time_limit"
        assert frontend.state == "recovering"
        assert frontend.num_live == 1
        assert frontend.load.num_waiting == 1
        await readers["stays"].whole()
        assert readers["stays"].num_tokens == 60
        assert frontend.num_live == 0


async def test_a_drain_during_an_outage_lets_the_streams_finish() -> None:
    [expected] = await undisturbed(ask("x"))
    async with serving(step_seconds=0.005, load_seconds=0.3) as frontend:
        reader = Reader(frontend, ask("x"))
        await reader.until(lambda: reader.num_tokens >= 3)
        await gone(frontend)
        assert await frontend.drain(SECONDS)
        assert frontend.state == "draining"
        assert await reader.whole() == expected


async def test_a_drain_and_a_close_during_an_outage_are_bounded() -> None:
    async with serving(step_seconds=0.005, load_seconds=0.5) as frontend:
        reader = Reader(frontend, ask("x", max_tokens=5000))
        await reader.until(lambda: reader.num_tokens >= 3)
        await gone(frontend)
        [restarted] = await restarting()
        assert not await frontend.drain(0.05)
        with pytest.raises(NotReady, match="shutting down"):
            await reader.whole()
        await asyncio.wait_for(frontend.close(), 10)
        assert not restarted.is_running()


async def restarting() -> list[psutil.Process]:
    """The engine processes that this one has; waits until there is one."""

    def engines() -> list[psutil.Process]:
        return [one for one in psutil.Process().children() if "runnerd_service.engine.process" in one.cmdline()]

    await eventually(lambda: bool(engines()))
    return engines()


@pytest.mark.parametrize("way", ["a step that never ends", "a process that stands still"])
async def test_an_engine_that_hangs_is_restarted(way: str) -> None:
    [expected] = await undisturbed(ask("x"))
    stall = {"stall_at_step": 45, "stall_seconds": 3600.0} if way == "a step that never ends" else {}
    async with serving(step_seconds=0.01, config={"step_timeout_seconds": 1.0}, **stall) as frontend:
        reader = Reader(frontend, ask("x"))
        if not stall:
            await reader.until(lambda: reader.num_tokens >= 5)
            assert frontend.engine_pid is not None
            os.kill(frontend.engine_pid, signal.SIGSTOP)
        assert await reader.whole() == expected
        assert frontend.num_engine_restarts == frontend.metrics().engine_restarts["hang"] > 0
        assert frontend.last_error == "EngineHung: requests were waiting, and no step ended in 1 s"


async def test_an_idle_engine_does_not_hang() -> None:
    async with serving(config={"step_timeout_seconds": 0.2}) as frontend:
        await asyncio.sleep(1.0)  # several times as long as a step may take
        assert frontend.state == "serving"
        assert frontend.num_engine_restarts == 0


async def test_what_the_threads_of_a_hanging_engine_did_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(config={"step_timeout_seconds": 0.5}, stall_at_step=3, stall_seconds=3600.0) as frontend:
        reader = Reader(frontend, ask("x"))
        await eventually(lambda: frontend.num_engine_restarts > 0)
        assert "execute_model" in caplog.text
        reader.task.cancel()


async def test_an_engine_that_does_not_start_again_is_tried_a_bounded_number_of_times() -> None:
    config = {"max_engine_restarts": 2, "engine_restart_backoff_seconds": 0.05}
    async with serving(step_seconds=0.01, load_seconds=1.0, config=config) as frontend:
        readers = [Reader(frontend, ask("x", max_tokens=500)) for _ in range(3)]
        await readers[0].until(lambda: readers[0].num_tokens >= 10)
        kill(frontend)
        for attempt in (1, 2):
            await eventually(lambda attempt=attempt: frontend.num_engine_restarts == attempt)
            [process] = await restarting()
            process.kill()
            process.wait(SECONDS)
        for reader in readers:
            with pytest.raises(EngineFailed, match="the engine failed, 3 times in a row; the server's log") as failure:
                await reader.whole()
            assert failure.value.retry_after_seconds is not None
        assert frontend.state == "failed"
        assert frontend.metrics().engine_restarts == {"exit": 0, "signal": 1, "error": 0, "hang": 0, "start": 1}
        with pytest.raises(NotReady, match="the engine failed; the server's log") as refusal:
            await Reader(frontend, ask("x")).whole()
        assert refusal.value.retry_after_seconds is not None


@pytest.mark.parametrize("fault", ["crash_at_step", "fail_at_step"])
async def test_an_engine_that_fails_whatever_it_is_given_fails_all_and_blames_nobody(fault: str) -> None:
    async with serving(config={"engine_restart_backoff_seconds": 0.01}, **{fault: 0}) as frontend:
        readers = [Reader(frontend, ask(f"{number}")) for number in range(8)]
        for reader in readers:
            with pytest.raises(EngineFailed, match="6 times in a row"):
                await reader.whole()
        assert frontend.state == "failed"
        assert frontend.metrics().num_poisonous == 0


async def test_totals_go_on_from_engine_to_engine() -> None:
    async with serving(step_seconds=0.002) as frontend:
        reader = Reader(frontend, ask("x", max_tokens=100))
        await reader.until(lambda: reader.num_tokens >= 50)
        await gone(frontend)
        at_least = frontend.load
        assert at_least.num_steps >= 50
        await reader.whole()
        load = frontend.load
        assert load.generation_tokens >= 100
        assert load.num_steps > at_least.num_steps
        assert load.times.device_busy >= at_least.times.device_busy > 0
        assert load.num_blocks == at_least.num_blocks


POISON = {
    "in the prompt": ask("some POISON in it"),
    "in the prompt, three outputs": ask("POISON", n=3),
    "at the end of a long prompt": ask("x" * 1500 + "POISON"),
    "in the output": ask("x", allowed_token_ids=tuple(b"P"), seed=1),
}


@pytest.mark.parametrize("kind", POISON)
async def test_a_poisonous_request_fails_alone_and_the_others_go_on(kind: str) -> None:
    text = "PPPPPPPPPPPPPPPPPPPP" if kind == "in the output" else "POISON"
    generations = [ask(f"{number}: innocent", n=1 + number % 2, max_tokens=200) for number in range(10)]
    expected = await undisturbed(*generations, prefix_caching=False)
    async with serving(step_seconds=0.005, crash_row_token=text, prefix_caching=False) as frontend:
        readers = [Reader(frontend, generation) for generation in generations]
        await readers[-1].until(lambda: readers[-1].num_tokens >= 2)
        poison = Reader(frontend, POISON[kind])
        with pytest.raises(PoisonousRequest, match="the engine died of this request each time"):
            await poison.whole()
        assert [await reader.whole() for reader in readers] == expected
        metrics = frontend.metrics()
        assert metrics.num_poisonous == 1
        assert 2 <= metrics.engine_restarts["exit"] == frontend.num_engine_restarts <= 4
        assert (frontend.state, frontend.num_live) == ("serving", 0)


@pytest.mark.parametrize("n", [1, 20])
async def test_a_poisonous_request_without_others_fails_when_it_killed_two_engines(n: int) -> None:
    async with serving(crash_row_token="POISON") as frontend:
        with pytest.raises(PoisonousRequest):
            await Reader(frontend, ask("POISON", n=n)).whole()
        assert frontend.num_engine_restarts == 2
        await back(frontend)
        await Reader(frontend, ask("harmless")).whole()


async def test_poisonous_requests_at_once_are_all_found() -> None:
    generations = [ask(f"{number}: innocent", max_tokens=200) for number in range(4)]
    expected = await undisturbed(*generations)
    config = {"engine_restart_backoff_seconds": 0.05, "max_engine_restarts": 20}
    async with serving(step_seconds=0.005, crash_row_token="POISON", config=config) as frontend:
        readers = [Reader(frontend, generation) for generation in generations]
        poisons = [Reader(frontend, ask("POISON" * number)) for number in (1, 2)]
        for poison in poisons:
            with pytest.raises(PoisonousRequest):
                await poison.whole()
        assert [await reader.whole() for reader in readers] == expected
        assert frontend.metrics().num_poisonous == 2


async def test_a_poisonous_request_whose_reader_leaves_is_forgotten() -> None:
    [expected] = await undisturbed(ask("innocent", max_tokens=300))
    async with serving(step_seconds=0.005, crash_row_token="POISON") as frontend:
        innocent = Reader(frontend, ask("innocent", max_tokens=300))
        await innocent.until(lambda: innocent.num_tokens >= 2)
        poison = Reader(frontend, ask("POISON"))
        await eventually(lambda: frontend.num_engine_restarts >= 2)
        poison.task.cancel()
        assert await innocent.whole() == expected
        assert frontend.metrics().num_poisonous == 0


async def test_a_request_whose_engine_is_killed_from_outside_twice_is_not_to_blame() -> None:
    generation = ask("x" * 3000, max_tokens=10)
    [expected] = await undisturbed(generation)
    async with serving(seconds_per_token=0.001) as frontend:
        reader = Reader(frontend, generation)
        for _ in range(2):  # each time before it has got further than the time before
            await eventually(lambda: frontend.load.num_running == 1)
            await gone(frontend)
            await back(frontend)
        assert await reader.whole() == expected


async def test_a_crash_in_native_code_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    [expected] = await undisturbed(ask("x"))
    async with serving(step_seconds=0.01) as frontend:
        reader = Reader(frontend, ask("x"))
        await reader.until(lambda: reader.num_tokens >= 3)
        assert frontend.engine_pid is not None
        os.kill(frontend.engine_pid, signal.SIGSEGV)
        assert await reader.whole() == expected
        assert "Fatal Python error: Segmentation fault" in caplog.text
        assert frontend.metrics().engine_restarts["signal"] == 1
        assert frontend.last_error.startswith("EngineProcessDied: the engine process was killed by SIGSEGV")
