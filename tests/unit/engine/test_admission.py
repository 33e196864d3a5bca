"""Which drafts are worth verifying: how likely they are to be accepted."""

import pickle

import numpy as np
import pytest

from fledge.decoding.drafter_statistics import BINS
from fledge.engine.admission import REFIT_ROUNDS, AcceptanceModel, DraftOutcomes
from tests import engine_cases

DEPTH = 3


def _outcomes(source: np.random.Generator, requests: int, *, width: int = DEPTH) -> DraftOutcomes:
    """Drafts of an overconfident drafter, worse the deeper; those of sampled requests stand half as often."""
    confidence = source.uniform(0.02, 0.98, (requests, width)).astype(np.float32)
    is_greedy = source.random(requests) < 0.5
    rate = _true_rate(confidence) * np.where(is_greedy, 1.0, 0.5)[:, None]
    stood = source.random((requests, width)) < rate
    return DraftOutcomes(confidence, np.full(requests, width), stood.cumprod(1).sum(1), is_greedy)


def _true_rate(confidence: np.ndarray) -> np.ndarray:
    odds = np.log(confidence / (1 - confidence))
    return 1 / (1 + np.exp(-(0.6 * odds - 0.4 * np.arange(confidence.shape[1]))))


def test_the_model_learns_how_often_drafts_stand() -> None:
    source, model = np.random.default_rng(0), AcceptanceModel(DEPTH)
    changed = [model.observe(_outcomes(source, 40, width=DEPTH if i % 2 else 2)) for i in range(5 * REFIT_ROUNDS)]
    assert 5 <= sum(changed) < 50
    confidence = np.array([[0.2, 0.5, 0.9], [0.9, 0.5, 0.2]], dtype=np.float32)
    found = model.probabilities(confidence, np.array([True, True]))
    assert found == pytest.approx(_true_rate(confidence), abs=0.08)
    assert (model.probabilities(confidence, np.array([False, False])) < found).all()
    assert model.probabilities(np.full((1, 1), np.nan, dtype=np.float32), np.array([True])) == pytest.approx(
        0.5, abs=0.1
    )


def test_calibration_says_what_was_predicted_and_what_came_true() -> None:
    source, model = np.random.default_rng(1), AcceptanceModel(DEPTH)
    for _ in range(4 * REFIT_ROUNDS):
        model.observe(_outcomes(source, 40))
    before = model.calibration().counts
    for _ in range(2 * REFIT_ROUNDS):
        model.observe(_outcomes(source, 40))
    counts = pickle.loads(pickle.dumps(model.calibration())).counts
    assert counts.shape == (DEPTH, BINS, 2)
    assert counts[0, :, 0].sum() == 6 * REFIT_ROUNDS * 40, "every first draft is reached"
    assert counts[1, :, 0].sum() == counts[0, :, 1].sum(), "and a second where the first stood"
    by_confidence = model.calibration().by_confidence.sum(0)
    assert by_confidence[:, [0, 2]].sum(0) == pytest.approx(counts.sum((0, 1))), "the same drafts"
    assert np.floor(by_confidence[:, 1] / by_confidence[:, 0] * BINS) == pytest.approx(np.arange(BINS))
    drafts, accepted = (counts - before).sum(axis=0).T
    predicted = (np.arange(BINS) + 0.5) / BINS
    seen = drafts > 200
    assert seen.sum() > 5
    assert accepted[seen] / drafts[seen] == pytest.approx(predicted[seen], abs=0.12)


def test_the_engine_counts_every_draft_that_was_reached() -> None:
    asks = [engine_cases.greedy([2, 3, 4], 30), engine_cases.sampled([5], 30, temperature=0.5)]
    engine = engine_cases.make_engine(drafts=engine_cases.drafter(), depth=DEPTH)
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(asks)]
    engine_cases.run(engine)
    rounds = [done for request in requests for done in request.rounds]
    counts = engine.stats().calibration.counts
    assert counts[..., 0].sum() == sum(min(done.accepted + 1, done.drafted) for done in rounds)
    assert counts[..., 1].sum() == sum(done.accepted for done in rounds)
    assert engine_cases.make_engine(drafts=engine_cases.drafter(), tree=engine_cases.TREE).stats().calibration is None
