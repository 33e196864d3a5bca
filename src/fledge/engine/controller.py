"""How deep to draft, step by step: a fixed depth, or the one that gives most tokens a second by what is measured.

    rate(depth) = expected tokens of a round at that depth / measured cost of such a round

is compared for all depths before every step, depth 0 (a plain step, the drafter left alone) among them. Expected tokens
follow from what was accepted of drafts at each depth before; costs from rounds that were timed (`costs.py`). Neither
looks at which token was drafted, so that what is chosen cannot change the distribution of the answers.

What is not tried is not known. A share of the time, `TRIAL_SHARE`, goes into rounds at depths that are not held to be
the best: those whose cost was not measured for long and, while nothing is drafted, the best depth by what was known.
"""

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from fledge.engine.config import SpeculativeConfig
from fledge.engine.costs import CostTable
from fledge.engine.request import Phase, Request

PRIOR_RATE = 0.6  # of drafts that are accepted, before any was tried
PRIOR_ROUNDS = 4  # that this is worth
MEMORY = 500  # rounds of one request each, after which what was accepted is half forgotten or more
REQUEST_MEMORY = 64  # drafts of one request, the same
REQUEST_PRIOR = 20  # drafts that the others' acceptance is worth in judging one request
STALE_MEMORY = 24  # rounds that old acceptance is worth once it is tried again after a pause
HYSTERESIS = 1.015  # how much better another depth must be
RETURN_HYSTERESIS = 1.03  # the same where nothing is drafted, or it is to be given up
DWELL = 8  # rounds before the depth changes again
TRIAL_SHARE = 0.01  # of the time
TRIAL_ROUNDS = 4
FIRST_CREDIT = 4  # plain steps that trials may lose before anything is saved
MOST_CREDIT = 12  # plain steps that trials may lose at once while drafting goes on
TRIAL_OBSERVATIONS = 16  # a trial of drafting goes on until so many requests' rounds were seen
STALE_ROUNDS = 400  # a cost that was not measured for so many rounds may be tried again
WORTH_TRYING = 0.85  # depths with a rate further below the best one's are not tried
MEAN_ANSWER = 128.0  # tokens that an answer has still to come, until answers have ended
EVERY = 4  # steps between decisions, which take a tenth of a millisecond or two, unless the batch has changed


class DepthChoice(NamedTuple):
    """What was decided last, and why."""

    depth: int
    batch: int
    tokens: float | None  # that a round is expected to give each request
    cost: float | None  # of such a round, in plain steps
    round_depth: int  # what these are of: the chosen depth, or the best one but 0 where that is 0
    reason: str  # one word: "best", "fixed", "trial", "unmeasured", "return" (drafting would pay, catching up not)

    @property
    def speed_up(self) -> float | None:
        """Of the chosen depth over plain decoding, as far as is known."""
        if self.depth == 0:
            return 1.0
        return None if self.tokens is None or not self.cost else self.tokens / self.cost


class DepthPolicy(Protocol):
    """Chooses how deep to draft. Asked before every step, in the engine's process, so it must be quick."""

    @property
    def depths(self) -> Collection[int]:
        """All depths it may choose: graphs are captured for these."""
        ...

    @property
    def choice(self) -> DepthChoice | None:
        """The last decision; None before the first."""
        ...

    def depth(self, requests: Collection[Request], costs: CostTable) -> int:
        """Return how many tokens to draft in the next step; 0 is plain decoding.

        `requests` run or wait to; each knows its acceptance so far and its own limit. The drafts of a request that
        wants fewer are cut by the engine.
        """
        ...

    def observe(self, request: Request, *, drafted: int, accepted: int) -> None:
        """Learn what one round did for one request."""
        ...

    def observe_round(self, *, depth: int, seconds: float) -> None:
        """Learn that a round at this depth took so long."""
        ...


