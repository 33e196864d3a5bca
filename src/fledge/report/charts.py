"""Matplotlib figures for a page: SVG inside the HTML, with the colours of the page's light or dark scheme."""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, PercentFormatter

from fledge.files import atomic_path
from fledge.report.intervals import Floats, Interval

# Colours that are CSS variables of the page; these are their values in the light scheme.
INK, MUTED, GRID, PAPER = "#1b1f24", "#5b6471", "#d9dde3", "#fffffe"
SERIES = ("#d55e00", "#0072b2", "#009e73", "#b8508f", "#a67100", "#3a8fc0")  # after Okabe and Ito, but darker ends
_MARKERS, _DASHES = "osD^vP", ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
SIZE = (4.4, 3.0)
Lines = Mapping[str, tuple[Mapping[str, Any], Mapping[Any, Interval]]]  # by label: matplotlib's style, and figures
_LONGEST = 34  # of a name in a legend
_TITLE_WIDTH, _TITLE_INCHES = 50, 0.18  # letters of a picture's title in a line, and the height of a line
_LEGEND_INCHES, _LEGEND_ROWS = 0.17, 2  # of a row; rows that the usual size of a figure has room for
_NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"} | {c: f"series-{i}" for i, c in enumerate(SERIES)}

STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be searched and read out, and it is small
    "font.size": 9,
    "axes.titlesize": 9.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": GRID,
    "hatch.color": INK,
    "figure.constrained_layout.use": True,
}


def series_style(number: int) -> dict[str, Any]:
    """Return the style of a line, which is the same in all pictures: colour, dash and marker."""
    shape = number + number // len(SERIES)  # when colours repeat, markers differ
    return {
        "color": SERIES[number % len(SERIES)],
        "marker": _MARKERS[shape % len(_MARKERS)],
        "linestyle": _DASHES[shape % len(_DASHES)],
        "linewidth": 1.8,
        "markersize": 4,
    }


def short_title(title: str) -> str:
    """Shorten a name in the middle so that it fits into a legend."""
    return title if len(title) <= _LONGEST else f"{title[: _LONGEST // 2 - 1]}…{title[-_LONGEST // 2 :]}"


def to_svg(figure: Figure, name: str, label: str) -> str:
    """Return one `<svg>` element. `name` makes its ids unique on the page; `label` is for screen readers.

    Unused ids are removed, and colours are replaced by the page's CSS variables.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    wanted = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in wanted else "", text).replace("xlink:href", "href")
    text = re.sub(r"font: ((?:[\w.]+ )*?[\d.]+px) [^;\"]*", r"font: \1 sans-serif", text)
    text = re.sub(r"#[0-9a-f]{6}\b", lambda m: f"var(--{_NAMES[m[0]]}, {m[0]})" if m[0] in _NAMES else m[0], text)
    box = re.search(r'viewBox="([^"]*)"', text)
    assert box is not None
    opening = f'<svg class="chart" role="img" aria-label="{escape(label)}" viewBox="{box[1]}">'
    return re.sub(r"\n\s*", "\n", opening + text[text.index(">") + 1 :])


def save_png(figure: Figure, path: Path, title: str) -> None:
    """Write a PNG with a white background and a title above the picture."""
    lines = [line for one in title.split("\n") for line in wrap(one, _TITLE_WIDTH)]
    figure.set_figheight(figure.get_figheight() + _TITLE_INCHES * len(lines))
    with matplotlib.rc_context(STYLE), atomic_path(path) as temporary:
        figure.suptitle("\n".join(lines), fontsize=10.5, fontweight="bold")
        figure.savefig(temporary, dpi=160, format="png", facecolor="white")


Drawn = tuple[str, str, str, Figure | None]  # name, section, title and picture, if there is anything to show


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture, its section of the report (empty: it is a file only), and its drafter (None: all of them)."""

    name: str
    section: str
    title: str
    figure: Figure
    drafter: str | None = None

    @property
    def svg(self) -> Markup:
        return Markup(to_svg(self.figure, self.name, self.title))


def charts_of(drawn: Iterable[Drawn]) -> list[Chart]:
    return [Chart(name=n, section=s, title=t, figure=figure) for n, s, t, figure in drawn if figure is not None]


def percentages() -> PercentFormatter:
    """Return a formatter for an axis of shares."""
    return PercentFormatter(1.0, decimals=0, symbol=" %")


