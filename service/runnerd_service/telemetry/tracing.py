"""Traces of requests: one span for a call, and below it how long it waited, and each of its phases.

Off unless asked for. Whose trace a request belongs to comes as W3C trace context in the call's metadata. Everything
else is set by the environment variables of OpenTelemetry (``OTEL_*``). No prompt, no output and no stop string enters
a span.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Protocol

from runnerd_service.errors import ConfigurationError
from runnerd_service.telemetry.requests import RequestTimes

Metadata = Iterable[tuple[str, str | bytes]]
Attributes = Mapping[str, str | int | float | bool | tuple[str, ...]]

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class RequestTrace(Protocol):
    """The trace of one request, from its arrival to its end."""

    @property
    def trace_id(self) -> str | None:
        """In 32 hexadecimal digits; None where there is no trace."""

    def end(self, times: RequestTimes, attributes: Attributes, error: str | None) -> None:
        """Tell how the request went.

        Args:
            times: All that is known.
            attributes: What became known after the start.
            error: Name of the error that it ended with; None for none.
        """


class RequestTracer(Protocol):
    """Begins traces of requests."""

    def start(self, name: str, metadata: Metadata, arrival_ns: int, attributes: Attributes) -> RequestTrace:
        """Begin the trace of a request that has just come in.

        Args:
            name: The span's.
            metadata: The call's; may hold the caller's trace context.
            arrival_ns: When it came, on the clock of ``time.monotonic_ns``.
            attributes: What is known by now.
        """

    def close(self) -> None:
        """Send what is queued, for a bounded time. Waits: not to be called in an event loop."""


class _NoTrace:
    @property
    def trace_id(self) -> None:
        return None

    def end(self, times: RequestTimes, attributes: Attributes, error: str | None) -> None:
        pass


_NO_TRACE = _NoTrace()


class NoTracer:
    """Traces nothing."""

    def start(self, name: str, metadata: Metadata, arrival_ns: int, attributes: Attributes) -> RequestTrace:
        """Give a trace that takes all and keeps none of it."""
        return _NO_TRACE

    def close(self) -> None:
        """Do nothing."""


def is_asked_for(endpoint: str | None, environment: Mapping[str, str]) -> bool:
    """Say whether requests are to be traced: an endpoint is named, and nothing turns traces off."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return endpoint is not None or any(environment.get(name) for name in _ENDPOINT_VARIABLES)


def open_tracer(endpoint: str | None, environment: Mapping[str, str] = os.environ) -> RequestTracer:
    """Give what traces requests; close it at the end.

    Args:
        endpoint: URL of the collector (OTLP over gRPC); None leaves it to the environment, and without one there traces
            are off.
        environment: The process's.

    Raises:
        ConfigurationError: The extra is not installed, or the environment asks for what is not there.
    """
    if not is_asked_for(endpoint, environment):
        return NoTracer()
    for name in _PROTOCOL_VARIABLES:
        if environment.get(name, "grpc") != "grpc":
            raise ConfigurationError(f"{name}: got {environment[name]!r}, expected grpc: traces are sent by gRPC only")
    try:
        from runnerd_service.telemetry.otlp import OpenTelemetryTracer
    except ImportError as error:
        raise ConfigurationError(
            f"traces are asked for and cannot be sent: {error}; pip install 'runnerd[otel]', or turn them off: no "
            "--otlp-traces-endpoint, and OTEL_TRACES_EXPORTER=none where the environment names an endpoint"
        ) from error
    try:
        return OpenTelemetryTracer(endpoint)
    except ValueError as error:
        raise ConfigurationError(f"traces cannot be set up: {error}; see the variables OTEL_*") from error


def phases(times: RequestTimes) -> list[tuple[str, int, int]]:
    """Give name, begin and end of what a request that has ended went through: queue, prefill, decode.

    One that ended early has no later phases, and its last one ends with it. What is prepared before the engine gets the
    request counts as queue.
    """
    if not times.num_prompt_tokens:  # it was refused
        return []
    marks = (
        ("queue", times.arrival_ns, times.began_ns),
        ("prefill", times.began_ns, times.first_token_ns),
        ("decode", times.first_token_ns, times.last_token_ns),
    )
    found: list[tuple[str, int, int]] = []
    for name, begin_ns, end_ns in marks:
        if not begin_ns:
            break
        found.append((name, begin_ns, end_ns or times.end_ns))
    return found
