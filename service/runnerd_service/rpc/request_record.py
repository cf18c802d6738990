"""What is kept of a generation from its call to its end, for log, metrics and traces: counts and times, never text."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass

from runnerd_service.errors import InvalidRequest, ReaderStalled
from runnerd_service.frontend.types import ChatPrompt, Event, Generation, OutputChunk, Started
from runnerd_service.rpc.status import REASONS, reason_of
from runnerd_service.telemetry.logs import printable, with_fields
from runnerd_service.telemetry.requests import RequestStats, RequestTimes
from runnerd_service.telemetry.tracing import Metadata, RequestTracer

logger = logging.getLogger(__name__)

REQUEST_NAME: ContextVar[str] = ContextVar("REQUEST_NAME", default="")
"""The id of the request that the present call is for, as the log can hold it; empty while none is known."""

FINISHED = "finished"
CANCELLED = "cancelled"
DEADLINE_EXCEEDED = "deadline_exceeded"
"""How a request ends that meets no error; the others are the reasons of :mod:`runnerd_service.rpc.status`."""
OUTCOMES = (FINISHED, CANCELLED, DEADLINE_EXCEEDED, *(reason.lower() for reason in REASONS))
FINISH_REASONS = ("stop", "length", "time_limit", "guide")

_STALLED = reason_of(ReaderStalled()).lower()
_LEVELS = {_STALLED: logging.WARNING}
"""Of what is told of a request, where that is not only for those who look: a network may be at fault."""
_SLACK_SECONDS = 0.1
"""The caller's own clock ends a call first, by as long as the call took to get here."""
_MAX_FIELDS_TOLD = 10
_PROVIDER = "runnerd"
_REQUEST_ATTRIBUTES = (
    ("gen_ai.request.temperature", "temperature"),
    ("gen_ai.request.top_p", "top_p"),
    ("gen_ai.request.top_k", "top_k"),
    ("gen_ai.request.frequency_penalty", "frequency_penalty"),
    ("gen_ai.request.presence_penalty", "presence_penalty"),
    ("gen_ai.request.max_tokens", "max_tokens"),
)


@dataclass(frozen=True, slots=True)
class Observers:
    """Who is told of requests."""

    stats: RequestStats
    tracer: RequestTracer


