"""Sends the requests of a benchmark when they are due, and records what comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from runnerd_bench.dataset import BenchRequest
from runnerd_bench.record import RequestRecord
from runnerd_client import AsyncClient, GenerateOptions, RunnerdError


@dataclass(frozen=True, slots=True)
class Run:
    """What a run gave."""

    records: list[RequestRecord]
    """Aligned with the requests; of an interrupted run, those that ended before."""
    seconds: float
    """From the start to the end of the last call."""
    client_cpu_seconds: float
    """CPU time of this process meanwhile."""
    interrupted: bool = False
    """Whether it was stopped before all requests ended."""


@dataclass(frozen=True, slots=True)
class Driver:
    """Sends requests to a server.

    Args:
        client: Of the server.
        options: Of every request.
        seed: A request's seed is this plus its index.
        max_concurrency: Requests that are live at once; None: all that are due.
        keep_texts: Keep the outputs' texts in the records.
    """

    client: AsyncClient
    options: GenerateOptions
    seed: int = 0
    max_concurrency: int | None = None
    keep_texts: bool = False

    async def run(
        self,
        requests: Sequence[BenchRequest],
        due: Sequence[float],
        on_end: Callable[[RequestRecord], object],
        stop: asyncio.Event | None = None,
    ) -> Run:
        """Send ``requests`` at their ``due`` times; those over ``max_concurrency`` wait for a place.

        A request's clock starts when it is sent, not while it waits here for a place. One that fails is recorded,
        and the others go on. When ``stop`` is set, the live ones are cancelled, and those that ended are given.
        """
        stop = stop or asyncio.Event()
        records = [RequestRecord() for _ in requests]
        ended = [False] * len(requests)
        places = nullcontext() if self.max_concurrency is None else asyncio.Semaphore(self.max_concurrency)
        cpu_before, begin = time.process_time(), time.perf_counter()

        async def send(index: int) -> None:
            async with places:
                await self._record(index, requests[index], records[index], begin)
            if not stop.is_set():
                ended[index] = True
                on_end(records[index])

        async def send_all() -> None:
            async with asyncio.TaskGroup() as group:
                for index, when in enumerate(due):
                    if (wait := begin + when - time.perf_counter()) > 0:
                        await asyncio.sleep(wait)
                    group.create_task(send(index))

        await _unless(stop, send_all())
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_before
        if all(ended):
            return Run(records, seconds, cpu_seconds)
        return Run([one for one, whole in zip(records, ended, strict=True) if whole], seconds, cpu_seconds, True)

    async def _record(self, index: int, request: BenchRequest, record: RequestRecord, begin: float) -> None:
        times, texts = record.message_times, list[str]()
        options = GenerateOptions(**{**self.options, "max_tokens": request.output_len, "seed": self.seed + index})
        record.start = time.perf_counter() - begin
        try:
            async with self.client.stream(request.prompt, **options) as stream:
                async for message in stream:
                    if message.HasField("output"):
                        times.append(time.perf_counter() - begin)
                        if self.keep_texts:
                            texts.append(message.output.text)
                        if message.output.HasField("finish"):
                            record.output_tokens = message.output.finish.usage.completion_tokens
                    elif message.HasField("started"):
                        record.prompt_tokens = message.started.prompt_tokens
            if not record.output_tokens:
                record.error = "the stream ended without a finish"
        except RunnerdError as error:
            record.error = f"{error.code.name}: {error}"
        except (ValueError, TypeError) as error:  # what no request can hold
            record.error = str(error)
        record.end = time.perf_counter() - begin
        record.text = "".join(texts)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``, or cancel it as soon as ``stop`` is set."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
