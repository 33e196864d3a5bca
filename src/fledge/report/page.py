"""What the HTML reports of Fledge share: templates that escape, one style for screen, phone and paper, safe text."""

import unicodedata
from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from fledge.report.charts import SERIES
from fledge.report.compact import compact_pictures
from fledge.report.intervals import Interval
from fledge.report.prose import ratio_tone

_HIDDEN = ("Cc", "Cf", "Cs", "Co")


@cache
def page_template(package: str, name: str) -> Template:
    """A template that lies in a package. Whatever is put into it is escaped, and must be there."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((files(package) / name).read_text(encoding="utf-8"))


def page_style() -> Markup:
    """The style sheet, in light, dark and print. It knows the colours of `svg.py` by their names."""
    return Markup(page_template("fledge.report", "page.css.jinja").render(series=SERIES))


def finished(page: str) -> str:
    """A page as it is written: compact; without what a file may not hold, does not show, or would rearrange it."""
    page = compact_pictures(page)
    hidden = {ord(c): "�" for c in set(page) if c not in "\n\t" and unicodedata.category(c) in _HIDDEN}
    return page.translate(hidden)


def visible(text: str, *, flat: bool = False) -> str:
    """Show what would not show, or would rearrange the page: control characters, and line ends as signs."""
    ends = "↵" if flat else "↵\n"
    return "".join(
        ends if c == "\n" else c if c == "\t" or unicodedata.category(c) not in _HIDDEN else "�" for c in text
    )


def ratio_bar(ratio: Interval, end: float, what: str = "the unperturbed acceptance length") -> Markup:
    """Draw a ratio and its interval on a line from 0 to `end`, as SVG. It is read out as "1.20 times `what`"."""

    def place(value: float) -> str:
        return f"{4 + 124 * min(max(value, 0.0), end) / end:.1f}"

    tone = ratio_tone(ratio)
    low, high = (ratio.value if edge is None else edge for edge in (ratio.low, ratio.high))
    label = escape(f"{ratio.value:.2f} times {what}")
    return Markup(
        f'<svg class="bar" viewBox="0 0 132 18" role="img" aria-label="{label}">'
        f'<line class="axis" x1="4" x2="128" y1="9" y2="9"/>'
        f'<line class="one" x1="{place(1)}" x2="{place(1)}" y1="1" y2="17"/>'
        f'<line class="range {tone}" x1="{place(low)}" x2="{place(high)}" y1="9" y2="9"/>'
        f'<circle class="{tone}" cx="{place(ratio.value)}" cy="9" r="4"/></svg>'
    )
