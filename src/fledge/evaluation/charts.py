"""Pictures of acceptance, for `fledge eval` and `fledge bench`: lines by label, each a look and its figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from fledge.report.charts import SIZE, frame, interval_bars, interval_edges, new_figure, put_legend, short_title
from fledge.report.intervals import Interval

Look = Mapping[str, Any]  # colour, marker, dash: matplotlib's names


def rates_by_depth(lines: Mapping[str, tuple[Look, Sequence[Interval]]]) -> Figure | None:
    """Rounds whose draft stands, against depth, by label; entry 0 is the first draft."""
    found = {label: (look, dict(enumerate(rates, start=1))) for label, (look, rates) in lines.items() if rates}
    return _by_depth(found, "draft depth", "rounds whose draft stands", 0.06, percent=True) if found else None


def lengths_by_depth(lines: Mapping[str, tuple[Look, Mapping[int, Interval]]]) -> Figure | None:
    """Acceptance length against depth, by label; None where no line has two depths."""
    if not any(len(values) > 1 for _, values in lines.values()):
        return None
    return _by_depth(lines, "tokens drafted ahead (K)", "acceptance length", 0.05, percent=False)


def _by_depth(
    lines: Mapping[str, tuple[Look, Mapping[int, Interval]]], across: str, up: str, apart: float, *, percent: bool
) -> Figure:
    """Lines with their intervals, each a bit beside the others."""
    figure, axes = new_figure()
    for number, (label, (look, values)) in enumerate(lines.items()):
        x = [depth + apart * (number - (len(lines) - 1) / 2) for depth in values]
        interval_bars(axes, x, list(values.values()), label=short_title(label), **look)
    depths = sorted({depth for _, values in lines.values() for depth in values})
    frame(axes, depths, percent=percent)
    if percent:
        axes.set_ylim(0, 1.02)
    else:
        axes.xaxis.set_major_locator(FixedLocator(depths))
        axes.set_ylim(bottom=1.0)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    put_legend(figure, axes)
    return figure


def lengths_by_workload(lines: Mapping[str, tuple[Look, Mapping[str, Interval]]]) -> Figure | None:
    """Acceptance length and its interval by workload, a row of points for each label; None for one workload."""
    workloads = list(dict.fromkeys(workload for _, values in lines.values() for workload in values))
    if len(workloads) < 2:
        return None
    figure, axes = new_figure((SIZE[0], 1.1 + 0.16 * len(workloads) * max(2, len(lines))))
    for number, (label, (look, values)) in enumerate(lines.items()):
        offset = (number - (len(lines) - 1) / 2) * 0.7 / len(lines)
        y = [workloads.index(workload) + offset for workload in values]
        middle, below, above = interval_edges(list(values.values()))
        points = {**look, "linestyle": "", "elinewidth": 1.4, "label": short_title(label)}
        axes.errorbar(middle, y, xerr=[below, above], **points)
    axes.set_yticks(range(len(workloads)), [short_title(workload) for workload in workloads])
    axes.set_ylim(len(workloads) - 0.5, -0.5)
    frame(axes, None, percent=False)
    axes.set_xlim(left=1.0)
    axes.set_xlabel("acceptance length")
    put_legend(figure, axes)
    return figure
