"""How likely a draft is to be accepted, by how sure the drafter was when it chose it.

A draft at depth k stands, if all before it do, with probability

    c_k = sigmoid(w * f + b_k)        f = log(q / (1 - q)),  q the drafter's largest probability where it chose

q is never that of the token that was drawn: what is verified must not depend on it, or sampled answers would no longer
follow the target's distribution. w and b are fitted to what became of drafts: greedy requests and sampled ones have
their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fledge.decoding.drafter_statistics import BINS

CERTAIN = 1e-4  # q is taken to be no nearer to 0 and 1 than this
REFIT_ROUNDS = 100  # after so many rounds of batches
REFIT_OUTCOMES = 2048  # or of single requests, the model is fitted again
COUNT_ROUNDS = 64  # of batches, are counted together
WINDOW = 4096  # drafts that it is fitted to, of each kind of request
RIDGE = 2.0  # drafts that w = 1, b = 0 are worth
NEWTON_STEPS = 4
LONGEST_STEP = 1.0

Floats = NDArray[np.float64]


class DraftOutcomes(NamedTuple):
    """What became of a round's drafts, a row for each request."""

    confidence: NDArray[np.float32]  # [requests, depth]: the drafter's largest probability at each draft
    drafted: NDArray[np.int64]  # [requests]: how many were up for acceptance
    accepted: NDArray[np.int64]  # [requests]
    is_greedy: NDArray[np.bool_]  # [requests]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How often drafts stood by how likely they were held to be, and by how sure the drafter was. Can be pickled."""

    # [depths, BINS, 2]: drafts whose predecessors all stood, by depth and by the tenth that the predicted probability
    # lay in; and how many of them were accepted.
    counts: NDArray[np.int64]
    # [2, BINS, 3]: the same drafts, of sampled requests and of greedy ones, by the tenth that the drafter's
    # own confidence lay in; the sum of their confidence; and how many of them were accepted.
    by_confidence: Floats


