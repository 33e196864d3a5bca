"""Intervals: that they cover as often as they say, that resampling rounds would not, and their edges."""

from collections import Counter

import numpy as np
import pytest

from fledge.report.intervals import Bootstrap, Comparison, Interval, cluster_interval, cluster_sums

QUICK = Bootstrap(resamples=300)


def simulated(generator: np.random.Generator):
    """Prompts of their own difficulty: (accepted, rounds) with 30 rounds of up to 5 drafts, and the true mean."""
    rates = generator.beta(2, 2, size=50)
    accepted = generator.binomial(5, rates[:, None], size=(50, 30))  # [prompts, rounds]
    return accepted, {str(i): (float(row.sum()), 30.0) for i, row in enumerate(accepted)}


def coverage(interval_of, truth: float, *, trials: int = 250) -> float:
    generator = np.random.default_rng(5)
    found = [interval_of(generator) for _ in range(trials)]
    return float(np.mean([one.low <= truth <= one.high for one in found]))


def test_acceptance_length_covers_the_truth_as_often_as_it_says():
    share = coverage(lambda generator: QUICK.acceptance_length(simulated(generator)[1]), 1 + 5 * 0.5)
    assert 0.90 <= share <= 0.98


def test_resampling_rounds_instead_of_prompts_would_not_cover():
    def by_rounds(generator):
        accepted, _ = simulated(generator)
        return QUICK.acceptance_length({str(i): (float(a), 1.0) for i, a in enumerate(accepted.ravel())})

    assert coverage(by_rounds, 1 + 5 * 0.5, trials=30) < 0.6


def paired(generator, effect: float):
    _, base = simulated(generator)
    after = {name: (total * (1 - effect) + generator.normal(0, 2), rounds) for name, (total, rounds) in base.items()}
    return after, base


def test_paired_difference_covers_and_is_narrower_than_unpaired():
    generator = np.random.default_rng(1)
    widths, covered = [], []
    for _ in range(120):
        after, base = paired(generator, 0.2)
        together = QUICK.compare(after, base, offset=1.0)
        apart = QUICK.compare({f"other-{name}": one for name, one in after.items()}, base, offset=1.0)
        assert together.is_paired
        assert not apart.is_paired
        assert together.ratio.value == pytest.approx(apart.ratio.value)
        widths.append((together.ratio.high - together.ratio.low) / (apart.ratio.high - apart.ratio.low))
        covered.append(together.difference.low <= -0.2 * 5 * 0.5 <= together.difference.high)
    assert np.mean(widths) < 0.6
    assert 0.88 <= np.mean(covered) <= 0.99


def test_no_effect_is_rarely_called_one():
    generator = np.random.default_rng(2)
    found = [QUICK.compare(*paired(generator, 0.0), offset=1.0).ratio for _ in range(120)]
    assert np.mean([one.low > 1 or one.high < 1 for one in found]) < 0.12


def test_values_are_pooled_over_rounds_not_averaged_over_prompts():
    counts = {"short": (1.0, 1.0), "long": (0.0, 99.0)}
    assert QUICK.acceptance_length(counts).value == pytest.approx(1.01)
    assert QUICK.pooled(counts).value == pytest.approx(0.01)


def test_comparison_is_over_the_prompts_both_have():
    base = {"a": (4.0, 2.0), "b": (2.0, 2.0), "only here": (100.0, 1.0)}
    found = QUICK.compare({"a": (1.0, 2.0), "b": (1.0, 2.0)}, base, offset=1.0)
    assert found.prompts == 2
    assert found.base == pytest.approx(2.5)
    assert found.ratio.value == pytest.approx(1.5 / 2.5)
    assert found.difference.value == pytest.approx(-1.0)


def test_the_seed_decides_and_the_level_widens():
    counts = simulated(np.random.default_rng(3))[1]
    assert QUICK.acceptance_length(counts) == QUICK.acceptance_length(counts)
    assert QUICK.acceptance_length(counts) != Bootstrap(resamples=300, seed=1).acceptance_length(counts)
    wide, narrow = (Bootstrap(resamples=300, level=level).acceptance_length(counts) for level in (0.99, 0.5))
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


def test_many_prompts_are_resampled_in_parts(monkeypatch):
    counts = simulated(np.random.default_rng(3))[1]
    whole = QUICK.acceptance_length(counts)
    monkeypatch.setattr("fledge.report.intervals._BLOCK", 50 * 7)
    assert QUICK.acceptance_length(counts) == whole
    assert QUICK.quantiles({(0, name): [total] for name, (total, _) in counts.items()}, (0.5,)) is not None


def test_too_little_to_say():
    assert QUICK.acceptance_length({}) is None
    assert QUICK.acceptance_length({"a": (0.0, 0.0)}) is None
    assert QUICK.acceptance_length({"a": (2.0, 4.0)}) == Interval(value=1.5)
    assert QUICK.compare({"a": (0.0, 0.0)}, {"a": (1.0, 1.0)}, offset=1.0) is None
    assert QUICK.pooled({}) is None


def test_running_sums_of_clusters_give_what_resampling_them_does():
    counts = {str(i): (float(3 + i % 5 * (i % 7)), float(2 + i % 9)) for i in range(120)}
    sums = Counter[str]()
    for one in counts.values():
        sums.update(cluster_sums(*one))
    quick, drawn = cluster_interval(sums), Bootstrap().pooled(counts)
    assert quick is not None
    assert drawn is not None
    assert quick.value == pytest.approx(drawn.value)
    assert quick.ends == pytest.approx(drawn.ends, rel=0.03)
    sums.subtract(cluster_sums(*counts["0"]))
    assert sums["clusters"] == 119
    assert cluster_interval(Counter()) is None
    assert cluster_interval(cluster_sums(3, 2)) == Interval(value=1.5)


def test_json_and_back():
    found = QUICK.compare(*paired(np.random.default_rng(1), 0.2), offset=1.0)
    assert Comparison.from_dict(found.to_dict()) == found
