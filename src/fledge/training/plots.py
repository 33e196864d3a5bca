"""Pictures of a run: how well the drafter drafts while it trains and whether it drifts; how much of it is accepted."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from fledge.files import atomic_path
from fledge.report.charts import GRID, MUTED, SERIES

_SHADES = ("#12467b", "#5b8db8", "#a9c7df", "#d6e4ef")  # of depths, from the first
_SHARES = {"accuracy_by_depth", "own_attention_by_depth", "sink_attention_by_depth"}
_PANELS = (  # in two rows: name in the log, title, unit
    ("loss", "Loss", "weighted sum over depths"),
    ("accuracy_by_depth", "Accuracy", "drafts equal to the target's choice"),
    ("simulated_acceptance_length", "Simulated acceptance length", "tokens per round"),
    ("hidden_rms_by_depth", "Size of the state fed forward", "root mean square"),
    ("own_attention_by_depth", "Attention on own drafts", "share of attention"),
    ("sink_attention_by_depth", "Attention on the first token", "share of attention"),
)


def plot_training(records: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Write a PNG of the records of a log. Where drift was not recorded, those panels say so."""
    depth = max((len(record["accuracy_by_depth"]) for record in records), default=1)
    last = max((record["step"] for record in records), default=1)
    figure = Figure(figsize=(14, 7.6), layout="constrained")  # without pyplot, which wants a display or a global choice
    figure.suptitle(title, fontsize=14, fontweight="bold")
    panels: dict[str, Axes] = {}
    for panel, (name, heading, unit) in zip(figure.subplots(2, 3).flat, _PANELS, strict=True):
        panels[name] = panel
        panel.set_title(heading, fontsize=11, loc="left", fontweight="bold")
        panel.set_ylabel(unit, fontsize=9)
        panel.set_xlabel("optimizer step", fontsize=9)
        panel.grid(True, color=GRID, linewidth=0.7)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=9)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10]))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,.0f}"))
        _draw_lines(panel, records, name)
        panel.set_xlim(0, last * 1.02)
        panel.set_ylim(bottom=0)
        if name in _SHARES:
            panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    panels["accuracy_by_depth"].set_ylim(0, 1)
    lengths = panels["simulated_acceptance_length"]
    lengths.axhline(depth + 1, color=MUTED, linewidth=1, linestyle=":")
    lengths.annotate(
        f"every draft right: {depth + 1}",
        (0.02, depth + 1),
        xycoords=("axes fraction", "data"),
        xytext=(0, -4),
        textcoords="offset points",
        va="top",
        fontsize=9,
        color=MUTED,
    )
    lengths.set_ylim(1, depth + 1.15)
    handles, labels = panels["accuracy_by_depth"].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right center", title="draft step", frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def _draw_lines(panel: Axes, records: Sequence[Mapping[str, Any]], name: str) -> None:
    """One line of a number; of a list one for each draft step, from dark (the first) to light."""
    shown = [(r["step"], r[name]) for r in records if isinstance(r.get(name), list) or _is_number(r.get(name))]
    if not shown:
        panel.text(0.5, 0.5, "not recorded", transform=panel.transAxes, ha="center", va="center", color=MUTED)
        panel.set_yticks([])
        return
    if not isinstance(shown[0][1], list):
        steps, values = zip(*shown, strict=True)
        panel.plot(steps, values, color=SERIES[1], linewidth=1.8, marker="o" if len(shown) < 3 else None)
        return
    depth, marker = max(len(values) for _, values in shown), "o" if len(shown) < 20 else None
    for k in range(depth):
        points = [(step, values[k]) for step, values in shown if k < len(values) and _is_number(values[k])]
        if points:
            steps, values = zip(*points, strict=True)
            colour = matplotlib.colormaps["viridis"](0.9 * k / max(depth - 1, 1))
            panel.plot(steps, values, color=colour, linewidth=1.3, marker=marker, markersize=3.5, label=str(k + 1))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def plot_acceptance(result: Mapping[str, Any], path: Path) -> None:
    """Draw the share of accepted drafts by position, and acceptance length by source and depth."""
    depths: Mapping[str, Any] = result["depths"]
    deepest = depths[max(depths, key=int)]
    grouping = "by_source" if len(deepest["by_source"]) > 1 else "by_category"
    names = list(deepest[grouping])[:10] if len(deepest[grouping]) > 1 else []
    figure = Figure(figsize=(10, max(3.8, 1.5 + 0.2 * (len(names) + 1) * len(depths))), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in names:
        rates = deepest[grouping][name]["rate_by_depth"]
        left.plot(range(1, len(rates) + 1), rates, color=_SHADES[2], linewidth=1)
    rates = deepest["total"]["rate_by_depth"]
    left.plot(range(1, len(rates) + 1), rates, color=_SHADES[0], linewidth=2.4, marker="o", label="all")
    if names:
        left.plot([], [], color=_SHADES[2], linewidth=1, label=f"each {grouping.removeprefix('by_')}")
    if result["trained_depth"] < len(rates):
        left.axvline(result["trained_depth"] + 0.5, color=MUTED, linestyle=":", label="trained depth")
    left.set(xlabel="draft position", ylabel="rounds in which it was accepted", ylim=(0, 1))
    left.set_xticks(range(1, len(rates) + 1))
    left.yaxis.set_major_formatter(PercentFormatter(1.0))
    left.legend(frameon=False)

    rows, height = ["all", *names], 0.8 / len(depths)
    for number, (depth, cell) in enumerate(depths.items()):
        figures = [cell["total"], *(cell[grouping].get(name) for name in names)]
        lengths = [(f["acceptance_length"] or 0.0) if f else 0.0 for f in figures]
        places = [row + (number - (len(depths) - 1) / 2) * height for row in range(len(rows))]
        bars = right.barh(places, lengths, height=height * 0.92, color=_SHADES[number % 4], label=f"depth {depth}")
        right.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    right.set_yticks(range(len(rows)), [name if len(name) < 28 else f"{name[:26]}…" for name in rows])
    right.invert_yaxis()
    right.margins(x=0.14)
    right.set(xlabel="acceptance length (tokens per round)")
    right.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(depths))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png", metadata={"Software": None})
