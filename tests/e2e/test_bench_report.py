"""`fledge bench report` and `compare` as a person runs them, and the page as a browser shows it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fledge.evaluation.results import Load, write_results
from tests.bench_results import EAGLE_3_1, PROVENANCE, make_eval_results, make_results
from tests.command_line import fledge

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(name="files", scope="module")
def _files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("bench")
    small = {"workloads": ("coding",), "concurrencies": (1, 16), "noise": 0.02}
    write_results(make_results(seed=1, title="Speed of it", **small), root / "a.json")
    write_results(make_results(seed=2, **small), root / "b.json")
    write_results(make_results(seed=2, speed=0.4, **small), root / "slow.json")
    other = {**PROVENANCE, "device": "Other GPU"}
    write_results(make_results(seed=2, speed=0.4, provenance=other, **small), root / "other.json")
    write_results(make_eval_results(prompts=6), root / "eval.json")
    (root / "notes.txt").write_text("First\nparagraph.\n\nSecond one.\n", encoding="utf-8")
    return root


@pytest.fixture(name="page", scope="module")
def _page(files: Path) -> Path:
    options = ("--reference", "Paper:1=2.03,4=1.71", "--note", "By hand.", "--note-file", "notes.txt")
    done = fledge("bench", "report", "a.json", "eval.json", "--out", "page.html", *options, cwd=files)
    assert done.returncode == 0, done.stderr
    assert "EAGLE-3.1 K=3 is 2." in done.stdout.replace("\n", " ")
    assert "Report: page.html" in done.stdout
    return files / "page.html"


def test_the_page_has_both_parts_and_the_notes(page: Path):
    text = page.read_text(encoding="utf-8")
    for wanted in (
        "Speed of it",
        "Acceptance length",
        "By hand.",
        "First paragraph.",
        "Second one.",
        "Paper (reported)",
    ):
        assert wanted in text


@pytest.mark.usefixtures("_blank_pictures")
def test_files_of_one_title_and_who_is_spoken_of_can_be_told(files: Path):
    done = fledge("bench", "report", "b.json", "slow.json", "eval.json", "--out", "x.html", cwd=files)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert " (b.json) " in said
    assert " (slow.json) " in said
    assert "EAGLE-3.1 K=3: Faster " in said  # whose acceptance length the next sentences tell
    assert "the mean acceptance length of eagle-3.1 over workloads" in said
    assert "its mean" not in said
    text = (files / "x.html").read_text(encoding="utf-8")
    assert text.count(" (b.json)</a>") == text.count(" (slow.json)</a>") == 1


@pytest.mark.usefixtures("_blank_pictures")
def test_markdown_goes_to_a_file_or_is_printed_alone(files: Path):
    done = fledge("bench", "report", "eval.json", "--out", "eval.html", "--markdown", "-", cwd=files)
    assert done.stdout.startswith("Acceptance length:\n\n| drafter | K | T | coding | chat | maths | mean |")
    done = fledge("bench", "report", "eval.json", "--out", "eval.html", "--markdown", "x/eval.md", "--quiet", cwd=files)
    assert (done.returncode, done.stdout) == (0, "")
    assert (files / "x" / "eval.md").read_text(encoding="utf-8").startswith("Acceptance length:\n\n| drafter |")
    done = fledge("bench", "report", "eval.json", "--out", "eval.html", "--markdown", "-", "--note", "Why.", cwd=files)
    assert done.stdout.startswith("Why.\n\nAcceptance length:\n\n| drafter |"), "words come first, as on the page"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.json",), "none.json: no such file"),
        (("notes.txt",), "no readable JSON"),
        (("a.json", "--baseline", "EAGLE-3.1 K=4"), "Did you mean 'EAGLE-3.1 K=3'?"),
        (("a.json", "--reference", "x"), "expected NAME:CONCURRENCY=RATIO"),
        (("a.json", "--note-file", "no.txt"), "--note-file no.txt: cannot be read"),
        (("a.json", "--out", "notes.txt/page.html"), "cannot be written"),
    ],
)
@pytest.mark.usefixtures("_blank_pictures")
def test_what_cannot_be_done_is_one_line(files: Path, arguments: tuple[str, ...], message: str):
    done = fledge("bench", "report", *arguments, cwd=files)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_regression_fails_the_job_and_is_named(files: Path):
    assert fledge("bench", "compare", "a.json", "b.json", "--fail-on", "change", cwd=files).returncode == 0
    done = fledge("bench", "compare", "a.json", "slow.json", cwd=files)
    assert done.returncode == 0  # it was not asked to fail
    assert "worse" in done.stdout
    done = fledge(
        "bench", "compare", "a.json", "slow.json", "--metric", "per-user", "--fail-on", "regression", cwd=files
    )
    assert done.returncode == 1
    assert "failed: EAGLE-3.1 K=3, coding, C=1: tokens/s per user worse, 0." in done.stderr
    done = fledge("bench", "compare", "slow.json", "a.json", "--fail-on", "regression", cwd=files)
    assert done.returncode == 0
    done = fledge("bench", "compare", "a.json", "slow.json", "--relative", "--fail-on", "change", cwd=files)
    assert done.returncode == 0  # all contenders are slower alike


def test_another_machine_is_compared_by_ratios_unless_asked(files: Path):
    done = fledge("bench", "compare", "a.json", "other.json", "--fail-on", "change", cwd=files)
    assert done.returncode == 0
    assert "other machine: device: Example GPU in A, Other GPU in B" in done.stdout
    asked = fledge("bench", "compare", "a.json", "other.json", "--across-machines", "--fail-on", "change", cwd=files)
    assert asked.returncode == 1


def test_compare_prints_json(files: Path):
    done = fledge("bench", "compare", "a.json", "slow.json", "--fail-on", "regression", "--json", cwd=files)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["failures"]
    one = next(c for c in found["changes"] if (c["contender"], c["metric"]) == (EAGLE_3_1, "per-user"))
    assert one["load"] == {"concurrency": Load(concurrency=1).concurrency, "rate": None}
    assert one["verdict"] == "worse"
    assert one["ratio"]["high"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--metric", "speed"), "unknown metric 'speed'"),
        (("--fail-on", "regressions"), "Did you mean 'regression'?"),
        (("--relative", "--across-machines"), "contradict each other"),
    ],
)
def test_compare_refuses_what_makes_no_sense(files: Path, arguments: tuple[str, ...], message: str):
    done = fledge("bench", "compare", "a.json", "b.json", *arguments, cwd=files)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.fixture(name="browser", scope="module")
def _browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it_at_any_width_without_asking_anyone(page: Path, browser: Any, width: int, scheme: str):
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # of a session of its own
    asked: list[str] = []
    problems: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("console", lambda line: problems.append(line.text))
    tab.goto(page.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") <= width  # tables scroll, the page does not
    charts = tab.locator("svg.chart")
    assert charts.count() >= 10
    sizes = [one.bounding_box() for one in charts.all() if one.is_visible()]
    assert all(box is not None and box["width"] > 250 and box["height"] > 100 for box in sizes)
    ground, ink = (
        tab.evaluate(f"getComputedStyle(document.body).{what}.match(/\\d+/g).slice(0, 3).map(Number)")
        for what in ("backgroundColor", "color")
    )
    assert (sum(ground) > sum(ink)) == (scheme == "light")
    tab.close()
    assert asked == [page.as_uri()]
    assert problems == []
