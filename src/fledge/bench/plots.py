"""The pictures of a benchmark report. A drafter has the same colour in all of them."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from fledge.bench.depth_plots import lengths_by_depth
from fledge.bench.figures import Latency, acceptance, acceptance_rates, latencies
from fledge.bench.part import Part, Reference
from fledge.bench.plot_parts import bars, coloured, edges, legend, style
from fledge.bench.resampling import interval, pooled
from fledge.bench.speed_plots import shown_names, speed_charts
from fledge.bench.words import ACCEPTANCE, LATENCY, load_text
from fledge.evaluation.results import Load
from fledge.report.charts import SIZE, STYLE, Chart, frame, new_figure, short_title
from fledge.report.intervals import Interval

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
            found += speed_charts(part, workload, tag, references)
            found += _latency_charts(part, workload, tag)
            found += _acceptance_charts(part, workload, tag)
        deep = {name for family in part.deep_families for name in family.names}
        figure = lengths_chart(part, [name for name in part.names if name not in deep])
        if figure is not None:
            title = "Acceptance length by workload"
            found.append(Chart(name=f"lengths-{part.number}", section=LENGTHS, title=title, figure=figure))
    return found


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
    for name in shown_names(part, workload, load):
        cells = [cell for cell in part.cells.get((name, workload, load), []) if cell.status == "complete"]
        values = sorted(value for several in latencies(cells, which).values() for value in several)
        if values:
            lines[name] = values
    if not lines:
        return None
    figure, axes = new_figure((SIZE[0], 2.7))
    for name, values in lines.items():
        look = {key: value for key, value in style(part, name).items() if not key.startswith("marker")}
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
    legend(figure, axes)
    return figure


def _acceptance_charts(part: Part, workload: str, tag: str) -> list[Chart]:
    found = []
    lines = {
        family.title: (style(part, family.names[0]), lengths)
        for family in part.deep_families
        if (lengths := {depth: length for depth, name in family.chains if (length := _length(part, name, workload))})
    }
    figure = lengths_by_depth(lines)
    if figure is not None:
        title = f"Acceptance length by depth: {workload}"
        found.append(Chart(name=f"depths-{tag}", section=LENGTHS, title=title, figure=figure))
    # The deepest chain of a drafter shows the depths of all others too.
    too_short = {name for family in part.deep_families for name in family.names[:-1]}
    figure = accepted_chart(part, [workload], [name for name in part.names if name not in too_short])
    if figure is not None:
        title = f"Drafts that stand, by depth: {workload}"
        found.append(Chart(name=f"acceptance-{tag}", section=ACCEPTANCE, title=title, figure=figure))
    return found


def _length(part: Part, name: str, workload: str) -> Interval | None:
    return interval([acceptance(part.pooled_cells(name, workload))], pooled(offset=1.0), is_share=True)


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
        bars(axes, x, values, label=short_title(name), **style(part, name))
    frame(axes, range(1, max(map(len, lines.values())) + 1), percent=True)
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("rounds whose draft stands")
    legend(figure, axes)
    return figure


def lengths_chart(part: Part, names: Sequence[str]) -> Figure | None:
    """Acceptance length and its interval by workload, a line of points for each contender."""
    lines: dict[str, dict[str, Interval]] = {}
    for name in names:
        for workload in part.workloads:
            found = _length(part, name, workload)
            if found is not None:
                lines.setdefault(name, {})[workload] = found
    workloads = [workload for workload in part.workloads if any(workload in line for line in lines.values())]
    if len(workloads) < 2:
        return None
    figure, axes = new_figure((SIZE[0], 1.1 + 0.16 * len(workloads) * max(2, len(lines))))
    for number, (name, line) in enumerate(lines.items()):
        offset = (number - (len(lines) - 1) / 2) * 0.7 / len(lines)
        look = {key: value for key, value in coloured(part, name, number).items() if key != "linestyle"}
        values = list(line.values())
        y = [workloads.index(workload) + offset for workload in line]
        middle, below, above = edges(values)
        axes.errorbar(middle, y, xerr=[below, above], linestyle="", elinewidth=1.4, label=short_title(name), **look)
    axes.set_yticks(range(len(workloads)), [short_title(workload) for workload in workloads])
    axes.set_ylim(len(workloads) - 0.5, -0.5)
    frame(axes, None, percent=False)
    axes.set_xlim(left=1.0)
    axes.set_xlabel("acceptance length")
    legend(figure, axes)
    return figure
