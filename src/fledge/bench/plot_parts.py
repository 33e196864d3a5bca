"""What the pictures of a benchmark report have in common: colours, points with intervals, axes and legends."""

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fledge.bench.families import drafter_of
from fledge.bench.part import Part
from fledge.evaluation.results import Load
from fledge.report.charts import INK, SERIES, series_style
from fledge.report.intervals import Floats, Interval

_ROW_INCHES = 0.17  # of a legend
_ROWS_WITHIN = 2  # of a legend that the usual size of a figure has room for
_MOST_COLUMNS = 3
_POINTS_PER_INCH = 72


def colour_number(part: Part, name: str) -> int:
    """One for each drafter. The baseline is drawn in the ink of the text, so the others share out the colours."""
    drafters = list(dict.fromkeys(drafter_of(part.contender(other)) for other in part.challengers))
    return drafters.index(drafter_of(part.contender(name)))


def style(part: Part, name: str) -> dict[str, Any]:
    """Of a line in all pictures. In grey print, marker and dash tell apart whatever is drawn in one picture."""
    if name == part.baseline:
        return {"color": INK, "marker": "o", "linestyle": "-", "linewidth": 1.4, "markersize": 3.5}
    lines: list[str] = []  # a drafter of many depths is one line: only its best is drawn
    for family in part.families:
        lines += family.names[:1] if family.has_many_depths else family.names
    family = part.family(name)
    drawn_as = family.names[0] if family.has_many_depths else name
    return coloured(part, name, lines.index(drawn_as))


def coloured(part: Part, name: str, shape: int) -> dict[str, Any]:
    """The colour of a contender's drafter, with the marker and the dash of that number."""
    colour = INK if name == part.baseline else SERIES[colour_number(part, name) % len(SERIES)]
    return series_style(shape) | {"color": colour}


def place(load: Load) -> float:
    """Where a load stands on its axis."""
    return float(load.concurrency or load.rate or 0)


def load_axis(axes: Axes, places: Sequence[float], *, is_rate: bool) -> None:
    if len(places) > 1:
        axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(places[0] / 1.3, places[-1] * 1.3)
    axes.set_xlabel("requests per second" if is_rate else "concurrency")


def bars(axes: Axes, x: Sequence[float], values: Sequence[Interval | None], **style: Any) -> None:
    """Points, their intervals where there are any, and a line through them that breaks where there is no value."""
    middle, below, above = edges(values)
    axes.errorbar(x, middle, yerr=[below, above], capsize=2.5, elinewidth=1.2, **style)


def edges(values: Sequence[Interval | None]) -> tuple[Floats, Floats, Floats]:
    """Values, and how far their intervals reach below and above them; NaN where there is no value."""
    ends = [
        (np.nan,) * 3
        if one is None
        else (one.value, one.value if one.low is None else one.low, one.value if one.high is None else one.high)
        for one in values
    ]
    middle, low, high = np.array(ends, dtype=np.float64).T
    return middle, np.abs(middle - low), np.abs(high - middle)


def legend(figure: Figure, axes: Axes) -> None:
    """Below the axes, in as many columns as fit. The figure grows by what it needs: the axes keep their size."""
    handles, labels = axes.get_legend_handles_labels()
    font_size = 8.0
    handle_length = 2.4
    # In font sizes: a letter is about 0.55 wide; between handle, label and the next column there is about 2.5 more.
    widest = font_size * (handle_length + 2.5 + 0.55 * max(map(len, labels), default=0))
    fitting = int(figure.get_figwidth() * _POINTS_PER_INCH / widest)
    columns = max(1, min(_MOST_COLUMNS, fitting, len(labels)))
    rows = ceil(len(labels) / columns)
    columns = ceil(len(labels) / rows) if rows else 1  # as few as those rows need
    figure.set_figheight(figure.get_figheight() + _ROW_INCHES * max(0, rows - _ROWS_WITHIN))
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=font_size,
        handlelength=handle_length,
    )