class AcceptanceModel:
    """`c_k` of the module's text: fitted to outcomes, some time after they are observed."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.coefficients = np.zeros((2, 1 + max_depth))  # [sampled, greedy]: w, then b of each depth
        self.coefficients[:, 0] = 1.0
        self._kinds = [_Fit(max_depth) for _ in range(2)]
        nothing = np.zeros((max_depth, BINS, 2), dtype=np.int64)
        self._calibration = Calibration(counts=nothing, by_confidence=np.zeros((2, BINS, 3)))
        self._pending: list[DraftOutcomes] = []
        self._waiting = 0  # requests in these

    def observe(self, outcomes: DraftOutcomes) -> bool:
        """Take note of a round; whether the coefficients have changed."""
        self._pending.append(outcomes)
        self._waiting += len(outcomes.drafted)
        if len(self._pending) < REFIT_ROUNDS and self._waiting < REFIT_OUTCOMES:
            return False
        self._digest()
        self.coefficients = np.stack(
            [fit.refitted(old) for fit, old in zip(self._kinds, self.coefficients, strict=True)]
        )
        return True

    def calibration(self, *, is_idle: bool = True) -> Calibration:
        """All that was observed; unless the engine is idle, without the latest few rounds: counting takes time."""
        if is_idle or len(self._pending) >= COUNT_ROUNDS:
            self._digest()
        return self._calibration

    def probabilities(self, confidence: NDArray[np.float32], is_greedy: NDArray[np.bool_]) -> Floats:
        """Confidences [requests, depth] -> how likely each is to stand if all before it do."""
        coefficients = self.coefficients[is_greedy.astype(int)]
        depth = confidence.shape[1]
        return _sigmoid(coefficients[:, :1] * log_odds(confidence) + coefficients[:, 1 : 1 + depth])

    def _digest(self) -> None:
        """Count what is pending, by the coefficients of its time."""
        if not self._pending:
            return
        pending, self._pending, self._waiting = self._pending, [], 0
        confidence, end = np.zeros((sum(len(one.drafted) for one in pending), self.max_depth), dtype=np.float32), 0
        for one in pending:
            start, end = end, end + len(one.drafted)
            confidence[start:end, : one.confidence.shape[1]] = one.confidence
        outcomes = DraftOutcomes(
            confidence=confidence,
            drafted=np.concatenate([one.drafted for one in pending]),
            accepted=np.concatenate([one.accepted for one in pending]),
            is_greedy=np.concatenate([one.is_greedy for one in pending]),
        )
        places = np.arange(self.max_depth)
        reached = places < np.minimum(outcomes.accepted + 1, outcomes.drafted)[:, None]
        row, depth = np.nonzero(reached)
        stood = depth < outcomes.accepted[row]
        predicted = self.probabilities(outcomes.confidence, outcomes.is_greedy)[row, depth]
        bins = np.minimum((predicted * BINS).astype(int), BINS - 1)
        cell = depth * BINS + bins
        counts = [np.bincount(cell, of, self.max_depth * BINS) for of in (None, stood)]
        sure = np.nan_to_num(outcomes.confidence[row, depth])
        tenth = outcomes.is_greedy[row] * BINS + np.minimum((sure * BINS).astype(int), BINS - 1)
        by_confidence = [np.bincount(tenth, of, 2 * BINS) for of in (None, sure, stood)]
        before = self._calibration
        self._calibration = Calibration(
            counts=before.counts + np.stack(counts, axis=-1).astype(np.int64).reshape(before.counts.shape),
            by_confidence=before.by_confidence + np.stack(by_confidence, axis=-1).reshape(2, BINS, 3),
        )
        odds = log_odds(outcomes.confidence[row, depth])
        for kind, fit in enumerate(self._kinds):
            own = outcomes.is_greedy[row] == bool(kind)
            fit.add(odds[own], depth[own], stood[own])


@dataclass
class _Fit:
    """The latest drafts of one kind of request, and the coefficients that are likeliest given them."""

    max_depth: int
    odds: Floats = field(default_factory=lambda: np.zeros(0))
    depth: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    stood: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))

    def add(self, odds: Floats, depth: NDArray[np.int64], stood: NDArray[np.bool_]) -> None:
        self.odds = np.concatenate([self.odds, odds])[-WINDOW:]
        self.depth = np.concatenate([self.depth, depth])[-WINDOW:]
        self.stood = np.concatenate([self.stood, stood])[-WINDOW:]

    def refitted(self, start: Floats) -> Floats:
        """Newton's method on the penalised likelihood, from the coefficients there were, a little at a time."""
        prior = np.zeros(1 + self.max_depth)
        prior[0] = 1.0
        found = start.copy()
        for _ in range(NEWTON_STEPS):
            predicted = _sigmoid(found[0] * self.odds + found[1 + self.depth])
            wrong, weight = predicted - self.stood, predicted * (1 - predicted)
            gradient = np.concatenate([[wrong @ self.odds], self._by_depth(wrong)]) + RIDGE * (found - prior)
            curvature = np.diag(np.concatenate([[weight @ self.odds**2], self._by_depth(weight)]) + RIDGE)
            curvature[0, 1:] = curvature[1:, 0] = self._by_depth(weight * self.odds)
            step = np.linalg.solve(curvature, gradient)
            found -= step * min(1.0, LONGEST_STEP / max(float(np.abs(step).max()), 1e-9))
        return found

    def _by_depth(self, values: Floats) -> Floats:
        return np.bincount(self.depth, values, self.max_depth).astype(np.float64)


def log_odds(confidence: NDArray[np.float32] | Sequence[float]) -> Floats:
    """log(q / (1 - q)), bounded; nothing is known of what is not a number: 0."""
    q = np.clip(np.nan_to_num(np.asarray(confidence, dtype=np.float64), nan=0.5), CERTAIN, 1 - CERTAIN)
    return np.log(q / (1 - q))


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))
