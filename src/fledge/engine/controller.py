"""What to draft, step by step: a fixed depth, or what gives most tokens a second by what is measured.

    rate(arm) = expected tokens of such a round / its measured cost

is compared for all arms before every step: chains, the tree if there is one, nothing (a plain step, the drafter left
alone). Expected tokens follow from what was accepted of drafts before (`estimator.py`), costs from rounds that were
timed (`costs.py`). Neither looks at which token was drafted, so that what is chosen cannot change the distribution of
the answers. In the same way a request's drafts are drawn at random, or are not: decided once, when it comes.

What is not tried is not known. A share of the time, `TRIAL_SHARE`, goes into rounds of arms that are not held to be
the best: those whose cost was not measured for long and, while nothing is drafted, the best one by what was known.
"""

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from fledge.engine.arms import PLAIN, Acceptance, Arm, RequestKind
from fledge.engine.config import SpeculativeConfig
from fledge.engine.costs import CostTable, RoundCosts
from fledge.engine.estimator import AcceptanceEstimator
from fledge.engine.request import Phase, Request

HYSTERESIS = 1.015  # how much better another arm must be
RETURN_HYSTERESIS = 1.03  # the same where nothing is drafted: what was missed must be read first
DWELL = 8  # rounds before the arm changes again
TRIAL_SHARE = 0.01  # of the time
TRIAL_ROUNDS = 4
FIRST_CREDIT = 4  # plain steps that trials may lose before anything is saved
MOST_CREDIT = 6  # plain steps that trials may lose at once while drafting goes on
TRIAL_OBSERVATIONS = 16  # a trial of drafting goes on until so many requests' rounds were seen
STALE_ROUNDS = 1000  # a cost that was not measured for so many rounds may be tried again
WORTH_TRYING = 0.92  # arms with a rate further below the best one's are not tried
WORTH_MEASURING = 0.6  # the same where their cost at such a batch is only a guess
MEAN_ANSWER = 128.0  # tokens that an answer has still to come, until answers have ended
OTHER_KIND_SHARE = 0.03  # of the rounds, in which a request drafts in the way that is not held to be the better one
MOST_NEW_ROUNDS = 24  # that are drafted because a kind has hardly drafted: some may have drafts that tell nothing
MANY = 64  # requests: each takes time
EVERY = 4  # steps between decisions for fewer, unless the batch has changed; twice as many for more
JUDGED_REQUESTS = 32  # of n times as many, a decision looks at about every n-th, in turns: each takes time

_SAMPLED = {True: RequestKind.SAMPLED_DRAFTS, False: RequestKind.SAMPLED}


class DepthChoice(NamedTuple):
    """What was decided last, and why."""

    arm: Arm
    batch: int
    tokens: float | None  # that a round is expected to give each request
    cost: float | None  # of such a round, in plain steps
    shown: Arm  # what these are of: the chosen arm, or where that drafts nothing the best one that does
    reason: str  # one word: "best", "fixed", "trial", "unmeasured", "return" (drafting would pay, catching up not)
    sampled_drafts: int = 0  # requests of the batch whose drafts are drawn at random

    @property
    def speed_up(self) -> float | None:
        """Of the chosen arm over plain decoding, as far as is known."""
        if not self.arm.depth:
            return 1.0
        return None if self.tokens is None or not self.cost else self.tokens / self.cost


class DepthPolicy(Protocol):
    """Chooses what to draft. Asked before every step, in the engine's process, so it must be quick."""

    @property
    def arms(self) -> Collection[Arm]:
        """All it may choose: graphs are captured for these."""
        ...

    @property
    def choice(self) -> DepthChoice | None:
        """The last decision; None before the first."""
        ...

    def expect(self, acceptance: Acceptance) -> None:
        """Begin, with another drafter anew, with what is known of how many drafts stand before any is tried."""
        ...

    def choose(self, requests: Collection[Request], costs: CostTable) -> Arm:
        """Return what to draft in the next step; depth 0 is plain decoding.

        `requests` run or wait to; each knows its acceptance so far and its own limit. The drafts of a request that
        wants fewer are cut by the engine.
        """
        ...

    def samples_drafts(self, request: Request, others: Collection[Request], costs: RoundCosts) -> bool:
        """Return whether the drafts of a new request, which leaves it open, are drawn at random. Asked once."""
        ...

    def observe(self, request: Request, *, is_tree: bool, drafted: int, accepted: int) -> None:
        """Learn what became of the drafts of one request in a round; or, without any, that it has ended."""
        ...

    def observe_round(self, *, arm: Arm, seconds: float) -> None:
        """Learn that a round that drafted so took so long."""
        ...


