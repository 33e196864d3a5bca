"""Pages in a fraction of their letters: matplotlib writes every line of a picture with a style of its own.

Knows the `<svg class="chart">` of `charts.to_svg` and nothing else. A picture looks as it did, to a hundredth of a
pixel, and its words are left alone.
"""

import re

# What matplotlib says at the top of every picture.
_DEFAULTS = "stroke-linejoin: round; stroke-linecap: butt"
_TAG = re.compile(r"<[^<>]+>")
_ID = re.compile(r'(?<=url\(#)[^)]+|(?<=href="#)[^"]+|(?<= id=")[^"]+')


def compact_pictures(page: str) -> str:
    """Return a page whose pictures share one style sheet, and say no number more precisely than it can be seen."""
    classes: dict[str, str] = {}  # by style
    ids: dict[str, str] = {}
    page = re.sub(
        r'(<svg class="chart"[^>]*>)(.*?)(?=</svg>)',
        lambda picture: picture[1] + _compact(picture[2], classes, ids),
        page,
        flags=re.DOTALL,
    )
    if not classes:
        return page
    rules = [f".chart *{{{_DEFAULTS}}}", *(f".{name}{{{style}}}" for style, name in classes.items())]
    return page.replace("</head>", "<style>\n" + "\n".join(rules) + "\n</style>\n</head>", 1)


def _compact(picture: str, classes: dict[str, str], ids: dict[str, str]) -> str:
    kept_groups: list[bool] = []

    def compact_tag(match: re.Match[str]) -> str:
        tag = re.sub(r"\s+", " ", match[0])
        if tag == "</g>":
            return tag if kept_groups.pop() else ""
        if re.match(r"<g\b", tag) and not tag.endswith("/>"):
            kept_groups.append(tag != "<g>")
            if tag == "<g>":  # without attributes it changes nothing
                return ""
        tag = re.sub(r' transform="rotate\(-?0 [^"]*"', "", tag)
        tag = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), tag)
        tag = re.sub(r"(?<=[0-9]) (?=[MLQCz])|(?<=[MLQC]) (?=[-0-9])|(?<=[0-9z]) (?=\")", "", tag)  # paths
        tag = _ID.sub(lambda id_: ids.setdefault(id_[0], f"pic{len(ids)}"), tag)
        return re.sub(r'style="([^"]*)"', lambda style: f'class="{_class_of(style[1], classes)}"', tag)

    picture = re.sub(rf"<defs>\s*<style[^>]*>\*{{{_DEFAULTS}}}</style>\s*</defs>", "", picture)
    return re.sub(r">\s+<", "><", _TAG.sub(compact_tag, picture)).strip()


def _class_of(style: str, classes: dict[str, str]) -> str:
    style = re.sub(r"var\((--[\w-]+), #\w+\)", r"var(\1)", style)  # the page has the colour by its name
    style = re.sub(r"font-family: [^;]*;? ?|(?<=px) '[^;]*", "", style)
    return classes.setdefault(style, f"s{len(classes)}")
