"""The pictures of a benchmark report. A drafter has one colour, and of many depths the fastest under each load."""

from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fledge.bench.figures import Latency, latencies
from fledge.bench.rows import Row
from fledge.bench.summary import Summary, Sweep, load_text
from fledge.bench.verdict import Reference
from fledge.evaluation.report import acceptance_length, acceptance_rates, complete_cells
from fledge.evaluation.results import Load
from fledge.report import charts as draw

_MOST_STEPS = 150
_PLAIN = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")
_LATENCIES: dict[Latency, str] = {"ttft": "Time to first token", "tpot": "Time per further token"}


def charts(summary: Summary, references: Sequence[Reference] = ()) -> list[draw.Chart]:
    """All pictures of one results file that measured speed. What was not measured has none."""
    with matplotlib.rc_context(draw.STYLE):
        return draw.charts_of(_figures(summary, references))


def _figures(summary: Summary, references: Sequence[Reference]) -> Iterator[draw.Drawn]:
    for number, workload in enumerate(summary.workloads, start=1):
        tag = f"{summary.number}-{number}"
        for kind, is_rate in (("concurrency", False), ("rate", True)):
            loads = [load for load in summary.loads if (load.rate is not None) == is_rate]
            title = f"Speed per user against {summary.baseline}: {workload}"
            shown = () if is_rate else references
            yield f"speed-{kind}-{tag}", "speed", title, _ratios(summary, workload, loads, shown)
            title = f"Speed per user by depth: {workload}"
            yield f"depth-{kind}-{tag}", "speed", title, _speed_by_depth(summary, workload, loads)
            title = f"Tokens per second, of all users and of each: {workload}"
            yield f"capacity-{kind}-{tag}", "capacity", title, _capacity(summary, workload, loads)
        for which, title in _LATENCIES.items():
            for place, load in enumerate(summary.loads, start=1):
                section = "latency" if load in (summary.loads[0], summary.loads[-1]) else "latency-more"
                figure = _distribution(summary, workload, load, which)
                yield f"{which}-{tag}-{place}", section, f"{title}, {load_text(load)}: {workload}", figure
        sweeps = {
            sweep.title: _lengths(summary, sweep.first, {d: (n, workload) for n, d in sweep.depths.items()})
            for sweep in summary.depth_sweeps
        }
        yield f"depths-{tag}", "acceptance", f"Acceptance length by depth: {workload}", draw.lines_by_depth(sweeps)
        rates = {}
        for name in ([*line.depths][-1] for line in summary.lines):  # the deepest shows all depths
            cells = complete_cells(summary.results, name, workload)
            rates[name] = style(summary, name), acceptance_rates(cells)
        figure = draw.lines_by_depth(rates, percent=True)
        yield f"acceptance-{tag}", "acceptance", f"Drafts that stand, by depth: {workload}", figure
    lines: dict[str, tuple[Any, Any]] = {}
    for name in (line.title for line in summary.lines if not line.has_many_depths):
        found = _lengths(summary, name, {workload: (name, workload) for workload in summary.workloads}, len(lines))
        lines |= {name: found} if found[1] else {}
    yield f"lengths-{summary.number}", "acceptance", "Acceptance length by workload", draw.forest(lines)


def _lengths(summary: Summary, name: str, of: dict[Any, tuple[str, str]], shape: int | None = None) -> tuple[Any, Any]:
    """A line of acceptance lengths of contenders on workloads, where there are any, in the style of `name`."""
    found = {key: acceptance_length(complete_cells(summary.results, *one)) for key, one in of.items()}
    return style(summary, name, shape), {key: length for key, length in found.items() if length is not None}


def style(summary: Summary, name: str, shape: int | None = None) -> dict[str, Any]:
    """Of a line in all pictures. `shape` is the number of its marker and dash, if not that of the contender's line."""
    place = summary.colour_number(name)
    if place is None and shape is None:
        return {"color": draw.INK, "marker": "o", "linestyle": "-", "linewidth": 1.4, "markersize": 3.5}
    shape = summary.sweeps.index(summary.line(name)) if shape is None else shape
    return draw.series_style(shape) | {"color": draw.INK if place is None else draw.SERIES[place]}


