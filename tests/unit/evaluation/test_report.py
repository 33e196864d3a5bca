"""Figures of `fledge eval` by hand, and what is said and drawn of them."""

from dataclasses import replace

import pytest

from fledge.evaluation.report import (
    LENGTHS,
    MORE,
    EvalReport,
    EvalRow,
    acceptance_rates,
    complete_cells,
    plus_minus,
)
from fledge.evaluation.results import Cell, Contender, Load, RequestRecord, Results
from fledge.report.intervals import Interval
from tests.bench_results import make_eval_results


def made_up(*records: tuple[str, str, tuple[int, int, int], int]) -> Results:
    """Records: (workload, prompt, (drafted, accepted, rounds), prompt tokens)."""
    names = list(dict.fromkeys(record[0] for record in records))
    cells = tuple(
        Cell(
            contender="d K=2 T=0",
            workload=name,
            load=Load(concurrency=1),
            repeat=0,
            seconds=1.0,
            requests=tuple(
                RequestRecord(prompt=p, sent=0.0, done=1.0, prompt_tokens=tokens, output_tokens=3, acceptance=(triple,))
                for n, p, triple, tokens in records
                if n == name
            ),
        )
        for name in names
    )
    facts = {
        name: {"categories": {"c": [p for n, p, *_ in records if n == name]}, "prompts": 9, "too_long": []}
        for name in names
    }
    return Results(
        kind="eval",
        title="made up",
        baseline=None,
        contenders=(Contender(name="d K=2 T=0", kind="fledge", target="t", speculation={"num_speculative_tokens": 2}),),
        cells=cells,
        settings={"workloads": facts, "dtype": "float32", "device": "cpu", "max_tokens": 3},
        provenance={},
    )


def only_row(results: Results) -> EvalRow:
    (row,) = EvalReport(results).rows
    return row


