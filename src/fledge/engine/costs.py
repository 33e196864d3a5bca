"""What rounds cost, as measured: by how many requests and what is drafted. The controller decides by it; the server
reads it.

A cost that is not measured again goes stale: contexts grow, neighbours come. What moves one cost that is being measured
moves the others with it, until they are measured again themselves. What warming up measured is an expectation only:
rounds of requests may be slower than those of dummies, and arms that have not run yet are taken to be slower by as
much as those that have.

The host's own work between two rounds comes on top, or where it overlaps with the device's bounds a round from below:
a small model on a large GPU is no faster than its requests can be told their tokens, however deep they draft. With
drafts there is more of it: they are counted, learned from and chosen among. So it is known of both apart, or plain
steps would look as dear as rounds wherever the host is the slower of the two.
"""

import math
from dataclasses import dataclass

from fledge.engine.arms import PLAIN, Arm, RequestKind

SMOOTHING = 0.1  # weight of the newest round in the mean cost
MIN_SAMPLES = 3  # rounds before a cost is believed
SETTLED_SAMPLES = 40  # rounds after which a change of the mean is a change of the times, not of what is known
FORGOTTEN_ROUNDS = 100  # a cost that was not measured for longer is learned anew, from what it was
OUTLIER = 3.0  # a round that takes this many times its mean counts as no more than that
REACH = 1.25  # a batch this much larger or smaller than a measured one costs about the same
PLAIN_HOST = 0.7  # of the host's work for a round with drafts, that for one without, until both have run


@dataclass
class _Cost:
    samples: int
    mean: float
    trend: float  # the table's when it was measured last
    measured_at: int  # in rounds of the table
    expected: float | None = None  # what warming up said
    has_run: bool = True  # no: it is only expected


@dataclass(frozen=True)
class _HostWork:
    """Of one round, in seconds."""

    samples: int
    mean: float


class CostTable:
    """What rounds cost, in seconds, by batch size and arm: exponentially weighted means of measured rounds.

    Can be pickled: the server's estimates read a copy of the engine's.
    """

    def __init__(self, *, host_overlaps: bool = True) -> None:
        self.rounds = 0  # measured so far
        self._host_overlaps = host_overlaps
        self._host: dict[tuple[int, bool], _HostWork] = {}  # power of two of the batch, whether there are drafts
        self._costs: dict[Arm, dict[int, _Cost]] = {}  # by batch
        self._discounts: dict[tuple[int, Arm], float] = {}  # power of two of the batch, arm: see `discount`
        self._trend = 0.0  # logarithm of how much slower everything has become
        self._slower = 0.0  # logarithm of how much slower rounds are than was expected of them
        self._compared = 0  # rounds that this was learned from

    def expect(self, *, batch: int, arm: Arm, seconds: float) -> None:
        """Believe that such rounds take so long until some have run."""
        cost = _Cost(MIN_SAMPLES, seconds, self._trend, self.rounds, expected=seconds, has_run=False)
        self._costs.setdefault(arm, {}).setdefault(batch, cost)

    def expectations(self) -> list[tuple[int, Arm, float]]:
        """What `expect` was told: batch, arm, seconds."""
        return [
            (batch, arm, cost.expected)
            for arm, costs in self._costs.items()
            for batch, cost in costs.items()
            if cost.expected is not None
        ]

    def add(self, *, batch: int, arm: Arm, seconds: float) -> None:
        """Learn how long a round took."""
        self.rounds += 1
        of_arm = self._costs.setdefault(arm, {})
        cost = of_arm.get(batch)
        if cost is None:
            of_arm[batch] = _Cost(1, seconds, self._trend, self.rounds)
            return
        before = self._now(arm, batch) if cost.has_run else self._believed(arm, batch)
        if self.rounds - cost.measured_at > FORGOTTEN_ROUNDS:
            cost.samples = min(cost.samples, MIN_SAMPLES)
        cost.samples += 1
        if cost.samples > MIN_SAMPLES:
            seconds = min(seconds, OUTLIER * before)
        cost.mean = before + max(SMOOTHING, 1 / cost.samples) * (seconds - before)
        if cost.samples > SETTLED_SAMPLES and cost.mean > 0 and before > 0:
            self._trend += math.log(cost.mean / before)
        cost.trend, cost.measured_at, cost.has_run = self._trend, self.rounds, True
        if cost.expected and seconds > 0:
            self._compared += 1
            found = math.log(seconds / cost.expected)
            self._slower += max(SMOOTHING, 1 / (self._compared + MIN_SAMPLES)) * (found - self._slower)

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
        if below is not None and above is not None:
            low, high = self._believed(arm, below), self._believed(arm, above)
            return low if above == below else low + (high - low) * (batch - below) / (above - below)
        nearest = below if above is None else above
        if nearest is not None and max(nearest, batch) <= REACH * min(nearest, batch):
            return self._believed(arm, nearest)
        return None

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
        """Rounds since this arm was last measured at about this size; None: never."""
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
        twin = CostTable(host_overlaps=self._host_overlaps)
        vars(twin).update(vars(self) | {"_host": dict(self._host), "_discounts": dict(self._discounts)})
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
        own, found = self._costs[arm][batch], self._now(arm, batch)
        runs = max(MIN_SAMPLES, own.samples if own.has_run else 0)
        for other, costs in self._costs.items():
            is_deeper = other.depth > arm.depth and not (other.is_tree or arm.is_tree)
            if is_deeper and (known := costs.get(batch)) is not None and known.has_run and known.samples > runs:
                found = min(found, self._now(other, batch))
        return found

    def _now(self, arm: Arm, batch: int) -> float:
        cost = self._costs[arm][batch]
        return cost.mean * math.exp(self._trend - cost.trend if cost.has_run else self._slower)


class RoundCosts:
    """A table for each kind of round: sampling takes time too, and more of it the more drafts there are."""

    def __init__(self, *, host_overlaps: bool = True) -> None:
        self.tables = {kind: CostTable(host_overlaps=host_overlaps) for kind in RequestKind}
        self.latest = self.tables[RequestKind.GREEDY]  # of the kind of round that ran last

    def add(self, kind: RequestKind, *, batch: int, arm: Arm, seconds: float) -> None:
        self.latest = self.tables[kind]
        self.latest.add(batch=batch, arm=arm, seconds=seconds)
