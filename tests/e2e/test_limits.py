"""Limits that an operator sets: each request beyond one is refused by the field's name, and one at it is served."""

from __future__ import annotations

import grpc
import pytest

from runnerd_client import InvalidRequestError, chat
from runnerd_client.aio import AsyncClient
from runnerd_service.config import SecurityConfig

LIMITS = {
    "max_n": 2,
    "max_logprobs": 3,
    "max_stop_strings": 2,
    "max_bad_words": 2,
    "max_logit_bias": 2,
    "max_message_bytes": 2000,
    "max_metadata_bytes": 2048,
}
# What is at the limit, what is beyond, and the field that is named.
CASES = [
    ({"n": 2}, {"n": 3}, "output.n"),
    ({"logprobs": 3}, {"logprobs": 4}, "output.logprobs"),
    ({"prompt_logprobs": 3}, {"prompt_logprobs": 4}, "output.prompt_logprobs"),
    ({"stop": ["a", "b"]}, {"stop": ["a", "b", "c"]}, "stopping.stop"),
    ({"stop": ["a" * 1024]}, {"stop": ["a" * 1025]}, "stopping.stop[0]"),
    ({"bad_words": ["a", "b"]}, {"bad_words": ["a", "b", "c"]}, "sampling.bad_words"),
    ({"bad_words": ["a" * 1024]}, {"bad_words": ["a" * 1025]}, "sampling.bad_words[0]"),
    ({"logit_bias": {1: 1, 2: 1}}, {"logit_bias": {1: 1, 2: 1, 3: 1}}, "sampling.logit_bias"),
    ({"request_id": "a" * 128}, {"request_id": "a" * 129}, "request_id"),
    ({"cache_salt": "a" * 128}, {"cache_salt": "a" * 129}, "cache_salt"),
    ({}, {"request_id": "a" * 2000}, "GenerateRequest"),
]


async def test_each_limit_is_kept_and_named(serve, idle) -> None:
    async with serve(**LIMITS) as live:
        info = await live.client.model_info()
        assert (info.max_n, info.max_logprobs) == (2, 3)
        for at, beyond, field in CASES:
            assert (await live.client.generate("x", max_tokens=1, **at)).outputs
            with pytest.raises(InvalidRequestError) as caught:
                await live.client.generate("x", max_tokens=1, **beyond)
            assert [one.field for one in caught.value.violations] == [field]
        await idle(live)


async def test_templates_of_requests_and_urgent_priorities_can_be_refused(serve) -> None:
    security = SecurityConfig(min_priority=5)
    async with serve(request_templates=False, security=security) as live:
        prompt = chat({"role": "user", "content": "x"})
        assert (await live.client.generate(prompt, max_tokens=1, priority=5)).outputs
        for priority, got in ((4, "got 4"), (None, "got nothing, which is 0")):
            with pytest.raises(InvalidRequestError, match=got) as caught:
                await live.client.generate(prompt, priority=priority)
            assert [one.field for one in caught.value.violations] == ["priority"]
        prompt.chat_template = "x"
        for refused in (live.client.generate(prompt, priority=5), live.client.tokenize(prompt)):
            with pytest.raises(InvalidRequestError) as caught:
                await refused
            assert [one.field for one in caught.value.violations] == ["chat.chat_template"]


async def test_metadata_beyond_the_limit_is_refused_by_grpc(serve) -> None:
    async with serve(**LIMITS) as live:
        async with AsyncClient(live.address, timeout=30, metadata={"x-small": "a" * 1000}) as client:
            for _ in range(20):  # below the limit never, above it always
                assert (await client.load()).num_running == 0
        for _ in range(5):
            async with AsyncClient(live.address, timeout=30, metadata={"x-large": "a" * 2000}) as client:
                with pytest.raises(InvalidRequestError, match="metadata") as caught:
                    await client.load()
            assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await live.client.generate("x", max_tokens=1)).outputs
