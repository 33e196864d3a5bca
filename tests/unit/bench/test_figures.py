"""Figures from hand-made requests, and intervals that hold what they promise."""

from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from fledge.bench.figures import decoding, figures_of, latencies
from fledge.bench.report import print_results
from fledge.bench.rows import Row
from fledge.bench.summary import Summary
from fledge.bench.verdict import warnings
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.errors import ConfigError
from fledge.evaluation.results import Cell, Load, RequestRecord, Results, turn_name
from fledge.report.intervals import Bootstrap, Interval, Panel, mean_ratio, pooled
from fledge.report.prose import number, times, with_interval
from tests.bench_results import ACCEPTED, EAGLE_3, EAGLE_3_1, PLAIN, make_results

ONE = Load(concurrency=1)
interval, quantiles = Bootstrap().interval, Bootstrap().quantiles


def ratios(results: Results, baseline: str) -> list[Row]:
    return Summary(results, baseline).ratios


def summarise(results: Results) -> list[Row]:
    return list(Summary(results, results.baseline).rows.values())


def agreements(results: Results, baseline: str) -> list[tuple[int, int]]:
    return [(row.compared, row.different) for row in Summary(results, baseline).agreements]


def request(prompt: str, sent: float, first: float, done: float, tokens: int, **more) -> RequestRecord:
    return RequestRecord(prompt=prompt, sent=sent, first_token=first, done=done, output_tokens=tokens, **more)


def cell(*requests: RequestRecord, repeat: int = 0, seconds: float = 10.0, **more) -> Cell:
    values = {"contender": "x", "workload": "w", "load": ONE, "repeat": repeat, "seconds": seconds, **more}
    return Cell(requests=tuple(requests), **values)


def test_figures_are_what_their_formulas_say():
    broken = request("c", 0, 0.5, 9, 1000, error="lost")
    found = figures_of(
        [
            cell(
                request("a", 0, 1, 3, 11),
                request("b", 1, 1.5, 2.5, 5),
                request("d", 0, 2, 2, 1),
                broken,
                status="partial",
            )
        ]
    )
    assert found.per_user_tokens_per_second is not None
    assert found.per_user_tokens_per_second.value == pytest.approx(
        (10 + 4) / (2 + 1)
    )  # an answer of one token has none
    assert found.total_tokens_per_second is not None
    assert found.total_tokens_per_second.value == pytest.approx((11 + 5 + 1) / 10)
    assert found.ttft_ms is not None
    assert found.ttft_ms["mean"].value == pytest.approx(1e3 * (1 + 0.5 + 2) / 3)
    assert found.ttft_ms["p50"].value == pytest.approx(1000)
    assert found.tpot_ms is not None
    assert found.tpot_ms["mean"].value == pytest.approx(1e3 * (0.2 + 0.25) / 2)
    assert (found.requests, found.errors, found.partial) == (3, 1, True)
    assert found.acceptance_length is None


def test_an_incomplete_repeat_enters_no_mean_beside_complete_ones():
    whole = cell(request("a", 0, 1, 3, 11), request("b", 0, 1, 3, 11))
    cut = cell(request("a", 0, 1, 101, 11), repeat=1, status="partial", note="interrupted")
    found = figures_of([whole, cut])
    assert found.per_user_tokens_per_second == figures_of([whole]).per_user_tokens_per_second
    assert (found.cells, found.failed_cells, found.partial) == (1, 1, True)
    assert found.reason == "1 of 2 repeats incomplete: interrupted"
    alone = figures_of([cut])
    assert alone.per_user_tokens_per_second is not None
    assert alone.partial
    nothing = figures_of([cell(status="failed", note="dead")])
    assert nothing.per_user_tokens_per_second is None
    assert nothing.reason == "1 of 1 repeat failed: dead"


