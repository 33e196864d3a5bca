"""The outcome as one picture of small multiples: attention by depth, slopes by trained depth, sizes, acceptance."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, PercentFormatter

from fledge.report.charts import GRID, MUTED, STYLE, frame, interval_bars, interval_edges, series_style
from fledge.report.intervals import Interval
from recipes.drift.pooled import ArmResult, DriftExperiment, in_points

_WIDTH, _ROW, _CONDITION = 11.0, 2.7, 0.125  # inches: of all, of a row, of an arm under a condition
_BESIDE = 0.5  # depths between the bars of two arms
Columns = Sequence[tuple[str, Sequence[ArmResult]]]  # panels of a row: their titles and arms


def small_multiples(outcome: DriftExperiment) -> Figure:
    """Every variant has one colour and mark in all panels."""
    styles = {name: series_style(i) for i, name in enumerate(dict.fromkeys(arm.variant for arm in outcome.arms))}
    # Where variants are compared beside each other: the trained depth that most of them have.
    common = Counter(arm.trained_depth for arm in outcome.arms).most_common(1)[0][0]
    beside = [arm for arm in outcome.arms if arm.trained_depth == common]
    conditions = list(dict.fromkeys(name for arm in beside for name in arm.conditions))
    last = 1.0 + _CONDITION * len(conditions) * max(2, len(beside))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, 3 * _ROW + last), layout="constrained")
        rows: Any = figure.subfigures(4, 1, height_ratios=[_ROW, _ROW, _ROW, last])
        columns = _columns(outcome.arms)
        _by_depth(rows[0], columns, styles, "attention on the last tokens", lambda arm: arm.recent)
        _by_depth(rows[1], columns, styles, "attention on the first token", lambda arm: arm.sink)
        panels = rows[2].subplots(1, 3)
        for axes, name in zip(panels[:2], ("recent", "sink"), strict=True):
            _slopes(axes, outcome.arms, styles, name)
        _lines(panels[2], beside, styles, lambda arm: arm.hidden_growth, percent=False)
        panels[2].axhline(1.0, color=MUTED, linewidth=1, linestyle=":")
        panels[2].set_title(f"state before the norm, times depth 1; TTT {common}")
        _accepted(rows[3].subplots(), beside, conditions, styles, common)
        handles: dict[str, Any] = {}
        for axes in figure.axes:
            handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(6, len(handles)), frameon=False)
    return figure


def _columns(arms: Sequence[ArmResult]) -> Columns:
    """A panel for each trained depth, of the variants that have several; then the other variants by their depth."""
    trained = Counter(arm.variant for arm in arms)
    several = [(f"TTT {arm.trained_depth}", arm) for arm in arms if trained[arm.variant] > 1]
    others = [(f"TTT {arm.trained_depth}" + (": the others" if several else ""), arm) for arm in arms]
    others = [(title, arm) for title, arm in others if trained[arm.variant] == 1]
    found: dict[str, list[ArmResult]] = {}
    for title, arm in (*sorted(several, key=lambda one: one[1].trained_depth), *others):
        found.setdefault(title, []).append(arm)
    return list(found.items())


def _by_depth(
    row: Any,
    columns: Columns,
    styles: dict[str, dict[str, Any]],
    what: str,
    curve: Callable[[ArmResult], Sequence[Interval]],
) -> None:
    """Panels with the same axis; a dashed line where drafts are deeper than was trained."""
    panels = row.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    row.suptitle(what)
    for axes, (title, arms) in zip(panels, columns, strict=True):
        _lines(axes, arms, styles, curve, percent=True)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))  # with the digits that so small shares need
        axes.set_title(title)
        axes.axvline(arms[0].trained_depth + 0.5, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    panels[0].set_ylim(bottom=0)


def _lines(
    axes: Axes,
    arms: Sequence[ArmResult],
    styles: dict[str, dict[str, Any]],
    curve: Callable[[ArmResult], Sequence[Interval]],
    *,
    percent: bool,
) -> None:
    """By draft depth. Intervals stand beside the last depth only: one on top of another they cannot be told apart."""
    depth = max(len(curve(arm)) for arm in arms)
    frame(axes, range(1, depth + 1), percent=percent)
    for number, arm in enumerate(arms):
        style, values = {**styles[arm.variant], "markersize": 3}, curve(arm)
        axes.plot(range(1, len(values) + 1), [one.value for one in values], label=arm.variant, **style)
        interval_bars(axes, [depth + 0.8 + _BESIDE * number], [values[-1]], **style)
    axes.set_xlim(0.7, depth + 0.8 + _BESIDE * len(arms))
    axes.set_xticks([1, *range(4, depth + 1, 4)])
    axes.set_xlabel(f"draft depth; bars: interval at {depth}")


def _slopes(axes: Axes, arms: Sequence[ArmResult], styles: dict[str, dict[str, Any]], name: str) -> None:
    depths = sorted({arm.trained_depth for arm in arms})
    for number, (variant, style) in enumerate(styles.items()):
        found = {
            arm.trained_depth: in_points(getattr(arm.unperturbed.attention, name).slope)
            for arm in arms
            if arm.variant == variant and arm.unperturbed.attention is not None
        }
        places = [depths.index(depth) + 0.12 * (number - (len(styles) - 1) / 2) for depth in found]
        interval_bars(axes, places, list(found.values()), label=variant, **style)
    frame(axes, None, percent=False)
    axes.xaxis.set_major_locator(FixedLocator(list(range(len(depths)))))
    axes.set_xticklabels([str(depth) for depth in depths])
    axes.set_xlim(-0.5, len(depths) - 0.5)
    axes.axhline(0.0, color=MUTED, linewidth=1, linestyle=":")
    axes.set(xlabel="trained depth (TTT)", title=f"slope of {name} attention, points a depth")


def _accepted(
    axes: Axes,
    arms: Sequence[ArmResult],
    conditions: Sequence[str],
    styles: dict[str, dict[str, Any]],
    depth: int,
) -> None:
    for number, arm in enumerate(arms):
        shown = [(i, arm.conditions[name].accepted) for i, name in enumerate(conditions) if name in arm.conditions]
        middle, *reach = interval_edges([accepted for _, accepted in shown])
        places = [i + (number - (len(arms) - 1) / 2) * 0.8 / len(arms) for i, _ in shown]
        style = styles[arm.variant] | {"linestyle": "", "elinewidth": 1.4}
        axes.errorbar(middle, places, xerr=reach, label=arm.variant, **style)
    for i in range(0, len(conditions), 2):  # every second condition on grey: which bars belong together
        axes.axhspan(i - 0.5, i + 0.5, color=GRID, alpha=0.35, linewidth=0)
    axes.set_yticks(range(len(conditions)), conditions)
    axes.set_ylim(len(conditions) - 0.5, -0.5)
    frame(axes, None, percent=False)
    axes.set_xlim(left=0.0)
    axes.set(xlabel="accepted drafts per round, without repetition", title=f"acceptance by condition; TTT {depth}")