def repeating(results: Results, *repeated: int) -> Results:
    """Of each workload's answers of three tokens so many are repeated, a third of the rounds is fresh and all fail."""
    cells = [
        replace(
            cell,
            requests=tuple(
                replace(one, repeated_tokens=count, fresh_acceptance=((2, 0, one.acceptance[0][2] // 3),))
                for one in cell.requests
            ),
        )
        for cell, count in zip(results.cells, repeated, strict=True)
    ]
    return replace(results, cells=tuple(cells))


def test_without_repetition_and_a_target_that_loops() -> None:
    plain = made_up(("a", "1", (2, 2, 9), 5), ("a", "2", (2, 2, 9), 5), ("b", "1", (2, 1, 9), 5))
    report = EvalReport(repeating(plain, 2, 0))
    (row,) = report.rows
    assert {name: length.value for name, length in row.by_workload.items()} == {"a": 3.0, "b": 2.0}
    assert {name: length.value for name, length in row.fresh_by_workload.items()} == {"a": 1.0, "b": 1.0}
    assert row.repeated_by_workload == {"a": 2 / 3, "b": 0.0}
    assert row.repeated == 4 / 9
    assert [table.title for table in report.tables()][1:3] == ["Without repetition", "Repeated tokens"]
    line = "the target repeats itself in 67 % of its text on a; figures without repetition are the ones to compare"
    assert report.notes == [line]
    assert f"Note: {line}." in report.markdown()
    assert EvalReport(repeating(plain, 0, 0)).notes == []
    older = EvalReport(plain)
    assert (older.notes, older.rows[0].repeated, older.tells_repetition) == ([], None, False)


def test_copies_of_the_prompt_are_told_apart() -> None:
    plain = made_up(("a", "1", (2, 2, 9), 5), ("a", "2", (2, 2, 9), 5), ("b", "1", (2, 1, 9), 5))
    fresh = repeating(plain, 0, 0)

    def copying(one: RequestRecord, copied: int) -> RequestRecord:
        return replace(one, copied_tokens=copied, novel_acceptance=((2, 1, 2), (2, 0, 2)))

    cells = [
        replace(cell, requests=tuple(copying(one, copied) for one in cell.requests))
        for cell, copied in zip(fresh.cells, (2, 0), strict=True)
    ]
    report = EvalReport(replace(fresh, cells=tuple(cells)))
    (row,) = report.rows
    assert {name: length.value for name, length in row.novel_by_workload.items()} == {"a": 1.5, "b": 1.5}
    assert (row.novel_mean.value, row.fresh_mean.value, row.mean.value) == (1.5, 1.0, 2.5)
    assert (row.copied_by_workload, row.copied) == ({"a": 2 / 3, "b": 0.0}, 4 / 9)
    titles = ["Without repetition and copies of the prompt", "Tokens copied from the prompt"]
    assert [table.title for table in report.tables()][3:5] == titles
    (line,) = report.notes
    assert line.startswith("the target copies the prompt in 67 % of its text on a: figures there measure copying too")
    assert f"Note: {line}." in report.markdown()
    (card,) = report.cards("x")
    assert card.headline == "Yields 2.50 tokens a round, 1.50 of new text"
    sentences = [one.text for one in card.sentences]
    assert "drafting 2 ahead (without repetition 1.00, without copies of the prompt too 1.50)." in sentences[0]
    assert "67 % of the tokens on a copy the prompt: figures there measure copying too." in sentences
    assert not [one for one in sentences if "tokens on b" in one]

    older = EvalReport(fresh)  # of a version that told of repetition alone
    assert (older.tells_copies, older.rows[0].copied, older.notes) == (False, None, [])
    assert "Tokens copied from the prompt" not in [table.title for table in older.tables()]
    assert not [one for one in older.cards("x")[0].sentences if "cop" in one.text]


def test_figures_by_hand() -> None:
    row = only_row(
        made_up(
            ("a", "1", (2, 2, 3), 100),  # 6 accepted in 3 rounds
            ("a", "1", (2, 0, 1), 300),  # another turn of the same prompt
            ("a", "2", (2, 1, 4), 100),
            ("b", "1", (2, 2, 5), 3000),
        )
    )
    assert row.by_workload["a"].value == pytest.approx(1 + 10 / 8)
    assert row.by_workload["b"] == Interval(value=3.0)  # one prompt says nothing about others
    assert row.mean.value == pytest.approx((2.25 + 3) / 2)
    assert row.mean.low is None
    assert row.by_category["c"].value == pytest.approx(1 + 20 / 13)
    assert list(row.by_length) == ["128", "512", "4k"]
    assert row.by_length["128"].value == pytest.approx(1 + 10 / 7)
    assert row.rate_by_depth == pytest.approx((12 / 13, 8 / 13))
    assert row.rounds == 13
    # Prompts are resampled, not turns: whichever two are drawn, the figure lies between those of the two prompts.
    assert row.by_workload["a"].low == pytest.approx(1 + 4 / 4)
    assert row.by_workload["a"].high == pytest.approx(1 + 6 / 4)
    assert row.by_workload["a"].half_width == pytest.approx(0.25)
    assert plus_minus(row.by_workload["a"]) == "2.25 ±0.25"


def test_the_mean_is_missing_where_a_workload_is() -> None:
    whole = made_up(("a", "1", (2, 2, 3), 1), ("b", "1", (2, 1, 3), 1))
    failed = replace(whole, cells=(whole.cells[0], replace(whole.cells[1], status="failed", note="it broke")))
    row = only_row(failed)
    assert row.mean is None
    assert set(row.by_workload) == {"a"}
    assert row.failed == {"b": "it broke"}


def test_rates_are_those_of_the_row_with_intervals() -> None:
    results = make_eval_results(prompts=6, depths=(3,), workloads=("chat", "coding"))
    for row in EvalReport(results).rows:
        rates = acceptance_rates(complete_cells(results, row.contender))
        assert [rate.value for rate in rates.values()] == pytest.approx(list(row.rate_by_depth))
        assert all(rate.low <= rate.value <= rate.high for rate in rates.values())


def test_a_card_states_means_best_and_worst_and_what_is_missing() -> None:
    results = made_up(("a", "1", (2, 2, 3), 1), ("a", "2", (2, 2, 3), 1), ("b", "1", (2, 0, 3), 1))
    (card,) = EvalReport(results).cards("acceptance-1")
    assert (card.name, card.headline) == ("d", "Yields 2.00 tokens a round")
    assert card.tiles == (("2.00", "mean at K=2, T=0", "neutral"),)
    texts = [sentence.text for sentence in card.sentences]
    assert texts[0] == "At temperature 0 the mean acceptance length of d over workloads is 2.00 drafting 2 ahead."
    assert texts[1].endswith("it does best on a, 3.00 [3.00, 3.00], and worst on b, 1.00.")
    assert {sentence.section for sentence in card.sentences} == {"acceptance-1"}
    failed = replace(results, cells=(results.cells[0], replace(results.cells[1], status="failed", note="it broke")))
    (card,) = EvalReport(failed).cards("x")
    assert card.headline == "Not measured in full"
    assert ("Not measured: b, drafting 2 ahead at temperature 0: it broke", "bad") in [
        (sentence.text, sentence.tone) for sentence in card.sentences
    ]


def test_the_headline_of_many_depths_is_all_of_them_not_the_best() -> None:
    (card, *_) = EvalReport(make_eval_results(prompts=4, depths=(3, 5), workloads=("chat", "coding"))).cards("x")
    low, high = (float(value) for value, *_ in card.tiles)
    assert low < high
    assert card.headline.startswith(f"Yields {low:.2f} to {high:.2f} tokens a round")


def test_pictures_of_every_kind_and_in_their_sections() -> None:
    report = EvalReport(make_eval_results(prompts=4, depths=(3, 5), workloads=("chat", "coding")))
    charts = {chart.name: chart for chart in report.charts(7)}
    temperatures = sorted({row.temperature for row in report.rows})
    names = ["depths-7", "acceptance-7-0", "acceptance-7-1", "acceptance-7-2"]
    assert list(charts) == [*names, *(f"lengths-7-{i}" for i in range(len(temperatures)))]
    assert [chart.section for chart in charts.values()].count(MORE) == 2
    assert charts["acceptance-7-0"].section == LENGTHS
    (axes,) = charts["depths-7"].figure.axes
    assert len(axes.containers) == len(report.drafters) * len(temperatures)
    (axes,) = charts["acceptance-7-0"].figure.axes
    assert len(axes.containers) == sum(row.depth == 5 for row in report.rows)
    assert len(axes.containers[0].lines[0].get_xdata()) == len(report.rows[-1].rate_by_depth)
    (axes,) = charts["lengths-7-0"].figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["chat", "coding"]


def test_a_page_shows_intervals_beside_their_figures() -> None:
    main, *_ = EvalReport(make_eval_results(prompts=6, workloads=("chat", "coding"))).tables()
    assert main.header == ("drafter", "K", "T", "chat", "coding", "mean")
    cell = main.rows[0].cells[3]
    assert cell.ends
    assert str(cell) == f"{cell.text} [{cell.ends}]"