@pytest.mark.parametrize("side", [PLAIN, EAGLE_3])
@pytest.mark.parametrize("harm", ["partial", "error"])
def test_a_ratio_with_a_side_that_is_not_whole_is_none_and_says_why(side: str, harm: str):
    results = make_results(contenders=(PLAIN, EAGLE_3), workloads=("chat",), concurrencies=(1, 4), repeats=2)
    cells = list(results.cells)
    place = next(i for i, c in enumerate(cells) if c.contender == side and c.load == ONE)
    lost = replace(cells[place].requests[0], error="connection lost", done=None)
    cells[place] = replace(
        cells[place],
        requests=(lost, *cells[place].requests[1:]),
        status="partial" if harm == "partial" else "complete",
        note="cut" if harm == "partial" else None,
    )
    hurt, whole = ratios(replace(results, cells=tuple(cells)), PLAIN)
    assert (hurt.per_user, hurt.total) == (None, None)
    assert hurt.reason is not None
    assert hurt.reason.startswith(f"{side}: ")
    assert ("cut" if harm == "partial" else "connection lost") in hurt.reason
    assert whole.per_user is not None
    assert whole.reason is None


def test_a_slow_repeat_does_not_move_a_ratio():
    """Both sides of a repeat are slowed alike; pooling their times would weigh it ten times."""

    def requests(seconds: float, ratio: float) -> list[RequestRecord]:
        return [request(p, 0, 0, seconds * ratio * s, 101) for p, s in (("a", 1.0), ("b", 1.1), ("c", 0.9))]

    cells = []
    for repeat, (slow, ratio) in enumerate([(1, 0.5), (10, 0.52), (1, 0.48)]):
        cells.append(cell(*requests(slow, 1.0), repeat=repeat, contender=PLAIN))
        cells.append(cell(*requests(slow, ratio), repeat=repeat, contender=EAGLE_3))
    results = replace(make_results(contenders=(PLAIN, EAGLE_3)), cells=tuple(cells))
    (found,) = ratios(results, PLAIN)
    assert found.per_user is not None
    assert found.per_user.value == pytest.approx((0.5 * 0.52 * 0.48) ** (-1 / 3))
    assert found.per_user.low is not None
    assert found.per_user.high is not None
    assert 1.7 < found.per_user.low < 2.0 < found.per_user.high < 2.4


def _simulated(rng: np.random.Generator, repeats: int, prompts: int) -> Panel:
    """Twice as fast on average over prompts, which differ; and each repeat has noise of its own."""
    ease = rng.normal(0, 0.15, prompts)
    rows = []
    for repeat in range(repeats):
        slow, extra = rng.normal(0, 0.1), rng.normal(0, 0.03)
        before = np.exp(slow + rng.normal(0, 0.03, prompts))
        after = np.exp(slow + extra - ease - 0.5 * 0.15**2 + rng.normal(0, 0.03, prompts)) / 2
        rows += [(repeat, str(p), (100, after[p], 100, before[p])) for p in range(prompts)]
    return Panel.collect(rows, columns=4)


@pytest.mark.parametrize("repeats", [3, 5])
def test_intervals_of_ratios_cover_the_truth(repeats: int):
    found = _intervals(repeats)
    inside = sum(low <= 2.0 <= high for low, high in found)
    assert 180 <= inside <= 199  # 95 % of 200 is 190, give or take three deviations of three
    assert np.median([high / low for low, high in found]) < 1.3  # and they say something


def test_intervals_of_one_repeat_are_too_narrow_as_the_page_says():
    """If this fails, docs/bench.md and `compare`, which refuses single repeats, are too shy."""
    assert sum(low <= 2.0 <= high for low, high in _intervals(1)) < 180


def _intervals(repeats: int) -> list[tuple[float, float]]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(200):
        one = interval([_simulated(rng, repeats, 20)], lambda sides: mean_ratio(sides[0]))
        assert one is not None
        assert one.low is not None
        assert one.high is not None
        found.append((one.low, one.high))
    return found


