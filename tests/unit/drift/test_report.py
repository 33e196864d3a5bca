"""The report as a file: all of it there, nothing in it from elsewhere, nothing in it that it should not be."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fledge.drift.perturb import FAMILIES, KINDS, UNPERTURBED
from fledge.drift.report import DriftReport, make_report, render, write_report
from fledge.drift.suite import FIGURES
from fledge.report.intervals import Interval
from fledge.report.page import ratio_bar
from tests.html_page import Page
from tests.unit.drift.report_cases import made_up, with_detail

SECTIONS = (
    "attention",
    "states",
    "cosine",
    "layers",
    "acceptance",
    "calibration",
    "perturbations",
    "examples",
    "setup",
    "definitions",
)


@pytest.fixture(name="written", scope="module")
def _written(tmp_path_factory: pytest.TempPathFactory):
    runs = {"template:plain": 8, "pad:64k:before": "65536 tokens do not fit", "json": 12}
    suite, results = made_up({"a3": runs, "<b>3.1": {**runs, "json": 16}})
    cells = tuple(
        replace(cell, left_out={"prompt-x": "too <long>"}) if cell.perturbation == "json" else cell
        for cell in suite.cells
    )
    suite = replace(suite, cells=cells)
    results = {key: with_detail(result) for key, result in results.items()}
    report = make_report(suite, results, {"Command": "fledge drift --target '<x>'", "Date": "today"})
    directory = tmp_path_factory.mktemp("report") / "new"
    write_report(directory, report, results)
    text = (directory / "report.html").read_text(encoding="utf-8")
    return directory, report, text, Page(text)


def test_all_sections_are_there(written):
    _, report, _, page = written
    ids = page.attributes("id")
    assert set(SECTIONS) <= set(ids)
    assert len(ids) == len(set(ids))
    for verdict in report.verdicts:
        assert verdict.headline in page.text
        assert all(one.text.replace(" %", "\u00a0%") in page.text for one in verdict.sentences)
    assert len([tag for tag, attrs in page.elements if tag == "svg" and attrs.get("class") == "chart"]) == 16
    assert "Head by head" in page.text


def test_links_lead_somewhere(written):
    *_, page = written
    ids = set(page.attributes("id"))
    links = [href for href in page.attributes("href") if not href.startswith("data:")]
    assert links
    assert {href.removeprefix("#") for href in links} <= ids


def test_nothing_is_loaded_from_elsewhere(written):
    _, _, text, page = written
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.elements}
    assert page.attributes("src") == []
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)


def test_what_comes_from_models_and_prompts_is_escaped(written):
    _, _, text, page = written
    for raw in ("<script>alert", "<b>wrong", "<img src=x>", "<i>long", "<b>3.1", "'<x>'", "too <long>"):
        assert raw not in text
        assert raw.replace("'", "") in page.text.replace("'", "")
    assert "\x00" not in text
    assert "\u202e" not in text


def test_tokens_are_told_apart_without_colour(written):
    _, _, text, _ = written
    assert '<span class="t-accepted">&lt;script&gt;' in text
    assert '<del>&lt;b&gt;wrong&lt;/b&gt;</del><span class="t-rejected">right</span>' in text
    assert '<del>often↵</del><span class="t-outside">rare↵\n</span>' in text
    for style in ("t-accepted { background: var(--good-soft); text-decoration: underline", "wavy", "line-through"):
        assert style in text


def test_long_prompts_are_cut_in_the_middle(written):
    *_, page = written
    assert "characters …]" in page.text
    assert "long " * 300 not in page.text


def test_the_table_has_losses_skips_and_the_warning_about_tasks(written):
    _, _, text, page = written
    assert page.text.count("Skipped: 65536 tokens do not fit") == 2
    assert "json †" in page.text
    assert "template:plain †" not in page.text
    assert "part of their loss is the task's" in page.text.replace("\n", " ")
    assert text.count('<svg class="bar"') == 4
    assert "20 of 21 / 400" in page.text


def test_changes_and_slopes_have_their_intervals(written):
    _, report, _, page = written
    one = report.suite.cell("a3").attention.recent
    slope = f"{100 * one.slope.value:+.2f} {100 * one.slope.low:+.2f} to {100 * one.slope.high:+.2f}"
    change = f"{100 * one.change.value:+.1f} {100 * one.change.low:+.1f} to {100 * one.change.high:+.1f}"
    shown = " ".join(page.text.split())
    assert change in shown
    assert slope in shown


def test_json_says_the_same(written):
    directory, report, _, _ = written
    values = json.loads((directory / "results.json").read_text())
    assert DriftReport.from_dict(values) == report
    assert set(values["unperturbed"]) == {"a3", "<b>3.1"}
    assert values["verdicts"][0]["sentences"][0]["section"] == "attention"


def test_files_are_whole_small_and_no_others(written):
    directory, _, text, _ = written
    assert {path.name for path in directory.iterdir()} == {"report.html", "results.json", "figures"}
    assert len(text.encode()) < 1_500_000
    pictures = {path.name for path in (directory / "figures").iterdir()}
    assert {"attention-1.png", "attention-2.png", "acceptance.png", "perturbations.png"} <= pictures


@pytest.mark.usefixtures("_blank_pictures")
def test_pictures_of_an_earlier_run_do_not_stay(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "attention-9.png").write_bytes(b"old")
    suite, results = made_up()
    write_report(tmp_path, make_report(suite, results, {}), results)
    assert not (tmp_path / "figures" / "attention-9.png").exists()
    assert (tmp_path / "figures" / "attention-1.png").is_file()


def test_a_run_without_perturbations_or_examples():
    suite, results = made_up()
    page = Page(render(make_report(suite, results, {}), results, ()))
    assert "No perturbation was run" in page.text
    assert "None: no draft was verified" in page.text


def test_a_drift_that_never_comes_is_null_in_json_and_infinite_on_the_page():
    suite, results = made_up(recent={"drafter": (0.1, 0.1, 0.1)})
    report = make_report(suite, results, {})
    assert report.figures["drafter"]["drift_depth"] is None
    json.dumps(report.to_dict(), allow_nan=False)
    assert "∞" in Page(render(report, results, ())).text


@pytest.mark.usefixtures("_blank_pictures")
def test_broken_text_does_not_break_the_file(tmp_path):
    suite, results = made_up()
    key = ("drafter", UNPERTURBED)
    result = with_detail(results[key])
    example = replace(result.examples[0], prompt="half a \ud83d character", category="\ud800")
    results = {key: replace(result, examples=(example,))}
    write_report(tmp_path, make_report(suite, results, {"Command": "\udcff --json"}), results)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "half a \ufffd character" in page.text
    assert "(\ufffd)" in page.text  # the category
    assert "\ufffd --json" in page.text
    assert json.loads((tmp_path / "results.json").read_text())["setup"]["Command"] == "\udcff --json"


@pytest.mark.parametrize(
    ("ratio", "tone"),
    [
        (Interval(value=0.8, low=0.7, high=0.9), "bad"),
        (Interval(value=1.1, low=1.05, high=1.2), "good"),
        (Interval(value=0.8, low=0.7, high=1.1), "neutral"),
        (Interval(value=0.8), "neutral"),
        (Interval(value=9.0, low=4.0, high=20.0), "good"),
    ],
)
def test_bars(ratio, tone):
    bar = ratio_bar(ratio, 1.5)
    assert f'circle class="{tone}"' in bar
    assert all(4 <= float(x) <= 128 for x in re.findall(r'(?:x1|x2|cx)="([^"]*)"', bar))


def test_the_documentation_names_every_figure_and_perturbation():
    text = (Path(__file__).parents[3] / "docs" / "drift.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` | {what} |" in text for name, what in FIGURES.items())
    assert all(re.search(rf"^\| `{kind}[`:]", text, re.MULTILINE) for kind in KINDS)
    assert " ".join(sorted(FAMILIES)) in text