class FixedDepth:
    """The depth that the config has for a batch size, and no more than some request wants."""

    def __init__(self, config: SpeculativeConfig | None, max_num_seqs: int) -> None:
        """No config: never draft."""
        self._by_batch = [0 if config is None else config.depth_at(size) for size in range(max_num_seqs + 1)]
        self._is_tree = config is not None and config.tree_width is not None
        self.choice: DepthChoice | None = None

    @property
    def arms(self) -> Collection[Arm]:
        return {self._arm(depth) for depth in self._by_batch[1:]}

    def _arm(self, depth: int) -> Arm:
        return Arm(depth, is_tree=self._is_tree and depth > 0)

    def choose(self, requests: Collection[Request], costs: CostTable) -> Arm:  # noqa: ARG002 - costs do not change it
        batch = min(len(requests), len(self._by_batch) - 1)
        arm = self._arm(min(self._by_batch[batch], wanted_depth(requests)))
        self.choice = DepthChoice(arm, batch, None, None, arm, "fixed")
        return arm

    def samples_drafts(self, request: Request, others: Collection[Request], costs: RoundCosts) -> bool:  # noqa: ARG002
        return False

    def expect(self, acceptance: Acceptance) -> None:
        pass

    def observe(self, request: Request, *, is_tree: bool, drafted: int, accepted: int) -> None:
        pass

    def observe_round(self, *, arm: Arm, seconds: float) -> None:
        pass


def wanted_depth(requests: Collection[Request]) -> int:
    """No request wants more drafts than this."""
    return max({request.draft_limit for request in requests if request.draft_until}, default=0)


