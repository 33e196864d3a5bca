"""A picture of a training run: how well the drafter drafts at each depth, and whether it drifts."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

_LINE = "#0072B2"  # of Okabe and Ito's colours, which colour-blind people tell apart
_GREY = "#555555"


def plot_training(records: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Write a PNG of the records of a log. Where drift was not recorded, those panels say so."""
    depth = max((len(record["accuracy_by_depth"]) for record in records), default=1)
    figure = Figure(figsize=(14, 7.6), layout="constrained")  # without pyplot, which wants a display or a global choice
    panels = figure.subplots(2, 3)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    _single(panels[0, 0], records, "loss", "Loss", "weighted sum over depths")
    _by_depth(panels[0, 1], records, "accuracy_by_depth", "Accuracy", "drafts equal to the target's choice")
    _single(panels[0, 2], records, "simulated_acceptance_length", "Simulated acceptance length", "tokens per round")
    _by_depth(panels[1, 0], records, "hidden_rms_by_depth", "Size of the state fed forward", "root mean square")
    _by_depth(panels[1, 1], records, "own_attention_by_depth", "Attention on own drafts", "share of attention")
    _by_depth(panels[1, 2], records, "sink_attention_by_depth", "Attention on the first token", "share of attention")
    for panel in (panels[0, 1], panels[1, 1], panels[1, 2]):
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    for panel in (panels[0, 0], panels[1, 0], panels[1, 1], panels[1, 2]):
        panel.set_ylim(bottom=0)
    panels[0, 1].set_ylim(0, 1)
    panels[0, 2].axhline(depth + 1, color=_GREY, linewidth=1, linestyle=":")
    panels[0, 2].annotate(
        f"every draft right: {depth + 1}",
        (0.02, depth + 1),
        xycoords=("axes fraction", "data"),
        xytext=(0, -4),
        textcoords="offset points",
        va="top",
        fontsize=9,
        color=_GREY,
    )
    panels[0, 2].set_ylim(1, depth + 1.15)
    last = max((record["step"] for record in records), default=1)
    for panel in panels.flat:
        panel.set_xlim(0, last * 1.02)
    handles, labels = panels[0, 1].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right center", title="draft step", frameon=False)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, dpi=110, format="png")
    temporary.replace(path)


def _single(panel: Axes, records: Sequence[Mapping[str, Any]], name: str, title: str, unit: str) -> None:
    points = [(r["step"], r[name]) for r in records if _is_number(r.get(name))]
    _frame(panel, title, unit)
    if points:
        steps, values = zip(*points, strict=True)
        panel.plot(steps, values, color=_LINE, linewidth=1.8, marker="o" if len(points) < 3 else None)
    else:
        _say_nothing(panel)


def _by_depth(panel: Axes, records: Sequence[Mapping[str, Any]], name: str, title: str, unit: str) -> None:
    """A line for each draft step, from dark (the first) to light."""
    shown = [record for record in records if record.get(name)]
    _frame(panel, title, unit)
    if not shown:
        _say_nothing(panel)
        return
    depth = max(len(record[name]) for record in shown)
    colours = matplotlib.colormaps["viridis"]
    marker = "o" if len(shown) < 20 else None
    for k in range(depth):
        points = [(r["step"], r[name][k]) for r in shown if k < len(r[name]) and _is_number(r[name][k])]
        if points:
            steps, values = zip(*points, strict=True)
            colour = colours(0.9 * k / max(depth - 1, 1))
            panel.plot(steps, values, color=colour, linewidth=1.3, marker=marker, markersize=3.5, label=str(k + 1))


def _frame(panel: Axes, title: str, unit: str) -> None:
    panel.set_title(title, fontsize=11, loc="left", fontweight="bold")
    panel.set_ylabel(unit, fontsize=9)
    panel.set_xlabel("optimizer step", fontsize=9)
    panel.grid(True, color="#DDDDDD", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=9)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10]))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,.0f}"))


def _say_nothing(panel: Axes) -> None:
    panel.text(0.5, 0.5, "not recorded", transform=panel.transAxes, ha="center", va="center", color=_GREY)
    panel.set_yticks([])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