class FixedDepth:
    """The depth that the config has for a batch size, and no more than some request wants."""

    def __init__(self, config: SpeculativeConfig | None, max_num_seqs: int) -> None:
        """No config: never draft."""
        self._by_batch = [0 if config is None else config.depth_at(size) for size in range(max_num_seqs + 1)]
        self.choice: DepthChoice | None = None

    @property
    def depths(self) -> Collection[int]:
        return set(self._by_batch[1:])

    def depth(self, requests: Collection[Request], costs: CostTable) -> int:  # noqa: ARG002 - costs do not change it
        batch = min(len(requests), len(self._by_batch) - 1)
        depth = min(self._by_batch[batch], wanted_depth(requests))
        self.choice = DepthChoice(depth, batch, None, None, depth, "fixed")
        return depth

    def observe(self, request: Request, *, drafted: int, accepted: int) -> None:
        pass

    def observe_round(self, *, depth: int, seconds: float) -> None:
        pass


def wanted_depth(requests: Collection[Request]) -> int:
    """No request wants more drafts than this."""
    return max((request.draft_limit for request in requests if request.draft_until), default=0)


class _DraftCounts:
    """Drafts of one kind of request by depth: reached (all before them stood), and accepted; the latest count most."""

    def __init__(self, max_depth: int) -> None:
        self.expected = [0.0]  # accepted drafts of the first n; as of the last `rates`
        self._counts = np.zeros((2, max_depth))
        self._new = [[0] * max_depth, [0] * max_depth]
        self._rounds = 0  # in `_new`
        self.rates()

    def add(self, reached: int, accepted: int) -> None:
        """One round of one request."""
        for k in range(reached):
            self._new[0][k] += 1
        for k in range(accepted):
            self._new[1][k] += 1
        self._rounds += 1

    def rates(self) -> np.ndarray:
        """Probability that the draft at each depth stands if all before it do. One not tried is as the one before."""
        if self._rounds:
            self._counts = self._counts * (1 - 1 / MEMORY) ** self._rounds + np.array(self._new)
            self._new = [[0] * len(self._new[0]) for _ in self._new]
            self._rounds = 0
        rates, prior = [], PRIOR_RATE
        for reached, accepted in self._counts.T.tolist():
            prior = (accepted + PRIOR_ROUNDS * prior) / (reached + PRIOR_ROUNDS)
            rates.append(prior)
        self.expected = [0.0, *itertools.accumulate(rates)]
        return np.array(rates)

    def fade(self) -> None:
        self.rates()
        self._counts *= min(1.0, STALE_MEMORY / max(self._counts[0].max(), 1.0))


