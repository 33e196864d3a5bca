"""The pictures of a report. Drafters share axes where their curves compare, and scales where they do not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fledge.drift.perturb import UNPERTURBED
from fledge.drift.result import DriftResult
from fledge.drift.segments import PROMPT_LABELS
from fledge.drift.summary import SuiteResult
from fledge.report.charts import (
    INK,
    MUTED,
    PAPER,
    SIZE,
    STYLE,
    Chart,
    frame,
    interval_edges,
    new_figure,
    percentages,
    put_legend,
    series_style,
    short_title,
    unframed,
)
from fledge.report.intervals import Bootstrap, Floats

FEW_DRAFTS = 10  # their calibration is all chance
_MANY_HEADS = 24
# Position classes from the bottom of the stack up: what drafts gain and what the first token loses both have a straight
# edge to be read from. By label: what to call it, and its colour.
SEGMENTS = {
    "drafted": ("own drafts", "#d1495b"),
    "output": ("verified output", "#edae49"),
    "prompt": ("prompt", "#5b9f6e"),
    "user": ("user", "#3f8f6b"),
    "assistant": ("earlier answers", "#8fc08a"),
    "tool": ("tool results", "#b0a160"),
    "system": ("system prompt", "#5fb3b3"),
    "template": ("template", "#9a8fc4"),
    "sink": ("first token", "#30638e"),
}


def charts(suite: SuiteResult, results: Mapping[str, DriftResult]) -> list[Chart]:
    """All pictures. `results` are the unperturbed ones, by drafter; what was not measured has no picture."""
    shown = {name: results[name] for name in suite.names if results[name].by_depth}
    several = []
    with matplotlib.rc_context(STYLE):
        for what, section, title, draw in _OF_ONE:
            several += [
                Chart(name=f"{what}-{number}", section=section, title=title, figure=draw(result), drafter=name)
                for number, (name, result) in enumerate(shown.items(), start=1)
                if section != "heads" or len(result.by_depth[0].heads) > 1
            ]
        series = [
            _Series(title=short_title(suite.titles[name]), result=shown[name], style=series_style(number))
            for number, name in enumerate(suite.names)
            if name in shown
        ]
        several += [
            Chart(name=name, section=section, title=title, figure=figure)
            for name, section, title, draw_all in (_OF_ALL if series else ())
            if (figure := draw_all(series, suite.level)) is not None
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

    @property
    def depths(self) -> list[int]:
        return [one.depth for one in self.result.by_depth]


_DrawAll = Callable[[Sequence[_Series], float], Figure | None]  # level of the intervals; None: nothing was measured


def _by_depth(
    figure_name: str,
    *,
    label: str = "",
    limits: tuple[float, float],
    percent: bool = False,
    level_at: float | None = None,
    accepted_of: str | None = None,
    least_reached: int = 0,
) -> _DrawAll:
    """A figure of `DepthMetrics` against depth, a line for each drafter, gaps where there is nothing.

    The axis has `limits` unless something lies beyond them; `level_at` is drawn across. `accepted_of`, the count that
    an acceptance rate is a share of, adds a band of its intervals. Depths that fewer than `least_reached` rounds
    reached are left out.
    """
    value = attrgetter(figure_name)

    def draw(series: Sequence[_Series], level: float) -> Figure | None:
        lines = [
            np.array([value(one) if one.reached >= least_reached else None for one in s.result.by_depth], dtype=float)
            for s in series
        ]
        drawn = np.concatenate(lines)
        if np.isnan(drawn).all():
            return None
        figure, axes = new_figure()
        for one, line in zip(series, lines, strict=True):
            axes.plot(one.depths, line, label=one.title, **one.style)
            if accepted_of is not None:
                low, high = _band(one.result, level, accepted_of)
                axes.fill_between(one.depths, low, high, color=one.style["color"], alpha=0.15, linewidth=0)
        _mark_trained(axes, series)
        frame(axes, max((one.depths for one in series), key=len), percent=percent)
        bottom, top = axes.get_ylim()
        bottom = limits[0] if np.nanmin(drawn) >= limits[0] else bottom
        axes.set_ylim(bottom, limits[1] if np.nanmax(drawn) <= limits[1] else top)
        if level_at is not None:
            axes.axhline(level_at, color=MUTED, linewidth=1, linestyle=":")
        axes.set_ylabel(label)
        put_legend(figure, axes, columns=2)
        return figure

    return draw


def _band(result: DriftResult, level: float, accepted_of: str) -> tuple[Floats, Floats]:
    """Where the rate at each depth may well lie, by resampling prompts."""
    bootstrap = Bootstrap(level=level, resamples=1000)
    rates = []
    for depth in range(len(result.by_depth)):
        counts = {}
        for row in result.prompt_rows:
            accepted, of = row.acceptance.accepted_by_depth, getattr(row.acceptance, accepted_of)
            counts[row.id] = (accepted[depth], of[depth]) if depth < len(of) else (0, 0)
        rates.append(bootstrap.pooled(counts))
    middle, below, above = interval_edges(rates)
    return middle - below, middle + above


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


def _layers(series: Sequence[_Series], _: float) -> Figure | None:
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


def _reliability(series: Sequence[_Series], _: float) -> Figure | None:
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


def _forest(suite: SuiteResult) -> Figure:
    names = [name for name in suite.perturbations if name != UNPERTURBED]
    figure, axes = new_figure((6.0, 1.1 + 0.3 * len(names) * max(1, 0.5 * len(suite.names))))
    titles = [short_title(title) for title in suite.titles.values()]
    for number, drafter in enumerate(suite.names):
        offset = (number - (len(suite.names) - 1) / 2) * 0.7 / len(suite.names)
        compared = [suite.cell(drafter, name).compared for name in names]
        ratios, *reach = interval_edges([None if one is None else one.ratio for one in compared])
        style = series_style(number) | {"linestyle": "", "elinewidth": 1.8}
        axes.errorbar(ratios, np.arange(len(names)) + offset, xerr=reach, label=titles[number], **style)
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


def segments_of(result: DriftResult) -> list[str]:
    """The position classes that there was anything of, from the bottom of the stack up."""
    return [name for name in SEGMENTS if any(one.uniform_mass[name] > 0 for one in result.by_depth)]


def _attention(result: DriftResult) -> Figure:
    figure, axes = new_figure()
    depths = [one.depth for one in result.by_depth]
    names = segments_of(result)
    shares = [[one.attention.mass[name] for one in result.by_depth] for name in names]
    # A stack of one depth has no width: it gets some.
    x, bands = (depths, shares) if len(depths) > 1 else ([0.6, 1.4], [[*share, *share] for share in shares])
    titles, colours = zip(*(SEGMENTS[name] for name in names), strict=True)
    axes.stackplot(x, bands, labels=titles, colors=colours, edgecolor=PAPER, linewidth=0.8)
    even = [one.uniform_mass["drafted"] for one in result.by_depth]
    axes.plot(depths, even, color=INK, linestyle=":", linewidth=1.6, label="own drafts if even")
    frame(axes, depths, percent=True)
    axes.set_ylim(0, 1)
    axes.set_xlim(x[0], x[-1])
    put_legend(figure, axes, columns=3)
    return figure


def _heat_map(result: DriftResult) -> Figure:
    names = segments_of(result)[::-1]
    depths = [one.depth for one in result.by_depth]
    figure, axes = new_figure((SIZE[0], 0.85 + 0.3 * len(names)))
    shares = np.array([[one.attention.mass[name] for one in result.by_depth] for name in names])
    axes.pcolormesh(shares, cmap="Blues", vmin=0, vmax=1, edgecolors=PAPER, linewidth=0.8)
    for (row, column), share in np.ndenumerate(shares):
        axes.text(
            column + 0.5,
            row + 0.5,
            f"{100 * share:.0f}",
            ha="center",
            va="center",
            fontsize=8 if len(depths) <= 14 else 6,
            color="#0b1a2e" if share < 0.6 else "#f7fbff",
        )
    axes.set_yticks(np.arange(len(names)) + 0.5, [SEGMENTS[name][0] for name in names])
    axes.set_xticks(np.arange(len(depths)) + 0.5, [str(depth) for depth in depths])
    axes.invert_yaxis()
    unframed(axes)
    axes.set_xlabel("draft depth (cells: % of attention)")
    return figure


def _heads(result: DriftResult) -> Figure:
    heads = result.by_depth[0].heads
    depths = [one.depth for one in result.by_depth]
    figure = Figure(figsize=(SIZE[0], min(7.5, 1.3 + 0.17 * len(heads))), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    kinds = {"own drafts": ("drafted",), "prompt": PROMPT_LABELS, "first token": ("sink",)}
    for axes, (title, labels) in zip(panels, kinds.items(), strict=True):
        shares = [[sum(h.attention.mass[label] for label in labels) for h in one.heads] for one in result.by_depth]
        image = axes.imshow(
            np.array(shares).T,
            cmap="Blues",
            vmin=0,
            vmax=1,
            aspect="auto",
            interpolation="nearest",
            extent=(depths[0] - 0.5, depths[-1] + 0.5, len(heads) - 0.5, -0.5),
        )
        axes.set_title(title)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        unframed(axes)
    panels[1].set_xlabel("draft depth")
    step = 1 + (len(heads) - 1) // _MANY_HEADS
    panels[0].set_yticks(
        range(0, len(heads), step), [f"{h.layer}.{h.head}" for h in heads[::step]], fontsize=7 if step == 1 else 6
    )
    panels[0].set_ylabel("layer.head")
    bar = figure.colorbar(image, ax=panels, fraction=0.05, format=percentages())
    bar.outline.set_visible(False)
    return figure


_OF_ONE: tuple[tuple[str, str, str, Callable[[DriftResult], Figure]], ...] = (
    ("attention", "attention", "Where attention goes", _attention),
    ("heat-map", "attention", "The same in numbers", _heat_map),
    ("heads", "heads", "Attention by head", _heads),
)
_GROWTH: dict[str, Any] = {"label": "times its size at depth 1", "limits": (0.0, 2.0), "level_at": 1.0}
_RATE: dict[str, Any] = {"limits": (0.0, 1.02), "percent": True}
_ERROR: dict[str, Any] = {"label": "calibration error", "limits": (0.0, 0.2), "percent": True}
_COSINE = _by_depth("feature_cosine", label="cosine", limits=(0.0, 1.0))
_FED, _HIDDEN = (_by_depth(f"{state}_growth", **_GROWTH) for state in ("feature", "hidden"))
_ALL_ROUNDS = _by_depth("acceptance", accepted_of="drafted_by_depth", **_RATE)
_IF_REACHED = _by_depth("conditional_acceptance", accepted_of="reached_by_depth", **_RATE)
_CALIBRATION = _by_depth("calibration.error", least_reached=FEW_DRAFTS, **_ERROR)
_OF_ALL: tuple[tuple[str, str, str, _DrawAll], ...] = (
    ("feature-growth", "states", "Size of the state fed to the next depth", _FED),
    ("hidden-growth", "states", "Size of the hidden state before the final norm", _HIDDEN),
    ("feature-cosine", "cosine", "Likeness of the state fed on to the target's own", _COSINE),
    ("aux-layers", "layers", "What the fused input is made of", _layers),
    ("acceptance", "acceptance", "Rounds whose draft stands", _ALL_ROUNDS),
    ("conditional-acceptance", "acceptance", "Drafts that stand, if all before did", _IF_REACHED),
    ("reliability", "calibration", "Confidence and what comes of it", _reliability),
    ("calibration-error", "calibration", "Calibration error by depth", _CALIBRATION),
)
