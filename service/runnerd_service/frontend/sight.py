"""What is shown of the engine from outside: figures for metrics, and recordings of its steps. It changes nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from runnerd_service.engine.client import EngineClient
from runnerd_service.engine.messages import EngineReady, Load
from runnerd_service.engine.trace import Trace
from runnerd_service.errors import FieldViolation, InvalidRequest, Overloaded
from runnerd_service.frontend.trace_events import trace_json
from runnerd_service.metrics import MetricsSnapshot, TenantFigures
from runnerd_service.telemetry.requests import RequestStats

MAX_TRACE_SECONDS = 60.0
_FAILURE_SEEN_SECONDS = 0.1
"""How long a caller waits at most for nothing, when the engine fails meanwhile."""


@dataclass(frozen=True, slots=True)
class CapturedTrace:
    """A recording for viewers."""

    trace_json: bytes
    """In the trace event format that Perfetto and Chrome read."""
    num_steps: int
    """Steps in it."""
    num_dropped_steps: int
    """Earlier steps that it had no room for."""


def metrics_snapshot(
    load: Load,
    ready: EngineReady | None,
    *,
    engine_restarts: Mapping[str, int],
    num_poisonous: int,
    tenants: Mapping[str, TenantFigures],
    model_name: str | None,
    requests: RequestStats,
) -> MetricsSnapshot:
    """Give the metrics' view of the engine's counters.

    Args:
        load: The latest counters.
        ready: What the engine told when it was ready; None before.
        engine_restarts: By cause.
        num_poisonous: Requests that were failed because engines died of them.
        tenants: Figures by tenant.
        model_name: As requests name it; None until it is known.
        requests: How requests went.
    """
    return MetricsSnapshot(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        kv_cache_usage=load.num_used_blocks / load.num_blocks if load.num_blocks else 0.0,
        num_steps=load.num_steps,
        num_graph_steps=load.num_graph_steps,
        num_graph_misses=load.num_graph_misses,
        num_preemptions=load.num_preemptions,
        prefix_cache_queries=load.prefix_cache_queries,
        prefix_cache_hits=load.prefix_cache_hits,
        prompt_tokens=load.prompt_tokens,
        generation_tokens=load.generation_tokens,
        device_busy_seconds=load.times.device_busy,
        device_idle_seconds=load.times.device_idle,
        bubble_seconds=msgspec.structs.asdict(load.times.bubble),
        host_seconds=msgspec.structs.asdict(load.times.host),
        max_in_flight=None if ready is None else ready.max_in_flight,
        depth=load.depth,
        engine_restarts=dict(engine_restarts),
        num_poisonous=num_poisonous,
        tenants=tenants,
        model_name=model_name,
        num_blocks=0 if ready is None else ready.num_blocks,
        block_size=0 if ready is None else ready.block_size,
        outcomes=requests.outcomes(),
        refused_calls=requests.refused_calls(),
        finish_reasons=requests.finish_reasons(),
        latencies=requests.latencies(),
        sizes=requests.sizes(),
    )


class TraceCapture:
    """Records the engine's steps, for one caller at a time."""

    def __init__(self) -> None:
        self._end_time: float | None = None

    async def capture(self, engine: EngineClient, seconds: float) -> CapturedTrace:
        """Record for ``seconds`` and give the recording; cancelled, it records no more.

        Raises:
            InvalidRequest: ``seconds`` is out of range.
            Overloaded: Another caller records.
            EngineFailed: The engine is gone.
        """
        if not (math.isfinite(seconds) and 0 < seconds <= MAX_TRACE_SECONDS):
            expected = f"expected above 0 and at most {MAX_TRACE_SECONDS:g} s"
            raise InvalidRequest(FieldViolation("duration", f"got {seconds:g} s, {expected}"))
        now = asyncio.get_running_loop().time()
        if self._end_time is not None:
            raise Overloaded(
                "a trace is being recorded for another caller; try again when that has ended",
                subject="trace",
                retry_after_seconds=max(self._end_time - now, 0.1),
            )
        self._end_time = now + seconds
        try:
            recorded = await _record(engine, seconds)
        finally:
            self._end_time = None
        # A long recording takes a while to write, and streams go on meanwhile.
        return await asyncio.to_thread(_captured, recorded)


async def _record(engine: EngineClient, seconds: float) -> str:
    loop = asyncio.get_running_loop()
    try:
        await engine.call("start_trace")
        end_time = loop.time() + seconds
        # A failure of the engine is a state that is told to one listener, who has other things to do.
        while (remaining := end_time - loop.time()) > 0 and engine.failure is None:  # noqa: ASYNC110
            await asyncio.sleep(min(remaining, _FAILURE_SEEN_SECONDS))
    finally:
        recorded = await engine.call("stop_trace")
    return recorded


def _captured(recorded: str) -> CapturedTrace:
    trace = msgspec.json.decode(recorded, type=Trace)
    return CapturedTrace(trace_json(trace), len(trace.steps), trace.num_dropped_steps)
