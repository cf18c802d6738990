"""The bar chart of ``cpu.py``: a panel for each model and workload, a bar for each engine, the best one on top."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLORS = {"bf16": "#2b6cb0", "int8": "#2f855a", "int4": "#b7791f"}
"""By class of weights; runnerd's bars are full, those of the others pale."""
PALE = 0.35
BAR_INCHES = 0.26


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw what ``cpu.compare`` gave for each model.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    columns = max(len(result["workloads"]) for result in results.values())
    bars = max(len(result["weights"]) for result in results.values())
    height = len(results) * (0.9 + BAR_INCHES * bars) + 0.5
    figure, axes = pyplot.subplots(
        len(results), columns, figsize=(max(3.6 * columns, 6.0), height), squeeze=False, layout="constrained"
    )
    for row, (model, result) in zip(axes, results.items(), strict=True):
        for axis in row[len(result["workloads"]) :]:
            axis.set_axis_off()
        for axis, (work, one) in zip(row, result["workloads"].items(), strict=False):
            _draw_panel(axis, f"{model}\n{work}", one["engines"], result["weights"])
    classes = sorted({one for result in results.values() for one in result["weights"].values()})
    handles = [Patch(color=COLORS[one], label=f"{one} weights") for one in (*COLORS,) if one in classes]
    handles.append(Patch(color="#777777", alpha=PALE, label="pale: other engines"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_panel(axis: Any, title: str, engines: dict[str, Any], weights: dict[str, str]) -> None:
    single = title.endswith("/1")
    key = (lambda one: one["ttft_ms"]["p50"]) if single else (lambda one: one["output_tokens_per_second"])
    values = {name: key(figures) for name, figures in engines.items()}
    # The last bar is drawn on top.
    order = sorted(values, key=values.__getitem__, reverse=single)
    bars = axis.barh(order, [values[name] for name in order], height=0.72)
    for bar, name in zip(bars, order, strict=True):
        bar.set_color(COLORS[weights[name]])
        bar.set_alpha(1.0 if name.startswith("runnerd-") else PALE)
    axis.bar_label(bars, fmt=lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.1f}", fontsize=7, padding=2)
    axis.set_title(f"{title}: {'TTFT in ms, less is better' if single else 'output tokens/s'}", fontsize=8)
    axis.margins(x=0.16)
    axis.tick_params(axis="y", labelsize=7, length=0)
    axis.tick_params(axis="x", labelsize=6)
    for label in axis.get_yticklabels():
        label.set_fontweight("bold" if label.get_text().startswith("runnerd-") else "normal")
    axis.spines[["top", "right"]].set_visible(False)