class RequestRecord:
    """One generation, as it goes.

    Args:
        generation: What is asked for.
        method: Name of the call, without the service.
        metadata: The call's.
        observers: Who is told at the end.
        model_name: The served model's; None while it is not known.
    """

    def __init__(
        self, generation: Generation, method: str, metadata: Metadata, observers: Observers, model_name: str | None
    ) -> None:
        num_outputs = 1 if generation.n is None else generation.n
        self.times = RequestTimes(num_outputs=num_outputs, max_tokens=generation.max_tokens)
        self.outcome = CANCELLED
        self._wrong_fields: tuple[str, ...] = ()
        self._request_id = generation.request_id or "(refused)"
        REQUEST_NAME.set(printable(generation.request_id or ""))
        self._tenant = generation.tenant
        self._num_outputs = num_outputs
        self._stats = observers.stats
        attributes = _request_attributes(generation, method, model_name)
        name = f"{attributes['gen_ai.operation.name']} {model_name}" if model_name else method
        self._trace = observers.tracer.start(name, metadata, self.times.arrival_ns, attributes)
        self._model_name = model_name

    def note(self, event: Event) -> None:
        """Take an event that goes to the client."""
        if isinstance(event, Started):
            self._request_id = event.request_id
            REQUEST_NAME.set(printable(event.request_id))
        elif isinstance(event, OutputChunk) and event.finish is not None:
            self.times.finish_reasons.append(event.finish.reason)

    def finish(self) -> None:
        """Note that all went well; refuse to end a stream OK that is not whole.

        Raises:
            RuntimeError: An output has no finish, or more than one.
        """
        num_finished = len(self.times.finish_reasons)
        if num_finished != self._num_outputs:
            raise RuntimeError(f"{num_finished} of {self._num_outputs} outputs of {self._request_id} finished")
        self.outcome = FINISHED

    def fail(self, error: Exception) -> None:
        """Note the error that it ends with."""
        self.outcome = reason_of(error).lower()
        if isinstance(error, InvalidRequest):
            # Paths of the API, which have no text of the request; what was got there is not told.
            self._wrong_fields = tuple(printable(one.field) for one in error.violations[:_MAX_FIELDS_TOLD])

    def close(self, seconds_left: float | None) -> None:
        """Tell log, metrics and trace that it has ended.

        Args:
            seconds_left: Until the call's deadline; None without one.
        """
        if self.outcome == CANCELLED and seconds_left is not None and seconds_left <= _SLACK_SECONDS:
            self.outcome = DEADLINE_EXCEEDED
        self._stats.ended(self.times, self.outcome)
        self._log()
        error = None if self.outcome == FINISHED else self.outcome
        self._trace.end(self.times, self._response_attributes(), error)

    def _log(self) -> None:
        times, name = self.times, printable(self._request_id)
        seconds = (times.end_ns - times.arrival_ns) * 1e-9
        logger.log(
            _LEVELS.get(self.outcome, logging.INFO),
            "request %s%s %s%s: %d prompt tokens, %d output tokens, %.3f s",
            name,
            f" of {self._tenant}" if self._tenant else "",
            self.outcome,
            f" ({', '.join(self._wrong_fields)})" if self._wrong_fields else "",
            times.num_prompt_tokens,
            times.num_output_tokens,
            seconds,
            extra=with_fields(
                request_id=name,
                tenant=self._tenant or None,
                outcome=self.outcome,
                wrong_fields=self._wrong_fields or None,
                prompt_tokens=times.num_prompt_tokens,
                cached_tokens=times.num_cached_tokens,
                output_tokens=times.num_output_tokens,
                seconds=round(seconds, 6),
                seconds_to_first_token=_seconds_to(times.first_token_ns, times.arrival_ns),
                trace_id=self._trace.trace_id,
            ),
        )

    def _response_attributes(self) -> dict[str, str | int | tuple[str, ...]]:
        times = self.times
        if not times.num_prompt_tokens:  # it was refused
            return {}
        told: dict[str, str | int | tuple[str, ...]] = {
            "gen_ai.response.id": printable(self._request_id),
            "gen_ai.response.finish_reasons": tuple(times.finish_reasons),
            "gen_ai.usage.input_tokens": times.num_prompt_tokens,
            "gen_ai.usage.output_tokens": times.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": times.num_cached_tokens,
        }
        return told | ({"gen_ai.response.model": self._model_name} if self._model_name else {})


def _request_attributes(g: Generation, method: str, model_name: str | None) -> dict[str, str | int | float | bool]:
    """Give what the field's conventions for generative models name; nothing of it is text of the request."""
    told: dict[str, str | int | float | bool] = {
        "gen_ai.operation.name": "chat" if isinstance(g.prompt, ChatPrompt) else "text_completion",
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.stream": method == "StreamGenerate",
        "rpc.system": "grpc",
        "rpc.service": "runnerd.v1.InferenceService",
        "rpc.method": method,
    }
    if model_name is not None:
        told["gen_ai.request.model"] = model_name
    for name, attribute in _REQUEST_ATTRIBUTES:
        value = getattr(g, attribute)
        if value is not None:
            told[name] = value
    if g.n is not None and g.n != 1:
        told["gen_ai.request.choice.count"] = g.n
    if g.seed is not None and g.seed < 2**63:  # an attribute is a signed integer
        told["gen_ai.request.seed"] = g.seed
    return told


def _seconds_to(moment_ns: int, since_ns: int) -> float | None:
    return round((moment_ns - since_ns) * 1e-9, 6) if moment_ns else None