def test_one_repeat_says_nothing_about_noise_and_one_request_nothing_at_all():
    panel = Panel.collect([(0, "a", (10, 1)), (0, "b", (10, 2))], columns=2)
    found = interval([panel], pooled())
    assert found is not None
    assert (found.low, found.value, found.high) == pytest.approx((5.0, 20 / 3, 10.0))
    assert interval([panel.only(prompts=["a"])], pooled()) == Interval(value=10.0)
    assert interval([panel.only(prompts=[])], pooled()) is None


def test_the_same_prompts_in_more_repeats_are_no_more_prompts():
    """Repeats of the same answers must not narrow the interval of an acceptance length."""
    once = [(0, str(p), (p % 4, 1.0)) for p in range(20)]
    again = [(repeat, prompt, values) for repeat in range(10) for _, prompt, values in once]
    one, ten = (interval([Panel.collect(rows, columns=2)], pooled(), is_share=True) for rows in (once, again))
    assert one == ten


def test_the_turns_of_a_conversation_are_drawn_together():
    """Four turns that are all fast or all slow tell no more than one: the interval must not become narrower."""

    def measured(turns: int, name) -> Interval:
        several = [request(name(p, turn), 0, 0, 1.0 + p % 5, 2) for p in range(12) for turn in range(turns)]
        found = interval([decoding([cell(*several)])], pooled())
        assert found is not None
        assert found.low is not None
        return found

    single = measured(1, lambda p, _turn: f"p{p}")
    together = measured(4, lambda p, turn: turn_name(f"p{p}", turn))
    apart = measured(4, lambda p, turn: f"p{p}/{turn}")
    assert (together.low, together.high) == pytest.approx((single.low, single.high))
    assert apart.high - apart.low < 0.7 * (single.high - single.low), "nothing was tested"
    only = cell(*(request(turn_name("only", turn), 0, 1.0 + turn, 2.0 + 2 * turn, 5) for turn in range(4)))
    assert quantiles(latencies([only], "ttft"), [0.5])[0].low is None, "one conversation says nothing about another"
    assert interval([decoding([only])], pooled()).low is None


def test_panels_side_by_side_keep_what_both_have():
    one = Panel.collect([(0, "a", (1, 1)), (0, "b", (2, 1)), (1, "a", (3, 1)), (1, "b", (4, 1))], columns=2)
    other = Panel.collect([(1, "b", (5, 1)), (1, "c", (6, 1)), (2, "b", (7, 1))], columns=2)
    both = one.beside(other)
    assert (both.repeats, both.prompts) == ((1,), ("b",))
    assert both.values.tolist() == [[[4, 1, 5, 1]]]


def test_quantiles_match_numpy_and_their_intervals_hold_them():
    rng = np.random.default_rng(0)
    values = {(r, str(p)): rng.lognormal(0, 0.5, 2).tolist() for r in range(3) for p in range(20)}
    found = quantiles(values, (0.5, 0.9, 0.99))
    assert found is not None
    flat = [value for several in values.values() for value in several]
    for one, level in zip(found, (0.5, 0.9, 0.99), strict=True):
        assert one.value == pytest.approx(np.quantile(flat, level))
        assert one.low is not None
        assert one.high is not None
        assert one.low < one.value < one.high or level == 0.99
    assert quantiles({}, (0.5,)) is None


def test_acceptance_is_that_of_the_one_definition():
    results = make_results(workloads=("chat",), concurrencies=(1,))
    for row in summarise(results):
        whole = AcceptanceStatistics.merge(one.acceptance_statistics for one in row.cells)
        if row.contender not in ACCEPTED:
            assert row.figures.acceptance_length is None
            continue
        assert row.figures.acceptance_length is not None
        assert row.figures.acceptance_length.value == pytest.approx(whole.acceptance_length)
        assert [one.value for one in row.figures.rate_by_depth] == pytest.approx(list(whole.rate_by_depth))
        assert row.figures.rounds == whole.rounds


