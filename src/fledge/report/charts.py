"""Matplotlib figures for a page: SVG that is part of the HTML and takes its colours from the page's light or dark."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

# Colours that the page knows by a name and changes with the scheme; the value is that of the light scheme.
INK, MUTED, GRID, PAPER = "#1b1f24", "#5b6471", "#d9dde3", "#fffffe"
SERIES = ("#d55e00", "#0072b2", "#009e73", "#b8508f", "#a67100", "#3a8fc0")  # after Okabe and Ito, but darker ends
_MARKERS, _DASHES = "osD^vP", ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
SIZE = (4.4, 3.0)
_LONGEST = 34  # of a name in a legend
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
    """Of a line that is drawn in several pictures: always the same colour, dash and marker."""
    shape = number + number // len(SERIES)  # where colours are used up, the same one comes with another marker
    return {
        "color": SERIES[number % len(SERIES)],
        "marker": _MARKERS[shape % len(_MARKERS)],
        "linestyle": _DASHES[shape % len(_DASHES)],
        "linewidth": 1.8,
        "markersize": 4,
    }


def short_title(title: str) -> str:
    """A name that fits into a legend, with both of its ends."""
    return title if len(title) <= _LONGEST else f"{title[: _LONGEST // 2 - 1]}…{title[-_LONGEST // 2 :]}"


def to_svg(figure: Figure, name: str, label: str) -> str:
    """Return one `<svg>` element. `name` keeps its ids apart from those of other figures, `label` is read out."""
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = _own_ids(text, name).replace("xlink:href", "href")
    text = re.sub(r"font: ((?:[\w.]+ )*?[\d.]+px) [^;\"]*", r"font: \1 sans-serif", text)
    text = re.sub(r"#[0-9a-f]{6}\b", _themed, text)
    box = re.search(r'viewBox="([^"]*)"', text)
    assert box is not None
    opening = f'<svg class="chart" role="img" aria-label="{escape(label)}" viewBox="{box[1]}">'
    return re.sub(r"\n\s*", "\n", opening + text[text.index(">") + 1 :])


def save_png(figure: Figure, path: Path, title: str) -> None:
    """Write a picture that stands by itself: with a title, on white. Under another name until it is whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    with matplotlib.rc_context(STYLE):
        figure.suptitle(title, fontsize=10.5, fontweight="bold")
        figure.savefig(temporary, dpi=160, format="png", facecolor="white")
    temporary.replace(path)


def _own_ids(text: str, name: str) -> str:
    """Drop the ids that nothing refers to, and make the others this figure's own."""
    wanted = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in wanted else "", text)
    return re.sub(r"(url\(#|href=\"#)", rf"\g<1>{name}-", text)


def _themed(match: re.Match[str]) -> str:
    name = _NAMES.get(match[0])
    return f"var(--{name}, {match[0]})" if name else match[0]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture, its section of the report (none: it is a file only), and the drafter it is about (None: all)."""

    name: str
    section: str
    title: str
    figure: Figure
    drafter: str | None = None


def percentages() -> PercentFormatter:
    """For an axis of shares, written as in the text."""
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


def put_legend(figure: Figure, axes: Axes, *, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if max(map(len, labels), default=0) > 20:
        columns = 1
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8, handlelength=2.4
    )
