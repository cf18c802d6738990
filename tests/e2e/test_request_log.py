"""What the log tells of a request: one line, with a name that is safe to print and counts that are right."""

from __future__ import annotations

import logging
import re

import pytest

from runnerd_client import InvalidRequestError

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOGGER = "runnerd_service.rpc.request_record"


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


async def test_a_request_id_cannot_write_a_line_of_its_own(live, caplog) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        await live.client.generate("x", request_id="mine\nrequest yours\x00\u2028é", max_tokens=1)
    (line,) = lines(caplog)
    assert line.startswith(r"request mine\nrequest yours\x00\u2028é finished: 1 prompt tokens, 1 output tokens, ")


async def test_a_request_id_that_is_refused_for_its_length_does_not_fill_the_log(live, caplog) -> None:
    with caplog.at_level(logging.INFO, LOGGER), pytest.raises(InvalidRequestError):
        await live.client.generate("x", request_id="x" * 1_000_000)
    (line,) = lines(caplog)
    assert len(line) < 300


async def test_the_tokens_of_a_stream_that_was_left_are_counted(slow, idle, caplog) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        async with slow.client.stream("x", n=2, max_tokens=5000, ignore_eos=True) as stream:
            seen = 0
            async for message in stream:
                seen += len(message.output.text)
                if seen >= 20:
                    break
        await idle(slow)
    (line,) = lines(caplog)
    found = re.search(r"cancelled: 1 prompt tokens, (\d+) output tokens", line)
    assert found is not None
    assert int(found[1]) >= 20
