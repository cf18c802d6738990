"""What is refused because too much waits, or waits for too long; and that nothing else is."""

from __future__ import annotations

import asyncio

import pytest

from runnerd_client import DeadlineError, OverloadedError

ENDLESS = {"max_tokens": 3000, "ignore_eos": True}


async def begun(client, **options) -> tuple[asyncio.Task[object], asyncio.Event]:
    """Start a stream; give its task, and the event of its first text."""
    first = asyncio.Event()

    async def read() -> object:
        async for message in client.stream(**options):
            if message.HasField("output"):
                first.set()
        return message.output.finish

    return asyncio.create_task(read()), first


async def ended(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def test_a_request_that_waits_too_long_for_a_place_is_refused(serve, idle) -> None:
    async with serve(engine={"max_num_seqs": 1}, options={"step_seconds": "0.01"}, queue_timeout_seconds=0.5) as live:
        running, first = await begun(live.client, prompt="x", **ENDLESS)
        async with asyncio.timeout(30):
            await first.wait()
        for n in (1, 3):
            with pytest.raises(OverloadedError, match=r"no place became free in 0.5 s") as caught:
                await live.client.generate("y", n=n, max_tokens=1)
            assert caught.value.retry_after is not None
        assert not running.done()  # which has run for longer than that
        await ended(running)
        await idle(live)
        assert (await live.client.generate("y", max_tokens=1)).outputs


async def test_a_prompt_that_takes_long_does_not_wait(serve, idle) -> None:
    options = {"seconds_per_token": "0.002"}
    async with serve(engine={"max_num_batched_tokens": 64}, options=options, queue_timeout_seconds=0.5) as live:
        answer = await live.client.generate("x" * 600, max_tokens=1)
        assert answer.outputs[0].finish.usage.prompt_tokens == 600
        await idle(live)


async def test_prompts_that_wait_are_bounded_by_their_tokens(serve, idle) -> None:
    async with serve(engine={"max_num_seqs": 1}, options={"step_seconds": "0.01"}, max_waiting_tokens=1000) as live:
        # The first does not wait, however long it is.
        running, first = await begun(live.client, prompt="x" * 5000, **ENDLESS)
        async with asyncio.timeout(30):
            await first.wait()
        waiting, _ = await begun(live.client, prompt="y" * 600, max_tokens=1)

        async def waits() -> bool:
            return (await live.client.load()).num_waiting == 1

        async with asyncio.timeout(30):
            while not await waits():  # noqa: ASYNC110 - asked over the wire
                await asyncio.sleep(0.01)
        for prompt, n in (("z" * 401, 1), ("z" * 201, 2)):
            with pytest.raises(
                OverloadedError, match=r"more than 1000 .--max-waiting-tokens.; try later, or "
            ) as caught:
                await live.client.generate(prompt, n=n, max_tokens=1)
            assert caught.value.retry_after is not None
        fits, _ = await begun(live.client, prompt="z" * 400, max_tokens=1)
        await ended(running)
        for task in (waiting, fits):
            assert (await task).usage.completion_tokens == 1
        await idle(live)


async def test_a_deadline_that_passes_before_a_request_can_begin_is_refused_at_once(serve, idle) -> None:
    brief = {"max_tokens": 10, "ignore_eos": True}  # which takes at least a tenth of a second
    async with serve(engine={"max_num_seqs": 1}, options={"step_seconds": "0.01"}) as live:
        # While nothing is known of how fast others begin, nobody is refused.
        with pytest.raises(DeadlineError):
            await live.client.generate("x", max_tokens=3000, ignore_eos=True, timeout=0.5)
        waiting = [asyncio.create_task(live.client.generate("x", **brief)) for _ in range(60)]
        async with asyncio.timeout(60):
            while sum(task.done() for task in waiting) < 15:  # noqa: ASYNC110 - asked over the wire
                await asyncio.sleep(0.01)
        with pytest.raises(OverloadedError, match=r"outputs wait before it.*its deadline is in") as caught:
            await live.client.generate("x", timeout=1.5, **brief)  # some 45 others take 4.5 s, and half of it at least
        assert caught.value.retry_after is not None
        # Who goes before them, who has more time, and who has any time, are not.
        urgent = live.client.generate("x", timeout=30, priority=-1, **brief)
        patient = live.client.generate("x", timeout=600, **brief)
        assert len(await asyncio.gather(urgent, patient, *waiting)) == 62
        await idle(live)


async def test_a_server_may_be_told_to_refuse_no_deadline(serve, idle) -> None:
    config = {"deadline_check": False, "engine": {"max_num_seqs": 1}}
    async with serve(options={"step_seconds": "0.01"}, **config) as live:
        waiting = [asyncio.create_task(live.client.generate("x", max_tokens=10, ignore_eos=True)) for _ in range(30)]
        async with asyncio.timeout(60):
            while sum(task.done() for task in waiting) < 10:  # noqa: ASYNC110 - asked over the wire
                await asyncio.sleep(0.01)
        with pytest.raises(DeadlineError):
            await live.client.generate("x", timeout=0.5, max_tokens=3000, ignore_eos=True)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await idle(live)


async def test_a_burst_of_calls_is_served(serve, idle) -> None:
    """gRPC cancels calls by chance when more than a thousand have come and are not taken up yet."""
    async with serve() as live:
        burst = (live.client.generate("x", max_tokens=1) for _ in range(3000))
        assert all(one.outputs for one in await asyncio.gather(*burst))
        await idle(live)
