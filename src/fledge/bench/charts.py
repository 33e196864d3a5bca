"""The pictures of a benchmark report. A drafter has the same colour in all of them.

A drafter at many depths is one line: under each load at whichever depth is the fastest there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fledge.bench.figures import Latency, acceptance_length, acceptance_rates, latencies
from fledge.bench.summary import Summary, Sweep
from fledge.bench.verdict import ACCEPTANCE, CAPACITY, LATENCY, SPEED, Reference, load_text
from fledge.evaluation.charts import Look, lengths_by_depth, lengths_by_workload, rates_by_depth
from fledge.evaluation.results import Load
from fledge.report.charts import (
    INK,
    MUTED,
    PAPER,
    SERIES,
    SIZE,
    STYLE,
    Chart,
    frame,
    interval_bars,
    new_figure,
    put_legend,
    series_style,
    short_title,
)
from fledge.report.intervals import Floats, Interval

MORE_LATENCY = "latency-more"  # charts of loads between the lowest and the highest
_MOST_STEPS = 150
_LABEL = 7.5  # points: text at a point of a picture
_NEAR = 0.06  # of the width or height of the axes: two labels within it would be written over each other
_LATENCIES: tuple[tuple[Latency, str], ...] = (("ttft", "Time to first token"), ("tpot", "Time per further token"))


def charts(summary: Summary, references: Sequence[Reference] = ()) -> list[Chart]:
    """All pictures of one results file that measured speed. What was not measured has none."""
    found: list[Chart | None] = []
    with matplotlib.rc_context(STYLE):
        for number, workload in enumerate(summary.workloads, start=1):
            tag = f"{summary.number}-{number}"
            found += _speeds(summary, workload, tag, references)
            found += _latencies(summary, workload, tag)
            found += _acceptance(summary, workload, tag)
        found.append(_lengths(summary))
    return [chart for chart in found if chart is not None]


def _chart(name: str, section: str, title: str, figure: Figure | None) -> Chart | None:
    return None if figure is None else Chart(name=name, section=section, title=title, figure=figure)


# How a contender is drawn.


def style(summary: Summary, name: str) -> dict[str, Any]:
    """Of a line in all pictures. In grey print, marker and dash tell apart whatever is drawn in one picture."""
    if name == summary.baseline:
        return {"color": INK, "marker": "o", "linestyle": "-", "linewidth": 1.4, "markersize": 3.5}
    lines = [n for sweep in summary.sweeps for n in (sweep.names[:1] if sweep.is_deep else sweep.names)]
    sweep = summary.sweep(name)
    return coloured(summary, name, lines.index(sweep.names[0] if sweep.is_deep else name))


def coloured(summary: Summary, name: str, shape: int) -> dict[str, Any]:
    """The colour of a contender's drafter, with the marker and the dash of that number."""
    place = summary.colour_number(name)
    return series_style(shape) | {"color": INK if place is None else SERIES[place]}


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A contender, or one drafter at whichever of its many depths is the fastest under each load."""

    label: str
    look: dict[str, Any]
    names: list[str | None]  # of the contender under each load
    depths: list[int | None]  # under each load, where it is one of many


def _lines(summary: Summary, workload: str, loads: Sequence[Load]) -> list[_Line]:
    """In the order of contenders, the baseline included."""
    lines = []
    for name in summary.names:
        sweep = None if name == summary.baseline else summary.sweep(name)
        look = style(summary, name)
        if sweep is None or not sweep.is_deep:
            count = len(loads)
            lines.append(_Line(label=short_title(name), look=look, names=[name] * count, depths=[None] * count))
        elif name == sweep.names[0]:
            bests = [summary.best_depths.get((sweep, workload, load)) for load in loads]
            names = [None if best is None else best.contender for best in bests]
            depths = [None if one is None else sweep.depth_of(one) for one in names]
            label = short_title(f"{sweep.title}, fastest depth")
            lines.append(_Line(label=label, look=look, names=list(names), depths=depths))
    return lines


# Speed.


def _speeds(summary: Summary, workload: str, tag: str, references: Sequence[Reference]) -> Iterator[Chart | None]:
    for kind, is_rate in (("concurrency", False), ("rate", True)):
        loads = [load for load in summary.loads if (load.rate is not None) == is_rate]
        shown = () if is_rate else references
        title = f"Speed per user against {summary.baseline}: {workload}"
        yield _chart(f"speed-{kind}-{tag}", SPEED, title, _ratios(summary, workload, loads, shown))
        title = f"Speed per user by depth: {workload}"
        yield _chart(f"depth-{kind}-{tag}", SPEED, title, _speed_by_depth(summary, workload, loads))
        title = f"Tokens per second, of all users and of each: {workload}"
        yield _chart(f"capacity-{kind}-{tag}", CAPACITY, title, _capacity(summary, workload, loads))


def _ratios(summary: Summary, workload: str, loads: Sequence[Load], references: Sequence[Reference]) -> Figure | None:
    """Ratios against load, with the fastest depth at the points of a drafter that has many."""
    lines = []
    for line in _lines(summary, workload, loads):
        rows = [name and summary.ratio(name, workload, load) for name, load in zip(line.names, loads, strict=True)]
        values = [row.per_user if row else None for row in rows]
        if any(values):
            lines.append((line, values))
    if not lines:
        return None
    figure, axes = new_figure()
    places = [load.size for load in loads]
    apart = _apart(len(lines), places)
    for number, (line, values) in enumerate(lines):
        x = [place * (1 + apart * (number - (len(lines) - 1) / 2)) for place in places]
        interval_bars(axes, x, values, label=line.label, **line.look)
        above = number >= (len(lines) - 1) / 2  # labels of two drafters do not meet
        for at, value, depth in zip(x, values, line.depths, strict=True):
            if value is not None and depth is not None:
                _write(axes, f"K={depth}", (at, value.ends[above]), line.look["color"], dy=3 if above else -3)
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
    _load_axis(axes, sorted({*places, *(float(c) for one in references for c in one.points)}), loads[0])
    frame(axes, None, percent=False)
    axes.set_ylabel("times its speed")
    axes.margins(y=0.12)
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.8, low), max(1.5, high))
    put_legend(figure, axes)
    return figure


def _apart(lines: int, places: Sequence[float]) -> float:
    """How far bars of one load are set apart, as a factor less 1: side by side, and far from those of the next load."""
    nearest = min((after / before for before, after in pairwise(places)), default=4.0)
    return min(0.08, (float(nearest**0.25) - 1) / max(1, lines - 1))


def _load_axis(axes: Axes, places: Sequence[float], load: Load) -> None:
    if len(places) > 1:
        axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(places[0] / 1.3, places[-1] * 1.3)
    axes.set_xlabel("concurrency" if load.rate is None else "requests per second")


def _write(axes: Axes, text: str, at: tuple[float, float], colour: str, *, dx: float = 0, dy: float = 0) -> None:
    """Text beside a point, `dx` to the right or `dy` above it."""
    sides: dict[str, Any] = {"ha": "left" if dx else "center", "va": "center"}
    if dy:
        sides["va"] = "bottom" if dy > 0 else "top"
    axes.annotate(text, at, (dx, dy), textcoords="offset points", fontsize=_LABEL, color=colour, **sides)


def _speed_by_depth(summary: Summary, workload: str, loads: Sequence[Load]) -> Figure | None:
    """A panel for each drafter of many depths, a line for each load. Intervals are left out: those of two depths
    hang together, so whether they can be told apart is said by the markers instead.
    """
    known = {row.contender for row in summary.ratios if row.workload == workload and row.load in loads and row.per_user}
    sweeps = [sweep for sweep in summary.deep_sweeps if known.intersection(sweep.names)]
    if not sweeps:
        return None
    abreast = min(len(sweeps), 2)
    rows = -(-len(sweeps) // abreast)
    figure = Figure(figsize=(SIZE[0], 0.4 + 2.6 * rows), layout="constrained")
    grid = figure.subplots(rows, abreast, sharey=True, squeeze=False)
    for axes in grid.flat[len(sweeps) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"times the speed of {short_title(summary.baseline or '')}")
    for axes, sweep in zip(grid.flat, sweeps, strict=False):
        _depth_panel(axes, summary, sweep, workload, loads)
    look: dict[str, Any] = {"marker": "o", "linestyle": "", "color": MUTED}
    handles = [
        Line2D([], [], markersize=9, markerfacecolor="none", label="fastest", **look),
        Line2D([], [], markersize=4, label="not to be told from it", **look),
        Line2D([], [], markersize=4, markerfacecolor=PAPER, label="slower beyond noise", **look),
    ]
    spacing: dict[str, Any] = {"frameon": False, "fontsize": 8, "handletextpad": 0, "columnspacing": 1}
    figure.legend(handles=handles, loc="outside lower center", ncols=3, **spacing)
    return figure


def _depth_panel(axes: Axes, summary: Summary, sweep: Sweep, workload: str, loads: Sequence[Load]) -> None:
    colour = style(summary, sweep.names[0])["color"]
    depths = [depth for depth, _ in sweep.chains]
    for number, load in enumerate(loads):
        rows = {depth: summary.ratio(name, workload, load) for depth, name in sweep.chains}
        values = {depth: row.per_user.value for depth, row in rows.items() if row is not None and row.per_user}
        best = summary.best_depths.get((sweep, workload, load))
        if not values or best is None:
            continue
        axes.plot(
            [*values], [*values.values()], color=colour, linestyle=series_style(number)["linestyle"], linewidth=1.4
        )
        full = {sweep.depth_of(name) for name in (best.contender, *best.alike)}
        for depth, value in values.items():
            face = colour if depth in full else PAPER
            axes.plot(depth, value, color=colour, marker="o", markersize=4, markerfacecolor=face)
        fastest = sweep.depth_of(best.contender)
        axes.plot(fastest, values[fastest], color=colour, marker="o", markersize=9, markerfacecolor="none")
        _write(axes, str(load), list(values.items())[-1], colour, dx=6)
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=":")
    axes.set_title(short_title(sweep.title), color=colour, fontweight="bold")
    frame(axes, None, percent=False)
    axes.xaxis.set_major_locator(FixedLocator(depths))
    width = depths[-1] - depths[0]
    axes.set_xlim(depths[0] - 0.1 * width, depths[-1] + 0.3 * width)  # the names of lines are on the right
    axes.set_xlabel("tokens drafted ahead (K)")


def _capacity(summary: Summary, workload: str, loads: Sequence[Load]) -> Figure | None:
    """Every load is a point: right is faster for each, up is more for all."""
    figure, axes = new_figure()
    named: list[tuple[Load, tuple[float, float], str]] = []
    for line in _lines(summary, workload, loads):
        points = [_capacity_point(summary, name, workload, load) for load, name in zip(loads, line.names, strict=True)]
        if not all(np.isnan(x) for x, _ in points):
            axes.plot(*zip(*points, strict=True), label=line.label, **line.look)
        known = [(load, point) for load, point in zip(loads, points, strict=True) if not np.isnan(point[0])]
        named += [(load, point, line.look["color"]) for load, point in known]
    if not named:
        return None
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"))
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(FixedLocator([m * 10.0**e for e in range(-2, 8) for m in (1, 2, 5)]))
    axes.set_ylim(low, high)
    axes.set_xlim(left=0)
    frame(axes, None, percent=False)
    axes.set_xlabel(f"tokens/s per user (numbers: {'concurrency' if loads[0].rate is None else 'requests/s'})")
    axes.set_ylabel("tokens/s in all")
    _name_loads(axes, named)
    put_legend(figure, axes)
    return figure


def _name_loads(axes: Axes, points: Sequence[tuple[Load, tuple[float, float], str]]) -> None:
    """Write the load at each point, once for points of one load that lie all but on each other."""
    done: list[tuple[Load, Floats]] = []
    for load, point, colour in points:
        at = axes.transAxes.inverted().transform(axes.transData.transform(point))
        if not any(other == load and np.abs(at - there).max() < _NEAR for other, there in done):
            done.append((load, at))
            _write(axes, f"{load.size:g}", point, colour, dx=4, dy=3)


def _capacity_point(summary: Summary, name: str | None, workload: str, load: Load) -> tuple[float, float]:
    """Tokens per second of each user and of all; NaN, where the line breaks, if they are not known."""
    row = None if name is None else summary.row(name, workload, load)
    if row is None or row.figures.partial:
        return np.nan, np.nan
    each, total = row.figures.per_user_tokens_per_second, row.figures.total_tokens_per_second
    return (np.nan, np.nan) if each is None or total is None else (each.value, total.value)


def _latencies(summary: Summary, workload: str, tag: str) -> Iterator[Chart | None]:
    for which, title in _LATENCIES:
        for place, load in enumerate(summary.loads, start=1):
            section = LATENCY if load in (summary.loads[0], summary.loads[-1]) else MORE_LATENCY
            figure = _distribution(summary, workload, load, which)
            yield _chart(f"{which}-{tag}-{place}", section, f"{title}, {load_text(load)}: {workload}", figure)


def _distribution(summary: Summary, workload: str, load: Load, which: Latency) -> Figure | None:
    """The share of requests that took no longer."""
    lines = {}
    for name in (name for line in _lines(summary, workload, [load]) for name in line.names if name is not None):
        cells = [cell for cell in summary.cells.get((name, workload, load), []) if cell.status == "complete"]
        values = sorted(value for several in latencies(cells, which).values() for value in several)
        if values:
            lines[name] = values
    if not lines:
        return None
    figure, axes = new_figure((SIZE[0], 2.7))
    for name, values in lines.items():
        look = {key: value for key, value in style(summary, name).items() if not key.startswith("marker")}
        # Of many requests as many points as can be told apart: a page of all of them would be megabytes.
        shown = values if len(values) <= _MOST_STEPS else np.quantile(values, np.linspace(0, 1, _MOST_STEPS))
        axes.ecdf(shown, label=short_title(name), **look)
    largest, smallest = max(map(max, lines.values())), min(map(min, lines.values()))
    if smallest > 0 and largest / smallest > 30:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_xlim(left=0)
    frame(axes, None, percent=True)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("requests")
    put_legend(figure, axes)
    return figure


# Acceptance.


def _acceptance(summary: Summary, workload: str, tag: str) -> Iterator[Chart | None]:
    sweeps, shallow = {}, set[str]()
    for sweep in summary.deep_sweeps:
        found = {depth: acceptance_length(summary.whole_cells(name, [workload])) for depth, name in sweep.chains}
        lengths = {depth: length for depth, length in found.items() if length is not None}
        sweeps[sweep.title] = (style(summary, sweep.names[0]), lengths)
        shallow.update(sweep.names[:-1])  # the deepest shows all depths
    title = f"Acceptance length by depth: {workload}"
    yield _chart(f"depths-{tag}", ACCEPTANCE, title, lengths_by_depth(sweeps))
    rates = {
        name: (style(summary, name), acceptance_rates(summary.whole_cells(name, [workload])))
        for name in summary.names
        if name not in shallow
    }
    yield _chart(f"acceptance-{tag}", ACCEPTANCE, f"Drafts that stand, by depth: {workload}", rates_by_depth(rates))


def _lengths(summary: Summary) -> Chart | None:
    """By workload, of contenders that are not one of many depths."""
    deep = {name for sweep in summary.deep_sweeps for name in sweep.names}
    lines: dict[str, tuple[Look, dict[str, Interval]]] = {}
    for name in (name for name in summary.names if name not in deep):
        found = {workload: acceptance_length(summary.whole_cells(name, [workload])) for workload in summary.workloads}
        lengths = {workload: length for workload, length in found.items() if length is not None}
        if lengths:
            lines[name] = (coloured(summary, name, len(lines)), lengths)
    title = "Acceptance length by workload"
    return _chart(f"lengths-{summary.number}", ACCEPTANCE, title, lengths_by_workload(lines))
