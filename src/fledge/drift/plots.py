"""The pictures of a report (data/pictures.yaml). Curves of all drafters share axes; other pictures share scales."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fledge.drift.change import shares_by_depth
from fledge.drift.perturb import UNPERTURBED, texts
from fledge.drift.prompts import PROMPT_LABELS
from fledge.drift.result import AttentionMeans, DriftResult
from fledge.drift.suite import SuiteResult
from fledge.report import charts as drawing
from fledge.report.charts import INK, MUTED, PAPER, SIZE, Chart, frame, interval_edges, new_figure
from fledge.report.intervals import Bootstrap, Interval

_MANY_HEADS = 24
_DOTTED: dict[str, Any] = {"color": MUTED, "linewidth": 1, "linestyle": ":"}


class _Series(NamedTuple):
    """A drafter as a line, with the same colour, dash and marker in all pictures."""

    title: str
    result: DriftResult
    style: dict[str, Any]

    @property
    def depths(self) -> list[int]:
        return [one.depth for one in self.result.by_depth]


def charts(suite: SuiteResult, results: Mapping[str, DriftResult]) -> list[Chart]:
    """Return all pictures of what was measured. `results` are the unperturbed ones, by drafter."""
    shown = {
        name: _Series(drawing.short_title(title), results[name], drawing.series_style(number))
        for number, (name, title) in enumerate(suite.titles.items())
        if results[name].by_depth
    }
    several, pictures = list(shown.values()), texts("pictures")
    draw_one = {"attention": _attention, "heat-map": _heat_map, "heads": _heads}
    draw_all = {"aux-layers": _layers, "reliability": _reliability}
    found: list[Chart] = []

    def add(name: str, about: Mapping[str, Any], figure: Figure | None, drafter: str | None = None) -> None:
        if figure is not None:
            drawing.put_legend(figure, figure.axes[0], columns=3 if about is pictures["of_one"]["attention"] else 2)
            named = {key: about[key] for key in ("section", "title")}
            found.append(Chart(name=name, figure=figure, drafter=drafter, **named))

    with matplotlib.rc_context(drawing.STYLE):
        for what, about in pictures["of_one"].items():
            for number, (drafter, one) in enumerate(shown.items(), start=1):
                add(f"{what}-{number}", about, draw_one[what](one), drafter)
        for what, about in pictures["of_all"].items() if shown else ():
            by_depth = about.get("by_depth")
            add(what, about, _by_depth(several, suite.level, by_depth) if by_depth else draw_all[what](several))
        add("perturbations", pictures["perturbations"], _forest(suite))
    return found


def _by_depth(series: Sequence[_Series], level: float, how: Mapping[str, Any]) -> Figure | None:
    """Plot a figure of `DepthMetrics` against depth, a line for each drafter, with gaps where there is no value.

    Keys of `how`: the y axis has `limits` unless values lie beyond them; `level_at` draws a horizontal line;
    `accepted_of` (the counts that an acceptance rate is a share of) and `share` (of attention) add a band of intervals.
    Calibration of few drafts is left out.
    """
    value = attrgetter(how["figure"])
    least = texts("figures")["limits"]["few_drafts"] if how["figure"].startswith("calibration") else 0
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
        bootstrap, rates = Bootstrap(level=level, resamples=1000), list[Interval | None]()
        if whole := how.get("accepted_of"):
            rows = [(row.id, row.fresh_acceptance) for row in one.result.prompt_rows]
            for at in (slice(depth - 1, depth) for depth in one.depths):  # empty where a prompt's rounds end before
                counts = {id: (sum(row.accepted_by_depth[at]), sum(getattr(row, whole)[at])) for id, row in rows}
                rates.append(bootstrap.pooled(counts))
        elif "share" in how:
            rates += shares_by_depth(bootstrap, how["share"], one.result)
        if rates:
            middle, below, above = interval_edges(rates)
            colour = one.style["color"]
            axes.fill_between(one.depths, middle - below, middle + above, color=colour, alpha=0.15, linewidth=0)
    # A line after the depth that a drafter was trained to; drafters of the same depth share it.
    for trained in {one.result.trained_depth or 0 for one in series} - {0}:
        if alike := [one for one in series if one.result.trained_depth == trained < one.depths[-1]]:
            colour = MUTED if len(alike) == len(series) else alike[0].style["color"]
            axes.axvline(trained + 0.5, color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
            place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}
            axes.text(trained + 0.5, 1.01, "trained to here", fontsize=7.5, color=colour, **place)  # above all curves
    frame(axes, max((one.depths for one in series), key=len), percent=how.get("percent", False))
    (low, high), (bottom, top) = how["limits"], axes.get_ylim()
    axes.set_ylim(low if np.nanmin(drawn) >= low else bottom, high if np.nanmax(drawn) <= high else top)
    if "level_at" in how:
        axes.axhline(how["level_at"], **_DOTTED)
    axes.set_ylabel(how.get("label", ""))
    return picture


def _rows(names: Sequence[str], size: tuple[float, float], several: int = 1) -> tuple[Figure, Axes, Any]:
    """Return axes with a name at each row, from the top down, and y positions [several, rows] of marks in the rows."""
    figure, axes = new_figure(size)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes, np.arange(len(names)) + (np.arange(several) - (several - 1) / 2)[:, None] * 0.8 / several


def _layers(series: Sequence[_Series]) -> Figure | None:
    parts = list(dict.fromkeys(share.part for line in series for share in line.result.fusion_shares))
    if not parts:
        return None
    figure, axes, places = _rows(parts, (SIZE[0], 1.0 + 0.28 * len(parts) * max(len(series), 1.5)), len(series))
    for line, at in zip(series, places, strict=True):
        shares = {share.part: share.share for share in line.result.fusion_shares}
        values = [shares.get(part, 0.0) for part in parts]
        bars = axes.barh(at, values, 0.74 / len(series), color=line.style["color"], label=line.title)
        labels = [f"{100 * value:.0f} %" if value else "" for value in values]
        axes.bar_label(bars, labels, padding=3, fontsize=8, bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.8})
        axes.axvline(1 / max(1, len(shares)), **_DOTTED)
    axes.xaxis.set_major_formatter(drawing.percentages())
    axes.set_xlim(0, max(0.5, axes.get_xlim()[1] * 1.08))
    axes.set_xlabel("share of the fused input (dotted: even)")
    return figure


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
    return figure


def _forest(suite: SuiteResult) -> Figure | None:
    names, drafters = [name for name in suite.perturbations if name != UNPERTURBED], len(suite.names)
    if all(cell.compared is None for cell in suite.cells):
        return None
    size = (6.0, 1.1 + 0.3 * len(names) * max(1, 0.5 * drafters))
    figure, axes, places = _rows([drawing.short_title(name) for name in names], size, drafters)
    for number, (drafter, title) in enumerate(suite.titles.items()):
        compared = [suite.cell(drafter, name).compared for name in names]
        ratios, *reach = interval_edges([None if one is None else one.ratio for one in compared])
        style = drawing.series_style(number) | {"linestyle": "", "elinewidth": 1.8}
        axes.errorbar(ratios, places[number], xerr=reach, label=drawing.short_title(title), **style)
    axes.axvline(1.0, **_DOTTED)
    axes.set_xlim(left=0)
    axes.grid(True, axis="x", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(f"times the unperturbed acceptance length ({100 * suite.level:.0f} % intervals)")
    return figure


def _shares(result: DriftResult) -> dict[str, list[float]]:
    """Attention by depth on the segments that occur, from the bottom of the stack up."""
    return {
        name: [one.attention.mass[name] for one in result.by_depth]
        for name in texts("pictures")["segments"]
        if any(one.uniform_mass[name] > 0 for one in result.by_depth)
    }


def _attention(one: _Series) -> Figure:
    figure, axes = new_figure()
    shares, even = _shares(one.result), [depth.uniform_mass["drafted"] for depth in one.result.by_depth]
    # A stack of a single depth would have no width.
    x, wide = (one.depths, 1) if len(one.depths) > 1 else ([0.6, 1.4], 2)
    titles, colours = zip(*(texts("pictures")["segments"][name] for name in shares), strict=True)
    bands = [share * wide for share in shares.values()]
    axes.stackplot(x, bands, labels=titles, colors=colours, edgecolor=PAPER, linewidth=0.8)
    axes.plot(one.depths, even, color=INK, linestyle=":", linewidth=1.6, label="own drafts if even")
    frame(axes, one.depths, percent=True)
    axes.set(xlim=(x[0], x[-1]), ylim=(0, 1))
    return figure


def _heat_map(one: _Series) -> Figure:
    shares = _shares(one.result)
    names = [texts("pictures")["segments"][name][0] for name in reversed(shares)]
    figure, axes, _ = _rows(names, (SIZE[0], 0.85 + 0.3 * len(shares)))
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
    kinds: dict[str, Callable[[AttentionMeans], float]] = {
        "recent tokens": lambda one: one.recent,
        "prompt": lambda one: sum(one.mass[label] for label in PROMPT_LABELS),
        "first token": lambda one: one.mass["sink"],
    }
    style: dict[str, Any] = {"cmap": "Blues", "vmin": 0, "vmax": 1, "aspect": "auto", "interpolation": "nearest"}
    for axes, (title, share) in zip(panels, kinds.items(), strict=True):
        shares = [[share(head.attention) for head in depth.heads] for depth in one.result.by_depth]
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
