"""The pictures of a report. Drafters share axes where their curves compare, and scales where they do not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fledge.drift.attention_plots import draw_attention, draw_heads, draw_heat_map
from fledge.drift.perturb import UNPERTURBED
from fledge.drift.result import DepthMetrics, DriftResult, PromptRow
from fledge.drift.summary import SuiteResult
from fledge.report.charts import (
    MUTED,
    PAPER,
    SIZE,
    STYLE,
    Chart,
    frame,
    new_figure,
    percentages,
    put_legend,
    series_style,
    short_title,
)
from fledge.report.intervals import Bootstrap

FEW_DRAFTS = 10  # their calibration is all chance


def charts(suite: SuiteResult, results: Mapping[str, DriftResult]) -> list[Chart]:
    """All pictures. `results` are the unperturbed ones, by drafter; what was not measured has no picture."""
    shown = {name: result for name, result in results.items() if result.by_depth}
    several = []
    with matplotlib.rc_context(STYLE):
        for what, section, title, draw in _OF_ONE:
            several += [
                Chart(name=f"{what}-{number}", section=section, title=title, figure=draw(result), drafter=name)
                for number, (name, result) in enumerate(shown.items(), start=1)
                if section != "heads" or len(result.by_depth[0].heads) > 1
            ]
        if shown:
            series = _series(suite, shown)
            several += [
                Chart(name=name, section=section, title=title, figure=figure)
                for name, section, title, draw in _OF_ALL
                if (figure := draw(series, suite)) is not None
            ]
        if any(cell.compared is not None for cell in suite.cells):
            title = "Acceptance length against the unperturbed run"
            several.append(Chart(name="perturbations", section="", title=title, figure=_forest(suite)))
    return several


@dataclass(frozen=True, kw_only=True)
class _Series:
    """A drafter as a line: always of the same colour, dash and marker."""

    title: str
    result: DriftResult
    style: dict[str, Any]


def _series(suite: SuiteResult, results: Mapping[str, DriftResult]) -> list[_Series]:
    return [
        _Series(title=short_title(suite.titles[name]), result=results[name], style=series_style(number))
        for number, name in enumerate(suite.names)
        if name in results
    ]


def _depth_chart(
    series: Sequence[_Series],
    value: Callable[[DepthMetrics], float | None],
    *,
    percent: bool = False,
) -> tuple[Figure, Axes] | None:
    """A line for each drafter against depth, gaps where there is nothing."""
    if not any(value(one) is not None for line in series for one in line.result.by_depth):
        return None
    figure, axes = new_figure()
    for line in series:
        axes.plot(
            [one.depth for one in line.result.by_depth],
            [np.nan if (found := value(one)) is None else found for one in line.result.by_depth],
            label=line.title,
            **line.style,
        )
    _mark_trained(axes, series)
    frame(axes, max(([one.depth for one in s.result.by_depth] for s in series), key=len), percent=percent)
    put_legend(figure, axes, columns=2)
    return figure, axes


def _growth(name: str) -> Callable[[Sequence[_Series], SuiteResult], Figure | None]:
    def draw(series: Sequence[_Series], _: SuiteResult) -> Figure | None:
        drawn = _depth_chart(series, lambda one: float(getattr(one, name)))
        if drawn is None:
            return None
        figure, axes = drawn
        axes.axhline(1.0, color=MUTED, linewidth=1, linestyle=":")
        axes.set_ylabel("times its size at depth 1")
        low, high = axes.get_ylim()
        axes.set_ylim(min(0.0, low), max(2.0, high))
        return figure

    return draw


def _cosine(series: Sequence[_Series], _: SuiteResult) -> Figure | None:
    drawn = _depth_chart(series, lambda one: one.feature_cosine)
    if drawn is None:
        return None
    figure, axes = drawn
    axes.set_ylabel("cosine")
    low, _high = axes.get_ylim()
    axes.set_ylim(min(0.0, low), 1.0)
    return figure


def _accepted(*, conditional: bool) -> Callable[[Sequence[_Series], SuiteResult], Figure | None]:
    def draw(series: Sequence[_Series], suite: SuiteResult) -> Figure | None:
        attribute = "conditional_acceptance" if conditional else "acceptance"
        drawn = _depth_chart(series, lambda one: getattr(one, attribute), percent=True)
        if drawn is None:
            return None
        figure, axes = drawn
        for line in series:
            _band(axes, line, suite.level, conditional=conditional)
        axes.set_ylim(0, 1.02)
        return figure

    return draw


def _band(axes: Axes, line: _Series, level: float, *, conditional: bool) -> None:
    """Where each rate may well lie, by resampling prompts."""
    bootstrap = Bootstrap(level=level, resamples=1000)
    edges = []
    for depth in range(len(line.result.by_depth)):
        counts = {row.id: _rate(row, depth, conditional) for row in line.result.prompt_rows}
        found = bootstrap.pooled(counts)
        empty = found is None or found.low is None or found.high is None
        edges.append((np.nan, np.nan) if empty or found is None else (found.low, found.high))
    low, high = zip(*edges, strict=True)
    depths = [one.depth for one in line.result.by_depth]
    axes.fill_between(depths, low, high, color=line.style["color"], alpha=0.15, linewidth=0)


def _rate(row: PromptRow, depth: int, conditional: bool) -> tuple[float, float]:
    found = row.acceptance
    of = found.reached_by_depth if conditional else found.drafted_by_depth
    return (found.accepted_by_depth[depth], of[depth]) if depth < len(of) else (0, 0)


def _layers(series: Sequence[_Series], _: SuiteResult) -> Figure | None:
    parts = list(dict.fromkeys(share.part for line in series for share in line.result.fusion_shares))
    if not parts:
        return None
    figure, axes = new_figure((SIZE[0], 1.0 + 0.28 * len(parts) * max(len(series), 1.5)))
    thickness = 0.8 / len(series)
    for number, line in enumerate(series):
        shares = {share.part: share.share for share in line.result.fusion_shares}
        places = [i + (number - (len(series) - 1) / 2) * thickness for i in range(len(parts))]
        values = [shares.get(part, 0.0) for part in parts]
        bars = axes.barh(places, values, thickness * 0.92, color=line.style["color"], label=line.title)
        labels = [f"{100 * shares[part]:.0f} %" if part in shares else "" for part in parts]
        axes.bar_label(
            bars, labels=labels, padding=3, fontsize=8, bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.8}
        )
    for number in {len(line.result.fusion_shares) for line in series} - {0}:
        axes.axvline(1 / number, color=MUTED, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(parts)), parts)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(percentages())
    axes.set_xlim(0, max(0.5, axes.get_xlim()[1] * 1.08))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("share of the fused input (dotted: even)")
    put_legend(figure, axes, columns=2)
    return figure


def _reliability(series: Sequence[_Series], _: SuiteResult) -> Figure | None:
    if not any(one.count for line in series for one in line.result.calibration.bins):
        return None
    figure, axes = new_figure()
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=":")
    for line in series:
        bins = [one for one in line.result.calibration.bins if one.count]
        most = max((one.count for one in bins), default=1)
        x, y = [one.confidence or 0.0 for one in bins], [one.right or 0.0 for one in bins]
        style = {key: line.style[key] for key in ("color", "linestyle", "linewidth")}
        axes.plot(x, y, label=line.title, marker=line.style["marker"], markersize=4, **style)
        sizes = [10 + 110 * one.count / most for one in bins]
        axes.scatter(x, y, s=sizes, color=line.style["color"], marker=line.style["marker"], alpha=0.55, linewidth=0)
    frame(axes, None, percent=True)
    axes.xaxis.set_major_formatter(percentages())
    axes.set(xlim=(0, 1.02), ylim=(0, 1.04), xlabel="confidence", ylabel="drafts that are right")
    put_legend(figure, axes, columns=2)
    return figure


def _calibration_error(depth: DepthMetrics) -> float | None:
    return depth.calibration.error if depth.reached >= FEW_DRAFTS else None


def _confidence(series: Sequence[_Series], _: SuiteResult) -> Figure | None:
    drawn = _depth_chart(series, _calibration_error, percent=True)
    if drawn is None:
        return None
    figure, axes = drawn
    axes.set_ylabel("calibration error")
    axes.set_ylim(0, max(0.2, axes.get_ylim()[1]))
    return figure


def _forest(suite: SuiteResult) -> Figure:
    names = [name for name in suite.perturbations if name != UNPERTURBED]
    figure, axes = new_figure((6.0, 1.1 + 0.3 * len(names) * max(1, 0.5 * len(suite.names))))
    for number, drafter in enumerate(suite.names):
        offset = (number - (len(suite.names) - 1) / 2) * 0.7 / len(suite.names)
        style = {key: series_style(number)[key] for key in ("color", "marker", "markersize")}
        label: str | None = short_title(suite.titles[drafter])
        for place, name in enumerate(names):
            compared = suite.cell(drafter, name).compared
            if compared is None:
                continue
            ratio = compared.ratio
            low, high = (
                ratio.value if ratio.low is None else ratio.low,
                ratio.value if ratio.high is None else ratio.high,
            )
            axes.plot([low, high], [place + offset] * 2, color=style["color"], linewidth=1.8)
            axes.plot([ratio.value], [place + offset], linestyle="", label=label, **style)
            label = None
    axes.axvline(1.0, color=MUTED, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(names)), [short_title(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(True, axis="x", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"times the unperturbed acceptance length ({100 * suite.level:.0f} % intervals)")
    put_legend(figure, axes, columns=2)
    return figure


_OF_ONE: tuple[tuple[str, str, str, Callable[[DriftResult], Figure]], ...] = (
    ("attention", "attention", "Where attention goes", draw_attention),
    ("heat-map", "attention", "The same in numbers", draw_heat_map),
    ("heads", "heads", "Attention by head", draw_heads),
)
_OF_ALL: tuple[tuple[str, str, str, Callable[[Sequence[_Series], SuiteResult], Figure | None]], ...] = (
    ("feature-growth", "states", "Size of the state fed to the next depth", _growth("feature_growth")),
    ("hidden-growth", "states", "Size of the hidden state before the final norm", _growth("hidden_growth")),
    ("feature-cosine", "cosine", "Likeness of the state fed on to the target's own", _cosine),
    ("aux-layers", "layers", "What the fused input is made of", _layers),
    ("acceptance", "acceptance", "Rounds whose draft stands", _accepted(conditional=False)),
    ("conditional-acceptance", "acceptance", "Drafts that stand, if all before did", _accepted(conditional=True)),
    ("reliability", "calibration", "Confidence and what comes of it", _reliability),
    ("calibration-error", "calibration", "Calibration error by depth", _confidence),
)


def _mark_trained(axes: Axes, series: Sequence[_Series]) -> None:
    """A line after the last depth that a drafter was trained for; drafters of the same depth share it."""
    by_depth: dict[int, list[_Series]] = {}
    for line in series:
        trained, last = line.result.trained_depth, line.result.by_depth[-1].depth
        if trained is not None and trained < last:
            by_depth.setdefault(trained, []).append(line)
    for trained, lines in by_depth.items():
        colour = MUTED if len(lines) == len(series) else lines[0].style["color"]
        axes.axvline(trained + 0.5, color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(
            "trained to here",
            (trained + 0.5, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),  # above, where no curve can run through it
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=7.5,
            color=colour,
        )
