"""What rounds cost, as measured: by how many requests and what is drafted. The controller decides by it; the server
reads it.

Attention takes longer the longer the contexts are, and not by the same factor for every arm: a plain step reads as many
keys as a round with drafts does, and does less besides. So costs are kept as of contexts of one length. What more keys
add was timed while warming up, and is taken off each measured round and put on each answer.

Neighbours come and go, and all rounds are slower or faster with them. So a cost is a part of its own, which is taken
not to change, times a pace that all rounds share: what moves one cost that is being measured moves the others with it.
What warming up measured is an expectation only. Rounds of requests may be slower than those of dummies, which is the
pace's matter, and an arm dearer beside the others than was measured, which a few rounds of it show.

The host's own work between two rounds comes on top, or where it overlaps with the device's bounds a round from below:
a small model on a large GPU is no faster than its requests can be told their tokens, however deep they draft. With
drafts there is more of it: they are counted, learned from and chosen among. So it is known of both apart, or plain
steps would look as dear as rounds wherever the host is the slower of the two.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from fledge.engine.arms import PLAIN, Arm, RequestKind

SMOOTHING = 0.1  # weight of the newest round in the mean of the host's work, and in that of discounts
SHORTEST = 1e-9  # seconds: a clock may not have moved
MIN_SAMPLES = 3  # rounds before a cost is believed
# Standard deviations of logarithms.
ROUND_NOISE = 0.05  # of one round about what it costs
EXPECTATION_ERROR = 0.1  # of what warming up said of an arm, beside the others
FIRST_PACE = 0.5  # of how much slower rounds of requests are than was expected, before any has run
PACE_DRIFT = 0.008  # of the pace, from round to round
COST_DRIFT = 0.001  # of a cost of its own, the same
MOST_DEVIATIONS = 2.5  # a round that is further off counts as no more than that, and says that something has changed
KNOWN_SAMPLES = 16  # rounds of a cost, after which only the pace can have: before, what was expected may be wrong
WORST_EXPECTATION = 0.3  # as EXPECTATION_ERROR, where a round says so
REVERSION = 1000.0  # rounds in which a cost that is not measured goes two thirds of the way down to what was expected
OUTLIER = 3.0  # the host's work of a round that takes this many times its mean counts as no more than that
REACH = 1.25  # a batch this much larger or smaller than a measured one costs about the same
PLAIN_HOST = 0.7  # of the host's work for a round with drafts, that for one without, until both have run
LEAST_OF_CONTEXT = 0.5  # of a cost at the expected length of contexts, that it is with shorter ones


@dataclass
class _Cost:
    samples: int
    mean: float  # logarithm of the seconds at the first pace, and with the contexts that were expected
    variance: float
    measured_at: int  # in rounds of the table
    expected: float | None = None  # what warming up said
    key_seconds: float | None = None  # of that, for each key that each of the requests reads; None: was not timed
    has_run: bool = True  # no: it is only expected


@dataclass
class Pace:
    """How much slower than at first all rounds are: logarithm, and its variance."""

    mean: float = 0.0
    variance: float = 0.0


class Expectation(NamedTuple):
    """What warming up said of a kind of round, in seconds."""

    batch: int
    arm: Arm
    seconds: float
    key_seconds: float | None


@dataclass(frozen=True)
class _HostWork:
    """Of one round, in seconds."""

    samples: int
    mean: float


class CostTable:
    """What rounds cost, in seconds, by batch size and arm: their own part as of now, times the pace.

    Can be pickled: the server's estimates read a copy of the engine's.
    """

    def __init__(self, *, host_overlaps: bool = True, pace: Pace | None = None) -> None:
        """`pace`: where other tables are of the same machine, one for all."""
        self.rounds = 0  # measured so far
        self._host_overlaps = host_overlaps
        self._pace = pace or Pace()
        self._host: dict[tuple[int, bool], _HostWork] = {}  # power of two of the batch, whether there are drafts
        self._costs: dict[Arm, dict[int, _Cost]] = {}  # by batch
        self._discounts: dict[tuple[int, Arm], float] = {}  # power of two of the batch, arm: see `discount`
        self.context: float | None = None  # keys that each request of the latest round read; None: as was expected
        self._expected_context = 0.0  # that costs are kept as of

    def expect(self, *, batch: int, arm: Arm, seconds: float) -> None:
        """Believe that such rounds take so long until some have run."""
        error = EXPECTATION_ERROR**2
        cost = _Cost(MIN_SAMPLES, math.log(max(seconds, SHORTEST)), error, self.rounds, expected=seconds, has_run=False)
        self._costs.setdefault(arm, {}).setdefault(batch, cost)
        if not self.rounds:
            self._pace.variance = FIRST_PACE**2

    def expect_context(self, *, batch: int, arm: Arm, context: int, key_seconds: float) -> None:
        """Believe that such rounds take `key_seconds` more for each key that each request has more than `context`.

        `context` is that of all that is expected. Nothing is believed of rounds that are not.
        """
        cost = self._costs.get(arm, {}).get(batch)
        if cost is not None and cost.expected is not None:
            self._expected_context, cost.key_seconds = float(context), max(key_seconds, 0.0)

    @property
    def expected_context(self) -> int:
        return round(self._expected_context)

    def expectations(self) -> list[Expectation]:
        """What `expect` and `expect_context` were told."""
        return [
            Expectation(batch, arm, cost.expected, cost.key_seconds)
            for arm, costs in self._costs.items()
            for batch, cost in costs.items()
            if cost.expected is not None
        ]

    def add(self, *, batch: int, arm: Arm, seconds: float, context: float | None = None) -> None:
        """Learn how long a round took. `context`: the keys that each of its requests read, on average."""
        self.rounds += 1
        self.context = context
        found = math.log(max(seconds, SHORTEST) / self._by_context(arm, batch))
        of_arm, pace, noise = self._costs.setdefault(arm, {}), self._pace, ROUND_NOISE**2
        cost = of_arm.get(batch)
        if cost is None:
            of_arm[batch] = _Cost(1, found - pace.mean, noise, self.rounds)
            return
        if not cost.has_run:
            cost.mean = min(cost.mean, math.log(self._believed(arm, batch)) - pace.mean)
        cost.mean = self._own(cost)
        # A Kalman filter of two numbers, of which a round is the sum: the pace, and this cost's own.
        pace.variance += PACE_DRIFT**2
        cost.variance += COST_DRIFT**2 * (self.rounds - cost.measured_at)
        surprise, spread = found - pace.mean - cost.mean, pace.variance + cost.variance + noise
        excess = abs(surprise) - MOST_DEVIATIONS * math.sqrt(spread)
        surprise -= math.copysign(max(excess, 0.0), surprise)
        pace.mean += pace.variance / spread * surprise
        cost.mean += cost.variance / spread * surprise
        pace.variance -= pace.variance**2 / spread
        cost.variance -= cost.variance**2 / spread
        if excess > 0:
            pace.variance += excess**2
            if cost.samples <= KNOWN_SAMPLES:
                cost.variance = min(cost.variance + excess**2, WORST_EXPECTATION**2)
        cost.samples += 1
        cost.measured_at, cost.has_run = self.rounds, True

    def add_host(self, *, batch: int, arm: Arm, seconds: float) -> None:
        """Learn how long the host itself was busy with a round."""
        key = batch.bit_length(), arm.depth > 0
        known = self._host.get(key)
        samples = 1 if known is None else known.samples + 1
        before = self._on_host(batch, arm) or seconds
        found = min(seconds, OUTLIER * before) - before
        self._host[key] = _HostWork(samples, before + max(SMOOTHING, 1 / samples) * found)

    def discount(self, batch: int, arm: Arm, factor: float) -> None:
        """Say what full rounds cost too much by: fewer drafts verified give as many tokens in `factor` of the time."""
        before = self.discount_of(batch, arm)
        self._discounts[batch.bit_length(), arm] = before + SMOOTHING * (factor - before)

    def discount_of(self, batch: int, arm: Arm) -> float:
        """What was said of it lately; 1: nothing."""
        return self._discounts.get((batch.bit_length(), arm), 1.0)

    def cost(self, batch: int, arm: Arm) -> float | None:
        """Return the cost of a round: measured, or between two measured sizes; None if neither, never a guess."""
        on_device = self.device_cost(batch, arm)
        return None if on_device is None else self.with_host(batch, arm, on_device)

    def with_host(self, batch: int, arm: Arm, on_device: float) -> float:
        """What a round costs that takes so long on the device."""
        on_host = self._on_host(batch, arm)
        return max(on_device, on_host) if self._host_overlaps else on_device + on_host

    def _on_host(self, batch: int, arm: Arm) -> float:
        """The host's work for such a round: measured, or guessed from that of rounds with drafts or without; or 0."""
        size, drafts = batch.bit_length(), arm.depth > 0
        if (own := self._host.get((size, drafts))) is not None:
            return own.mean
        other = self._host.get((size, not drafts))
        return 0.0 if other is None else other.mean * (1 / PLAIN_HOST if drafts else PLAIN_HOST)

    def device_cost(self, batch: int, arm: Arm) -> float | None:
        """`cost` without the host's part."""
        below, above = self._neighbours(batch, arm)
        nearest = below if above is None else above
        if below is not None and above is not None:
            found = _between(batch, (below, self._believed(arm, below)), (above, self._believed(arm, above)))
        elif nearest is not None and max(nearest, batch) <= REACH * min(nearest, batch):
            found = self._believed(arm, nearest)
        else:
            return None
        return found * self._by_context(arm, batch)

    def estimate(self, batch: int, arm: Arm) -> float | None:
        """As `cost`, less its discount; what was not measured is guessed: of a chain from others, or the nearest size.

        Another arm that was measured at both sizes tells how much dearer this one is. None only if this arm was never
        measured, and if it is a chain at most one other was.
        """
        found = self._estimate(batch, arm)
        return None if found is None else found * self.discount_of(batch, arm)

    def _estimate(self, batch: int, arm: Arm) -> float | None:
        exact = self.cost(batch, arm)
        if exact is not None:
            return exact
        chains = sorted(other.depth for other in self._costs if not other.is_tree) if not arm.is_tree else ()
        known = [(depth, cost) for depth in chains if (cost := self.cost(batch, Arm(depth))) is not None]
        if len(known) >= 2:  # a line through the two nearest depths
            (a, cost_a), (b, cost_b) = sorted(sorted(known, key=lambda one: abs(one[0] - arm.depth))[:2])
            return max(cost_a + (cost_b - cost_a) * (arm.depth - a) / (b - a), 0.5 * min(cost_a, cost_b))
        below, above = self._neighbours(batch, arm)
        nearest = below if above is None else above
        if nearest is None:
            return None
        guess = self._now(arm, nearest)
        others = sorted(self._costs, key=lambda other: (not other.depth, -other.depth))  # plain steps grow least
        for other in others:
            here, there = self.cost(batch, other), self.cost(nearest, other)
            if here and there:
                return guess * here / there
        return guess

    def age(self, batch: int, arm: Arm) -> int | None:
        """Rounds since this arm was last measured at about this size, warming up included; None: never."""
        near = [b for b in self._costs.get(arm, {}) if max(b, batch) <= REACH * min(b, batch)]
        return min((self.rounds - self._costs[arm][b].measured_at for b in near), default=None)

    def ratio(self, batch: int, arm: Arm) -> float | None:
        """How many plain steps a round costs: the tokens a round must give to break even."""
        plain, round_cost = self.cost(batch, PLAIN), self.cost(batch, arm)
        return None if plain is None or round_cost is None or plain <= 0 else round_cost / plain

    def smallest_batch(self, arm: Arm) -> int | None:
        """The smallest batch at which both this arm and plain decoding were measured."""
        return min((b for b in self._costs.get(arm, {}) if self.ratio(b, arm) is not None), default=None)

    def seconds_per_row(self) -> float | None:
        """What one more token costs in a pass that is busy anyway: a plain step of the largest size, divided."""
        largest = max(
            (b for b, cost in self._costs.get(PLAIN, {}).items() if cost.samples >= MIN_SAMPLES), default=None
        )
        return None if largest is None else self._now(PLAIN, largest) / largest

    def copy(self) -> "CostTable":
        twin = CostTable(host_overlaps=self._host_overlaps, pace=Pace(**vars(self._pace)))
        own = {"_pace": twin._pace, "_host": dict(self._host), "_discounts": dict(self._discounts)}
        vars(twin).update(vars(self) | own)
        twin._costs = {
            arm: {batch: _Cost(**vars(cost)) for batch, cost in costs.items()} for arm, costs in self._costs.items()
        }
        return twin

    def _neighbours(self, batch: int, arm: Arm) -> tuple[int | None, int | None]:
        """The nearest believed sizes of this arm: not larger, and not smaller."""
        known = [b for b, cost in self._costs.get(arm, {}).items() if cost.samples >= MIN_SAMPLES]
        return max((b for b in known if b <= batch), default=None), min((b for b in known if b >= batch), default=None)

    def _believed(self, arm: Arm, batch: int) -> float:
        """As measured, but no more than a deeper chain takes that has run more often: drafting more never takes less,
        and one stall of a busy host while warming up is no cost.
        """
        own, found = self._costs[arm][batch], self._at_expected_context(arm, batch)
        runs = max(MIN_SAMPLES, own.samples if own.has_run else 0)
        for other, costs in self._costs.items():
            is_deeper = other.depth > arm.depth and not (other.is_tree or arm.is_tree)
            if is_deeper and (known := costs.get(batch)) is not None and known.has_run and known.samples > runs:
                found = min(found, self._at_expected_context(other, batch))
        return found

    def _now(self, arm: Arm, batch: int) -> float:
        return self._at_expected_context(arm, batch) * self._by_context(arm, batch)

    def _at_expected_context(self, arm: Arm, batch: int) -> float:
        return math.exp(self._own(self._costs[arm][batch]) + self._pace.mean)

    def _own(self, cost: _Cost) -> float:
        """The part of its own, logarithm: whoever was in the way while it was measured may have gone since."""
        if cost.expected is None:
            return cost.mean
        above = max(cost.mean - math.log(max(cost.expected, SHORTEST)), 0.0)
        return cost.mean - above * (1 - math.exp((cost.measured_at - self.rounds) / REVERSION))

    def _by_context(self, arm: Arm, batch: int) -> float:
        """How many times as long a round takes with the contexts of now as with those that were expected."""
        more = 0.0 if self.context is None else self.context - self._expected_context
        known = [one for one in self._costs.get(arm, {}).items() if one[1].key_seconds is not None] if more else []
        if not known:
            return 1.0
        _, nearest = min(known, key=lambda one: abs(math.log(one[0] / batch)))
        assert nearest.expected is not None
        assert nearest.key_seconds is not None
        return max(1 + more * nearest.key_seconds / nearest.expected, LEAST_OF_CONTEXT)


def _between(batch: int, low: tuple[int, float], high: tuple[int, float]) -> float:
    """What lies between what belongs to two sizes."""
    (below, least), (above, most) = low, high
    return least if above == below else least + (most - least) * (batch - below) / (above - below)


class RoundCosts:
    """A table for each kind of round: sampling takes time too, and more of it the more drafts there are."""

    def __init__(self, *, host_overlaps: bool = True) -> None:
        pace = Pace()
        self.tables = {kind: CostTable(host_overlaps=host_overlaps, pace=pace) for kind in RequestKind}
        self.latest = self.tables[RequestKind.GREEDY]  # of the kind of round that ran last

    def add(self, kind: RequestKind, *, batch: int, arm: Arm, seconds: float, context: float) -> None:
        """Learn how long a round took. All kinds of requests have the contexts of the latest round."""
        self.latest = self.tables[kind]
        self.latest.add(batch=batch, arm=arm, seconds=seconds, context=context)
        for table in self.tables.values():
            table.context = context
