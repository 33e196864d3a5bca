"""How many of a round's drafts to verify: how likely each is to be accepted, and what that is worth.

A draft at depth k stands, if all before it do, with probability

    c_k = sigmoid(w * f + b_k)        f = log(q / (1 - q)),  q the drafter's largest probability where it chose

q is never that of the token that was drawn: what is verified must not depend on it, or sampled answers would no longer
follow the target's distribution. w and b are fitted to what became of drafts: greedy requests and sampled ones have
their own.

Of a batch of R requests the drafts likeliest to be reached and accepted are verified (`kernels/admit.py`), in the
number for which

    (R + their expected acceptances) / measured cost of the round

is highest; there are a few numbers to choose from. With sampled drafts the expectation is that of rounds before: by
this round's it would depend on the tokens drawn first how many of them are verified.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fledge.decoding.drafter_statistics import BINS
from fledge.engine.arms import Arm, RequestKind
from fledge.engine.config import SpeculativeConfig
from fledge.engine.costs import CostTable
from fledge.engine.request import Request
from fledge.kernels.admit import CERTAIN

REFIT_ROUNDS = 100  # after so many rounds of batches
REFIT_OUTCOMES = 4096  # or of single requests, the model is fitted again
WINDOW = 4096  # drafts that it is fitted to, of each kind of request
MANY = 32  # requests; of n times as many, every n-th round is learned from: each takes time
RIDGE = 2.0  # drafts that w = 1, b = 0 are worth
NEWTON_STEPS = 4
LONGEST_STEP = 1.0

HYSTERESIS = 1.01  # how much better than a full round one of fewer drafts must be
FULL_EVERY = 8  # rounds, one is full: of its drafts the controller learns, which were not chosen for their chances
GAIN_SMOOTHING = 0.2  # weight of the newest round in the expected acceptances
GAIN_EVERY = 4  # rounds
WORTH_MEASURING = 0.8  # of a full round's tokens, that a round must be expected to give to be timed

Floats = NDArray[np.float64]


class DraftOutcomes(NamedTuple):
    """What became of a round's drafts, a row for each request."""

    confidence: NDArray[np.float32]  # [requests, depth]: the drafter's largest probability at each draft
    drafted: NDArray[np.int64]  # [requests]: how many were up for acceptance
    accepted: NDArray[np.int64]  # [requests]
    is_greedy: NDArray[np.bool_]  # [requests]


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Of how many drafts rounds may verify the likeliest: shares of all, but only where a row less saves time."""

    shares: tuple[float, ...] = ()  # ascending, all below 1
    min_batch: int = 1
    max_depth: int = 64

    def sizes(self, batch: int, depth: int) -> list[int]:
        """The numbers of drafts, ascending; all of them is not among these."""
        if batch < self.min_batch or depth > self.max_depth:
            return []
        return sorted({size for share in self.shares if (size := math.ceil(share * batch * depth)) < batch * depth})


NO_BUDGETS = Budgets()
# Each is a graph of its own there. Up to some sixteen requests a pass takes as long as reading the weights does, and
# with more of them deep drafts do not pay.
GPU_BUDGETS = Budgets(shares=(0.5,), min_batch=16, max_depth=3)
# There every row takes time; for a few requests, to choose takes as long as is saved.
CPU_BUDGETS = Budgets(shares=(0.25, 0.5, 0.75), min_batch=8)


def budgets_for(speculation: SpeculativeConfig | None, on_gpu: bool) -> Budgets:
    """None where the config says how many drafts are verified, or that they are judged together."""
    if speculation is None or not speculation.is_adaptive or speculation.rejection_sample_method == "block":
        return NO_BUDGETS
    return GPU_BUDGETS if on_gpu else CPU_BUDGETS


@dataclass(frozen=True, kw_only=True)
class DraftCalibration:
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
        self.calibration = DraftCalibration(
            counts=nothing, by_confidence=np.zeros((2, BINS, 3))
        )  # replaced, never changed
        self._pending: list[DraftOutcomes] = []
        self._waiting = 0  # requests in these

    def observe(self, outcomes: DraftOutcomes) -> bool:
        """Take note of a round; whether the coefficients have changed."""
        self._pending.append(outcomes)
        self._waiting += len(outcomes.drafted)
        if len(self._pending) < REFIT_ROUNDS and self._waiting < REFIT_OUTCOMES:
            return False
        self.digest()
        self.coefficients = np.stack(
            [fit.refitted(old) for fit, old in zip(self._kinds, self.coefficients, strict=True)]
        )
        return True

    def probabilities(self, confidence: NDArray[np.float32], is_greedy: NDArray[np.bool_]) -> Floats:
        """Confidences [requests, depth] -> how likely each is to stand if all before it do."""
        coefficients = self.coefficients[is_greedy.astype(int)]
        depth = confidence.shape[1]
        return _sigmoid(coefficients[:, :1] * log_odds(confidence) + coefficients[:, 1 : 1 + depth])

    def digest(self) -> None:
        """Count what is pending, by the coefficients of its time: the calibration is up to date then."""
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
        before = self.calibration
        self.calibration = DraftCalibration(
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


class AdmissionPolicy:
    """Chooses how many drafts of the next round are verified. Asked before every round, so it must be quick.

    What rounds with a share of their drafts cost is kept in full rounds: what slows one slows the other.
    """

    def __init__(self, max_depth: int, budgets: Budgets) -> None:
        self.model = AcceptanceModel(max_depth)
        self.budgets = budgets
        self._costs: dict[float, CostTable] = {}  # by share of the drafts; in full rounds
        self._gains: dict[int, Floats] = {}  # depth -> acceptances of a request at each share, and of a full round
        self._rounds = 0

    def forget(self) -> None:
        """There is another drafter: what its confidence means, and what drafts are worth, is not known yet."""
        self.model = AcceptanceModel(self.model.max_depth)
        self._gains.clear()

    def observe(self, outcomes: DraftOutcomes) -> bool:
        """Learn from a round; whether the model's coefficients have changed."""
        batch, depth = outcomes.confidence.shape
        self._rounds += 1
        every = max(batch // MANY, 1)
        if self._rounds % max(GAIN_EVERY, every) == 0 and self.budgets.sizes(batch, depth):
            gains = self._expected(outcomes.confidence, outcomes.is_greedy)
            before = self._gains.get(depth, gains)
            self._gains[depth] = before + GAIN_SMOOTHING * (gains - before)
        # Whole turns of `FULL_EVERY`: a full round is in each of them.
        return self._rounds // FULL_EVERY % every == 0 and self.model.observe(outcomes)

    def observe_cost(self, batch: int, depth: int, admit: int, seconds: float, full: CostTable) -> None:
        """Learn how long a round took that was to verify `admit` drafts, beside `full` ones of its kind."""
        whole = full.device_cost(batch, Arm(depth))
        if not whole:
            return
        share = min(self.budgets.shares, key=lambda share: abs(share - admit / (batch * depth)))
        self._costs.setdefault(share, CostTable()).add(batch=batch, arm=Arm(depth), seconds=seconds / whole)

    def admit(
        self,
        requests: Sequence[Request],
        depth: int,
        full: CostTable,
        confidence: Callable[[Sequence[Request], int], NDArray[np.float32] | None],
    ) -> int | None:
        """Return how many drafts to verify; None: all. `full` are the costs of full rounds. No request needs the host.

        `confidence` tells that of the drafts themselves, [requests, depth], if it is known and none of them was drawn.
        """
        batch = len(requests)
        whole = full.device_cost(batch, Arm(depth))
        if whole is None or self._rounds % FULL_EVERY == 0 or not self.budgets.sizes(batch, depth):
            return None
        known = confidence(requests, depth)
        gains = self._gains.get(depth) if known is None else self._expected(known, are_greedy(requests))
        if gains is None:
            return None
        full_rate = (1 + gains[-1]) / full.with_host(batch, Arm(depth), whole)
        best, best_rate = 1.0, HYSTERESIS * full_rate
        for share, gain in zip(self.budgets.shares, gains[:-1].tolist(), strict=True):
            table = self._costs.get(share)
            relative = None if table is None else table.cost(batch, Arm(depth))
            if relative is None:
                if 1 + gain < WORTH_MEASURING * (1 + gains[-1]):
                    continue
                best = share
                break
            rate = (1 + gain) / full.with_host(batch, Arm(depth), relative * whole)
            if rate > best_rate:
                best, best_rate = share, rate
        saved = 1 - full_rate / best_rate if best < 1 else 0.0
        full.discount(batch, Arm(depth), 1 - saved * (1 - 1 / FULL_EVERY))
        size = math.ceil(best * batch * depth)
        return size if size < batch * depth else None

    def _expected(self, confidence: NDArray[np.float32], is_greedy: NDArray[np.bool_]) -> Floats:
        """Acceptances of a request, on average: of the likeliest drafts at each share, and of all."""
        survival = np.sort(self.model.probabilities(confidence, is_greedy).cumprod(axis=1), axis=None)[::-1]
        sizes = [math.ceil(share * survival.size) for share in (*self.budgets.shares, 1.0)]
        expected: Floats = survival.cumsum()[np.array(sizes) - 1] / len(confidence)
        return expected


def are_greedy(requests: Sequence[Request]) -> NDArray[np.bool_]:
    """[requests]"""
    return np.array([request.kind is RequestKind.GREEDY for request in requests])


def log_odds(confidence: NDArray[np.float32] | Sequence[float]) -> Floats:
    """log(q / (1 - q)), bounded; nothing is known of what is not a number: 0."""
    q = np.clip(np.nan_to_num(np.asarray(confidence, dtype=np.float64), nan=0.5), CERTAIN, 1 - CERTAIN)
    return np.log(q / (1 - q))


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))
