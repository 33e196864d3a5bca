"""What changed and what did not, and when that cannot be said."""

from dataclasses import replace

import pytest

from fledge.bench.compare import METRICS, Change, ResultsDiff, compare
from fledge.evaluation.results import Cell, Results
from tests.bench_results import EAGLE_3, EAGLE_3_1, PLAIN, PROVENANCE, make_eval_results, make_results

SMALL = {"workloads": ("chat",), "concurrencies": (1, 16), "noise": 0.02}


def before(**changes) -> Results:
    return make_results(seed=1, **{**SMALL, **changes})


def after(**changes) -> Results:
    return make_results(seed=2, **{**SMALL, **changes})


def slower(results: Results, contender: str, times: float) -> Results:
    """One contender takes `times` as long."""

    def slow(cell: Cell) -> Cell:
        if cell.contender != contender:
            return cell
        requests = tuple(
            replace(r, sent=times * r.sent, first_token=times * (r.first_token or 0), done=times * (r.done or 0))
            for r in cell.requests
        )
        return replace(cell, requests=requests, seconds=times * cell.seconds)

    return replace(results, cells=tuple(map(slow, results.cells)))


def verdicts(found: ResultsDiff) -> dict[tuple[str, str, str], str]:
    return {(one.contender, str(one.load), one.metric): one.verdict for one in found.changes}


def test_the_same_twice_is_the_same():
    found = compare(before(), after())
    assert {one.verdict for one in found.changes} == {"same"}
    assert len(found.changes) == 3 * 2 * 3 + 2 * 2  # speeds of all, acceptance of drafters
    assert found.fails("regression") == found.fails("change") == []
    assert compare(before(), before()).warnings == ()


def test_a_slower_contender_is_found_and_named_whichever_way_is_better():
    found = compare(before(), slower(after(), EAGLE_3_1, 2.0))
    told = verdicts(found)
    for load in ("C=1", "C=16"):
        for metric in ("per-user", "total", "ttft"):
            assert told[EAGLE_3_1, load, metric] == "worse"
            assert told[EAGLE_3, load, metric] == "same"
        assert told[EAGLE_3_1, load, "acceptance"] == "same"
    failures = found.fails("regression")
    assert len(failures) == 6
    assert any("tokens/s per user worse, 0.5" in line for line in failures)
    back = compare(slower(after(), EAGLE_3_1, 2.0), before())
    assert verdicts(back)[EAGLE_3_1, "C=1", "ttft"] == "better"
    assert back.fails("regression") == []
    assert len(back.fails("change")) == 6


def test_a_change_below_the_threshold_is_none():
    one, other = before(noise=0.0), slower(before(noise=0.0), EAGLE_3, 1.04)
    assert verdicts(compare(one, other, metrics=("per-user",)))[EAGLE_3, "C=1", "per-user"] == "same"


def test_acceptance_is_compared_prompt_by_prompt():
    """The same prompts on both sides: what they differ by among themselves is no noise here."""

    def worse(cell: Cell) -> Cell:
        def less(r):
            kept = tuple((d, max(0, a - (a == 3)), n) for d, a, n in r.acceptance)  # every full round loses one
            return replace(r, acceptance=kept)

        return replace(cell, requests=tuple(map(less, cell.requests))) if cell.contender == EAGLE_3_1 else cell

    results = before(repeats=1)
    found = compare(results, replace(results, cells=tuple(map(worse, results.cells))), metrics=("acceptance",))
    told = {one.contender: one for one in found.changes if str(one.load) == "C=1"}
    assert told[EAGLE_3_1].verdict == "worse"
    ratio = told[EAGLE_3_1].ratio
    assert ratio is not None
    assert ratio.high is not None
    assert ratio.high < 0.95
    assert told[EAGLE_3].verdict == "same"


@pytest.mark.parametrize("rounds", ["fresh", "novel"])
def test_acceptance_without_repetition_or_copies_is_compared_where_both_sides_tell(rounds):
    def told(results, *, loops: bool):
        def fresh(r):
            kept = tuple((d, 0 if loops else a, n) for d, a, n in r.acceptance)
            return replace(r, **{f"{rounds}_acceptance": kept})

        cells = [replace(cell, requests=tuple(map(fresh, cell.requests))) for cell in results.cells]
        return replace(results, cells=tuple(cells))

    results = before(repeats=1)
    found = compare(told(results, loops=False), told(results, loops=True))
    verdict = {one.metric: one.verdict for one in found.changes if (one.contender, str(one.load)) == (EAGLE_3, "C=1")}
    assert (verdict["acceptance"], verdict[f"{rounds}-acceptance"]) == ("same", "worse")
    assert not [one for one in compare(results, results).changes if one.metric == f"{rounds}-acceptance"]


