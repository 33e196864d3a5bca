"""Sums that add up, and the figures made of them."""

import json

import pytest
import torch

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.training.metrics import TttMetrics


def filled(scale: int) -> TttMetrics:
    metrics = TttMetrics.zeros(2)
    metrics.supervised += torch.tensor([10, 4]) * scale
    metrics.outside += torch.tensor([2, 1]) * scale
    metrics.correct += torch.tensor([5, 1]) * scale
    metrics.loss += torch.tensor([20.0, 12.0]) * scale
    metrics.overlap += torch.tensor([4.0, 1.0]) * scale
    metrics.tally[1, 0] = 2 * scale
    metrics.tally[1, 1] = 4 * scale
    metrics.tally[2, 0] = 3 * scale
    metrics.tally[2, 2] = 1 * scale
    return metrics


def test_figures_by_hand() -> None:
    report = filled(1).report()
    assert report["loss_by_depth"] == [2.0, 3.0]
    assert report["accuracy_by_depth"] == [0.5, 0.25]
    assert report["overlap_by_depth"] == [0.4, 0.25]
    assert report["outside_vocabulary"] == pytest.approx(3 / 14)
    assert report["supervised"] == [10, 4]
    assert report["simulated_acceptance_length"] == pytest.approx(1 + (4 + 2) / 10)
    assert "hidden_rms_by_depth" not in report
    assert "feature_loss_by_depth" not in report
    json.dumps(report)


def test_acceptance_is_the_shared_definition() -> None:
    by_hand = AcceptanceStatistics()
    for drafted, accepted, rounds in ((1, 0, 2), (1, 1, 4), (2, 0, 3), (2, 2, 1)):
        by_hand.add(drafted=drafted, accepted=accepted, rounds=rounds)
    assert filled(1).acceptance() == by_hand


def test_sums_of_parts_are_the_figures_of_the_whole() -> None:
    """Unlike means of means: a part of twice the size weighs twice as much."""
    first, second = filled(1), filled(2)
    second.correct[0] += 10
    joined = first + second
    assert joined.report()["accuracy_by_depth"][0] == pytest.approx((5 + 20) / 30)
    assert first.report()["accuracy_by_depth"][0] == 0.5  # unchanged
    for tensor, other in zip(first.tensors(), second.tensors(), strict=True):
        tensor.add_(other)  # what an all-reduce does
    assert first.report() == joined.report()


def test_recorded_signals_are_means_over_the_steps_that_recorded() -> None:
    metrics = filled(1)
    metrics.recorded += torch.tensor([5, 0])
    metrics.hidden_rms += torch.tensor([10.0, 0.0])
    report = metrics.report()
    assert report["hidden_rms_by_depth"] == [2.0, None]
    assert report["own_attention_by_depth"] == [0.0, None]


def test_nothing_taught_is_none_and_not_zero() -> None:
    report = TttMetrics.zeros(3).report()
    assert report["loss_by_depth"] == [None, None, None]
    assert report["simulated_acceptance_length"] is None
    assert report["outside_vocabulary"] is None
