"""What rounds cost, as measured: by how many requests and how deep. The controller decides by it; the server reads it.

A cost that is not measured again goes stale: contexts grow, neighbours come. What moves one cost that is being measured
moves the others with it, until they are measured again themselves.

The host's own work between two rounds comes on top, or where it overlaps with the device's bounds a round from below:
a small model on a large GPU is no faster than its requests can be told their tokens, however deep they draft.
"""

import math
from dataclasses import dataclass

SMOOTHING = 0.1  # weight of the newest round in the mean cost
MIN_SAMPLES = 3  # rounds before a cost is believed
SETTLED_SAMPLES = 40  # rounds after which a change of the mean is a change of the times, not of what is known
FORGOTTEN_ROUNDS = 100  # a cost that was not measured for longer is learned anew, from what it was
OUTLIER = 3.0  # a round that takes this many times its mean counts as no more than that
REACH = 1.25  # a batch this much larger or smaller than a measured one costs about the same


@dataclass
class _Cost:
    samples: int
    mean: float
    trend: float  # the table's when it was measured last
    measured_at: int  # in rounds of the table


class CostTable:
    """What rounds cost, in seconds, by batch size and depth: exponentially weighted means of measured rounds.

    Depth 0 is a plain step. Can be pickled: the server's estimates read a copy of the engine's.
    """

    def __init__(self, *, host_overlaps: bool = True) -> None:
        self.rounds = 0  # measured so far
        self._host_overlaps = host_overlaps
        self._host: dict[int, float] = {}  # seconds of the host's work for a round, by the power of two of the batch
        self._costs: dict[int, dict[int, _Cost]] = {}  # depth -> batch
        self._discounts: dict[tuple[int, int], float] = {}  # power of two of the batch, depth: see `discount`
        self._trend = 0.0  # logarithm of how much slower everything has become

    def add(self, *, batch: int, depth: int, seconds: float) -> None:
        self.rounds += 1
        at_depth = self._costs.setdefault(depth, {})
        cost = at_depth.get(batch)
        if cost is None:
            at_depth[batch] = _Cost(1, seconds, self._trend, self.rounds)
            return
        before = cost.mean * math.exp(self._trend - cost.trend)
        if self.rounds - cost.measured_at > FORGOTTEN_ROUNDS:
            cost.samples = min(cost.samples, MIN_SAMPLES)
        cost.samples += 1
        if cost.samples > MIN_SAMPLES:
            seconds = min(seconds, OUTLIER * before)
        cost.mean = before + max(SMOOTHING, 1 / cost.samples) * (seconds - before)
        if cost.samples > SETTLED_SAMPLES and cost.mean > 0 and before > 0:
            self._trend += math.log(cost.mean / before)
        cost.trend, cost.measured_at = self._trend, self.rounds

    def add_host(self, *, batch: int, seconds: float) -> None:
        """Learn how long the host itself was busy with a round."""
        size = batch.bit_length()
        before = self._host.get(size, seconds)
        self._host[size] = before + SMOOTHING * (min(seconds, OUTLIER * before) - before)

    def discount(self, batch: int, depth: int, factor: float) -> None:
        """Say what full rounds cost too much by: fewer drafts verified give as many tokens in `factor` of the time."""
        before = self._discounts.get((batch.bit_length(), depth), 1.0)
        self._discounts[batch.bit_length(), depth] = before + SMOOTHING * (factor - before)

    def cost(self, batch: int, depth: int) -> float | None:
        """Return the cost of a round: measured, or between two measured sizes; None if neither, never a guess."""
        on_device = self.device_cost(batch, depth)
        return None if on_device is None else self.with_host(batch, on_device)

    def with_host(self, batch: int, on_device: float) -> float:
        """What a round costs that takes so long on the device."""
        on_host = self._host.get(batch.bit_length(), 0.0)
        return max(on_device, on_host) if self._host_overlaps else on_device + on_host

    def device_cost(self, batch: int, depth: int) -> float | None:
        """`cost` without the host's part."""
        below, above = self._neighbours(batch, depth)
        if below is not None and above is not None:
            low, high = self._now(depth, below), self._now(depth, above)
            return low if above == below else low + (high - low) * (batch - below) / (above - below)
        nearest = below if above is None else above
        if nearest is not None and max(nearest, batch) <= REACH * min(nearest, batch):
            return self._now(depth, nearest)
        return None

    def estimate(self, batch: int, depth: int) -> float | None:
        """As `cost`, less its discount; what was not measured is guessed: from other depths, or from the nearest size.

        None only if nothing was measured at this depth or at two others.
        """
        found = self._estimate(batch, depth)
        return None if found is None else found * self._discounts.get((batch.bit_length(), depth), 1.0)

    def _estimate(self, batch: int, depth: int) -> float | None:
        exact = self.cost(batch, depth)
        if exact is not None:
            return exact
        known = [(other, cost) for other in sorted(self._costs) if (cost := self.cost(batch, other)) is not None]
        if len(known) >= 2:  # a line through the two nearest depths
            (a, cost_a), (b, cost_b) = sorted(sorted(known, key=lambda one: abs(one[0] - depth))[:2])
            return max(cost_a + (cost_b - cost_a) * (depth - a) / (b - a), 0.5 * min(cost_a, cost_b))
        below, above = self._neighbours(batch, depth)
        nearest = below if above is None else above
        return None if nearest is None else self._now(depth, nearest)

    def age(self, batch: int, depth: int) -> int | None:
        """Rounds since this depth was last measured at about this size; None: never."""
        near = [b for b in self._costs.get(depth, {}) if max(b, batch) <= REACH * min(b, batch)]
        return min((self.rounds - self._costs[depth][b].measured_at for b in near), default=None)

    def ratio(self, batch: int, depth: int) -> float | None:
        """How many plain steps a round costs: the tokens a round must give to break even."""
        plain, round_cost = self.cost(batch, 0), self.cost(batch, depth)
        return None if plain is None or round_cost is None or plain <= 0 else round_cost / plain

    def smallest_batch(self, depth: int) -> int | None:
        """The smallest batch at which both this depth and plain decoding were measured."""
        return min((b for b in self._costs.get(depth, {}) if self.ratio(b, depth) is not None), default=None)

    def seconds_per_row(self) -> float | None:
        """What one more token costs in a pass that is busy anyway: a plain step of the largest size, divided."""
        largest = max((b for b, cost in self._costs.get(0, {}).items() if cost.samples >= MIN_SAMPLES), default=None)
        return None if largest is None else self._now(0, largest) / largest

    def copy(self) -> "CostTable":
        twin = CostTable(host_overlaps=self._host_overlaps)
        twin.rounds, twin._trend, twin._host = self.rounds, self._trend, dict(self._host)
        twin._discounts = dict(self._discounts)
        twin._costs = {
            depth: {batch: _Cost(**vars(cost)) for batch, cost in costs.items()} for depth, costs in self._costs.items()
        }
        return twin

    def _neighbours(self, batch: int, depth: int) -> tuple[int | None, int | None]:
        """The nearest believed sizes at this depth: not larger, and not smaller."""
        known = [b for b, cost in self._costs.get(depth, {}).items() if cost.samples >= MIN_SAMPLES]
        return max((b for b in known if b <= batch), default=None), min((b for b in known if b >= batch), default=None)

    def _now(self, depth: int, batch: int) -> float:
        cost = self._costs[depth][batch]
        return cost.mean * math.exp(self._trend - cost.trend)
