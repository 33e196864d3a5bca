"""The report as a file: what it says is what was measured, all of it is there, nothing in it comes from elsewhere."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fledge.bench.report import BenchReport, rounds_table, speed_table
from fledge.bench.summary import Summary, summaries
from fledge.bench.verdict import Reference, disappointments, overall, verdicts, warnings
from fledge.errors import ConfigError
from fledge.evaluation.results import Load, RequestRecord, Results
from tests.bench_results import EAGLE_3, EAGLE_3_1, PLAIN, make_eval_results, make_results
from tests.html_page import Page

NASTY = '<script>alert("x")</script> | \u202e'


FINE = make_results(concurrencies=(1, 4), repeats=2, prompts=8)


def troubled() -> Results:
    """A repeat cut short, answers that differ, inflated models, counted chunks, and names that are code."""
    results = make_results(workloads=("coding",), concurrencies=(1, 16, 64), repeats=2, title=NASTY, seed=2)
    cells = list(results.cells)
    for i, cell in enumerate(cells):
        if cell.contender == EAGLE_3 and cell.load == Load(concurrency=16) and cell.repeat == 1:
            lost = [replace(r, error="lost", done=None) for r in cell.requests[6:]]
            cells[i] = replace(cell, requests=(*cell.requests[:6], *lost), status="partial", note="<b>6 lost</b>")
        if cell.contender == EAGLE_3_1 and cell.load == Load(concurrency=64):
            cells[i] = replace(cell, requests=(replace(cell.requests[0], digest="other"), *cell.requests[1:]))
    return replace(
        results,
        cells=tuple(cells),
        contenders=tuple(replace(one, inflated="8b") for one in results.contenders),
        status="partial",
        notes=("tokens are pieces of text counted",),
    )


@pytest.fixture(name="written", scope="module")
def _written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BenchReport, str, Page]:
    directory = tmp_path_factory.mktemp("report")
    report = BenchReport(
        summaries=tuple(summaries([FINE, troubled(), make_eval_results(prompts=6, workloads=("coding", "chat"))])),
        title=f"All of it {NASTY}",
        references=(Reference.parse(f"Paper {NASTY}:1=9.03,4=1.71"),),
        notes=(f"By hand: {NASTY}",),
    )
    report.write(directory / "new" / "page.html")
    text = (directory / "new" / "page.html").read_text(encoding="utf-8")
    return directory, report, text, Page(text)


def test_everything_is_on_the_page(written):
    _, report, _, page = written
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    for section in ("speed", "capacity", "latency", "acceptance", "why", "answers", "setup"):
        assert f"{section}-1" in ids
    assert "speed-3" not in ids  # an eval measures no speed
    for part in report.summaries[:2]:
        sentences = [one for verdict in verdicts(part) for one in verdict.sentences]
        for sentence in [*sentences, *overall(part), *disappointments(part, report.references)]:
            assert sentence.text.replace("\u202e", "�") in page.text
            assert sentence.section in ids
        for line in warnings(part):
            assert line in page.text
    assert "By hand" in page.text
    assert "docs/bench.md" in page.text


def test_trouble_is_labelled(written):
    *_, page = written
    for wanted in (
        "This run is partial",
        "1 of 2 repeats incomplete: <b>6 lost</b>; it has no ratio",
        "Inflated to the shape 8b",
        "(EAGLE-3.1 K=3: 2 of 72)",
        "tokens are pieces of text counted",
        "there is no ratio at concurrency 16",
    ):
        assert wanted in page.text
    assert page.text.count("inflated: 8b") >= 10  # wherever such a contender is named


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs(written):
    _, _, text, page = written
    assert not {"script", "link", "iframe", "object", "img"} & {tag for tag, _ in page.elements}
    assert page.attributes("src") == []
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert NASTY[:8] not in text
    assert "\u202e" not in text
    assert {href.removeprefix("#") for href in page.attributes("href")} <= set(page.attributes("id"))


def test_pictures_are_files_too(tmp_path: Path):
    several = [make_results(workloads=("chat",), concurrencies=(1,), repeats=2), make_eval_results(prompts=4)]
    report = BenchReport(summaries=tuple(summaries(several)), title="x")
    report.write(tmp_path / "page.html", pictures=tmp_path / "pictures")
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert {"speed-concurrency-1-1.png", "capacity-concurrency-1-1.png", "ttft-1-1-1.png", "tpot-1-1-1.png"} <= names
    assert {"acceptance-1-1.png", "depths-2.png", "acceptance-2-0.png", "lengths-2-0.png", "lengths-2-1.png"} <= names
    assert all(path.stat().st_size > 5000 for path in (tmp_path / "pictures").iterdir())


def test_the_verdict_says_where_a_gain_ends_and_what_it_would_take():
    (part,) = summaries([make_results(noise=0.01)])
    slow = next(one for one in verdicts(part) if one.name == EAGLE_3)
    assert (slow.headline, slow.tone) == ("Faster up to concurrency 16", "good")
    ratio = part.rows[EAGLE_3, "coding", Load(concurrency=1)]
    assert ratio.per_user is not None
    first = slow.sentences[0].text
    assert f"{ratio.per_user.value:.2f} times [{ratio.per_user.low:.2f}, {ratio.per_user.high:.2f}]" in first
    assert "it stops paying above concurrency 16 and is slower at concurrency 64" in first
    assert all(f"at concurrency {load}" in first for load in (1, 4, 16, 64))
    fast, *_ = verdicts(part)
    assert (fast.name, fast.headline) == (EAGLE_3_1, "Faster under every load")
    losses = [one.text for one in disappointments(part) if one.tone == "bad"]
    assert len(losses) == 2
    assert all("64 x 4 = 256 tokens" in text for text in losses)
    cost = part.rows[EAGLE_3, "coding", Load(concurrency=64)].round_cost
    assert cost is not None
    assert 2.0 < cost < 2.5  # the helper's machine: (5 + 0.9 + 12.8) / (5 + 3.2) is 2.28
    assert f"need an acceptance length of {cost:.2f}" in losses[0]


def test_nothing_is_called_faster_that_noise_may_have_made():
    results = make_results(contenders=(PLAIN, "twin"), workloads=("chat",), concurrencies=(1, 4), noise=0.1)
    (part,) = summaries([results])
    (verdict,) = verdicts(part)
    assert (verdict.headline, verdict.tone) == ("No difference that is more than noise", "neutral")
    assert "no difference beyond noise" in verdict.sentences[0].text
    assert "not to be told from" in overall(part)[0].text


def test_a_gap_is_not_taken_for_the_end_of_a_gain():
    (part,) = summaries([troubled()])
    verdict = next(one for one in verdicts(part) if one.name == EAGLE_3)
    assert verdict.headline == "Faster under some loads"
    assert "stops paying" not in verdict.sentences[0].text


def test_a_shortfall_against_what_others_report_is_told():
    (part,) = summaries([make_results(workloads=("chat",), concurrencies=(1, 4))])
    texts = [one.text for one in disappointments(part, [Reference.parse("Paper: part 2:1=9,4=1.1,128=3")])]
    below = [text for text in texts if "reported for Paper: part 2" in text]
    assert len(below) == 2
    assert "against 9.00 at concurrency 1" in below[0]
    assert "concurrency 4" not in below[0]


@pytest.mark.parametrize(
    "text", ["Paper", "Paper:", ":1=2", "Paper:1", "Paper:x=2", "Paper:0=2", "Paper:1=-2", "Paper:1=nan"]
)
def test_references_that_cannot_be_read_are_refused(text: str):
    with pytest.raises(ConfigError, match="expected NAME:CONCURRENCY=RATIO"):
        Reference.parse(text)


def test_markdown_is_tables_and_what_must_be_known(written):
    _, report, *_ = written
    text = report.to_markdown()
    assert "| coding, per user | C=1 | C=4 |\n|---|---|---|\n" in text
    ratio = report.summaries[0].rows[EAGLE_3_1, "coding", Load(concurrency=1)]
    assert ratio.per_user is not None
    assert f"{ratio.per_user.value:.2f}x [{ratio.per_user.low:.2f}, {ratio.per_user.high:.2f}]" in text
    assert "| coding, per user (inflated: 8b) | C=1 | C=16 | C=64 |" in text
    assert "\N{EN DASH} |" in text  # the ratio that cannot be given
    assert "> - This run is partial" in text
    assert "<script" not in text
    assert "Acceptance length:\n\n| drafter | K | T | coding | chat | mean |\n" in text
    assert "\n| eagle-3.1 | 5 | 1 | " in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")


@pytest.mark.usefixtures("_blank_pictures")
def test_notes_stand_once_whatever_is_on_the_page():
    speed, evaluated = make_results(workloads=("chat",), concurrencies=(1,)), make_eval_results(prompts=4)
    for several in ([speed], [evaluated], [speed, evaluated], [evaluated, evaluated]):
        page = BenchReport(summaries=tuple(summaries(several)), title="x", notes=("Said by hand.",)).to_html()
        assert page.count("Said by hand.") == 1


def test_another_baseline_can_be_chosen_and_must_be_there():
    results = make_results(workloads=("chat",), concurrencies=(1,))
    (part,) = summaries([results], EAGLE_3)
    assert {row.contender for row in part.ratios} == {PLAIN, EAGLE_3_1}
    with pytest.raises(ConfigError, match="Did you mean 'EAGLE-3 K=3'"):
        summaries([results], "EAGLE-3 K=2")


def test_a_page_that_cannot_be_written_is_one_clear_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    part = Summary(make_results(workloads=("chat",), concurrencies=(1,), repeats=1), PLAIN)
    report = BenchReport(summaries=(part,), title="x")
    with pytest.raises(ConfigError, match="cannot be written"):
        report.write(tmp_path / "file" / "page.html")


def test_rates_of_requests_have_words_and_axes_of_their_own(tmp_path: Path):
    results = make_results(workloads=("chat",), concurrencies=(1, 4), repeats=2)
    cells = tuple(replace(cell, load=Load(rate=0.5 * (cell.load.concurrency or 0))) for cell in results.cells)
    report = BenchReport(summaries=tuple(summaries([replace(results, cells=cells)])), title="rates")
    report.write(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "at 0.5 requests per second" in text
    assert ">requests per second</text>" in text


def test_both_spellings_of_workload_facts_are_read():
    serve, evaluated = make_results(workloads=("chat",)), make_eval_results(workloads=("chat",))
    assert serve.workload_facts["chat"]["digest"] == evaluated.workload_facts["chat"]["digest"] == "digest of chat"


@pytest.mark.parametrize(
    "what", ["no cells", "all failed", "one request", "eval cut short", "eval without cells", "no baseline"]
)
def test_results_with_next_to_nothing_in_them_still_make_a_page(tmp_path: Path, what: str):
    results = make_results(workloads=("chat",), concurrencies=(1,), repeats=1, prompts=1)
    evaluated = make_eval_results(workloads=("chat",), prompts=2)
    if what == "all failed":
        dead = tuple(replace(cell, requests=(), seconds=0.0, status="failed", note="dead") for cell in results.cells)
        results = replace(results, cells=dead, status="failed")
    elif what == "no cells":
        results = replace(results, cells=(), status="failed")
    elif what == "no baseline":
        results = replace(results, baseline=None)
    elif what == "eval cut short":
        cells = (replace(evaluated.cells[0], status="failed", requests=(), note="broke"), *evaluated.cells[1:3])
        results = replace(evaluated, cells=cells, status="partial")
    elif what == "eval without cells":
        results = replace(evaluated, cells=(), contenders=(), status="partial")
    report = BenchReport(summaries=tuple(summaries([results])), title=what)
    report.write(tmp_path / "page.html", pictures=tmp_path)
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert ("This run is" in page.text) == (results.status != "complete")
    if what == "one request":
        assert "measured once: no interval" in page.text
    assert "95 % intervals" in report.to_markdown()


def test_the_markdown_of_an_eval_has_lengths_of_all_fresh_and_novel_rounds_and_both_shares() -> None:
    told = {"fresh_acceptance": ((5, 1, 4),), "novel_acceptance": ((5, 2, 4),), "output_tokens": 20}
    counts = {"repeated_tokens": 5, "copied_tokens": 15}
    results = make_eval_results(workloads=("chat",), prompts=2)
    cells = [replace(c, requests=tuple(replace(r, **told, **counts) for r in c.requests)) for c in results.cells]
    text = BenchReport(summaries=summaries([replace(results, cells=tuple(cells))]), title="x").to_markdown()
    headings = re.findall(r"^(.+):\n\n\| drafter \| K \| T \| chat \|$", text, re.MULTILINE)
    assert headings == [
        "Acceptance length",
        "Without repetition",
        "Repeated tokens",
        "Without repetition and copies of the prompt",
        "Tokens copied from the prompt",
    ]
    row = "| eagle-3.1 | 5 | 1 | "
    figures = [line.removeprefix(row).rstrip(" |") for line in text.splitlines() if line.startswith(row)]
    assert figures[1:] == ["2.00 [2.00, 2.00]", "25 %", "3.00 [3.00, 3.00]", "75 %"]


def test_copies_of_the_prompt_are_told_apart() -> None:
    def half(r: RequestRecord, *, copied: int | None) -> RequestRecord:
        """All fresh; of the rounds one in two is novel, and none of these accepts anything."""
        novel = () if copied is None else tuple((d, 0, n) for d, _, n in r.acceptance)
        tokens = None if copied is None else copied * r.output_tokens // 2
        return replace(
            r, fresh_acceptance=r.acceptance, novel_acceptance=novel, repeated_tokens=0, copied_tokens=tokens
        )

    def told(copied: int | None) -> BenchReport:
        cells = [replace(c, requests=tuple(half(r, copied=copied) for r in c.requests)) for c in FINE.cells]
        return BenchReport(summaries=summaries([replace(FINE, cells=tuple(cells))]), title="x")

    copying, older = told(1), told(None)
    (summary,) = copying.summaries
    assert {length.value for length in summary.lengths_of(EAGLE_3, "novel").values()} == {1.0}
    assert all(length.value > 1.0 for length in summary.lengths_of(EAGLE_3, "fresh").values())
    assert "| without repetition and copies of the prompt |" in copying.to_markdown()
    assert "copied tokens" in rounds_table(summary).header
    assert "copied tokens" not in speed_table(summary).header  # it is wide enough
    assert any("the target copies the prompt in 50 % of its greedy text on" in line for line in warnings(summary))
    spoken = " ".join(sentence.text for card in verdicts(summary) for sentence in card.sentences)
    assert "Without repetition and copies of the prompt: 1.00" in spoken
    between = next(one.text for one in overall(summary) if one.text.startswith("The acceptance length of"))
    assert re.search(
        r"as far ahead: 1\.\d+ times .*\. Without repetition and copies of the prompt: 1\.00 times", between
    )
    (before,) = older.summaries
    assert not [one.text for one in overall(before) if "copies of the prompt" in one.text]
    assert before.tells_repetition
    assert not before.tells_copies
    assert "copies of the prompt" not in older.to_markdown()
    assert "copied tokens" not in rounds_table(before).header
