"""One table, three ways to show it."""

import shutil
from dataclasses import replace

import pytest
from rich.console import Console

from fledge.report.intervals import Interval
from fledge.report.page import page_style, page_template, ratio_bar
from fledge.report.tables import Table, TableCell, TableRow, figure_cell

RATIO = figure_cell(Interval(value=2.0, low=1.5, high=2.5), "{:.2f}", unit="x")
TABLE = Table(
    title="Speeds",
    header=("name", "speed", "ratio"),
    rows=(
        TableRow(cells=("plain", "12", ""), group="chat, C=1"),
        TableRow(cells=(TableCell(text="a|b", colour="red", badge="inflated: 8b"), "24", RATIO), group="chat, C=1"),
        TableRow(cells=("<i>", "7", "-"), group="chat, C=4", is_partial=True, note="it died"),
    ),
)


def printed(tables: list, width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    return capture.get()


def test_figures_have_their_unit_and_interval():
    assert (RATIO.text, RATIO.ends, RATIO.range, str(RATIO)) == (
        "2.00x",
        "1.50, 2.50",
        "1.50 to 2.50",
        "2.00x [1.50, 2.50]",
    )
    assert str(figure_cell(Interval(value=1234.5))) == "1,234"
    assert str(figure_cell(None, missing="?")) == "?"


def test_markdown_has_a_line_for_each_row_and_no_cell_ends_early():
    lines = TABLE.to_markdown().splitlines()
    assert lines[:3] == ["| name | speed | ratio |", "|---|---|---|", "| plain | 12 |  |"]
    assert lines[3:] == ["| a\\|b | 24 | 2.00x [1.50, 2.50] |", "| &lt;i> | 7 | - |"]


def test_a_terminal_shows_groups_once_and_nothing_is_taken_for_markup():
    text = printed(TABLE.to_rich(100))
    assert text.count("chat, C=1") == text.count("chat, C=4") == 1
    assert "2.00x [1.50, 2.50]" in text
    assert "<i>" in text


def test_a_wide_table_is_printed_in_parts_that_repeat_the_labels():
    wide = Table.of("Wide", ("name", *(f"column-{i}" for i in range(9))), [("row", *map(str, range(9)))])
    parts = wide.to_rich(width=50)
    assert [str(part.title) for part in parts] == ["Wide"] + ["Wide (more)"] * (len(parts) - 1)
    text = printed(parts, width=50)
    assert len(parts) > 1
    assert all(text.count(f"column-{i}") == 1 for i in range(9))
    assert text.count("row") == len(parts)
    assert max(map(len, text.splitlines())) <= 50


def test_no_figure_is_cut_and_the_border_is_whole_at_80_columns():
    """A heading is broken between words; intervals stay on one line; a name longer than the terminal is folded."""
    header = ("contender", "tokens/s per user", "ratio", "tokens/s in all", "ratio", "acceptance length", "requests")
    figures = ("1,445 [1,243, 1,690]", "2.14x [1.99, 2.31]") * 2 + ("2.75 [2.56, 2.95]", "1,024 (+36 failed)")
    for name in ("EAGLE-3.1 K=3", "a-model-with-a-name-" * 6):
        row = TableRow(cells=(name, *figures), group="a_workload_of_ours, concurrency 64")
        text = printed(Table(title="Speed", header=header, rows=(row,)).to_rich(80), width=80)
        assert "…" not in text
        assert {line[-1] for line in text.splitlines() if line[0] != "S"} <= set("┓┃┩│┘┤")
        assert all(figure in text for figure in figures)


def test_a_page_has_all_of_it_escaped():
    text = page_template("fledge.report", "blocks.html.jinja").module.table(TABLE)
    for wanted in (
        '<th colspan="3" scope="rowgroup">chat, C=4</th>',
        '<span class="badge">inflated: 8b</span>',
        "2.00x <small>1.50 to 2.50</small>",
        '<tr class="reason"><td colspan="3">it died</td></tr>',
        "&lt;i&gt;",
    ):
        assert wanted in text
    assert text.count('scope="rowgroup"') == 2
    assert "<i>" not in text


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_no_column_of_a_page_is_cut_at_1200_pixels():
    """The widest tables of docs/results: speeds with a bar, acceptance by category, and what differs where."""
    playwright = pytest.importorskip("playwright.sync_api")
    ratio, speed = (
        Interval(value=10.05, low=10.01, high=10.09),
        figure_cell(Interval(value=1234.0, low=1111, high=1333)),
    )
    shown = figure_cell(ratio, "{:.2f}", unit="x", graphic=ratio_bar(ratio, 12.0))
    name = TableCell(text="Fledge, EAGLE-3.1 depth 3", colour="red", badge="inflated: 8b")
    header = ("contender", "tokens/s per user", "ratio", "tokens/s in all", "ratio", "acceptance length", "requests")
    rates = "round costs, in plain steps", "tokens verified at once", "% accepted at depth 1, 2, …", "rounds"
    categories = (
        "writing roleplay reasoning math coding extraction stem humanities dialogue qa instructions long_context"
    )
    differ = "; ".join(f"mt_bench, C={i}: 12 of 240" for i in range(12))
    tables = [
        Table.of("", header, [[name, speed, shown, speed, replace(shown, graphic=""), speed, "1,440 (+36 failed)"]]),
        Table.of(
            "", ("contender", "acceptance length", *rates), [[name, speed, "1.23", "320", "71  52  40  31", "9,999"]]
        ),
        Table.of(
            "",
            ("drafter", "K", "T", *categories.split()),
            [["fledgling-eagle3.1", "10", "1", *["2.58 ±0.12"] * 12]],
            3,
        ),
        Table.of(
            "", ("contender", "compared with no speculation", "different", "of these"), [[name, "999", "9", differ]]
        ),
    ]
    table = page_template("fledge.report", "blocks.html.jinja").module.table
    page = f"<!doctype html><style>{page_style()}</style><main>{''.join(map(str, map(table, tables)))}</main>"
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1200, "height": 900})
        tab.set_content(page)
        found = tab.evaluate(
            "[...document.querySelectorAll('.scroll')].map((one) => one.scrollWidth - one.clientWidth)"
        )
        browser.close()
    assert found == [0] * 4
