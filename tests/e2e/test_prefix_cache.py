"""The prefix cache seen by clients: what a request found, that children share, and that a reset forgets it."""

from __future__ import annotations

import asyncio

import pytest

from runnerd_client import UnavailableError

PROMPT = list(range(1, 102))
"""Six full blocks of 16, and five tokens."""


async def cached_tokens(live, **options) -> list[int]:
    answer = await live.client.generate(PROMPT, max_tokens=2, ignore_eos=True, **options)
    return [output.finish.usage.cached_tokens for output in answer.outputs]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_reset_forgets_what_was_cached_of_every_salt(live) -> None:
    await live.client.reset_prefix_cache()
    for salt in ("", "tenant"):
        assert await cached_tokens(live, cache_salt=salt) == [0]
        assert await cached_tokens(live, cache_salt=salt) == [96]
    assert await live.client.reset_prefix_cache() == 12
    assert await live.client.reset_prefix_cache() == 0
    for salt in ("", "tenant"):
        assert await cached_tokens(live, cache_salt=salt) == [0]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_outputs_of_a_request_share_its_prompt(live, idle) -> None:
    await live.client.reset_prefix_cache()
    assert await cached_tokens(live, n=4) == [0, 96, 96, 96]
    await idle(live)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_reset_while_requests_run_changes_no_token_of_them(slow, idle) -> None:
    options = {"max_tokens": 40, "seed": 5, "ignore_eos": True, "tokens": True, "n": 3}
    undisturbed = await slow.client.generate(PROMPT, **options)
    running = asyncio.create_task(slow.client.generate(PROMPT, **options))
    num_resets = 0
    while not running.done():
        await slow.client.reset_prefix_cache()
        num_resets += 1
        await asyncio.sleep(0.02)
    assert num_resets > 3
    for mine, other in zip((await running).outputs, undisturbed.outputs, strict=True):
        assert [one.id for one in mine.tokens] == [one.id for one in other.tokens]
    await idle(slow)


async def test_a_reset_is_refused_while_the_model_loads(serve) -> None:
    async with serve(load=False) as loading:
        with pytest.raises(UnavailableError, match="the model is loading"):
            await loading.client.reset_prefix_cache()


def test_the_command_resets_the_cache_of_a_running_server(module_daemon, runnerd) -> None:
    address = module_daemon().wait_until_ready()
    ended = runnerd("reset-prefix-cache", "--address", address)
    assert (ended.returncode, ended.stdout) == (0, "0 KV blocks held a cached prefix\n")
