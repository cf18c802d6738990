"""How requests went: when each was taken in, began, gave its first and last token; and the sums over all of them.

It is told by whoever serves them and knows neither engine nor gRPC; no text passes through here. Times are
``time.monotonic_ns`` values, which the processes of a machine share.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from runnerd_service.telemetry.histogram import Histogram, HistogramSnapshot, decades

_SECONDS = decades(-3, 3, (1, 1.5, 2, 3, 5, 7.5))
"""1 ms to 1000 s: a prompt may take minutes on a small machine."""
_TOKEN_SECONDS = decades(-4, 1, (1, 1.5, 2, 3, 5, 7.5))
_COUNTS = decades(0, 6, (1, 2, 5))

LATENCIES = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between two tokens of an output.",
    "request_time_per_output_token_seconds": "Mean time of a request's tokens after the first.",
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
    "request_queue_time_seconds": "From a request's arrival to the beginning of its first step.",
    "request_prefill_time_seconds": "From the beginning of a request's first step to its first token.",
    "request_decode_time_seconds": "From a request's first to its last token.",
    "request_inference_time_seconds": "From the beginning of a request's first step to its last token.",
}
"""Name and meaning of the histograms of times."""
SIZES = {
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens generated for a request, all its outputs together.",
    "request_params_n": "Outputs that a request asked for.",
    "request_params_max_tokens": "Most tokens of an output that a request asked for, where it did.",
}
"""Name and meaning of the histograms of counts."""


@dataclass(slots=True, eq=False)
class RequestTimes:
    """What is known of one request so far; a time is 0 until it has come."""

    arrival_ns: int = field(default_factory=time.monotonic_ns)
    began_ns: int = 0
    """The engine put the first part of the prompt into a step."""
    first_token_ns: int = 0
    last_token_ns: int = 0
    end_ns: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had, at the output that found most."""
    num_output_tokens: int = 0
    """Of all outputs, those included that their reader never took."""
    num_outputs: int = 1
    max_tokens: int | None = None
    """As asked for."""
    finish_reasons: list[str] = field(default_factory=list)
    """Of the outputs that have ended, in the order of their ends."""


class OutputMeter:
    """Notes what comes of one output of a request.

    Args:
        times: The request's.
        first_token: Takes the time to the request's first token.
        inter_token: Takes the times between tokens.
    """

    __slots__ = ("_first_token", "_inter_token", "_last_ns", "_times")

    def __init__(self, times: RequestTimes, first_token: Histogram, inter_token: Histogram) -> None:
        self._times = times
        self._first_token = first_token
        self._inter_token = inter_token
        self._last_ns = 0

    def note(self, num_tokens: int, began_ns: int, num_cached_tokens: int) -> None:
        """Take what a step gave.

        Args:
            num_tokens: May be 0: a part of the prompt.
            began_ns: When the engine began with the output, told once; else 0.
            num_cached_tokens: Prompt tokens that the prefix cache had.
        """
        times = self._times
        if began_ns and not times.began_ns:
            times.began_ns = began_ns
        if not num_tokens:
            return
        now = time.monotonic_ns()
        times.num_output_tokens += num_tokens
        times.last_token_ns = now
        if self._last_ns:
            self._inter_token.observe((now - self._last_ns) * 1e-9 / num_tokens)
        else:
            if not times.first_token_ns:
                times.first_token_ns = now
                self._first_token.observe((now - times.arrival_ns) * 1e-9)
            if num_cached_tokens > times.num_cached_tokens:
                times.num_cached_tokens = num_cached_tokens
        self._last_ns = now


