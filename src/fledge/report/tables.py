"""Tables that can be printed in a terminal, written as Markdown, and rendered on a page (`page.html.jinja`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from rich.console import JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from fledge.report.intervals import Interval
from fledge.report.page import visible
from fledge.report.prose import Tone, with_interval

WARNING = "yellow"
_STYLES = {"good": "green", "bad": "red", "neutral": ""}
_BORDER = 3  # columns of a terminal that a cell takes besides its text


@dataclass(frozen=True, kw_only=True)
class TableCell:
    """The text of a cell, and what a page shows beside it. A plain string can be used for text only."""

    text: str
    ends: str = ""  # of an interval: "1.80, 2.00"
    tone: Tone = "neutral"
    colour: str = ""  # of a chip before the text
    badge: str = ""  # a label that belongs to the text
    graphic: Markup | str = ""  # before the text

    def __str__(self) -> str:
        return f"{self.text} [{self.ends}]" if self.ends else self.text

    @property
    def range(self) -> str:
        """The interval as "1.80 to 2.00"."""
        return self.ends.replace(", ", " to ")


def figure_cell(
    interval: Interval | None, form: str | None = None, *, unit: str = "", missing: str = "", graphic: Markup | str = ""
) -> TableCell:
    """A figure and its interval; `form` as in `with_interval`, `unit` follows the value."""
    if interval is None:
        return TableCell(text=missing)
    value, _, ends = with_interval(interval, form).partition(" ")
    return TableCell(text=value + unit, ends=ends.strip("[]"), graphic=graphic)


@dataclass(frozen=True, kw_only=True)
class TableRow:
    cells: tuple[TableCell | str, ...]
    group: str = ""  # consecutive rows of a group are shown under its name
    is_partial: bool = False  # something is missing from its figures
    note: str = ""  # why; shown below the row on a page


@dataclass(frozen=True, kw_only=True)
class Table:
    """The first `labels` columns name a row, the others are figures."""

    title: str
    header: tuple[str, ...]
    rows: tuple[TableRow, ...]
    labels: int = 1

    @classmethod
    def of(
        cls, title: str, header: Sequence[str], body: Sequence[Sequence[TableCell | str]], labels: int = 1
    ) -> "Table":
        """A table of rows that have no group and no note."""
        rows = tuple(TableRow(cells=tuple(cells)) for cells in body)
        return cls(title=title, header=tuple(header), rows=rows, labels=labels)

    def to_markdown(self) -> str:
        """Return Markdown without title and groups. Text is escaped."""
        lines = [self.header, *(row.cells for row in self.rows)]
        text = [f"| {' | '.join(markdown_text(str(cell)) for cell in cells)} |" for cells in lines]
        return "\n".join([text[0], "|---" * len(self.header) + "|", *text[1:]])

    def to_rich(self, width: int) -> list[RichTable]:
        """Return parts that fit into a terminal of this width, each with the label columns. No figure is cut."""
        # Cells stay on one line; headings may wrap between words.
        texts = [[*name.split(), "", *(str(row.cells[i]) for row in self.rows)] for i, name in enumerate(self.header)]
        texts[0] += [row.group for row in self.rows]
        widths = [max(map(len, column)) for column in texts]
        parts, labels = [list[int]()], list(range(self.labels))
        for i in range(self.labels, len(self.header)):
            if parts[-1] and 1 + sum(widths[j] + _BORDER for j in (*labels, *parts[-1], i)) > width:
                parts.append([])
            parts[-1].append(i)
        return [self._part([*labels, *part], widths, is_first=part is parts[0]) for part in parts]

    def _part(self, columns: Sequence[int], widths: Sequence[int], *, is_first: bool) -> RichTable:
        table = RichTable(title=Text(self.title if is_first else f"{self.title} (more)"), title_justify="left")
        for i in columns:
            side: JustifyMethod = "left" if i < self.labels else "right"
            table.add_column(Text(self.header[i]), justify=side, overflow="fold", max_width=widths[i])
        group = ""
        for row in self.rows:
            if row.group != group:
                group = row.group
                table.add_section()
                table.add_row(Text(group, style="bold"))
            cells = [row.cells[i] for i in columns]
            texts = [Text(str(cell), style=_STYLES[getattr(cell, "tone", "neutral")]) for cell in cells]
            table.add_row(*texts, style=WARNING if row.is_partial else "")
        return table


def markdown_text(text: str) -> str:
    """Escape text for a cell of a Markdown table: on one line, without `|` and HTML."""
    return " ".join(visible(text, flat=True).split()).replace("|", "\\|").replace("<", "&lt;")