class AdaptiveDepth:
    """The arm with the highest expected rate. Remembers what it chose; `seconds` of rounds are its clock."""

    def __init__(self, max_depth: int, max_num_seqs: int, *, tree: bool = False) -> None:
        """`tree`: a tree of the deepest depth is an arm as well."""
        useful = {1, 2, 3, 5, 7, 10, 13}  # between these the rate changes little
        depths = sorted({d for d in useful if d < max_depth} | {max_depth})
        self.arms: Sequence[Arm] = [PLAIN, *map(Arm, depths), *([Arm(max_depth, is_tree=True)] if tree else [])]
        self._max_num_seqs = max_num_seqs
        self._max_depth, self._first = max_depth, Arm(max((d for d in depths if d <= 3), default=max_depth))
        self._trial_rounds = self._trial_observations = 0
        self._steps = self._decisions = 0
        self._credit: float | None = None  # seconds that may be lost in trials; None: nothing is known yet
        self._answer_length = MEAN_ANSWER
        self._rounds = self._other_kind_rounds = 0
        self._drawn_is_better, self._judged_at = False, 0  # as of this step
        self._other_kind: Request | None = None  # drafts in the way that is not held to be the better one
        self.choice: DepthChoice | None = None
        self.expect({})

    def expect(self, acceptance: Acceptance) -> None:
        self._acceptance = AcceptanceEstimator(self._max_depth)
        self._acceptance.expect(acceptance)
        self._current = self._first
        self._trial: Arm | None = None  # what is being tried instead
        self._since_change = DWELL
        self._is_new = False  # of a kind that has hardly drafted: no guess decides that nothing is drafted
        self._new_rounds = 0  # that this held for
        self._batch = 0

    def observe(self, request: Request, *, is_tree: bool, drafted: int, accepted: int) -> None:
        if drafted:
            self._trial_observations += 1
            self._acceptance.observe(request, is_tree=is_tree, drafted=drafted, accepted=accepted)
        if request.finish_reason is not None:
            self._answer_length += 0.05 * (request.num_output - self._answer_length)

    def observe_round(self, *, arm: Arm, seconds: float) -> None:
        self._since_change += 1
        self._rounds += 1
        self._new_rounds += self._is_new
        self._other_kind_rounds += self._other_kind is not None and self._other_kind.phase is not Phase.FINISHED
        if self._credit is not None:
            self._credit += TRIAL_SHARE * seconds
        if arm == self._trial:
            self._trial_rounds += 1

    def samples_drafts(self, request: Request, others: Collection[Request], costs: RoundCosts) -> bool:
        """The way that promises more tokens a second if all that leave it open draft so; for a few, the other."""
        if self._steps >= self._judged_at + _every(len(others)) or self._judged_at == 0:
            self._judged_at, self._drawn_is_better = self._steps, self._judge_drawn(request, others, costs)
        better = self._drawn_is_better
        is_alone = self._other_kind is None or self._other_kind.phase is Phase.FINISHED
        if is_alone and self._other_kind_rounds < OTHER_KIND_SHARE * self._rounds:
            self._other_kind = request
            return not better
        return better

    def _judge_drawn(self, request: Request, others: Collection[Request], costs: RoundCosts) -> bool:
        batch = [request, *itertools.islice(others, self._max_num_seqs - 1)]
        rates: dict[bool, float] = {}
        for sampled in (True, False):
            kinds = [one.kind if not one.may_sample_drafts else _SAMPLED[sampled] for one in batch]
            tokens = self._acceptance.expected_tokens(batch, kinds)
            table = costs.tables[RequestKind.of_round(kinds)]
            known = [(arm, table.estimate(len(batch), arm)) for arm in self.arms if arm.depth and not arm.is_tree]
            rates[sampled] = max((float(tokens[arm.depth]) / cost for arm, cost in known if cost), default=0.0)
        return bool(rates[True] >= rates[False])

    def choose(self, requests: Collection[Request], costs: CostTable) -> Arm:
        wanted = wanted_depth(requests)
        if wanted == 0:
            return PLAIN
        batch = min(len(requests), self._max_num_seqs)
        self._steps += 1
        has_changed = not 0.8 * self._batch <= batch <= 1.25 * self._batch
        if has_changed or self._is_new or self._steps % _every(batch) == 0 or self.choice is None:
            self._batch = batch
            arms = [arm for arm in self.arms if arm.is_tree or arm.depth <= wanted]
            self._decide(list(itertools.islice(requests, batch)), costs, arms, at_once=has_changed or self._is_new)
        chosen = self._current if self._trial is None else self._trial
        return chosen if chosen.is_tree else Arm(min(chosen.depth, wanted))

    def _decide(self, requests: list[Request], costs: CostTable, arms: Sequence[Arm], *, at_once: bool) -> None:
        """Choose among `arms`: those of all that some request wants. `at_once`: however short the last choice held."""
        batch = len(requests)
        if self._trial in arms and not self._trial_is_over(costs, batch):
            return
        self._trial = None
        known = {arm: cost for arm in arms if (cost := costs.estimate(batch, arm))}
        if PLAIN not in known or len(known) < 2:
            self._measure_first(known, batch)
            return
        plain = known[PLAIN]
        every = batch // JUDGED_REQUESTS | 1  # odd, and others each time: there may be an order in them
        self._decisions += 1
        judged = requests[self._decisions % every :: every]
        shapes, share = {arm.is_tree for arm in known}, len(judged) / batch
        expected = {is_tree: self._acceptance.expected_tokens(judged, is_tree=is_tree) for is_tree in shapes}
        tokens = {arm: float(expected[arm.is_tree][arm.depth]) / share for arm in known}
        rates = {arm: tokens[arm] / cost for arm, cost in known.items()}
        drafting = max((arm for arm in rates if arm.depth), key=lambda arm: rates[arm])
        catch_up = self._catch_up_seconds(judged, share, plain, costs)
        best = max(rates, key=lambda arm: rates[arm])
        is_cheap = catch_up <= FIRST_CREDIT * plain and rates[drafting] > WORTH_TRYING * rates[best]
        is_known = self._new_rounds >= MOST_NEW_ROUNDS or self._acceptance.has_seen(judged, TRIAL_OBSERVATIONS)
        self._is_new = is_cheap and not is_known
        best = drafting if self._is_new else best
        reason = "best"
        if self._current not in rates or (self._is_new and not self._current.depth):
            self._current = best
        if self._credit is None:
            self._credit = FIRST_CREDIT * plain
        if self._current.depth:  # while nothing is drafted it is saved for the catching up, which may be dear
            self._credit = min(self._credit, MOST_CREDIT * plain)
        if best != self._current and (at_once or self._since_change >= DWELL):
            gain = rates[best] / rates[self._current]
            enough = HYSTERESIS if self._current.depth else RETURN_HYSTERESIS
            saved = self._answer_length * plain * (1 - 1 / gain)
            if gain > enough and (self._current.depth or saved > catch_up):
                self._change(best)
            elif gain > enough:
                reason = "return"
        trial = self._worth_a_trial(rates, known, costs, batch, catch_up)
        if trial is not None:
            reason = "trial"
            if not self._current.depth:
                self._acceptance.fade()
            self._trial, self._trial_rounds, self._trial_observations = trial, 0, 0
        chosen = self._current if trial is None else trial
        shown = chosen if chosen.depth else drafting
        self.choice = DepthChoice(
            arm=chosen,
            batch=batch,
            tokens=tokens[shown] / batch,
            cost=known[shown] / plain,
            shown=shown,
            reason=reason,
            sampled_drafts=sum(request.sample_drafts for request in requests),
        )

    def _change(self, arm: Arm) -> None:
        self._current, self._since_change = arm, 0
        if not arm.depth:
            self._credit = 0.0

    def _measure_first(self, known: Collection[Arm], batch: int) -> None:
        """Nothing can be compared yet: draft for some rounds, then do without for some."""
        if any(arm.depth for arm in known):
            self._trial, self._trial_rounds, self._trial_observations = PLAIN, 0, TRIAL_OBSERVATIONS
        self.choice = DepthChoice(self._current, batch, None, None, self._current, "unmeasured")

    def _trial_is_over(self, costs: CostTable, batch: int) -> bool:
        assert self._trial is not None
        enough = self._trial_rounds >= TRIAL_ROUNDS and costs.cost(batch, self._trial) is not None
        return (enough and (not self._trial.depth or self._trial_observations >= TRIAL_OBSERVATIONS)) or (
            self._trial_rounds >= TRIAL_ROUNDS + TRIAL_OBSERVATIONS
        )

    def _worth_a_trial(
        self, rates: dict[Arm, float], known: dict[Arm, float], costs: CostTable, batch: int, catch_up: float
    ) -> Arm | None:
        """The arm to try now, if one is due and what it may cost has been saved up."""
        if self._since_change < DWELL:
            return None
        best = rates[self._current]
        due = []
        for arm, rate in rates.items():
            age = costs.age(batch, arm)
            is_stale = age is None or age > STALE_ROUNDS
            if arm == self._current or not (is_stale or not self._current.depth):
                continue
            if rate < (WORTH_MEASURING if age is None else WORTH_TRYING) * best and self._current.depth:
                continue
            rounds = TRIAL_ROUNDS if not arm.depth else max(TRIAL_ROUNDS, -(-TRIAL_OBSERVATIONS // batch))
            lost = rounds * known[arm] * max(0.0, 1 - rate / best)
            if not arm.depth or not self._current.depth:
                lost += max(catch_up, known[PLAIN])
            due.append((rate, arm, lost))
        if not due:
            return None
        _, arm, lost = max(due)
        if self._credit is None or lost > self._credit:
            return None
        self._credit -= lost
        return arm

    def _catch_up_seconds(self, judged: Sequence[Request], share: float, plain: float, costs: CostTable) -> float:
        """What it costs to let the drafter read what it has missed: a pass over these tokens, the target's too.

        `judged` are this share of the requests.
        """
        missed = sum(len(r.tokens) - 1 - r.settled for r in judged if r.phase is Phase.DECODE and r.draft_until) / share
        return plain + missed * (costs.seconds_per_row() or plain) if missed > 0 else 0.0


def _every(batch: int) -> int:
    return EVERY if batch < MANY else 2 * EVERY


def make_policy(config: SpeculativeConfig | None, max_num_seqs: int) -> DepthPolicy:
    """The policy that a config asks for."""
    if config is None or not config.is_adaptive:
        return FixedDepth(config, max_num_seqs)
    return AdaptiveDepth(config.max_depth, max_num_seqs, tree=config.tree_width is not None)
