"""Turns the records of a run into the field's figures, under the key names of its benchmark results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from runnerd_bench.driver import Run
from runnerd_bench.record import RequestRecord

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""Name in keys to short and long name for people."""


def samples(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Give all samples of each metric in milliseconds; failed requests have none."""
    done = [one for one in records if one.completed]
    seconds = {
        "ttft": [one.ttft for one in done],
        "tpot": [one.tpot for one in done if one.tpot is not None],
        "itl": [itl for one in done for itl in one.itls],
        "e2el": [one.latency for one in done],
    }
    return {name: [1e3 * value for value in values] for name, values in seconds.items()}


def summarise(
    run: Run, percentiles: Sequence[float], goodput: Mapping[str, float] | None = None
) -> dict[str, float | int | None]:
    """Give the figures of a run.

    Rates are over the whole run. Percentiles are interpolated linearly; a metric without a sample is None.

    Args:
        run: What was recorded.
        percentiles: Such as 99 or 99.9, besides mean, median and standard deviation.
        goodput: Metric name to the most milliseconds that a good request may take; None: no goodput.
    """
    done = [one for one in run.records if one.completed]
    inputs, outputs = sum(one.prompt_tokens for one in done), sum(one.output_tokens for one in done)
    figures: dict[str, float | int | None] = {
        "duration": run.seconds,
        "completed": len(done),
        "failed": len(run.records) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / run.seconds,
        "request_goodput": None if not goodput else sum(_is_good(one, goodput) for one in done) / run.seconds,
        "output_throughput": outputs / run.seconds,
        "total_token_throughput": (inputs + outputs) / run.seconds,
        "max_output_tokens_per_s": max(output_rate(done), default=0.0),
        "max_concurrent_requests": max_concurrent(run.records),
        "total_messages": sum(len(one.message_times) for one in done),
        "client_cpu_share": run.client_cpu_seconds / run.seconds,
    }
    for name, values in samples(run.records).items():
        figures |= _statistics(name, values, percentiles)
    return figures


def percentile_key(percentile: float, metric: str) -> str:
    """Give the key of a percentile, such as "p99_ttft_ms"."""
    return f"p{percentile:g}_{metric}_ms"


def output_rate(records: Sequence[RequestRecord], bucket_seconds: float = 1.0) -> list[float]:
    """Give output tokens per second, one figure for each ``bucket_seconds`` from the start.

    A request's tokens count evenly at its messages: the stream tells how many an output has, not each message.
    """
    times = np.concatenate([one.message_times for one in records] or [[]])
    if not times.size:
        return []
    weights = np.concatenate(
        [np.full(len(one.message_times), one.output_tokens / len(one.message_times)) for one in records]
    )
    tokens = np.bincount((times / bucket_seconds).astype(int), weights)
    rates: list[float] = (tokens / bucket_seconds).tolist()
    return rates


def max_concurrent(records: Sequence[RequestRecord]) -> int:
    """Give how many requests were live at once at most."""
    changes = sorted([(one.start, 1) for one in records] + [(one.end, -1) for one in records])
    return int(np.cumsum([change for _, change in changes]).max(initial=0))


def _statistics(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    keys = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std")]
    keys += [percentile_key(one, name) for one in percentiles]
    if not values:
        return dict.fromkeys(keys)
    figures = [np.mean(values), np.median(values), np.std(values), *np.percentile(values, percentiles)]
    return dict(zip(keys, map(float, figures), strict=True))


def _is_good(record: RequestRecord, goodput: Mapping[str, float]) -> bool:
    # A request of a single token has no TPOT, and keeps any limit on it.
    taken = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(1e3 * taken[name] <= limit for name, limit in goodput.items())
