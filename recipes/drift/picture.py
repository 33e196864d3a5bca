"""The outcome as one picture of small multiples: attention by depth, slopes by trained depth, sizes, acceptance."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, PercentFormatter

from fledge.report.charts import MUTED, STYLE, frame, interval_bars, interval_edges, series_style
from fledge.report.intervals import Interval
from recipes.drift.pooled import ArmResult, DriftExperiment, in_points

_WIDTH, _ROW, _CONDITION = 11.0, 2.7, 0.22  # inches: of all, of a row, of an arm under a condition


def small_multiples(outcome: DriftExperiment) -> Figure:
    """Every variant has one colour and mark in all panels."""
    styles = {name: series_style(i) for i, name in enumerate(dict.fromkeys(arm.variant for arm in outcome.arms))}
    depths = sorted({arm.trained_depth for arm in outcome.arms})
    # Where variants are compared beside each other: the trained depth that most of them have.
    common = Counter(arm.trained_depth for arm in outcome.arms).most_common(1)[0][0]
    beside = [arm for arm in outcome.arms if arm.trained_depth == common]
    conditions = list(dict.fromkeys(name for arm in beside for name in arm.conditions))
    last = 1.0 + _CONDITION * len(conditions) * max(1.0, 0.5 * len(beside))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, 3 * _ROW + last), layout="constrained")
        rows: Any = figure.subfigures(4, 1, height_ratios=[_ROW, _ROW, _ROW, last])
        _by_depth(rows[0], outcome, depths, styles, "attention on the last tokens", lambda arm: arm.recent)
        _by_depth(rows[1], outcome, depths, styles, "attention on the first token", lambda arm: arm.sink)
        panels = rows[2].subplots(1, 3)
        for axes, name in zip(panels[:2], ("recent", "sink"), strict=True):
            _slopes(axes, outcome.arms, styles, name)
        for arm in beside:
            _line(panels[2], arm.hidden_growth, styles[arm.variant], arm.variant)
        frame(panels[2], range(1, outcome.depth + 1), percent=False)
        panels[2].axhline(1.0, color=MUTED, linewidth=1, linestyle=":")
        panels[2].set_title(f"state before the norm, times depth 1; TTT {common}")
        _accepted(rows[3].subplots(), beside, conditions, styles, common)
        handles: dict[str, Any] = {}
        for axes in figure.axes:
            handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(6, len(handles)), frameon=False)
    return figure


def _by_depth(
    row: Any,
    outcome: DriftExperiment,
    depths: Sequence[int],
    styles: dict[str, dict[str, Any]],
    what: str,
    curve: Callable[[ArmResult], Sequence[Interval]],
) -> None:
    """A panel for each trained depth, all with the same axis."""
    panels = row.subplots(1, len(depths), sharey=True, squeeze=False)[0]
    for axes, depth in zip(panels, depths, strict=True):
        for arm in (arm for arm in outcome.arms if arm.trained_depth == depth):
            _line(axes, curve(arm), styles[arm.variant], arm.variant)
        frame(axes, range(1, outcome.depth + 1), percent=True)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))  # with the digits that so small shares need
        axes.set_title(f"{what}; TTT {depth}")
        axes.axvline(depth + 0.5, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))  # deeper than trained
    panels[0].set_ylim(bottom=0)


def _line(axes: Axes, values: Sequence[Interval], style: dict[str, Any], label: str) -> None:
    middle, below, above = interval_edges(values)
    x = range(1, len(values) + 1)
    axes.plot(x, middle, label=label, **{**style, "markersize": 3})
    axes.fill_between(x, middle - below, middle + above, color=style["color"], alpha=0.15, linewidth=0)


def _slopes(axes: Axes, arms: Sequence[ArmResult], styles: dict[str, dict[str, Any]], name: str) -> None:
    depths = sorted({arm.trained_depth for arm in arms})
    for number, (variant, style) in enumerate(styles.items()):
        found = {
            arm.trained_depth: in_points(getattr(arm.unperturbed.attention, name).slope)
            for arm in arms
            if arm.variant == variant and arm.unperturbed.attention is not None
        }
        places = [depths.index(depth) + 0.07 * (number - (len(styles) - 1) / 2) for depth in found]
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
        places = [i + (number - (len(arms) - 1) / 2) * 0.75 / len(arms) for i, _ in shown]
        style = styles[arm.variant] | {"linestyle": "", "elinewidth": 1.4}
        axes.errorbar(middle, places, xerr=reach, label=arm.variant, **style)
    axes.set_yticks(range(len(conditions)), conditions)
    axes.set_ylim(len(conditions) - 0.5, -0.5)
    frame(axes, None, percent=False)
    axes.set_xlim(left=0.0)
    axes.set(xlabel="accepted drafts per round, without repetition", title=f"acceptance by condition; TTT {depth}")
