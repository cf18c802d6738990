"""Draws a run: how its latencies are distributed, and its throughput over time. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from runnerd_bench.metrics import METRICS, output_rate, samples
from runnerd_bench.record import RequestRecord


class PlotUnavailable(Exception):
    """matplotlib is not installed."""


def check_available() -> None:
    """Raise PlotUnavailable if nothing could be drawn, before a run that would be in vain."""
    if find_spec("matplotlib") is None:
        raise PlotUnavailable("--plot needs matplotlib; pip install 'runnerd[bench]'")


def draw(records: Sequence[RequestRecord], result: Mapping[str, object], path: Path) -> None:
    """Write a PNG to ``path``.

    Raises:
        OSError: It cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic([["ttft", "tpot", "itl", "e2el"], ["rate"] * 4])
    for name, values in samples(records).items():
        axis = axes[name]
        axis.set_title(f"{METRICS[name][0]} (ms)")
        if values:
            axis.hist(values, bins=min(50, max(10, len(values) // 10)), color="C0", log=name == "itl")
            for share, style in ((50, "-"), (90, "--"), (99, ":")):
                value = float(np.percentile(values, share))
                axis.axvline(value, color="C3", linestyle=style, label=f"P{share} {value:.1f}")
            axis.legend(fontsize="small")
    axes["ttft"].set_ylabel("requests")
    axes["itl"].set_ylabel("messages, logarithmic")
    done = [one for one in records if one.completed]
    bucket_seconds = min(1.0, max((one.end for one in records), default=1.0) / 50)
    rates = output_rate(done, bucket_seconds)
    axes["rate"].stairs(rates, np.arange(len(rates) + 1) * bucket_seconds, fill=True, alpha=0.5, color="C0")
    axes["rate"].set(xlabel="seconds", ylabel="output tokens/s", ylim=(0, None), title="Throughput and live requests")
    live = axes["rate"].twinx()
    changes = sorted([(one.start, 1) for one in records] + [(one.end, -1) for one in records])
    live.step([0.0, *(when for when, _ in changes)], np.cumsum([0, *(by for _, by in changes)]), "C1", where="post")
    live.set(ylabel="live requests", ylim=(0, None))
    live.yaxis.label.set_color("C1")
    figure.suptitle(
        f"{result['model_id']}: {result['completed']} requests, {result['output_throughput']:.0f} output tokens/s"
    )
    figure.savefig(path, format="png", dpi=110)
