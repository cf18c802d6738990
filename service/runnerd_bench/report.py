"""Shows results to people: one result, and two beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runnerd_bench.metrics import METRICS, percentile_key

_WIDTH = 58
_BUSY_SHARE = 0.8

_TOTALS = (
    ("completed", "Successful requests:"),
    ("failed", "Failed requests:"),
    ("max_concurrency", "Maximum request concurrency:"),
    ("request_rate", "Request rate configured (req/s):"),
    ("duration", "Benchmark duration (s):"),
    ("total_input_tokens", "Total input tokens:"),
    ("total_output_tokens", "Total generated tokens:"),
    ("request_throughput", "Request throughput (req/s):"),
    ("request_goodput", "Request goodput (req/s):"),
    ("output_throughput", "Output token throughput (tok/s):"),
    ("max_output_tokens_per_s", "Most output tokens in one second:"),
    ("max_concurrent_requests", "Peak concurrent requests:"),
    ("total_token_throughput", "Total token throughput (tok/s):"),
    ("client_cpu_share", "CPU cores used by this client:"),
)
_COMPARED = (
    "completed",
    "duration",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
)
_SETUP = (
    "model_id",
    "dataset_name",
    "num_prompts",
    "request_rate",
    "max_concurrency",
    "seed",
    "temperature",
    "interrupted",
)


def table(result: Mapping[str, object], percentiles: Sequence[float], metrics: Sequence[str]) -> str:
    """Lay out a result."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [_line(label, result[key]) for key, label in _TOTALS if result.get(key) is not None]
    for name in metrics:
        short, long = METRICS[name]
        lines.append(f" {long} ".center(_WIDTH, "-"))
        rows = [(f"{kind} {short} (ms):", f"{kind.lower()}_{name}_ms") for kind in ("Mean", "Median")]
        rows += [(f"P{one:g} {short} (ms):", percentile_key(one, name)) for one in percentiles]
        lines += [_line(label, result.get(key)) for label, key in rows]
    return "\n".join([*lines, "=" * _WIDTH])


def busy_warning(result: Mapping[str, object]) -> str | None:
    """Say that the benchmark itself may be what was measured; None if it had CPU time to spare."""
    share = result["client_cpu_share"]
    if not isinstance(share, float) or share < _BUSY_SHARE:
        return None
    return (
        f"this client used {share:.2f} CPU cores and can use one: the figures may be its own, not the server's; "
        "spread the load over several runs at once"
    )


def comparison(base: Mapping[str, object], new: Mapping[str, object]) -> str:
    """Lay out two results beside each other, with the ratio of the second to the first.

    Figures that only one of them has are left out, and said; so is what was set up differently.
    """
    lines = [f"differs: {key}: {base.get(key)} / {new.get(key)}" for key in _SETUP if base.get(key) != new.get(key)]
    keys = [*_COMPARED, *sorted(one for one in {*base, *new} if one.endswith("_ms"))]
    shown = [(key, _number(base.get(key)), _number(new.get(key))) for key in keys]
    lines.append(f"{'':<26}{'base':>14}{'new':>14}{'new/base':>10}")
    for key, before, after in shown:
        if before is not None and after is not None:
            ratio = f"{after / before:.3f}" if before else "-"
            lines.append(f"{key:<26}{before:>14.2f}{after:>14.2f}{ratio:>10}")
    if lonely := [key for key, before, after in shown if (before is None) != (after is None)]:
        lines.append(f"only in one of them: {', '.join(lonely)}")
    return "\n".join(lines)


def _line(label: str, value: object) -> str:
    text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<42}{text:<16}".rstrip()


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