class RequestStats:
    """The sums over all requests since the server's start. Told in one thread, read in any."""

    def __init__(self) -> None:
        buckets = {
            "inter_token_latency_seconds": _TOKEN_SECONDS,
            "request_time_per_output_token_seconds": _TOKEN_SECONDS,
        }
        self._latencies = {name: Histogram(buckets.get(name, _SECONDS)) for name in LATENCIES}
        self._sizes = {name: Histogram(_COUNTS) for name in SIZES}
        self._outcomes: Counter[str] = Counter()
        self._finish_reasons: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def expect(
        self, outcomes: Iterable[str] = (), finish_reasons: Iterable[str] = (), refusals: Iterable[str] = ()
    ) -> None:
        """Name what may come, so that it is told as 0 before: what appears with a 1 is no increase to Prometheus."""
        self._outcomes.update(dict.fromkeys(outcomes, 0))
        self._finish_reasons.update(dict.fromkeys(finish_reasons, 0))
        self._refused.update(dict.fromkeys(refusals, 0))

    def meter(self, times: RequestTimes) -> OutputMeter:
        """Give what notes the tokens of one more output of a request."""
        latencies = self._latencies
        return OutputMeter(times, latencies["time_to_first_token_seconds"], latencies["inter_token_latency_seconds"])

    def ended(self, times: RequestTimes, outcome: str) -> None:
        """Count a request that has ended, in whatever way.

        Args:
            times: What is known of it; its end is set to now.
            outcome: How it ended: one of few names.
        """
        times.end_ns = time.monotonic_ns()
        self._outcomes[outcome] += 1
        self._finish_reasons.update(times.finish_reasons)
        if not times.num_prompt_tokens:  # it was refused
            return
        self._observe_sizes(times)
        self._observe_times(times)

    def call_refused(self, reason: str, *, is_generation: bool) -> None:
        """Count a call, of any method, whose caller may not make it.

        Args:
            reason: Why: one of few names.
            is_generation: Whether it asked for a generation, which has ended by that.
        """
        self._refused[reason] += 1
        if is_generation:
            self._outcomes[reason] += 1

    def refused_calls(self) -> Mapping[str, int]:
        """Give the calls whose callers might not make them, by why."""
        return dict(self._refused)

    def outcomes(self) -> Mapping[str, int]:
        """Give the requests by how they ended."""
        return dict(self._outcomes)

    def finish_reasons(self) -> Mapping[str, int]:
        """Give the outputs by why they finished."""
        return dict(self._finish_reasons)

    def latencies(self) -> Mapping[str, HistogramSnapshot]:
        """Give the times, by the names of :data:`LATENCIES`."""
        return {name: histogram.snapshot() for name, histogram in self._latencies.items()}

    def sizes(self) -> Mapping[str, HistogramSnapshot]:
        """Give the counts, by the names of :data:`SIZES`."""
        return {name: histogram.snapshot() for name, histogram in self._sizes.items()}

    def _observe_sizes(self, times: RequestTimes) -> None:
        sizes = self._sizes
        sizes["request_prompt_tokens"].observe(times.num_prompt_tokens)
        sizes["request_generation_tokens"].observe(times.num_output_tokens)
        sizes["request_params_n"].observe(times.num_outputs)
        if times.max_tokens is not None:
            sizes["request_params_max_tokens"].observe(times.max_tokens)

    def _observe_times(self, times: RequestTimes) -> None:
        self._span("e2e_request_latency_seconds", times.arrival_ns, times.end_ns)
        self._span("request_queue_time_seconds", times.arrival_ns, times.began_ns)
        if times.began_ns:
            self._span("request_prefill_time_seconds", times.began_ns, times.first_token_ns)
            self._span("request_inference_time_seconds", times.began_ns, times.last_token_ns)
        self._span("request_decode_time_seconds", times.first_token_ns, times.last_token_ns)
        if times.num_output_tokens > times.num_outputs:
            # The outputs of a request decode side by side.
            seconds = (times.last_token_ns - times.first_token_ns) * 1e-9
            per_output = times.num_output_tokens / times.num_outputs
            self._latencies["request_time_per_output_token_seconds"].observe(seconds / (per_output - 1))

    def _span(self, name: str, begin_ns: int, end_ns: int) -> None:
        if end_ns:
            self._latencies[name].observe(max(0, end_ns - begin_ns) * 1e-9)