def _label(line: Sweep) -> str:
    return draw.short_title(f"{line.title}, fastest depth" if line.has_many_depths else line.title)


def _write(axes: Axes, text: str, at: tuple[float, float], colour: str, *, dx: float = 0, dy: float = 0) -> None:
    """Text beside a point, `dx` to the right or `dy` above it."""
    sides: dict[str, Any] = {"ha": "left" if dx else "center", "va": "bottom" if dy > 0 else "top" if dy else "center"}
    axes.annotate(text, at, (dx, dy), textcoords="offset points", fontsize=7.5, color=colour, **sides)


def _finished(figure: Figure, axes: Axes, x: str, y: str, *, percent: bool = False) -> Figure:
    draw.frame(axes, None, percent=percent)
    axes.set(xlabel=x, ylabel=y)
    draw.put_legend(figure, axes)
    return figure


def _ratios(summary: Summary, workload: str, loads: Sequence[Load], references: Sequence[Reference]) -> Figure | None:
    """Ratios against load, with the fastest depth at the points of a drafter that has many."""
    lines = [(line, [summary.shown(line, workload, load) for load in loads]) for line in summary.lines]
    lines = [(line, rows) for line, rows in lines if any(row and row.per_user for row in rows)]
    if not lines:
        return None
    figure, axes = draw.new_figure()
    for number, (line, rows) in enumerate(lines):
        look = style(summary, line.first)
        aside = number - (len(lines) - 1) / 2  # bars of one load are set apart
        x = [load.size * (1 + min(0.08, 0.3 / len(lines)) * aside) for load in loads]
        draw.interval_bars(axes, x, [row.per_user if row else None for row in rows], label=_label(line), **look)
        for at, row in zip(x, rows, strict=True):
            if row and row.per_user and line.has_many_depths:  # labels of two drafters do not meet
                place = at, row.per_user.ends[aside >= 0]
                _write(axes, f"K={line.depths[row.contender]}", place, look["color"], dy=3 if aside >= 0 else -3)
    for number, reference in enumerate(references):
        label = f"{draw.short_title(reference.name)} (reported)"
        look = {"color": draw.MUTED, "linestyle": (0, (1, 2)), "linewidth": 1, "zorder": 4}  # above lines that agree
        points = zip(*reference.points.items(), strict=True)
        axes.plot(*points, marker="*x+1"[number % 4], markersize=8, label=label, **look)
    axes.axhline(1.0, color=draw.INK, linewidth=1, linestyle=":")
    places = sorted({load.size for load in loads} | {float(c) for one in references for c in one.points})
    if len(places) > 1:
        axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(places[0] / 1.3, places[-1] * 1.3)
    axes.margins(y=0.12)
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.8, low), max(1.5, high))
    return _finished(figure, axes, "concurrency" if loads[0].rate is None else "requests per second", "times its speed")


def _speed_by_depth(summary: Summary, workload: str, loads: Sequence[Load]) -> Figure | None:
    """A panel for each drafter of many depths, a line for each load. Intervals are left out: those of two depths
    hang together, so whether they can be told apart is said by the markers instead.
    """
    known = {row.contender for row in summary.ratios if row.workload == workload and row.load in loads and row.per_user}
    sweeps = [sweep for sweep in summary.depth_sweeps if known & sweep.depths.keys()]
    if not sweeps:
        return None
    figure = Figure(figsize=(max(draw.SIZE[0], 2.2 * len(sweeps)), 3.0), layout="constrained")
    panels = figure.subplots(1, len(sweeps), sharey=True, squeeze=False)[0]
    panels[0].set_ylabel(f"times the speed of {draw.short_title(summary.baseline or '')}")
    for axes, sweep in zip(panels, sweeps, strict=True):
        _depth_panel(axes, summary, sweep, workload, loads)
    look: dict[str, Any] = {"marker": "o", "linestyle": "", "color": draw.MUTED}
    handles = [
        Line2D([], [], markersize=9, markerfacecolor="none", label="fastest", **look),
        Line2D([], [], markersize=4, label="not to be told from it", **look),
        Line2D([], [], markersize=4, markerfacecolor=draw.PAPER, label="slower beyond noise", **look),
    ]
    spacing: dict[str, Any] = {"frameon": False, "fontsize": 8, "handletextpad": 0, "columnspacing": 1}
    figure.legend(handles=handles, loc="outside lower center", ncols=3, **spacing)
    return figure


