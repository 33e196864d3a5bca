"""Drift by its definition: change against depth 1, with intervals, whatever the level."""

from dataclasses import replace

import pytest

from fledge.drift.change import BOUND, FEW_PROMPTS, attention_change, compare_changes, shares_by_depth
from fledge.report.intervals import Bootstrap
from tests.unit.drift.drift_cases import drift_result

QUICK = Bootstrap(resamples=200)


def straight(first: float, last: float, depths: int = 8) -> tuple[float, ...]:
    return tuple(first + (last - first) * d / (depths - 1) for d in range(depths))


def result(recent, sink=None, prompts=FEW_PROMPTS, **options):
    counts = {f"prompt-{i}": (1, 2 + i % 3) for i in range(prompts)}
    return drift_result(counts, recent=recent, sink=sink, user=0.0, **options)


def change(recent, sink=None, prompts=FEW_PROMPTS):
    return attention_change(QUICK, result(recent, sink, prompts))


def test_the_papers_drafters_are_called_what_the_paper_calls_them():
    """Pre-norm drifts; post-norm looks at recent tokens far more, at every depth, and is steady."""
    pre_norm = change(straight(0.14, 0.31), straight(0.46, 0.08))
    post_norm = change(straight(0.50, 0.53), straight(0.11, 0.10))
    assert (pre_norm.status, post_norm.status) == ("drifts", "steady")
    assert post_norm.drift_depth is None
    assert pre_norm.recent.change.value == pytest.approx(0.17, abs=0.004)
    assert pre_norm.sink.change.value == pytest.approx(-0.38, abs=0.004)
    assert pre_norm.recent.slope.value == pytest.approx(0.17 / 7, abs=0.001)
    assert pre_norm.recent.slope.low < pre_norm.recent.slope.value < pre_norm.recent.slope.high
    # Half a point of sink at each step of depth 2: beyond the bound, and there to stay.
    assert pre_norm.drift_depth == 2


def test_either_symptom_suffices_and_the_depth_is_that_from_which_on_it_stays():
    assert change((0.1, 0.1, 0.1), (0.4, 0.3, 0.2)).drift_depth == 2
    assert change((0.1, 0.3, 0.1, 0.2), (0.1,) * 4).drift_depth == 4
    away = change((0.3, 0.1, 0.1), (0.1, 0.3, 0.3))  # from recent tokens to the sink: the other way round
    assert (away.status, away.drift_depth) == ("steady", None)


def test_what_is_within_chance_of_the_bound_cannot_be_told():
    wide = result(straight(0.2, 0.2 + BOUND - 0.005))
    rows = tuple(
        replace(
            row,
            recent_attention=tuple(
                share + (0.1 if i % 2 else -0.1) * (d > 0) for d, share in enumerate(row.recent_attention)
            ),
        )
        for i, row in enumerate(wide.prompt_rows)
    )
    assert attention_change(QUICK, replace(wide, prompt_rows=rows)).status == "unclear"
    assert attention_change(QUICK, wide).status == "steady"


def test_few_prompts_get_no_verdict_however_clear_their_figures():
    few = change(straight(0.1, 0.9), prompts=FEW_PROMPTS - 1)
    assert (few.status, few.drift_depth) == ("few", 2)
    assert change((0.1,)) is None  # one depth has nothing to change to
    alone = change(straight(0.1, 0.9), prompts=1)
    assert (alone.recent.change.low, alone.drift_depth) == (None, None)


def test_drafters_are_compared_by_their_changes_prompt_by_prompt():
    steep, level = result(straight(0.1, 0.3)), result(straight(0.5, 0.5))
    difference = compare_changes(QUICK, "recent", [steep], [level])
    assert difference.value == pytest.approx(0.2)
    assert difference.high - difference.low < 1e-9  # both have the same prompts, which differ alike in both
    assert compare_changes(QUICK, "recent", [steep], [result((0.1,))]) is None
    shorter = compare_changes(QUICK, "recent", [steep], [result(straight(0.5, 0.5, depths=4))])
    assert shorter.value == pytest.approx(0.2 * 3 / 7)  # to the last depth that both have


def test_shares_by_depth_are_pooled_over_rounds():
    found = result((0.2, 0.4), prompts=2)
    rows = [
        replace(row, rounds_by_depth=counts) for row, counts in zip(found.prompt_rows, ((1, 1), (3, 0)), strict=True)
    ]
    rows = [replace(row, recent_attention=curve) for row, curve in zip(rows, ((0.1, 0.4), (0.5, None)), strict=True)]
    shares = shares_by_depth(QUICK, "recent", replace(found, prompt_rows=tuple(rows)))
    assert [one.value for one in shares] == pytest.approx([0.4, 0.4])


def test_seeds_that_disagree_widen_the_interval_and_leave_the_mean():
    """Three drafters of one recipe: what they differ by is no less a doubt than what prompts differ by."""
    alike = [result(straight(0.1, 0.2))] * 3
    apart = [result(straight(0.1, last)) for last in (0.1, 0.2, 0.3)]
    one, other = (attention_change(QUICK, *runs).recent for runs in (alike, apart))
    assert one.change.value == pytest.approx(other.change.value)
    assert one.change.value == pytest.approx(0.1, abs=0.001)
    assert one.change.half_width < 0.01
    assert other.change.half_width > 0.1
    assert attention_change(QUICK, *apart).status == "unclear"
    assert attention_change(QUICK, *apart).prompts == FEW_PROMPTS
    assert compare_changes(QUICK, "recent", apart, alike).half_width > 0.1
