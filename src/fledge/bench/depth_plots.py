"""Pictures of what drafting further ahead brings: speed and acceptance length against depth."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from fledge.bench.families import Family
from fledge.bench.part import Part
from fledge.bench.plot_parts import bars, legend, style
from fledge.evaluation.results import Load
from fledge.report.charts import INK, MUTED, PAPER, SIZE, frame, new_figure, series_style, short_title
from fledge.report.intervals import Interval

_ABREAST = 2  # panels
_LABEL = 7.5  # points
_LABEL_ROOM = 0.07  # of the height of the axes: how far apart two names of lines are at least
_AXIS = "tokens drafted ahead (K)"


def speed_by_depth(part: Part, workload: str, loads: Sequence[Load]) -> Figure | None:
    """A panel for each drafter of many depths, a line for each load. Intervals are left out: those of two depths
    hang together, so whether they can be told apart is said by the markers instead.
    """
    known = {row.contender for row in part.ratios if row.workload == workload and row.load in loads and row.per_user}
    families = [family for family in part.deep_families if known.intersection(family.names)]
    if not families:
        return None
    abreast = min(len(families), _ABREAST)
    rows = -(-len(families) // abreast)
    figure = Figure(figsize=(SIZE[0], 0.4 + 2.6 * rows), layout="constrained")
    grid = figure.subplots(rows, abreast, sharey=True, squeeze=False)
    for axes in grid.flat[len(families) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"times the speed of {short_title(part.baseline or '')}")
    panels = list(zip(grid.flat, families, strict=False))
    ends = [_panel(axes, part, family, workload, loads) for axes, family in panels]
    for (axes, family), several in zip(panels, ends, strict=True):  # now that the height they share is known
        _name_lines(axes, several, style(part, family.names[0])["color"])
    look: dict[str, Any] = {"marker": "o", "linestyle": "", "color": MUTED}
    handles = [
        Line2D([], [], markersize=9, markerfacecolor="none", label="fastest", **look),
        Line2D([], [], markersize=4, label="not to be told from it", **look),
        Line2D([], [], markersize=4, markerfacecolor=PAPER, label="slower beyond noise", **look),
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8,
        handletextpad=0,
        columnspacing=1,
    )
    return figure


def _panel(
    axes: Axes, part: Part, family: Family, workload: str, loads: Sequence[Load]
) -> dict[str, tuple[int, float]]:
    """Return the last point of each line, by the name of its load."""
    ends = {}
    colour = style(part, family.names[0])["color"]
    for number, load in enumerate(loads):
        rows = {depth: part.ratio(name, workload, load) for depth, name in family.chains}
        values = {depth: row.per_user.value for depth, row in rows.items() if row is not None and row.per_user}
        best = part.best_depths.get((family, workload, load))
        if not values or best is None:
            continue
        dash = series_style(number)["linestyle"]
        axes.plot([*values], [*values.values()], color=colour, linestyle=dash, linewidth=1.4)
        for depth, value in values.items():
            is_slower = depth != best.depth and depth not in best.alike
            axes.plot(
                depth, value, color=colour, marker="o", markersize=4, markerfacecolor=PAPER if is_slower else colour
            )
        axes.plot(best.depth, values[best.depth], color=colour, marker="o", markersize=9, markerfacecolor="none")
        ends[str(load)] = list(values.items())[-1]
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=":")
    axes.set_title(short_title(family.title), color=colour, fontweight="bold")
    frame(axes, None, percent=False)
    depths = [depth for depth, _ in family.chains]
    axes.xaxis.set_major_locator(FixedLocator(depths))
    width = depths[-1] - depths[0]
    axes.set_xlim(depths[0] - 0.1 * width, depths[-1] + 0.3 * width)  # the names of lines are on the right
    axes.set_xlabel(_AXIS)
    return ends


def _name_lines(axes: Axes, ends: Mapping[str, tuple[int, float]], colour: str) -> None:
    """At their right ends, from the lowest up, each far enough above the one before."""
    low, high = axes.get_ylim()
    free = low
    for name, (depth, value) in sorted(ends.items(), key=lambda one: one[1][1]):
        at = max(value, free)
        axes.annotate(name, (depth, at), (6, 0), textcoords="offset points", va="center", fontsize=_LABEL, color=colour)
        free = at + _LABEL_ROOM * (high - low)


def lengths_by_depth(lines: Mapping[str, tuple[dict[str, Any], Mapping[int, Interval]]]) -> Figure | None:
    """Acceptance length against depth; `lines` are looks and values by depth, by label."""
    if not any(len(values) > 1 for _, values in lines.values()):
        return None
    figure, axes = new_figure()
    for number, (label, (look, values)) in enumerate(lines.items()):
        x = [depth + 0.05 * (number - (len(lines) - 1) / 2) for depth in values]
        bars(axes, x, list(values.values()), label=short_title(label), **look)
    depths = sorted({depth for _, values in lines.values() for depth in values})
    frame(axes, depths, percent=False)
    axes.xaxis.set_major_locator(FixedLocator(depths))
    axes.set_xlabel(_AXIS)
    axes.set_ylabel("acceptance length")
    axes.set_ylim(bottom=1.0)
    legend(figure, axes)
    return figure
