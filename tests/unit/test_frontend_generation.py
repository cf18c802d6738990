"""The front end on a real engine process with the simulated runner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import pytest_asyncio

from runnerd_service.config import EngineConfig, ServerConfig
from runnerd_service.errors import DuplicateRequest, InvalidRequest, Overloaded, RequestAborted, RowFailed
from runnerd_service.frontend.effort import effort_of
from runnerd_service.frontend.frontend import Frontend
from runnerd_service.frontend.types import (
    ChatPrompt,
    Event,
    Finish,
    Generation,
    OutputChunk,
    PromptRecords,
    Started,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = 2000


@asynccontextmanager
async def serving(*, config: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Frontend]:
    """Serve the simulated runner with engine settings; those it does not know go to the runner as options."""
    known = {name: settings.pop(name) for name in tuple(settings) if name in EngineConfig.__dataclass_fields__}
    options = {name: str(value) for name, value in settings.items()}
    engine = EngineConfig(runner="sim", runner_options=options, **known)
    frontend = Frontend(ServerConfig(engine=engine, **(config or {})))
    try:
        await frontend.start()
        yield frontend
    finally:
        await frontend.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend() -> AsyncIterator[Frontend]:
    """Answers by a hash of the history, one step in a millisecond, eight requests at once."""
    async with serving(step_seconds=0.001, max_num_seqs=8, max_num_batched_tokens=256, kv_shadow=True) as one:
        yield one
        await until(lambda: is_idle(one))


def ask(prompt: str | Sequence[int] | ChatPrompt, **options: Any) -> Generation:
    """Ask for an output whose length does not hang on chance: it goes on after EOS unless told otherwise."""
    return Generation(prompt, **({"ignore_eos": True} | options))


async def events_of(frontend: Frontend, generation: Generation) -> list[Event]:
    async with aclosing(frontend.generate(generation)) as stream:
        return [event async for event in stream]


def text_of(events: list[Event], index: int = 0) -> str:
    return "".join(one.text for one in events if isinstance(one, OutputChunk) and one.index == index)


def ids_of(events: list[Event], index: int = 0) -> list[int]:
    chunks = [one for one in events if isinstance(one, OutputChunk) and one.index == index]
    return [token.id for chunk in chunks for token in chunk.tokens]


def finish_of(events: list[Event], index: int = 0) -> Finish:
    chunks = [one for one in events if isinstance(one, OutputChunk) and one.index == index]
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].finish is not None
    return chunks[-1].finish


def is_idle(frontend: Frontend) -> bool:
    load = frontend.load
    return (frontend.num_live, load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0, 0)


async def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 # the counters have no event
            await asyncio.sleep(0.005)


async def test_stream_tells_the_start_the_text_and_the_end(frontend: Frontend) -> None:
    events = await events_of(frontend, ask("hello", request_id="mine", seed=7, max_tokens=20, tokens=True))

    assert events[0] == Started("mine", seed=7, prompt_tokens=5)
    ids = ids_of(events)
    assert text_of(events) == bytes(one for one in ids if one < 256).decode(errors="replace")
    assert len(ids) == 20
    assert finish_of(events) == Finish("length", prompt_tokens=5, completion_tokens=20, cached_tokens=0)


async def test_same_seed_gives_the_same_answer_alone_and_in_company(frontend: Frontend) -> None:
    asked = ask("same", seed=3, max_tokens=30)
    alone = text_of(await events_of(frontend, asked))

    crowd = await asyncio.gather(
        *(events_of(frontend, ask(f"other {number}", max_tokens=30)) for number in range(12)),
        events_of(frontend, asked),
    )

    assert text_of(crowd[-1]) == alone


async def test_drawn_seed_is_told_and_repeats_the_answer(frontend: Frontend) -> None:
    first = await events_of(frontend, ask("draw", max_tokens=20))
    assert isinstance(first[0], Started)

    again = await events_of(frontend, ask("draw", max_tokens=20, seed=first[0].seed))

    assert text_of(again) == text_of(first)


async def test_outputs_of_a_request_differ_and_the_first_is_that_of_the_seed(frontend: Frontend) -> None:
    alone = text_of(await events_of(frontend, ask("many", seed=5, max_tokens=24)))

    events = await events_of(frontend, ask("many", seed=5, max_tokens=24, n=4))

    texts = [text_of(events, index) for index in range(4)]
    assert texts[0] == alone
    assert len(set(texts)) == 4
    assert [finish_of(events, index).completion_tokens for index in range(4)] == [24] * 4


async def test_cumulative_stream_repeats_all_so_far(frontend: Frontend) -> None:
    asked = ask("all so far", seed=1, max_tokens=25, tokens=True)
    whole = await events_of(frontend, asked)

    events = await events_of(frontend, ask("all so far", seed=1, max_tokens=25, tokens=True, cumulative=True))

    chunks = [event for event in events if isinstance(event, OutputChunk)]
    assert chunks[-1].text == text_of(whole)
    assert [token.id for token in chunks[-1].tokens] == ids_of(whole)
    for before, after in pairwise(chunks):
        assert after.text.startswith(before.text)
        assert after.tokens[: len(before.tokens)] == before.tokens


async def test_prompt_records_come_once_before_the_outputs(frontend: Frontend) -> None:
    events = await events_of(frontend, ask("prompt", max_tokens=4, n=3, prompt_logprobs=2, logprobs=1))

    assert isinstance(events[1], PromptRecords)
    assert [token.id for token in events[1].tokens] == [*b"rompt"]
    assert "".join(token.text for token in events[1].tokens) == "rompt"
    assert all(token.logprob is not None and len(token.candidates) == 2 for token in events[1].tokens)
    assert sum(isinstance(event, PromptRecords) for event in events) == 1


async def test_prompt_of_one_token_has_no_records(frontend: Frontend) -> None:
    events = await events_of(frontend, ask("p", max_tokens=2, prompt_logprobs=2))

    assert events[1] == PromptRecords(())


async def test_output_begins_with_the_prompt_when_asked_for(frontend: Frontend) -> None:
    plain = await events_of(frontend, ask("Q: ", seed=2, max_tokens=5))
    for prompt in ("Q: ", tuple(b"Q: ")):
        echoed = await events_of(frontend, ask(prompt, seed=2, max_tokens=5, include_prompt=True))
        assert text_of(echoed) == "Q: " + text_of(plain)


async def test_conversation_is_answered_as_its_rendered_text(frontend: Frontend) -> None:
    chat = ChatPrompt(({"role": "user", "content": "hi"},))
    rendered = (await frontend.tokenize(chat)).ids

    assert bytes(rendered) == b"user: hi\nassistant: "
    by_chat = await events_of(frontend, ask(chat, seed=1, max_tokens=9))
    assert text_of(by_chat) == text_of(await events_of(frontend, ask(rendered, seed=1, max_tokens=9)))


async def test_slow_reader_gets_merged_tokens_and_holds_up_nobody(frontend: Frontend) -> None:
    async with aclosing(frontend.generate(ask("slow", max_tokens=200, tokens=True))) as stream:
        assert isinstance(await anext(stream), Started)
        await events_of(frontend, ask("quick", max_tokens=200))
        await until(lambda: frontend.load.num_running == 0)
        chunks = [event async for event in stream]

    assert len(chunks) == 1
    assert len(ids_of(chunks)) == 200


@pytest.mark.parametrize("num_before", [0, 1, 5])
async def test_reader_that_leaves_frees_the_engine(frontend: Frontend, num_before: int) -> None:
    async with aclosing(frontend.generate(ask("leave", max_tokens=LONG, n=3))) as stream:
        for _ in range(num_before):
            await anext(stream)

    assert frontend.num_live == 0
    await until(lambda: is_idle(frontend))


async def test_cancelled_reader_frees_the_engine(frontend: Frontend) -> None:
    for delay in (0.0, 0.001, 0.01, 0.05):
        task = asyncio.create_task(events_of(frontend, ask("cancel", max_tokens=LONG)))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert frontend.num_live == 0
    await until(lambda: is_idle(frontend))


async def test_hundred_cancelled_requests_leave_nothing(frontend: Frontend) -> None:
    asked = [ask(f"{number} " * 40, max_tokens=LONG, n=2, request_id=f"r{number}") for number in range(100)]
    tasks = [asyncio.create_task(events_of(frontend, one)) for one in asked]
    for number, task in enumerate(tasks):
        if number % 3 == 0:
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert frontend.num_live == 0
    await until(lambda: is_idle(frontend))
    assert len(ids_of(await events_of(frontend, ask("after", max_tokens=3, tokens=True, request_id="r1")))) == 3


async def test_abort_ends_the_request_of_another_reader(frontend: Frontend) -> None:
    async with aclosing(frontend.generate(ask("x", request_id="a", max_tokens=LONG))) as stream:
        for _ in range(4):
            await anext(stream)

        assert frontend.abort("a")
        assert not frontend.abort("a"), "it is over already"
        with pytest.raises(RequestAborted, match="'a'"):
            async for _ in stream:
                pass

    assert not frontend.abort("a")
    await until(lambda: is_idle(frontend))


async def test_abort_of_nothing_is_no_error(frontend: Frontend) -> None:
    assert not frontend.abort("never was")


async def test_abort_of_an_ended_request_leaves_its_answer_whole(frontend: Frontend) -> None:
    async with aclosing(frontend.generate(ask("x", request_id="ended", max_tokens=5, tokens=True))) as stream:
        await anext(stream)
        await until(lambda: frontend.load.num_running == 0)
        await asyncio.sleep(0.05)

        assert not frontend.abort("ended")
        assert len(ids_of([event async for event in stream])) == 5


async def test_abort_during_preparation_is_remembered(frontend: Frontend) -> None:
    chat = ChatPrompt(({"role": "user", "content": "x"},), chat_template="{{ messages[0].content }}")
    task = asyncio.create_task(events_of(frontend, ask(chat, request_id="early", max_tokens=LONG)))
    await asyncio.sleep(0.01)

    assert frontend.abort("early")
    with pytest.raises(RequestAborted):
        await task
    assert frontend.num_live == 0


async def test_id_of_a_live_request_is_refused_and_the_first_goes_on(frontend: Frontend) -> None:
    async with aclosing(frontend.generate(ask("x", request_id="d", max_tokens=40, tokens=True))) as stream:
        first = [await anext(stream)]
        with pytest.raises(DuplicateRequest, match="'d'"):
            await events_of(frontend, ask("y", request_id="d"))
        first += [event async for event in stream]

    assert len(ids_of(first)) == 40
    assert len(ids_of(await events_of(frontend, ask("x", request_id="d", max_tokens=2, tokens=True)))) == 2


async def test_refused_request_leaves_nothing(frontend: Frontend) -> None:
    with pytest.raises(InvalidRequest):
        await events_of(frontend, ask("", request_id="refused"))

    assert frontend.num_live == 0
    assert len(await events_of(frontend, ask("ok", request_id="refused", max_tokens=1))) >= 2


async def test_time_that_is_over_ends_the_outputs_with_what_there_is(frontend: Frontend) -> None:
    events = await events_of(frontend, ask("time", max_tokens=8000, time_limit_seconds=0.2, tokens=True, n=2))

    for index in range(2):
        finish = finish_of(events, index)
        assert finish.reason == "time_limit"
        assert 0 < finish.completion_tokens == len(ids_of(events, index)) < 8000
    await until(lambda: is_idle(frontend))


async def test_tokenize_tells_what_generate_would_see(frontend: Frontend) -> None:
    told = await frontend.tokenize("é!")

    assert told.ids == (0xC3, 0xA9, ord("!"))
    assert told.tokens == ("<0xC3>", "<0xA9>", "!")
    assert told.max_model_len == 8192
    assert await frontend.detokenize(told.ids) == "é!"
    assert await frontend.detokenize((65, 256), False) == "A<eos>"
    with pytest.raises(InvalidRequest, match=r"ids\[1\]: got 300, expected 0 to 256"):
        await frontend.detokenize((65, 300))
    with pytest.raises(InvalidRequest, match="text"):
        await frontend.tokenize("")


async def turns_during(work: Coroutine[Any, Any, Any]) -> int:
    """Give how often the event loop came round while ``work`` went on."""
    task, turns = asyncio.create_task(work), 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    await task
    return turns


@pytest.mark.parametrize(
    "generation",
    [
        ask([1] * 2000, max_tokens=1),
        ask("x" * 5000, max_tokens=1),
        ask("x", max_tokens=1, stop=[character * 1024 for character in "abcdefgh"]),
        ask("x", max_tokens=1, bad_words=[f"word {number}" for number in range(1000)]),
    ],
    ids=["token ids", "text", "stop", "bad words"],
)
async def test_large_request_is_served(frontend: Frontend, generation: Generation) -> None:
    assert finish_of(await events_of(frontend, generation)).completion_tokens == 1


async def test_large_work_leaves_the_event_loop_to_others(frontend: Frontend) -> None:
    assert await turns_during(frontend.detokenize([65] * 100_000)) > 10
    assert await turns_during(frontend.tokenize("x" * 200_000)) > 10
    small = await turns_during(frontend.detokenize([65]))
    assert small < 10


@pytest.mark.parametrize(
    ("generation", "effort"),
    [
        (Generation("x" * 4000), "small"),
        (Generation("x" * 4001), "large"),
        (Generation("x" * 1_000_001), "huge"),
        (Generation([1] * 4001), "large"),
        (Generation("x", stop=["y" * 1024] * 4), "large"),
        (Generation("x", bad_words=["yy"] * 2001), "large"),
        (Generation("x", allowed_token_ids=[1] * 4001), "large"),
        (Generation("x", stop_token_ids=[1] * 4001), "large"),
        (Generation("x", logit_bias=dict.fromkeys(range(4001), 1.0)), "large"),
        (Generation(ChatPrompt(({"role": "user", "content": "x"},))), "small"),
        (Generation(ChatPrompt(({"role": "user", "content": "x" * 4001},))), "large"),
        (Generation(ChatPrompt(({"role": "user", "content": "x" * 1_000_001},), tools=({},))), "huge"),
        (Generation(ChatPrompt(({"role": "user", "content": ""},) * 4001)), "large"),
        (Generation(ChatPrompt(({"role": "user", "content": "x"},), tools=({},))), "large"),
        (Generation(ChatPrompt(({"role": "user", "content": "x"},), template_kwargs={"a": 1})), "large"),
        (Generation(ChatPrompt(({"role": "user", "content": "x"},), chat_template="x")), "foreign"),
    ],
)
async def test_effort_is_told_by_size(generation: Generation, effort: str) -> None:
    assert effort_of(generation) == effort


async def test_long_prompt_is_served_while_others_go_on(frontend: Frontend) -> None:
    told = await frontend.tokenize("x" * 50_000)

    assert len(told.ids) == 50_000
    with pytest.raises(InvalidRequest, match=r"prompt: got at least 50000 tokens .50000 bytes of text., at most 8191"):
        await events_of(frontend, ask("x" * 50_000))


async def test_model_is_described(frontend: Frontend) -> None:
    told = frontend.describe_model()

    assert (told.name, told.vocab_size, told.eos_token_ids) == ("sim", 257, (256,))
    assert told.has_chat_template
    assert told.capabilities["guided_decoding"] == "host_sync"
    assert told.max_logprobs == 20


async def test_scripted_answer_ends_with_eos() -> None:
    async with serving(script="The answer is 42. 🙂 STOP and more") as frontend:
        events = await events_of(frontend, ask("x", temperature=0.0, tokens=True, ignore_eos=False))
        assert text_of(events) == "The answer is 42. 🙂 STOP and more"
        assert finish_of(events).eos_token_id == 256
        assert ids_of(events)[-1] == 256
        assert finish_of(events).completion_tokens == len(ids_of(events))

        for stop, expected in (("STOP", "The answer is 42. 🙂 "), ("🙂", "The answer is 42. "), ("T", "")):
            for include in (False, True):
                asked = ask("x", temperature=0.0, stop=("nothing", stop), include_stop=include, tokens=True)
                events = await events_of(frontend, asked)
                assert text_of(events) == expected + stop * include
                assert finish_of(events).reason == "stop"
                assert finish_of(events).stop_string == stop
                assert finish_of(events).completion_tokens == len(ids_of(events)) == len((expected + stop).encode())
        await until(lambda: is_idle(frontend))

        events = await events_of(frontend, ask("x", temperature=0.0, stop_token_ids=(ord("."),)))
        assert text_of(events) == "The answer is 42"
        assert finish_of(events).stop_token_id == ord(".")


async def test_stop_string_ends_the_engines_work_though_nobody_reads() -> None:
    async with serving(script="one two three", step_seconds=0.001) as frontend:
        asked = ask("x", temperature=0.0, stop=("two",), max_tokens=LONG)
        async with aclosing(frontend.generate(asked)) as stream:
            await anext(stream)
            await until(lambda: frontend.load.num_steps > 0 and frontend.load.num_running == 0)
            assert frontend.load.generation_tokens < 20
            assert text_of([event async for event in stream]) == "one "


async def test_requests_wait_for_a_place_and_can_be_ended_there() -> None:
    async with serving(step_seconds=0.002, max_num_seqs=1, config={"max_waiting": 2}) as frontend:
        running = frontend.generate(ask("run", max_tokens=LONG))
        async with aclosing(running):
            for _ in range(3):
                await anext(running)
            waiting = [
                asyncio.create_task(events_of(frontend, ask("w", request_id=name, max_tokens=3)))
                for name in ("first", "second")
            ]
            await until(lambda: frontend.load.num_waiting == 2)

            with pytest.raises(
                Overloaded, match=r"run or wait: 3; .* more than 2 \(--max-waiting\) would wait"
            ) as refusal:
                await events_of(frontend, ask("third"))
            assert refusal.value.subject == "max_waiting"
            assert refusal.value.retry_after_seconds > 0

            assert frontend.abort("first")
            with pytest.raises(RequestAborted):
                await waiting[0]
            late = await events_of(frontend, ask("late", time_limit_seconds=0.05))
            assert finish_of(late) == Finish("time_limit", prompt_tokens=4, completion_tokens=0, cached_tokens=0)
        assert finish_of(await waiting[1]).reason == "length"
        await until(lambda: is_idle(frontend))


async def test_more_outputs_than_may_ever_wait_are_refused() -> None:
    async with serving(max_num_seqs=2, config={"max_waiting": 0}) as frontend:
        with pytest.raises(Overloaded):
            await events_of(frontend, ask("x", n=3))
        assert len(await events_of(frontend, ask("x", n=2, max_tokens=1))) >= 3


async def test_abort_in_prefill_frees_the_engine() -> None:
    async with serving(step_seconds=0.01, max_num_batched_tokens=16, max_num_seqs=4) as frontend:
        task = asyncio.create_task(events_of(frontend, ask("x" * 4000, request_id="prefill")))
        await until(lambda: frontend.num_live == 1)
        await asyncio.sleep(0.05)

        assert frontend.abort("prefill")
        with pytest.raises(RequestAborted):
            await task
        assert len(ids_of(await events_of(frontend, ask("y", max_tokens=2, tokens=True)))) == 2
        await until(lambda: is_idle(frontend))
        assert frontend.load.num_steps < 4000 // 16


async def test_row_that_fails_fails_its_request_alone() -> None:
    async with serving(step_seconds=0.001, fail_row_token="poison") as frontend:
        other = asyncio.create_task(events_of(frontend, ask("fine", max_tokens=50, tokens=True)))
        with pytest.raises(RowFailed):
            await events_of(frontend, ask("this is poison", n=2))
        assert len(ids_of(await other)) == 50
        assert frontend.state == "serving"
        await until(lambda: is_idle(frontend))