def test_a_servers_own_tally_has_intervals_from_repeats_only():
    cells = [
        cell(request("a", 0, 1, 2, 5), repeat=repeat, acceptance=((3, 1, 10 + repeat), (3, 3, 10)))
        for repeat in range(3)
    ]
    found = figures_of(cells).acceptance_length
    assert found is not None
    assert found.value == pytest.approx(1 + (33 + 90) / 63)
    assert found.low is not None
    assert found.low < found.value
    assert figures_of(cells[:1]).acceptance_length == Interval(value=3.0)


def test_answers_are_compared_by_prompt_where_nothing_is_random():
    results = make_results(contenders=(PLAIN, EAGLE_3), workloads=("chat",), concurrencies=(4,), repeats=2)
    assert agreements(results, PLAIN) == [(24, 0)]
    cells = list(results.cells)
    place = next(i for i, c in enumerate(cells) if c.contender == EAGLE_3)
    several = tuple(reversed(cells[place].requests))  # the order of answers does not matter
    cells[place] = replace(cells[place], requests=(replace(several[0], digest="other"), *several[1:]))
    results = replace(results, cells=tuple(cells))
    assert agreements(results, PLAIN) == [(24, 1)]
    assert agreements(replace(results, settings={"temperature": 0.7}), PLAIN) == []


def test_true_ratios_of_the_synthetic_machine_are_found():
    """The helper's own model, so that reports are tested with figures that mean something."""
    results = make_results(contenders=(PLAIN, EAGLE_3_1), workloads=("chat",), concurrencies=(1, 64), noise=0.01)
    low, high = ratios(results, PLAIN)
    assert low.per_user is not None
    assert high.per_user is not None
    assert 2.0 < low.per_user.value < 2.6
    assert high.per_user.value < 1.4
    with pytest.raises(ConfigError, match="no contender"):
        ratios(results, "no speculatoin")


def test_figures_are_written_with_their_intervals():
    assert [number(v) for v in (0.1234, 1.234, 12.34, 123.4, 1234.5)] == ["0.123", "1.23", "12.3", "123", "1,234"]
    assert with_interval(Interval(value=2.0, low=1.5, high=2.5), "{:.1f}") == "2.0 [1.5, 2.5]"
    assert times(Interval(value=2.0, low=1.5, high=2.5)) == "2.00x [1.50, 2.50]"
    assert times(Interval(value=2.0)) == "2.00x"
    assert times(None) == "\N{EN DASH}"


def test_rows_with_fewer_repeats_than_asked_for_are_named():
    results = make_results(workloads=("chat",), concurrencies=(1,), repeats=3)
    results = replace(results, settings={**results.settings, "repeats": 3})
    assert warnings(Summary(results, None)) == []
    results = replace(results, cells=results.cells[:-1])
    (line,) = warnings(Summary(results, None))
    assert line == f"Fewer than the 3 repeats that were asked for: {EAGLE_3_1}, chat, C=1."


def test_the_printed_table_labels_what_is_not_whole(capsys):
    results = make_results(workloads=("chat",), concurrencies=(1,), repeats=2)
    cells = [replace(c, status="failed", note="it died") if c.contender == EAGLE_3 else c for c in results.cells]
    contenders = tuple(replace(one, inflated="8b") for one in results.contenders)
    results = replace(results, cells=tuple(cells), contenders=contenders, status="partial", notes=("A note.",))
    print_results(Summary(results, PLAIN), Console(width=160))
    text = capsys.readouterr().out
    for wanted in ("This run is partial", "it died; it has no ratio", "shape 8b", "A note.", "no speculation", "p99"):
        assert wanted in text
    line = next(line for line in text.splitlines() if EAGLE_3 in line)
    assert line.count("\N{EN DASH}") == 2
