"""What the log tells of a request: one line, with a name that is safe to print and counts that are right."""

from __future__ import annotations

import logging
import re

import pytest

from runnerd_client import DeadlineError, InvalidRequestError, RequestCancelledError
from runnerd_service.frontend.types import Generation
from runnerd_service.rpc.request_record import Observers, RequestRecord
from runnerd_service.telemetry.requests import RequestStats
from runnerd_service.telemetry.tracing import NoTracer

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


async def test_a_refusal_is_told_with_the_fields_that_are_wrong_and_not_with_what_they_hold(live, caplog) -> None:
    with caplog.at_level(logging.INFO, LOGGER), pytest.raises(InvalidRequestError):
        await live.client.generate("x", request_id="mine", top_p=7.0, stop=["a secret" * 1000])
    (line,) = lines(caplog)
    assert line.startswith("request mine invalid_request (sampling.top_p, stopping.stop[0]): ")
    assert "secret" not in line
    (told,) = (record.fields for record in caplog.records if record.name == LOGGER)
    assert told["wrong_fields"] == ("sampling.top_p", "stopping.stop[0]")


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


async def test_how_requests_ended_is_counted(slow, idle) -> None:
    def outcomes() -> dict[str, int]:
        return dict(slow.frontend.request_stats.outcomes())

    before = outcomes()
    assert "overloaded" in before  # what has not come is told as 0, so that its first time is an increase
    await slow.client.generate("x", max_tokens=2, ignore_eos=True)
    with pytest.raises(InvalidRequestError):
        await slow.client.generate("x", top_p=7.0)
    with pytest.raises(DeadlineError):
        await slow.client.generate("x", max_tokens=5000, ignore_eos=True, timeout=0.5)
    async with slow.client.stream("x", max_tokens=5000, ignore_eos=True) as stream:
        await anext(stream)
    async with slow.client.stream("x", request_id="mine", max_tokens=5000, ignore_eos=True) as stream:
        await anext(stream)
        await slow.client.abort("mine")
        with pytest.raises(RequestCancelledError):
            async for _ in stream:
                pass
    await idle(slow)
    ended = {name: count - before[name] for name, count in outcomes().items() if count != before[name]}
    # Which of the two a deadline is depends on whose clock ends the call, by how much.
    assert ended.pop("cancelled") + ended.pop("deadline_exceeded", 0) == 2
    assert ended == {"finished": 1, "invalid_request": 1, "request_aborted": 1}


@pytest.mark.parametrize(
    ("seconds_left", "outcome"),
    [(None, "cancelled"), (5.0, "cancelled"), (0.0, "deadline_exceeded"), (0.05, "deadline_exceeded")],
)
async def test_a_call_that_ends_at_its_deadline_was_not_cancelled(seconds_left: float | None, outcome: str) -> None:
    stats = RequestStats()
    record = RequestRecord(Generation("x"), "Generate", (), Observers(stats, NoTracer()), None)
    record.close(seconds_left)
    assert stats.outcomes() == {outcome: 1}