class AcceptanceEstimator:
    """How likely drafts are to be accepted, by depth, from those that were: for all requests of a kind, and for each.

    A request's own factor is what was accepted of its drafts over what was expected of them, drawn towards 1.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._by_kind = {is_greedy: _DraftCounts(max_depth) for is_greedy in (True, False)}

    def observe(self, request: Request, *, drafted: int, accepted: int) -> None:
        counts = self._by_kind[request.params.is_greedy]
        reached = min(accepted + 1, drafted)
        keep = max(1 - reached / REQUEST_MEMORY, 0.0)
        request.drafts_expected = keep * request.drafts_expected + counts.expected[reached]
        request.drafts_accepted = keep * request.drafts_accepted + accepted
        counts.add(reached, accepted)

    def expected_tokens(self, requests: Sequence[Request]) -> np.ndarray:
        """Tokens that a round at each depth from 0 to the deepest gives all of these requests together."""
        total = np.full(self._max_depth + 1, float(len(requests)))
        for is_greedy in (True, False):
            drafting = [r for r in requests if r.draft_until and r.params.is_greedy == is_greedy]
            if not drafting:
                continue
            factors = np.array(
                [(r.drafts_accepted + REQUEST_PRIOR) / (r.drafts_expected + REQUEST_PRIOR) for r in drafting]
            )
            rates = np.minimum(factors[:, None] * self._by_kind[is_greedy].rates()[None], 0.98)
            survival = rates.cumprod(axis=1)
            if any(r.draft_limit < self._max_depth for r in drafting):
                limits = np.array([r.draft_limit for r in drafting])
                survival[np.arange(self._max_depth)[None] >= limits[:, None]] = 0.0
            total[1:] += survival.sum(axis=0).cumsum()
        return total

    def fade(self) -> None:
        """Keep of what is known its gist only: what comes now counts more than what was."""
        for counts in self._by_kind.values():
            counts.fade()


class AdaptiveDepth:
    """The depth with the highest expected rate. Remembers what it chose; `seconds` of rounds are its clock."""

    def __init__(self, max_depth: int, max_num_seqs: int, *, only_deepest: bool = False) -> None:
        """`only_deepest`: the deepest or none (trees are laid out for one depth)."""
        useful = {1, 2, 3, 5, 7, 10, 13}  # between these the rate changes little
        arms = {max_depth} if only_deepest else {d for d in useful if d < max_depth} | {max_depth}
        self._arms = sorted({0} | arms)
        self._only_deepest = only_deepest
        self._max_num_seqs = max_num_seqs
        self._acceptance = AcceptanceEstimator(max_depth)
        self._current = max_depth if max_depth < 3 or only_deepest else max(d for d in self._arms if d <= 3)
        self._trial: int | None = None  # what is being tried instead
        self._trial_rounds = self._trial_observations = 0
        self._since_change = DWELL
        self._steps = 0
        self._batch = 0
        self._credit: float | None = None  # seconds that may be lost in trials; None: nothing is known yet
        self._answer_length = MEAN_ANSWER
        self.choice: DepthChoice | None = None

    @property
    def depths(self) -> Collection[int]:
        return self._arms

    def observe(self, request: Request, *, drafted: int, accepted: int) -> None:
        if drafted:
            self._trial_observations += 1
            self._acceptance.observe(request, drafted=drafted, accepted=accepted)
        if request.finish_reason is not None:
            self._answer_length += 0.05 * (request.num_output - self._answer_length)

    def observe_round(self, *, depth: int, seconds: float) -> None:
        self._since_change += 1
        if self._credit is not None:
            self._credit += TRIAL_SHARE * seconds
        if depth == self._trial:
            self._trial_rounds += 1

    def depth(self, requests: Collection[Request], costs: CostTable) -> int:
        wanted = wanted_depth(requests)
        if wanted == 0:
            return 0
        batch = min(len(requests), self._max_num_seqs)
        self._steps += 1
        has_changed = not 0.8 * self._batch <= batch <= 1.25 * self._batch
        if has_changed or self._steps % EVERY == 0 or self.choice is None:
            self._batch = batch
            arms = [depth for depth in self._arms if depth <= wanted or self._only_deepest]
            self._decide(list(itertools.islice(requests, batch)), costs, arms, at_once=has_changed)
        chosen = self._current if self._trial is None else self._trial
        return chosen if self._only_deepest else min(chosen, wanted)

    def _decide(self, requests: list[Request], costs: CostTable, arms: Sequence[int], *, at_once: bool) -> None:
        """Choose among `arms`: those of all that some request wants. `at_once`: however short the last choice held."""
        batch = len(requests)
        if self._trial in arms and not self._trial_is_over(costs, batch):
            return
        self._trial = None
        tokens = self._acceptance.expected_tokens(requests)
        known = {d: cost for d in arms if (cost := costs.estimate(batch, d))}
        if 0 not in known or len(known) < 2:
            self._measure_first(known, batch)
            return
        rates = {d: float(tokens[d]) / cost for d, cost in known.items()}
        best = max(rates, key=lambda d: rates[d])
        drafting = max((d for d in rates if d), key=lambda d: rates[d])
        reason = "best"
        if self._current not in rates:
            self._current = best
        catch_up = self._catch_up_seconds(requests, known[0], costs)
        if self._credit is None:
            self._credit = FIRST_CREDIT * known[0]
        if self._current:  # while nothing is drafted it is saved for the catching up, which may be dear
            self._credit = min(self._credit, MOST_CREDIT * known[0])
        if best != self._current and (at_once or self._since_change >= DWELL):
            gain = rates[best] / rates[self._current]
            enough = HYSTERESIS if best and self._current else RETURN_HYSTERESIS
            saved = self._answer_length * known[0] * (1 - 1 / gain)
            if gain > enough and (self._current or saved > catch_up):
                self._change(best)
            elif gain > enough:
                reason = "return"
        trial = self._worth_a_trial(rates, known, costs, batch, catch_up)
        if trial is not None:
            reason = "trial"
            if self._current == 0:
                self._acceptance.fade()
            self._trial, self._trial_rounds, self._trial_observations = trial, 0, 0
        chosen = self._current if trial is None else trial
        shown = chosen or drafting
        self.choice = DepthChoice(
            depth=chosen,
            batch=batch,
            tokens=float(tokens[shown]) / batch,
            cost=known[shown] / known[0],
            round_depth=shown,
            reason=reason,
        )

    def _change(self, depth: int) -> None:
        self._current, self._since_change = depth, 0
        if not depth:
            self._credit = 0.0

    def _measure_first(self, known: dict[int, float], batch: int) -> None:
        """Nothing can be compared yet: draft for some rounds, then do without for some."""
        if any(known):
            self._trial, self._trial_rounds, self._trial_observations = 0, 0, TRIAL_OBSERVATIONS
        self.choice = DepthChoice(self._current, batch, None, None, self._current, "unmeasured")

    def _trial_is_over(self, costs: CostTable, batch: int) -> bool:
        enough = self._trial_rounds >= TRIAL_ROUNDS and costs.cost(batch, self._trial or 0) is not None
        return (enough and (not self._trial or self._trial_observations >= TRIAL_OBSERVATIONS)) or (
            self._trial_rounds >= TRIAL_ROUNDS + TRIAL_OBSERVATIONS
        )

    def _worth_a_trial(
        self, rates: dict[int, float], known: dict[int, float], costs: CostTable, batch: int, catch_up: float
    ) -> int | None:
        """The depth to try now, if one is due and what it may cost has been saved up."""
        if self._since_change < DWELL:
            return None
        best = rates[self._current]
        due = []
        for depth, rate in rates.items():
            age = costs.age(batch, depth)
            is_stale = age is None or age > STALE_ROUNDS
            if depth == self._current or not (is_stale or self._current == 0):
                continue
            if rate < WORTH_TRYING * best and self._current and age is not None:
                continue
            rounds = TRIAL_ROUNDS if not depth else max(TRIAL_ROUNDS, -(-TRIAL_OBSERVATIONS // batch))
            lost = rounds * known[depth] * max(0.0, 1 - rate / best)
            if depth == 0 or self._current == 0:
                lost += max(catch_up, known[0])
            due.append((rate, depth, lost))
        if not due:
            return None
        _, depth, lost = max(due)
        if self._credit is None or lost > self._credit:
            return None
        self._credit -= lost
        return depth

    def _catch_up_seconds(self, requests: Sequence[Request], plain: float, costs: CostTable) -> float:
        """What it costs to let the drafter read what it has missed: a pass over these tokens, the target's too."""
        missed = sum(len(r.tokens) - 1 - r.settled for r in requests if r.phase is Phase.DECODE and r.draft_until)
        return plain + max(missed, 0) * (costs.seconds_per_row() or plain) if missed > 0 else 0.0


def make_policy(config: SpeculativeConfig | None, max_num_seqs: int) -> DepthPolicy:
    """The policy that a config asks for."""
    if config is None or not config.is_adaptive:
        return FixedDepth(config, max_num_seqs)
    return AdaptiveDepth(config.max_depth, max_num_seqs, only_deepest=config.tree_width is not None)
