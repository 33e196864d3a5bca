"""How likely drafts are to be accepted, by depth, from those that were: what a round is expected to give."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fledge.engine.arms import Acceptance, RequestKind
from fledge.engine.request import Request

# Of drafts, how many are accepted before any was tried.
PRIOR_RATES = {RequestKind.GREEDY: 0.6, RequestKind.SAMPLED: 0.4, RequestKind.SAMPLED_DRAFTS: 0.55}
PRIOR_ROUNDS = 4  # that this is worth
MEASURED_PRIOR_ROUNDS = 16  # that the drafter's evaluation is worth
TREE_MISSES = 0.65  # of the positions that chains miss, trees that were not tried are taken to miss this share
MEMORY = 500  # rounds of one request each, after which what was accepted is half forgotten or more
REQUEST_MEMORY = 64  # drafts of one request, the same
REQUEST_PRIOR = 20  # drafts that the others' acceptance is worth in judging one request
STALE_MEMORY = 24  # rounds that old acceptance is worth once it is tried again after a pause
MOST = 0.98  # no draft is held to be surer
OBSERVED_REQUESTS = 64  # of a round, on average, that are learned from: each takes time

Array = NDArray[np.float64]


class _DraftCounts:
    """Drafts of one kind by depth: reached (all before them stood), and accepted; the latest count most."""

    def __init__(self, prior: Sequence[float]) -> None:
        """`prior`: the rate at each depth before anything is known."""
        self.expected = [0.0]  # accepted drafts of the first n; as of the last `rates`
        self.prior, self.prior_rounds = prior, PRIOR_ROUNDS
        self._counts = np.zeros((2, len(prior)))
        self._new: Counter[tuple[int, int]] = Counter()  # rounds since then, by drafts reached and accepted
        self.rounds = 0  # of one request each
        self.rates()

    def add(self, reached: int, accepted: int) -> None:
        """One round of one request."""
        self._new[reached, accepted] += 1
        self.rounds += 1

    def rates(self) -> Array:
        """Probability that the draft at each depth stands if all before it do. One not tried is as the one before.

        As much as the prior has it above or below that one.
        """
        if self._new:
            rounds, depths = np.array([*self._new.values()]), np.arange(len(self.prior))
            has_drafts = np.array([*self._new])[:, :, None] > depths  # [outcomes, 2, depths]
            new = (rounds[:, None, None] * has_drafts).sum(axis=0)
            self._counts = self._counts * (1 - 1 / MEMORY) ** int(rounds.sum()) + new
            self._new.clear()
        rates: list[float] = []
        for depth, (reached, accepted) in enumerate(self._counts.T.tolist()):
            prior = self.prior[depth] if not depth else rates[-1] * self.prior[depth] / self.prior[depth - 1]
            rates.append((accepted + self.prior_rounds * min(prior, MOST)) / (reached + self.prior_rounds))
        self.expected = [0.0, *itertools.accumulate(rates)]
        return np.array(rates)

    def fade(self) -> None:
        self.rates()
        self._counts *= min(1.0, STALE_MEMORY / max(self._counts[0].max(), 1.0))


class Turns:
    """Whose drafts are learned from: everybody's in a round of a few, in those of many some take turns."""

    def __init__(self) -> None:
        self._rounds = 0  # that were learned from: in step with others, the same would have all turns
        self._due = 0  # requests that may be learned from next

    def next(self, requests: int, *, is_full: bool) -> range:
        """Of so many in the next round with drafts. Nobody's, if it is not full: the next that is makes up for it."""
        self._due += OBSERVED_REQUESTS
        if not is_full:
            return range(0)
        every = max(requests // self._due, 1)
        self._rounds, self._due = self._rounds + 1, 0
        return range(self._rounds % every, requests, every)


class AcceptanceEstimator:
    """Acceptance by depth, of all requests of a kind, in chains and in trees apart; and for each request a factor.

    That is what was accepted of its drafts over what was expected of them, drawn towards 1.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._chains = {kind: _DraftCounts([rate] * max_depth) for kind, rate in PRIOR_RATES.items()}
        self._trees = {kind: _DraftCounts([0.5] * max_depth) for kind in (RequestKind.GREEDY, RequestKind.SAMPLED)}

    def expect(self, acceptance: Acceptance) -> None:
        """Take over what an evaluation found of chains, for what it knows."""
        for kind, rates in acceptance.items():
            known = [max(rate, 0.01) for rate in rates[: self._max_depth]]
            if known:
                counts = self._chains[kind]
                counts.prior = [*known, *[known[-1]] * (self._max_depth - len(known))]
                counts.prior_rounds = MEASURED_PRIOR_ROUNDS

    def observe(self, request: Request, *, is_tree: bool, drafted: int, accepted: int) -> None:
        counts = self._counts(request.kind, is_tree=is_tree)
        reached = min(accepted + 1, drafted)
        keep = max(1 - reached / REQUEST_MEMORY, 0.0)
        request.drafts_expected = keep * request.drafts_expected + counts.expected[reached]
        request.drafts_accepted = keep * request.drafts_accepted + accepted
        counts.add(reached, accepted)

    def has_seen(self, requests: Sequence[Request], rounds: int) -> bool:
        """Whether as many, of one request each, were observed of the kind that most of these are of."""
        kinds = Counter(request.kind for request in requests if request.draft_until)
        seen = [self._chains[kind].rounds + self._trees[_argmax(kind)].rounds for kind, _ in kinds.most_common(1)]
        return all(count >= rounds for count in seen)

    def expected_tokens(
        self, requests: Sequence[Request], kinds: Sequence[RequestKind] | None = None, *, is_tree: bool = False
    ) -> Array:
        """Tokens that a round at each depth from 0 to the deepest gives all of these requests together.

        `kinds`: what they are taken to be, if not what they are.
        """
        total = np.full(self._max_depth + 1, float(len(requests)))
        by_kind: dict[RequestKind, list[Request]] = {}
        for request, kind in zip(requests, kinds or [request.kind for request in requests], strict=True):
            if request.draft_until:
                by_kind.setdefault(kind, []).append(request)
        for kind, drafting in by_kind.items():
            factors = np.array(
                [(r.drafts_accepted + REQUEST_PRIOR) / (r.drafts_expected + REQUEST_PRIOR) for r in drafting]
            )
            rates = np.minimum(factors[:, None] * self._counts(kind, is_tree=is_tree).rates()[None], MOST)
            survival: Any = rates.cumprod(axis=1)
            if any(r.draft_limit < self._max_depth for r in drafting):
                limits = np.array([r.draft_limit for r in drafting])
                survival[np.arange(self._max_depth)[None] >= limits[:, None]] = 0.0
            total[1:] += survival.sum(axis=0).cumsum()
        return total

    def fade(self) -> None:
        """Keep of what is known its gist only: what comes now counts more than what was."""
        for counts in (*self._chains.values(), *self._trees.values()):
            counts.fade()

    def _counts(self, kind: RequestKind, *, is_tree: bool) -> _DraftCounts:
        if not is_tree:
            return self._chains[kind]
        kind = _argmax(kind)
        self._trees[kind].prior = (1 - TREE_MISSES * (1 - self._chains[kind].rates())).tolist()
        return self._trees[kind]


def _argmax(kind: RequestKind) -> RequestKind:
    """The kind of such a request if its drafts are not drawn: those of trees never are."""
    return RequestKind.GREEDY if kind is RequestKind.GREEDY else RequestKind.SAMPLED