def _depth_panel(axes: Axes, summary: Summary, sweep: Sweep, workload: str, loads: Sequence[Load]) -> None:
    colour = style(summary, sweep.first)["color"]
    for number, load in enumerate(loads):
        best = summary.best_depths.get((sweep, workload, load))
        rows = [summary.rows.get((name, workload, load)) for name in sweep.depths]
        points = {r.contender: (sweep.depths[r.contender], r.per_user.value) for r in rows if r and r.per_user}
        if not points or best is None:
            continue
        dash = draw.series_style(number)["linestyle"]
        axes.plot(*zip(*points.values(), strict=True), color=colour, linestyle=dash, linewidth=1.4)
        for name, point in points.items():
            face = colour if name in (best.contender, *best.alike) else draw.PAPER
            axes.plot(*point, color=colour, marker="o", markersize=4, markerfacecolor=face)
        axes.plot(*points[best.contender], color=colour, marker="o", markersize=9, markerfacecolor="none")
        _write(axes, str(load), list(points.values())[-1], colour, dx=6)
    axes.axhline(1.0, color=draw.INK, linewidth=1, linestyle=":")
    axes.set_title(draw.short_title(sweep.title), color=colour, fontweight="bold")
    draw.frame(axes, None, percent=False)
    axes.xaxis.set_major_locator(FixedLocator([*sweep.depths.values()]))
    axes.margins(x=0.3)  # the names of lines are on the right
    axes.set_xlabel("tokens drafted ahead (K)")


def _capacity(summary: Summary, workload: str, loads: Sequence[Load]) -> Figure | None:
    """Every load is a point: right is faster for each, up is more for all."""
    figure, axes = draw.new_figure()
    for line in summary.lines:
        look = style(summary, line.first)
        points = np.full((len(loads), 2), np.nan)  # a line breaks where there is no value
        for place, load in enumerate(loads):
            row = summary.shown(line, workload, load)
            total = row and row.figures.total_tokens_per_second
            if row and row.speed and total:
                points[place] = row.speed.value, total.value
                _write(axes, f"{load.size:g}", (row.speed.value, total.value), look["color"], dx=4, dy=3)
        if not np.isnan(points).all():
            axes.plot(*points.T, label=_label(line), **look)
    if not axes.lines:
        return None
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_PLAIN)
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(FixedLocator([m * 10.0**e for e in range(-2, 8) for m in (1, 2, 5)]))
    axes.set_ylim(low, high)
    axes.set_xlim(left=0)
    unit = "concurrency" if loads[0].rate is None else "requests/s"
    return _finished(figure, axes, f"tokens/s per user (numbers: {unit})", "tokens/s in all")


def _distribution(summary: Summary, workload: str, load: Load, which: Latency) -> Figure | None:
    """The share of requests that took no longer."""
    figure, axes = draw.new_figure((draw.SIZE[0], 2.7))
    ends: list[float] = []
    shown: list[Row | None] = [summary.shown(line, workload, load) for line in summary.lines]
    for row in filter(None, shown):
        cells = [cell for cell in row.cells if cell.status == "complete"]
        values = sorted(value for several in latencies(cells, which).values() for value in several)
        look = {key: value for key, value in style(summary, row.contender).items() if not key.startswith("marker")}
        if values:
            # Of many requests as many points as can be told apart: a page of all of them would be megabytes.
            steps = values if len(values) <= _MOST_STEPS else np.quantile(values, np.linspace(0, 1, _MOST_STEPS))
            axes.ecdf(steps, label=draw.short_title(row.contender), **look)
            ends += values[0], values[-1]
    if not ends:
        return None
    if min(ends) > 0 and max(ends) / min(ends) > 30:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_PLAIN)
    else:
        axes.set_xlim(left=0)
    return _finished(figure, axes, "milliseconds", "requests", percent=True)
