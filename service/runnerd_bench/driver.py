"""Sends the requests of a benchmark when they are due, and records what comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from runnerd_bench.dataset import BenchRequest
from runnerd_bench.record import RequestRecord
from runnerd_client import AsyncClient, GenerateOptions, RunnerdError


@dataclass(frozen=True, slots=True)
class Run:
    """What a run gave."""

    records: list[RequestRecord]
    """Aligned with the requests."""
    seconds: float
    """From the start to the end of the last call."""
    client_cpu_seconds: float
    """CPU time of this process meanwhile."""


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
        self, requests: Sequence[BenchRequest], due: Sequence[float], on_end: Callable[[RequestRecord], object]
    ) -> Run:
        """Send ``requests`` at their ``due`` times; those over ``max_concurrency`` wait for a place.

        A request's clock starts when it is sent, not while it waits here for a place. One that fails is recorded,
        and the others go on.
        """
        records = [RequestRecord() for _ in requests]
        places = nullcontext() if self.max_concurrency is None else asyncio.Semaphore(self.max_concurrency)
        cpu_before, begin = time.process_time(), time.perf_counter()

        async def send(index: int) -> None:
            record = records[index]
            async with places:
                await self._record(index, requests[index], record, begin)
            on_end(record)

        async with asyncio.TaskGroup() as group:
            for index, when in enumerate(due):
                if (wait := begin + when - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(send(index))
        return Run(records, time.perf_counter() - begin, time.process_time() - cpu_before)

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
