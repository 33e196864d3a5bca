"""A compact page shows what the page showed."""

import re
from html.parser import HTMLParser

from fledge.report.charts import new_figure, put_legend, series_style, to_svg
from fledge.report.page import compact_pictures

Element = tuple[str, dict[str, str], dict[str, str]]


class Pictures(HTMLParser):
    """The elements of a page in order, with their styles resolved and their ids numbered, and its words."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.rules = dict(re.findall(r"^\.(s\d+)\{(.*)\}$", page, flags=re.MULTILINE))
        self.elements: list[Element] = []
        self.words: list[str] = []
        self.ids: dict[str, int] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        text = self.rules.get(given.pop("class", ""), "") + given.pop("style", "")
        text = re.sub(r"font-family: [^;]*;? ?", "", re.sub(r"(var\(--\w+(?:-\d)?), #\w+\)", r"\1)", text))
        style = dict(rule.split(": ", 1) for rule in text.split("; ") if rule)
        if given.get("transform", "").startswith("rotate(-0"):
            del given["transform"]
        if tag in ("style", "meta") or (tag == "g" and not given) or (tag == "defs"):
            return
        self.elements.append(
            (tag, {n: self._plain(v) for n, v in given.items()}, {n: self._plain(v) for n, v in style.items()})
        )

    def _plain(self, value: str) -> str:
        value = re.sub(r"(?<=url\(#)[^)]+|^#.+|^[\w.-]*[0-9a-f]{10}$|^pic\d+$", self._number_of_id, value)
        numbers = re.sub(r"-?\d+(?:\.\d+)?", lambda m: f"{float(m[0]):.2f}", value)
        return re.sub(r"\s", "", numbers)

    def _number_of_id(self, match: re.Match[str]) -> str:
        return f"id{self.ids.setdefault(match[0].lstrip('#'), len(self.ids))}"

    def handle_data(self, data: str) -> None:
        if data.strip() and self.lasttag != "style":
            self.words.append(data.strip())


def page_of(*pictures: str) -> str:
    return "<html><head><title>A page of 0.123456</title></head><body><p>\n".join(["", *pictures]) + "</body></html>"


def picture(name: str) -> str:
    figure, axes = new_figure()
    for number in range(3):
        axes.plot([1, 2, 3.123456], [number, 2.5, 1], **series_style(number), label=f"line 0.12345{number}")
    axes.fill_between([1, 2], [0.1, 0.2], [0.3, 0.4], alpha=0.3, hatch="//")
    axes.set_title("before  0.987654")
    axes.tick_params(axis="x", rotation=40)
    put_legend(figure, axes, columns=2)
    return to_svg(figure, name, "A picture of 0.123456")


def test_pictures_stay_what_they_are() -> None:
    page = page_of(picture("one"), picture("two"))
    compact = compact_pictures(page)
    before, after = Pictures(page), Pictures(compact)
    assert len(after.elements) > 50
    assert after.elements == before.elements
    assert after.words == before.words
    assert 'aria-label="A picture of 0.123456"' in compact
    assert "A page of 0.123456" in compact


def test_it_is_less_than_half() -> None:
    page = page_of(*(picture(f"number-{number}") for number in range(4)))
    assert len(compact_pictures(page)) < len(page) / 2


def test_ids_are_still_distinct_and_found() -> None:
    compact = compact_pictures(page_of(picture("one"), picture("two")))
    ids = re.findall(r' id="([^"]+)"', compact)
    assert len(ids) == len(set(ids)) > 2
    assert set(re.findall(r'url\(#([^)]+)|href="#([^"]+)', compact)) <= {(i, "") for i in ids} | {("", i) for i in ids}


def test_a_page_without_pictures_is_left_alone() -> None:
    page = page_of('<svg class="bar"><line style="fill: none" x1="4.123456"/></svg>')
    assert compact_pictures(page) == page
