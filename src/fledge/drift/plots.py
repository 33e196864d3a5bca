"""The pictures of a report (data/pictures.yaml). Drafters share axes where curves compare, and scales elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fledge.drift.perturb import UNPERTURBED, texts
from fledge.drift.result import DriftResult
from fledge.drift.segments import PROMPT_LABELS
from fledge.drift.summary import SuiteResult
from fledge.report import charts as drawing
from fledge.report.charts import INK, MUTED, PAPER, SIZE, Chart, frame, interval_edges, new_figure
from fledge.report.intervals import Bootstrap

FEW_DRAFTS = 10  # their calibration is all chance
_MANY_HEADS = 24
_DOTTED: dict[str, Any] = {"color": MUTED, "linewidth": 1, "linestyle": ":"}


@dataclass(frozen=True, kw_only=True)
class _Series:
    """A drafter as a line: always of the same colour, dash and marker."""

    title: str
    result: DriftResult
    style: dict[str, Any]

    @property
    def depths(self) -> list[int]:
        return [one.depth for one in self.result.by_depth]


def charts(suite: SuiteResult, results: Mapping[str, DriftResult]) -> list[Chart]:
    """All pictures. `results` are the unperturbed ones, by drafter; what was not measured has no picture."""
    shown = {
        name: _Series(title=drawing.short_title(title), result=results[name], style=drawing.series_style(number))
        for number, (name, title) in enumerate(suite.titles.items())
        if results[name].by_depth
    }
    several = list(shown.values())
    draw_one = {"attention": _attention, "heat-map": _heat_map, "heads": _heads}
    draw_all = {"aux-layers": _layers, "reliability": _reliability}
    drawn: list[tuple[str, str | None, dict[str, str], Figure | None]] = []
    with matplotlib.rc_context(drawing.STYLE):
        for what, about in texts("pictures")["of_one"].items():
            for number, (drafter, one) in enumerate(shown.items(), start=1):
                drawn.append((f"{what}-{number}", drafter, about, draw_one[what](one)))
        for what, about in texts("pictures")["of_all"].items() if shown else ():
            if what in draw_all:
                figure = draw_all[what](several)
            else:
                figure = _by_depth(several, suite.level, **about["by_depth"])
            drawn.append((what, None, about, figure))
        drawn.append(("perturbations", None, texts("pictures")["perturbations"], _forest(suite)))
    return [
        Chart(name=name, section=about["section"], title=about["title"], figure=figure, drafter=drafter)
        for name, drafter, about, figure in drawn
        if figure is not None
    ]


def _by_depth(
    series: Sequence[_Series],
    level: float,
    *,
    figure: str,
    limits: tuple[float, float],
    label: str = "",
    percent: bool = False,
    level_at: float | None = None,
    accepted_of: str | None = None,
) -> Figure | None:
    """A figure of `DepthMetrics` against depth, a line for each drafter, gaps where there is nothing.

    The axis has `limits` unless something lies beyond them; `level_at` is drawn across. `accepted_of`, the count that
    an acceptance rate is a share of, adds a band of its intervals. A calibration of few drafts is left out.
    """
    value, least = attrgetter(figure), FEW_DRAFTS if figure.startswith("calibration") else 0
    lines = [
        np.array([value(one) if one.reached >= least else None for one in line.result.by_depth], dtype=float)
        for line in series
    ]
    drawn = np.concatenate(lines)
    if np.isnan(drawn).all():
        return None
    picture, axes = new_figure()
    for one, line in zip(series, lines, strict=True):
        axes.plot(one.depths, line, label=one.title, **one.style)
        if accepted_of is not None:
            low, high = _band(one, level, accepted_of)
            axes.fill_between(one.depths, low, high, color=one.style["color"], alpha=0.15, linewidth=0)
    _mark_trained(axes, series)
    frame(axes, max((one.depths for one in series), key=len), percent=percent)
    bottom, top = axes.get_ylim()
    bottom = limits[0] if np.nanmin(drawn) >= limits[0] else bottom
    axes.set_ylim(bottom, limits[1] if np.nanmax(drawn) <= limits[1] else top)
    if level_at is not None:
        axes.axhline(level_at, **_DOTTED)
    axes.set_ylabel(label)
    return _with_legend(picture, axes)


def _with_legend(figure: Figure, axes: Axes, columns: int = 2) -> Figure:
    drawing.put_legend(figure, axes, columns=columns)
    return figure


def _band(one: _Series, level: float, accepted_of: str) -> tuple[Any, Any]:
    """Where the rate at each depth may well lie, by resampling prompts; one whose rounds end before counts nothing."""
    rows = {row.id: row.acceptance for row in one.result.prompt_rows}
    rates = []
    for at in (slice(depth - 1, depth) for depth in one.depths):
        counts = {id: (sum(row.accepted_by_depth[at]), sum(getattr(row, accepted_of)[at])) for id, row in rows.items()}
        rates.append(Bootstrap(level=level, resamples=1000).pooled(counts))
    middle, below, above = interval_edges(rates)
    return middle - below, middle + above


def _mark_trained(axes: Axes, series: Sequence[_Series]) -> None:
    """A line after the last depth that a drafter was trained for; drafters of the same depth share it."""
    for trained in {line.result.trained_depth or 0 for line in series} - {0}:
        lines = [one for one in series if one.result.trained_depth == trained < one.depths[-1]]
        if lines:
            colour = MUTED if len(lines) == len(series) else lines[0].style["color"]
            axes.axvline(trained + 0.5, color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
            place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}
            axes.text(trained + 0.5, 1.01, "trained to here", fontsize=7.5, color=colour, **place)  # above all curves


def _rows(names: Sequence[str], size: tuple[float, float]) -> tuple[Figure, Axes]:
    """Axes with a name at each row, from the top down."""
    figure, axes = new_figure(size)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _layers(series: Sequence[_Series]) -> Figure | None:
    parts = list(dict.fromkeys(share.part for line in series for share in line.result.fusion_shares))
    if not parts:
        return None
    figure, axes = _rows(parts, (SIZE[0], 1.0 + 0.28 * len(parts) * max(len(series), 1.5)))
    thickness = 0.8 / len(series)
    for number, line in enumerate(series):
        shares = {share.part: share.share for share in line.result.fusion_shares}
        places = np.arange(len(parts)) + (number - (len(series) - 1) / 2) * thickness
        values = [shares.get(part, 0.0) for part in parts]
        bars = axes.barh(places, values, thickness * 0.92, color=line.style["color"], label=line.title)
        labels = [f"{100 * shares[part]:.0f} %" if part in shares else "" for part in parts]
        box = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8}
        axes.bar_label(bars, labels=labels, padding=3, fontsize=8, bbox=box)
        axes.axvline(1 / max(1, len(shares)), **_DOTTED)
    axes.xaxis.set_major_formatter(drawing.percentages())
    axes.set_xlim(0, max(0.5, axes.get_xlim()[1] * 1.08))
    axes.set_xlabel("share of the fused input (dotted: even)")
    return _with_legend(figure, axes)


def _reliability(series: Sequence[_Series]) -> Figure | None:
    if not any(one.count for line in series for one in line.result.calibration.bins):
        return None
    figure, axes = new_figure()
    axes.plot([0, 1], [0, 1], **_DOTTED)
    for line in series:
        bins = [(one.confidence, one.right, one.count) for one in line.result.calibration.bins if one.count]
        x, y, counts = np.array(bins, dtype=float).reshape(-1, 3).T
        axes.plot(x, y, label=line.title, **line.style)
        sizes = 10 + 110 * counts / counts.max(initial=1)
        axes.scatter(x, y, s=sizes, color=line.style["color"], marker=line.style["marker"], alpha=0.55, linewidth=0)
    frame(axes, None, percent=True)
    axes.xaxis.set_major_formatter(drawing.percentages())
    axes.set(xlim=(0, 1.02), ylim=(0, 1.04), xlabel="confidence", ylabel="drafts that are right")
    return _with_legend(figure, axes)


def _forest(suite: SuiteResult) -> Figure | None:
    names, drafters = [name for name in suite.perturbations if name != UNPERTURBED], len(suite.names)
    if all(cell.compared is None for cell in suite.cells):
        return None
    size = (6.0, 1.1 + 0.3 * len(names) * max(1, 0.5 * drafters))
    figure, axes = _rows([drawing.short_title(name) for name in names], size)
    for number, (drafter, title) in enumerate(suite.titles.items()):
        places = np.arange(len(names)) + (number - (drafters - 1) / 2) * 0.7 / drafters
        compared = [suite.cell(drafter, name).compared for name in names]
        ratios, *reach = interval_edges([None if one is None else one.ratio for one in compared])
        style = drawing.series_style(number) | {"linestyle": "", "elinewidth": 1.8}
        axes.errorbar(ratios, places, xerr=reach, label=drawing.short_title(title), **style)
    axes.axvline(1.0, **_DOTTED)
    axes.set_xlim(left=0)
    axes.grid(True, axis="x", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(f"times the unperturbed acceptance length ({100 * suite.level:.0f} % intervals)")
    return _with_legend(figure, axes)


def _shares(result: DriftResult) -> dict[str, list[float]]:
    """Attention by depth on the position classes that there was anything of, from the bottom of the stack up."""
    return {
        name: [one.attention.mass[name] for one in result.by_depth]
        for name in texts("pictures")["segments"]
        if any(one.uniform_mass[name] > 0 for one in result.by_depth)
    }


def _attention(one: _Series) -> Figure:
    figure, axes = new_figure()
    depths, shares = one.depths, _shares(one.result)
    # A stack of one depth has no width: it gets some.
    x, wide = (depths, 1) if len(depths) > 1 else ([0.6, 1.4], 2)
    titles, colours = zip(*(texts("pictures")["segments"][name] for name in shares), strict=True)
    bands = [share * wide for share in shares.values()]
    axes.stackplot(x, bands, labels=titles, colors=colours, edgecolor=PAPER, linewidth=0.8)
    even = [depth.uniform_mass["drafted"] for depth in one.result.by_depth]
    axes.plot(depths, even, color=INK, linestyle=":", linewidth=1.6, label="own drafts if even")
    frame(axes, depths, percent=True)
    axes.set(xlim=(x[0], x[-1]), ylim=(0, 1))
    return _with_legend(figure, axes, columns=3)


def _heat_map(one: _Series) -> Figure:
    shares = _shares(one.result)
    names = [texts("pictures")["segments"][name][0] for name in reversed(shares)]
    figure, axes = _rows(names, (SIZE[0], 0.85 + 0.3 * len(shares)))
    cells = np.array(list(shares.values()))[::-1]
    edges = [np.arange(count + 1) - 0.5 for count in cells.shape]
    axes.pcolormesh(edges[1], edges[0], cells, cmap="Blues", vmin=0, vmax=1, edgecolors=PAPER, linewidth=0.8)
    for (row, column), share in np.ndenumerate(cells):
        colour = "#0b1a2e" if share < 0.6 else "#f7fbff"
        axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7.5, color=colour)
    axes.set_xticks(range(len(one.depths)), [str(depth) for depth in one.depths])
    drawing.unframed(axes)
    axes.set_xlabel("draft depth (cells: % of attention)")
    return figure


def _heads(one: _Series) -> Figure | None:
    heads, depths = one.result.by_depth[0].heads, one.depths
    if len(heads) < 2:
        return None
    figure = Figure(figsize=(SIZE[0], min(7.5, 1.3 + 0.17 * len(heads))), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    kinds = {"own drafts": ("drafted",), "prompt": PROMPT_LABELS, "first token": ("sink",)}
    style: dict[str, Any] = {"cmap": "Blues", "vmin": 0, "vmax": 1, "aspect": "auto", "interpolation": "nearest"}
    for axes, (title, labels) in zip(panels, kinds.items(), strict=True):
        shares = [[sum(h.attention.mass[label] for label in labels) for h in d.heads] for d in one.result.by_depth]
        extent = (depths[0] - 0.5, depths[-1] + 0.5, len(heads) - 0.5, -0.5)
        image = axes.imshow(np.array(shares).T, extent=extent, **style)
        axes.set_title(title)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        drawing.unframed(axes)
    step = 1 + (len(heads) - 1) // _MANY_HEADS
    panels[0].set_yticks(range(0, len(heads), step), [f"{h.layer}.{h.head}" for h in heads[::step]], fontsize=6.5)
    panels[0].set_ylabel("layer.head")
    figure.colorbar(image, ax=panels, fraction=0.05, format=drawing.percentages()).outline.set_visible(False)
    return figure
