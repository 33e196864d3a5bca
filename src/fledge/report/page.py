"""The HTML reports of Fledge: one skeleton and style for screen, phone and paper, filled with blocks, and safe text.

A page has parts, a part has sections, a section has blocks: prose, pictures, tables (`tables.py`), sentences, cards.
Whatever is put into them is escaped. A report that needs more has a template of its own (`page_template`).
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from fledge.report.charts import SERIES, Chart
from fledge.report.intervals import Interval
from fledge.report.prose import Sentence, Tone, ratio_tone

_HIDDEN = ("Cc", "Cf", "Cs", "Co")
# What matplotlib says at the top of every picture.
_DEFAULTS = "stroke-linejoin: round; stroke-linecap: butt"
_ID = re.compile(r'(?<=url\(#)[^)]+|(?<=href="#)[^"]+|(?<= id=")[^"]+')


class Block:
    """Something that a section shows; `page.html.jinja` has a macro for each kind."""

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Prose(Block):
    text: str
    is_quiet: bool = False


@dataclass(frozen=True)
class Pictures(Block):
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Sentences(Block):
    """A list in a box; each sentence leads to the section that backs it."""

    sentences: Sequence[Sentence]
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Card:
    """The verdict on one thing that was measured."""

    name: str
    headline: str
    tone: Tone
    tiles: tuple[tuple[str, str, Tone], ...]  # value, text, tone
    sentences: tuple[Sentence, ...]
    colour: str = "var(--line)"
    badge: str = ""


@dataclass(frozen=True)
class Cards(Block):
    cards: Sequence[Card]


@dataclass(frozen=True)
class Fold(Block):
    """Blocks behind a line that opens them."""

    summary: str
    blocks: Sequence[Block]
    is_open: bool = False


@dataclass(frozen=True)
class Facts(Block):
    """Names and what they stand for. `code`: the names whose value is a command."""

    facts: Mapping[str, str]
    code: Sequence[str] = ()


@dataclass(frozen=True)
class Notice(Block):
    """What must be read before the rest."""

    title: str
    lines: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Section:
    """`id` is the anchor; `short` its name in the list of sections."""

    id: str
    title: str
    blocks: Sequence[Block]
    short: str = ""


@dataclass(frozen=True, kw_only=True)
class PagePart:
    """What was measured in one go; `lead` comes before the list of its sections."""

    id: str
    title: str
    lead: Sequence[Block]
    sections: Sequence[Section]


@dataclass(frozen=True, kw_only=True)
class Page:
    kicker: str  # what kind of page it is
    title: str
    parts: Sequence[PagePart]
    end: Sequence[Section] = field(default=())

    def to_html(self) -> str:
        """One file that needs nothing else: no script, nothing that is loaded."""
        template = page_template("fledge.report", "page.html.jinja")
        return finished(template.render(page=self, style=page_style()))


@cache
def page_template(package: str, name: str) -> Template:
    """A template that lies in a package. Whatever is put into it must be there, and is escaped, but for Markdown."""
    is_markup = ".md." not in name
    environment = Environment(autoescape=is_markup, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((files(package) / name).read_text(encoding="utf-8"))


def page_style() -> Markup:
    """The style sheet, in light, dark and print. It knows the colours of `charts.py` by their names."""
    return Markup(page_template("fledge.report", "page.css.jinja").render(series=SERIES))


def finished(page: str) -> str:
    """A page as it is written: compact; without what a file may not hold, does not show, or would rearrange it."""
    page = compact_pictures(page)
    hidden = {ord(c): "�" for c in set(page) if c not in "\n\t" and unicodedata.category(c) in _HIDDEN}
    return page.translate(hidden)


def compact_pictures(page: str) -> str:
    """Return a page whose pictures share one style sheet, and say no number more precisely than it can be seen.

    matplotlib writes every line of a picture with a style of its own. Knows the `<svg class="chart">` of `to_svg` and
    nothing else; a picture looks as it did, to a hundredth of a pixel, and its words are left alone.
    """
    classes: dict[str, str] = {}  # by style
    ids: dict[str, str] = {}

    def class_of(match: re.Match[str]) -> str:
        style = re.sub(r"var\((--[\w-]+), #\w+\)", r"var(\1)", match[1])  # the page has the colour by its name
        style = re.sub(r"font-family: [^;]*;? ?|(?<=px) '[^;]*", "", style)
        return f'class="{classes.setdefault(style, f"s{len(classes)}")}"'

    def compact_tag(match: re.Match[str]) -> str:
        tag = re.sub(r' transform="rotate\(-?0 [^"]*"', "", re.sub(r"\s+", " ", match[0]))
        tag = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), tag)
        tag = re.sub(r"(?<=[0-9]) (?=[MLQCz])|(?<=[MLQC]) (?=[-0-9])|(?<=[0-9z]) (?=\")", "", tag)  # paths
        tag = _ID.sub(lambda id_: ids.setdefault(id_[0], f"pic{len(ids)}"), tag)
        return re.sub(r'style="([^"]*)"', class_of, tag)

    def compact(match: re.Match[str]) -> str:
        picture = re.sub(rf"<defs>\s*<style[^>]*>\*{{{_DEFAULTS}}}</style>\s*</defs>", "", match[2])
        return match[1] + re.sub(r">\s+<", "><", re.sub(r"<[^<>]+>", compact_tag, picture)).strip()

    page = re.sub(r'(<svg class="chart"[^>]*>)(.*?)(?=</svg>)', compact, page, flags=re.DOTALL)
    if not classes:
        return page
    rules = [f".chart *{{{_DEFAULTS}}}", *(f".{name}{{{style}}}" for style, name in classes.items())]
    return page.replace("</head>", "<style>\n" + "\n".join(rules) + "\n</style>\n</head>", 1)


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
