"""Traces by OpenTelemetry's SDK, of the extra ``otel``; imported when they are asked for.

A span goes to a queue and is sent by a thread of the SDK; when the queue is full it is dropped. So a collector that is
slow or gone holds up no request.
"""

from __future__ import annotations

import logging
import threading
import time
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from runnerd_service.telemetry.requests import RequestTimes
from runnerd_service.telemetry.tracing import Attributes, Metadata, phases

logger = logging.getLogger(__name__)

_CONTEXT_KEYS = ("traceparent", "tracestate")
_FLUSH_SECONDS = 3.0
"""What is queued at the end is given so long: the SDK would try for ten times that."""


class OpenTelemetryTracer:
    """Sends traces to a collector.

    Args:
        endpoint: Its URL; None: as the environment says.

    Raises:
        ValueError: The environment holds what the SDK does not take.
    """

    def __init__(self, endpoint: str | None) -> None:
        named = Resource.create({SERVICE_NAME: "runnerd", SERVICE_VERSION: version("runnerd")})
        # The environment goes first.
        self._provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("runnerd", version("runnerd"))
        self._propagator = TraceContextTextMapPropagator()

    def start(self, name: str, metadata: Metadata, arrival_ns: int, attributes: Attributes) -> OpenTelemetryTrace:
        """Begin the trace of a request that has just come in."""
        carrier = {key: value for key, value in metadata if key in _CONTEXT_KEYS and isinstance(value, str)}
        offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            name, self._propagator.extract(carrier), SpanKind.SERVER, attributes, start_time=arrival_ns + offset_ns
        )
        return OpenTelemetryTrace(self._tracer, span, offset_ns)

    def close(self) -> None:
        """Send what is queued, for a bounded time."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(_FLUSH_SECONDS)
        if closing.is_alive():
            logger.warning("the last traces could not be sent in %g s", _FLUSH_SECONDS)
            self._exporter.shutdown()  # ends the attempts


class OpenTelemetryTrace:
    """The trace of one request.

    Args:
        tracer: Makes the spans of the phases.
        span: The request's.
        offset_ns: From ``time.monotonic_ns`` to the time of day.
    """

    def __init__(self, tracer: Tracer, span: Span, offset_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._offset_ns = offset_ns

    @property
    def trace_id(self) -> str | None:
        """In 32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def end(self, times: RequestTimes, attributes: Attributes, error: str | None) -> None:
        """Tell how the request went, and queue its spans."""
        if self._span.is_recording():
            self._span.set_attributes(attributes)
            if error is not None:
                self._span.set_attribute("error.type", error)
                self._span.set_status(Status(StatusCode.ERROR))
            for name, begin_ns, end_ns in phases(times):
                child = self._tracer.start_span(
                    name, set_span_in_context(self._span), start_time=begin_ns + self._offset_ns
                )
                child.end(end_ns + self._offset_ns)
        self._span.end(times.end_ns + self._offset_ns)
