"""Pictures of speed: ratios against load and against depth, and what all users get against what each gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fledge.bench.depth_plots import speed_by_depth
from fledge.bench.part import Part, Reference
from fledge.bench.plot_parts import bars, legend, load_axis, place, style
from fledge.bench.words import CAPACITY, SPEED
from fledge.evaluation.results import Load
from fledge.report.charts import INK, MUTED, Chart, frame, new_figure, short_title
from fledge.report.intervals import Floats, Interval

_LABEL = 7.5  # points: text at a point of a picture
_NEAR = 0.06  # of the width or height of the axes: two labels within it would be written over each other


def speed_charts(part: Part, workload: str, tag: str, references: Sequence[Reference]) -> list[Chart]:
    found = []
    kinds = {"concurrency": [load for load in part.loads if load.rate is None]}
    kinds["rate"] = [load for load in part.loads if load.rate is not None]
    for kind, loads in kinds.items():
        if not loads:
            continue
        figure = _ratios(part, workload, loads, references if kind == "concurrency" else ())
        if figure is not None:
            title = f"Speed per user against {part.baseline}: {workload}"
            found.append(Chart(name=f"speed-{kind}-{tag}", section=SPEED, title=title, figure=figure))
        figure = speed_by_depth(part, workload, loads)
        if figure is not None:
            title = f"Speed per user by depth: {workload}"
            found.append(Chart(name=f"depth-{kind}-{tag}", section=SPEED, title=title, figure=figure))
        figure = _capacity(part, workload, loads)
        if figure is not None:
            title = f"Tokens per second, of all users and of each: {workload}"
            found.append(Chart(name=f"capacity-{kind}-{tag}", section=CAPACITY, title=title, figure=figure))
    return found


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A contender, or one drafter at whichever of its many depths is the fastest under each load."""

    label: str
    look: dict[str, Any]
    names: list[str | None]  # of the contender under each load
    depths: list[int | None] | None = None  # under each load; None: it is one contender


def shown_names(part: Part, workload: str, load: Load) -> list[str]:
    """Whom a picture of one load shows."""
    return [name for line in _lines(part, workload, [load]) for name in line.names if name is not None]


def _lines(part: Part, workload: str, loads: Sequence[Load]) -> list[_Line]:
    """In the order of contenders, the baseline included."""
    lines = []
    for name in part.names:
        family = None if name == part.baseline else part.family(name)
        if family is None or not family.has_many_depths:
            lines.append(_Line(label=short_title(name), look=style(part, name), names=[name] * len(loads)))
        elif name == family.names[0]:
            bests = [part.best_depths.get((family, workload, load)) for load in loads]
            lines.append(
                _Line(
                    label=short_title(f"{family.title}, fastest depth"),
                    look=style(part, name),
                    names=[None if best is None else best.name for best in bests],
                    depths=[None if best is None else best.depth for best in bests],
                )
            )
    return lines


def _ratios(part: Part, workload: str, loads: Sequence[Load], references: Sequence[Reference]) -> Figure | None:
    lines = [
        (line, values)
        for line in _lines(part, workload, loads)
        if any(values := [_ratio(part, name, workload, load) for name, load in zip(line.names, loads, strict=True)])
    ]
    if not lines:
        return None
    figure, axes = new_figure()
    has_depths = any(line.depths for line, _ in lines)
    apart = _apart(len(lines), [place(load) for load in loads])
    labels: dict[Load, list[_DepthLabel]] = {load: [] for load in loads}
    for number, (line, values) in enumerate(lines):
        offset = 1 + apart * (number - (len(lines) - 1) / 2)
        bars(axes, [place(load) * offset for load in loads], values, label=line.label, **line.look)
        for load, value, depth in zip(loads, values, line.depths or (), strict=False):
            if value is not None and depth is not None:
                labels[load].append(_DepthLabel(place(load) * offset, value, f"K={depth}", line.look["color"]))
    for number, reference in enumerate(references):
        axes.plot(
            *zip(*reference.points.items(), strict=True),
            color=MUTED,
            marker="*x+1"[number % 4],
            markersize=8,
            linestyle=(0, (1, 2)),
            linewidth=1,
            label=f"{short_title(reference.name)} (reported)",
            zorder=4,  # else lines that agree with it hide it
        )
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=":")
    places = [place(load) for load in loads] + [float(c) for one in references for c in one.points]
    load_axis(axes, sorted(set(places)), is_rate=loads[0].rate is not None)
    frame(axes, None, percent=False)
    axes.set_ylabel("times its speed")
    low, high = axes.get_ylim()
    room = 0.06 * (high - low) if has_depths else 0.0
    axes.set_ylim(min(0.8, low - room), max(1.5, high + room))
    for several in labels.values():
        _put_depth_labels(axes, several)
    legend(figure, axes)
    return figure


