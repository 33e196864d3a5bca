"""What the HTML reports of Fledge share: templates that escape, one style for screen, phone and paper, safe text."""

import unicodedata
from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from fledge.report.charts import SERIES

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
    """A page as it is written: without what a file may not hold, does not show, or would rearrange the page."""
    hidden = {ord(c): "�" for c in set(page) if c not in "\n\t" and unicodedata.category(c) in _HIDDEN}
    return page.translate(hidden)


def visible(text: str, *, flat: bool = False) -> str:
    """Show what would not show, or would rearrange the page: control characters, and line ends as signs."""
    ends = "↵" if flat else "↵\n"
    return "".join(
        ends if c == "\n" else c if c == "\t" or unicodedata.category(c) not in _HIDDEN else "�" for c in text
    )