def new_figure(size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")  # without pyplot, which wants a display or a global choice
    return figure, figure.subplots()


def frame(axes: Axes, depths: Sequence[int] | None, *, percent: bool) -> None:
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if depths is not None:
        axes.set_xlabel("draft depth")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=min(len(depths), 12), integer=True))
        axes.set_xlim(depths[0] - 0.3, depths[-1] + 0.3)
    if percent:
        axes.yaxis.set_major_formatter(percentages())


def unframed(axes: Axes) -> None:
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("draft depth")


def put_legend(figure: Figure, axes: Axes, *, columns: int = 3) -> None:
    """Put the legend below the axes, in as many columns as fit. The figure grows, the axes keep their size."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    size, handle = 8.0, 2.4
    # In font sizes: a letter is about 0.55 wide; between handle, label and the next column there is about 2.5 more.
    widest = size * (handle + 2.5 + 0.55 * max(map(len, labels)))
    columns = max(1, min(columns, int(72 * figure.get_figwidth() / widest), len(labels)))
    rows = ceil(len(labels) / columns)
    figure.set_figheight(figure.get_figheight() + _LEGEND_INCHES * max(0, rows - _LEGEND_ROWS))
    look: dict[str, Any] = {"frameon": False, "fontsize": size, "handlelength": handle}
    figure.legend(handles, labels, loc="outside lower center", ncols=ceil(len(labels) / rows), **look)


def interval_bars(axes: Axes, x: Sequence[float], values: Sequence[Interval | None], **style: Any) -> None:
    """Draw points with their intervals, and a line through them with gaps where there is no value."""
    middle, *reach = interval_edges(values)
    axes.errorbar(x, middle, yerr=reach, capsize=2.5, elinewidth=1.2, **style)


def interval_edges(values: Sequence[Interval | None]) -> tuple[Floats, Floats, Floats]:
    """Return values, and the lengths of their intervals below and above; NaN where there is no value."""
    ends = [(np.nan,) * 3 if one is None else (one.value, *one.ends) for one in values]
    middle, low, high = np.array(ends, dtype=np.float64).reshape(-1, 3).T
    return middle, np.abs(middle - low), np.abs(high - middle)


def lines_by_depth(lines: Lines, *, percent: bool = False) -> Figure | None:
    """Plot acceptance length against draft depth, or with `percent` the share of accepted drafts at each depth.

    Lines are shifted a little against each other. Returns None without data, or if there are lengths of one depth only.
    """
    lines = {label: line for label, line in lines.items() if line[1]}
    if not any(len(values) > 1 or percent for _, values in lines.values()):
        return None
    figure, axes = new_figure()
    for number, (label, (style, values)) in enumerate(lines.items()):
        x = [depth + (0.06 if percent else 0.05) * (number - (len(lines) - 1) / 2) for depth in values]
        interval_bars(axes, x, list(values.values()), label=short_title(label), **style)
    depths = sorted({depth for _, values in lines.values() for depth in values})
    frame(axes, depths, percent=percent)
    if percent:
        axes.set(ylim=(0, 1.02), ylabel="rounds whose draft stands")
    else:
        axes.xaxis.set_major_locator(FixedLocator(depths))
        axes.set_ylim(bottom=1.0)
        axes.set(xlabel="tokens drafted ahead (K)", ylabel="acceptance length")
    put_legend(figure, axes)
    return figure


def forest(lines: Lines) -> Figure | None:
    """Plot acceptance lengths and their intervals by name, from the top down; None if there is only one name."""
    names = list(dict.fromkeys(name for _, values in lines.values() for name in values))
    if len(names) < 2:
        return None
    figure, axes = new_figure((SIZE[0], 1.1 + 0.16 * len(names) * max(2, len(lines))))
    for number, (title, (style, values)) in enumerate(lines.items()):
        y = [names.index(name) + (number - (len(lines) - 1) / 2) * 0.7 / len(lines) for name in values]
        middle, *reach = interval_edges(list(values.values()))
        points = {**style, "linestyle": "", "elinewidth": 1.4, "label": short_title(title)}
        axes.errorbar(middle, y, xerr=reach, **points)
    axes.set_yticks(range(len(names)), [short_title(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    frame(axes, None, percent=False)
    axes.set_xlim(left=1.0)
    axes.set_xlabel("acceptance length")
    put_legend(figure, axes)
    return figure