def _apart(lines: int, places: Sequence[float]) -> float:
    """How far bars of one load are set apart, as a factor less 1: side by side, and far from those of the next load."""
    nearest = min((after / before for before, after in pairwise(places)), default=4.0)
    return min(0.08, (float(nearest**0.25) - 1) / max(1, lines - 1))


def _ratio(part: Part, name: str | None, workload: str, load: Load) -> Interval | None:
    found = None if name is None else part.ratio(name, workload, load)
    return None if found is None else found.per_user


class _DepthLabel(NamedTuple):
    x: float
    value: Interval
    text: str
    colour: str


def _put_depth_labels(axes: Axes, several: Sequence[_DepthLabel]) -> None:
    """At the far ends of the bars of one load: above those of the faster half, below those of the others."""
    for rank, label in enumerate(sorted(several, key=lambda label: -label.value.value)):
        is_above = rank < (len(several) + 1) // 2
        axes.annotate(
            label.text,
            (label.x, (label.value.high if is_above else label.value.low) or label.value.value),
            (0, 3 if is_above else -3),
            textcoords="offset points",
            ha="center",
            va="bottom" if is_above else "top",
            fontsize=_LABEL,
            color=label.colour,
        )


def _capacity(part: Part, workload: str, loads: Sequence[Load]) -> Figure | None:
    """Every load is a point: right is faster for each, up is more for all."""
    figure, axes = new_figure()
    named: list[tuple[Load, float, float, str]] = []
    for line in _lines(part, workload, loads):
        points = [
            (load, *_capacity_point(part, name, workload, load)) for load, name in zip(loads, line.names, strict=True)
        ]
        if all(np.isnan(x) for _, x, _ in points):
            continue
        axes.plot([x for _, x, _ in points], [y for *_, y in points], label=line.label, **line.look)
        named += [(load, x, y, line.look["color"]) for load, x, y in points if not np.isnan(x)]
    if not named:
        return None
    axes.set_yscale("log")
    ticks = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")
    axes.yaxis.set_major_formatter(ticks)
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(FixedLocator([m * 10.0**e for e in range(-2, 8) for m in (1, 2, 5)]))
    axes.set_ylim(low, high)
    axes.set_xlim(left=0)
    frame(axes, None, percent=False)
    axes.set_xlabel(f"tokens/s per user (numbers: {'concurrency' if loads[0].rate is None else 'requests/s'})")
    axes.set_ylabel("tokens/s in all")
    _name_loads(axes, named)
    legend(figure, axes)
    return figure


def _name_loads(axes: Axes, points: Sequence[tuple[Load, float, float, str]]) -> None:
    """Write the load at each point, once for points of one load that lie all but on each other."""
    done: list[tuple[Load, Floats]] = []
    for load, x, y, colour in points:
        at = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
        if any(other == load and np.abs(at - there).max() < _NEAR for other, there in done):
            continue
        done.append((load, at))
        axes.annotate(f"{place(load):g}", (x, y), (4, 3), textcoords="offset points", fontsize=_LABEL, color=colour)


def _capacity_point(part: Part, name: str | None, workload: str, load: Load) -> tuple[float, float]:
    """Tokens per second of each user and of all; NaN, where the line breaks, if they are not known."""
    row = None if name is None else part.row(name, workload, load)
    if row is None or row.figures.partial:
        return np.nan, np.nan
    each, all_of_them = row.figures.per_user_tokens_per_second, row.figures.total_tokens_per_second
    return (np.nan, np.nan) if each is None or all_of_them is None else (each.value, all_of_them.value)