def test_between_machines_only_ratios_to_the_own_baseline_are_compared():
    other = {**PROVENANCE, "device": "Other GPU"}
    found = compare(before(), after(speed=3.0, provenance=other))
    assert found.is_relative
    assert {one.verdict for one in found.changes} == {"same"}
    assert PLAIN not in {one.contender for one in found.changes}
    assert any("other machine" in line and "Other GPU" in line for line in found.warnings)
    plain = compare(before(), after(speed=3.0, provenance=other), is_relative=False)
    assert verdicts(plain)[PLAIN, "C=1", "per-user"] == "better"
    worse = compare(before(), slower(after(speed=3.0, provenance=other), EAGLE_3, 2.0))
    assert verdicts(worse)[EAGLE_3, "C=1", "per-user"] == "worse"
    assert verdicts(worse)[EAGLE_3_1, "C=1", "per-user"] == "same"


def test_one_repeat_is_not_enough_to_tell_speed_from_noise():
    found = compare(before(repeats=1), slower(after(repeats=1), EAGLE_3, 3.0))
    for one in found.changes:
        assert one.verdict == ("same" if one.metric == "acceptance" else "unknown")
    assert "A: one repeat only" in str(next(one for one in found.changes if one.verdict == "unknown"))


def test_what_is_missing_or_broken_in_b_fails_a_job():
    results = after()
    gone = replace(results, cells=tuple(c for c in results.cells if c.contender != EAGLE_3))
    found = compare(before(), gone)
    assert found.missing == (f"{EAGLE_3}, chat, C=1 (not measured)", f"{EAGLE_3}, chat, C=16 (not measured)")
    assert len(found.fails("regression")) == 2
    assert compare(gone, before()).added == found.missing
    assert compare(gone, before()).fails("regression") == []
    assert len(compare(gone, before()).fails("change")) == 2
    dead = tuple(replace(c, status="failed", note="died") if c.contender == EAGLE_3 else c for c in results.cells)
    found = compare(before(), replace(results, cells=dead))
    assert "3 of 3 repeats failed: died" in found.missing[0]
    assert {one.verdict for one in found.changes if one.contender == EAGLE_3} == {"unknown"}


def test_other_prompts_under_the_same_name_are_not_compared():
    results = after()
    settings = {**results.settings, "workloads": [{"name": "chat", "digest": "another", "prompts": 12}]}
    found = compare(before(), replace(results, settings=settings))
    assert {(one.verdict, one.reason) for one in found.changes} == {("unknown", "the workload has other prompts")}
    assert any(line.startswith("workload chat: digest") for line in found.warnings)


def test_whatever_else_differs_is_told():
    results = after()
    provenance = {**PROVENANCE, "threads": 2, "versions": {**PROVENANCE["versions"], "torch": "9.9"}}
    contenders = (*results.contenders[:2], replace(results.contenders[2], drafter="another"))
    settings = {**results.settings, "max_tokens": 7}
    found = compare(before(), replace(results, provenance=provenance, contenders=contenders, settings=settings))
    told = "\n".join(found.warnings)
    for wanted in (
        "threads: 8 in A, 2 in B",
        "torch: 2.11.0 in A, 9.9",
        "max_tokens: 96 in A, 7",
        "drafter",
        "another",
    ):
        assert wanted in told
    assert not found.is_relative  # the same machine


def test_evals_are_compared_by_acceptance_alone():
    found = compare(make_eval_results(seed=1), make_eval_results(seed=1))
    assert {(one.metric, one.verdict) for one in found.changes} == {("acceptance", "same")}
    assert len(found.changes) == 2 * 2 * 2 * 3  # drafters, depths, temperatures, workloads


def test_chance_is_taken_for_a_change_as_rarely_as_the_level_says():
    """Drafts that are drawn anew on both sides, without any threshold: one in twenty may look like a change."""
    changed = total = 0
    for seed in range(6):
        one, other = (make_eval_results(seed=100 * side + seed, depths=(3,), prompts=20) for side in (1, 2))
        found = compare(one, other, threshold=0.0).changes
        changed, total = changed + sum(c.verdict != "same" for c in found), total + len(found)
    assert total == 72
    assert changed <= 10  # 3.6 on average; ten are more than three deviations above


def test_figures_before_and_after_are_those_of_the_metric():
    found = compare(before(), before(), metrics=tuple(METRICS))
    one: Change = next(c for c in found.changes if (c.contender, c.metric) == (EAGLE_3, "acceptance"))
    assert one.before == one.after
    assert one.ratio is not None
    assert one.ratio.value == pytest.approx(1.0)
    assert one.before is not None
    assert 1.5 < one.before < 2.5
    restored = ResultsDiff.from_dict(found.to_dict())
    assert restored == found
