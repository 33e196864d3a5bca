"""The pictures of a benchmark report. A contender has the same colour, dash and marker in all of them."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fledge.bench.figures import Latency, acceptance, acceptance_rates, latencies
from fledge.bench.part import Part, Reference
from fledge.bench.resampling import interval, pooled
from fledge.bench.results import Load
from fledge.bench.verdict import ACCEPTANCE, CAPACITY, LATENCY, SPEED, load_text
from fledge.drift.attention_plots import SIZE, frame, new_figure, put_legend
from fledge.drift.bootstrap import Floats, Interval
from fledge.drift.plots import Chart
from fledge.drift.svg import INK, MUTED, STYLE, series_style, short_title

MORE = "latency-more"  # charts of loads between the lowest and the highest
LENGTHS = "lengths"
_MOST_STEPS = 150
_LATENCIES: tuple[tuple[Latency, str], ...] = (("ttft", "Time to first token"), ("tpot", "Time per further token"))


def charts(part: Part, references: Sequence[Reference] = ()) -> list[Chart]:
    """All pictures of one results file that measured speed. What was not measured has none."""
    found: list[Chart] = []
    with matplotlib.rc_context(STYLE):
        for number, workload in enumerate(part.workloads, start=1):
            tag = f"{part.number}-{number}"
            found += _speed_charts(part, workload, tag, references)
            found += _latency_charts(part, workload, tag)
            figure = accepted_chart(part, [workload], part.names)
            if figure is not None:
                title = f"Drafts that stand, by depth: {workload}"
                found.append(Chart(name=f"acceptance-{tag}", section=ACCEPTANCE, title=title, figure=figure))
        figure = lengths_chart(part, part.names)
        if figure is not None:
            title = "Acceptance length by workload"
            found.append(Chart(name=f"lengths-{part.number}", section=LENGTHS, title=title, figure=figure))
    return found


def colour_number(part: Part, name: str) -> int:
    """The baseline is drawn in the ink of the text, so the others share out the colours."""
    return part.challengers.index(name)


def _style(part: Part, name: str) -> dict[str, Any]:
    if name == part.baseline:
        return {"color": INK, "marker": "o", "linestyle": "-", "linewidth": 1.4, "markersize": 3.5}
    return series_style(colour_number(part, name))


def _speed_charts(part: Part, workload: str, tag: str, references: Sequence[Reference]) -> list[Chart]:
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
        figure = _capacity(part, workload, loads)
        if figure is not None:
            title = f"Tokens per second, of all users and of each: {workload}"
            found.append(Chart(name=f"capacity-{kind}-{tag}", section=CAPACITY, title=title, figure=figure))
    return found


def _place(load: Load) -> float:
    return float(load.concurrency or load.rate or 0)


def _ratios(part: Part, workload: str, loads: Sequence[Load], references: Sequence[Reference]) -> Figure | None:
    lines: dict[str, list[Interval | None]] = {}
    for name in part.challengers:
        known = dict(part.ratios_of(name, workload))
        if any(load in known for load in loads):
            lines[name] = [known.get(load) for load in loads]
    if not lines:
        return None
    figure, axes = new_figure()
    for name, values in lines.items():
        offset = 1 + 0.025 * (list(lines).index(name) - (len(lines) - 1) / 2)  # bars side by side, not over each other
        bars(axes, [_place(load) * offset for load in loads], values, label=short_title(name), **_style(part, name))
    for number, reference in enumerate(references):
        marker = "*x+1"[number % 4]
        label = f"{short_title(reference.name)} (reported)"
        axes.plot(
            *zip(*reference.points.items(), strict=True),
            color=MUTED,
            marker=marker,
            markersize=8,
            linestyle=(0, (1, 2)),
            linewidth=1,
            label=label,
        )
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=":")
    places = [_place(load) for load in loads] + [float(c) for one in references for c in one.points]
    _load_axis(axes, sorted(set(places)), is_rate=loads[0].rate is not None)
    frame(axes, None, percent=False)
    axes.set_ylabel("times its speed")
    axes.set_ylim(min(0.5, axes.get_ylim()[0]), max(1.5, axes.get_ylim()[1]))
    put_legend(figure, axes, columns=2)
    return figure


def bars(axes: Axes, x: Sequence[float], values: Sequence[Interval | None], **style: Any) -> None:
    """Points, their intervals where there are any, and a line through them that breaks where there is no value."""
    middle, below, above = _edges(values)
    axes.errorbar(x, middle, yerr=[below, above], capsize=2.5, elinewidth=1.2, **style)


def _edges(values: Sequence[Interval | None]) -> tuple[Floats, Floats, Floats]:
    """Values, and how far their intervals reach below and above them; NaN where there is no value."""
    ends = [
        (np.nan,) * 3
        if one is None
        else (one.value, one.value if one.low is None else one.low, one.value if one.high is None else one.high)
        for one in values
    ]
    middle, low, high = np.array(ends, dtype=np.float64).T
    return middle, np.abs(middle - low), np.abs(high - middle)


def _load_axis(axes: Axes, places: Sequence[float], *, is_rate: bool) -> None:
    if len(places) > 1:
        axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(places[0] / 1.3, places[-1] * 1.3)
    axes.set_xlabel("requests per second" if is_rate else "concurrency")


def _capacity(part: Part, workload: str, loads: Sequence[Load]) -> Figure | None:
    """Every load is a point: right is faster for each, up is more for all."""
    figure, axes = new_figure()
    drawn = False
    for name in part.names:
        points = []
        for load in loads:
            row = part.row(name, workload, load)
            mine = all_of_them = None
            if row is not None and not row.figures.partial:
                mine, all_of_them = row.figures.per_user_tokens_per_second, row.figures.total_tokens_per_second
            if mine is None or all_of_them is None:
                points.append((load, np.nan, np.nan))  # the line breaks here
            else:
                points.append((load, mine.value, all_of_them.value))
        if all(np.isnan(x) for _, x, _ in points):
            continue
        drawn = True
        style = _style(part, name)
        axes.plot([x for _, x, _ in points], [y for *_, y in points], label=short_title(name), **style)
        for load, x, y in points:
            if np.isnan(x):
                continue
            text = f"{_place(load):g}"
            axes.annotate(text, (x, y), (4, 3), textcoords="offset points", fontsize=7.5, color=style["color"])
    if not drawn:
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
    put_legend(figure, axes, columns=2)
    return figure


def _latency_charts(part: Part, workload: str, tag: str) -> list[Chart]:
    found = []
    for which, title in _LATENCIES:
        for place, load in enumerate(part.loads):
            figure = _distribution(part, workload, load, which)
            if figure is None:
                continue
            section = LATENCY if load in (part.loads[0], part.loads[-1]) else MORE
            text = f"{title}, {load_text(load)}: {workload}"
            found.append(Chart(name=f"{which}-{tag}-{place + 1}", section=section, title=text, figure=figure))
    return found


def _distribution(part: Part, workload: str, load: Load, which: Latency) -> Figure | None:
    """The share of requests that took no longer."""
    lines = {}
    for name in part.names:
        cells = [cell for cell in part.cells.get((name, workload, load), []) if cell.status == "complete"]
        values = sorted(value for several in latencies(cells, which).values() for value in several)
        if values:
            lines[name] = values
    if not lines:
        return None
    figure, axes = new_figure((SIZE[0], 2.7))
    for name, values in lines.items():
        style = {key: value for key, value in _style(part, name).items() if not key.startswith("marker")}
        # Of many requests as many points as can be told apart: a page of all of them would be megabytes.
        shown = values if len(values) <= _MOST_STEPS else np.quantile(values, np.linspace(0, 1, _MOST_STEPS))
        axes.ecdf(shown, label=short_title(name), **style)
    largest, smallest = max(map(max, lines.values())), min(map(min, lines.values()))
    if smallest > 0 and largest / smallest > 30:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_xlim(left=0)
    frame(axes, None, percent=True)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("requests")
    put_legend(figure, axes, columns=2)
    return figure


def accepted_chart(part: Part, workloads: Sequence[str], names: Sequence[str]) -> Figure | None:
    """Rounds whose draft stands, against depth; the workloads pooled."""
    lines: dict[str, list[Interval]] = {}
    for name in names:
        lines[name] = acceptance_rates(part.all_cells(name, workloads))
    lines = {name: values for name, values in lines.items() if values}
    if not lines:
        return None
    figure, axes = new_figure()
    for name, values in lines.items():
        offset = 0.06 * (list(lines).index(name) - (len(lines) - 1) / 2)
        x = [depth + offset for depth in range(1, len(values) + 1)]
        bars(axes, x, values, label=short_title(name), **_style(part, name))
    frame(axes, range(1, max(map(len, lines.values())) + 1), percent=True)
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("rounds whose draft stands")
    put_legend(figure, axes, columns=2)
    return figure


def lengths_chart(part: Part, names: Sequence[str]) -> Figure | None:
    """Acceptance length and its interval by workload, a line of points for each contender."""
    lines: dict[str, dict[str, Interval]] = {}
    for name in names:
        for workload in part.workloads:
            found = interval([acceptance(part.pooled_cells(name, workload))], pooled(offset=1.0), is_share=True)
            if found is not None:
                lines.setdefault(name, {})[workload] = found
    workloads = [workload for workload in part.workloads if any(workload in line for line in lines.values())]
    if len(workloads) < 2:
        return None
    figure, axes = new_figure((SIZE[0], 1.1 + 0.16 * len(workloads) * max(2, len(lines))))
    for number, (name, line) in enumerate(lines.items()):
        offset = (number - (len(lines) - 1) / 2) * 0.7 / len(lines)
        style = {key: value for key, value in _style(part, name).items() if key != "linestyle"}
        values = list(line.values())
        y = [workloads.index(workload) + offset for workload in line]
        middle, below, above = _edges(values)
        axes.errorbar(middle, y, xerr=[below, above], linestyle="", elinewidth=1.4, label=short_title(name), **style)
    axes.set_yticks(range(len(workloads)), [short_title(workload) for workload in workloads])
    axes.set_ylim(len(workloads) - 0.5, -0.5)
    frame(axes, None, percent=False)
    axes.set_xlim(left=1.0)
    axes.set_xlabel("acceptance length")
    put_legend(figure, axes, columns=2)
    return figure
