"""The HTML reports of Fledge: templates that extend `page.html.jinja` and use the macros of `blocks.html.jinja`.

The sentences of a report come from another template (`said`).
"""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from fledge.report import prose
from fledge.report.charts import SERIES
from fledge.report.intervals import Interval
from fledge.report.prose import Sentence, Tone

_HIDDEN = ("Cc", "Cf", "Cs", "Co")
# The style that matplotlib writes at the top of every picture.
_DEFAULTS = "stroke-linejoin: round; stroke-linecap: butt"
_ID = re.compile(r'(?<=url\(#)[^)]+|(?<=href="#)[^"]+|(?<= id=")[^"]+')


@dataclass(frozen=True, kw_only=True)
class Card:
    """The verdict on one thing that was measured."""

    name: str
    headline: str
    tiles: tuple[tuple[str, str, Tone], ...]  # value, text, tone
    sentences: tuple[Sentence, ...]
    tone: Tone = "neutral"
    colour: str = "var(--line)"
    badge: str = ""


@cache
def page_template(package: str, name: str) -> Template:
    """Return a template of a package, which may extend or import those of `fledge.report`.

    Undefined variables are errors, and in HTML templates values are escaped.
    """
    loader = ChoiceLoader([PackageLoader(package, "."), PackageLoader("fledge.report", ".")])
    strict: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=loader, autoescape=".html." in name, **strict).get_template(name)


def said(package: str, name: str, /, **values: Any) -> list[Sentence]:
    """Return the sentences of a template, in the order of its calls of `say`. It can use the functions of `prose`."""
    found: list[Sentence] = []

    def say(section: str = "", tone: Tone = "neutral", *, caller: Callable[[], str]) -> str:
        found.append(Sentence(text=" ".join(caller().split()), section=section, tone=tone))
        return ""

    page_template(package, name).render({**vars(prose), "say": say, **values})
    return found


def page_style() -> Markup:
    """Return the style sheet for light, dark and print. It defines the colours of `charts.py`."""
    return Markup(page_template("fledge.report", "page.css.jinja").render(series=SERIES))


def finished(page: str) -> str:
    """Return the page as it is written: compact, and without control characters and other invisible ones."""
    return _without_hidden(compact_pictures(page))


def _without_hidden(text: str) -> str:
    signs = (c for c in set(text) if c not in "\n\t" and unicodedata.category(c) in _HIDDEN)
    return text.translate(dict.fromkeys(map(ord, signs), "�"))


def compact_pictures(page: str) -> str:
    """Return the page with a common style sheet for its pictures, and with rounded coordinates.

    matplotlib writes a style attribute for every element. Only the `<svg class="chart">` of `to_svg` are changed; they
    look the same to a hundredth of a pixel, and their text is not changed.
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
    """Replace invisible characters, and show line ends as signs."""
    return _without_hidden(text).replace("\n", "↵" if flat else "↵\n")


def ratio_bar(ratio: Interval, end: float, what: str = "the unperturbed acceptance length") -> Markup:
    """Draw a ratio and its interval on a line from 0 to `end`, as SVG. It is read out as "1.20 times `what`"."""
    places = [f"{4 + 124 * min(max(value, 0.0), end) / end:.1f}" for value in (1, ratio.value, *ratio.ends)]
    bar = page_template("fledge.report", "ratio_bar.html.jinja")
    return Markup(bar.render(ratio=ratio, what=what, tone=prose.ratio_tone(ratio), places=places))
