"""How deep to draft, and what is known of the costs."""

SMOOTHING = 0.1  # weight of the newest round in the mean cost
MIN_SAMPLES = 3  # rounds before a cost is believed
REACH = 1.25  # a batch this much larger or smaller than a measured one costs about the same


class CostTable:
    """What rounds cost, in seconds, by batch size and depth: exponentially weighted means of measured rounds.

    Depth 0 is a plain step. Can be pickled: the server's estimates read a copy of the engine's.
    """

    def __init__(self) -> None:
        self._costs: dict[int, dict[int, tuple[int, float]]] = {}  # depth -> batch -> samples, mean

    def add(self, *, batch: int, depth: int, seconds: float) -> None:
        at_depth = self._costs.setdefault(depth, {})
        samples, mean = at_depth.get(batch, (0, 0.0))
        samples += 1
        at_depth[batch] = (samples, mean + max(SMOOTHING, 1 / samples) * (seconds - mean))

    def cost(self, batch: int, depth: int) -> float | None:
        """Return the cost of a round: measured, or between two measured sizes; None if neither, never a guess."""
        known = {b: mean for b, (samples, mean) in self._costs.get(depth, {}).items() if samples >= MIN_SAMPLES}
        if batch in known:
            return known[batch]
        below = max((b for b in known if b < batch), default=None)
        above = min((b for b in known if b > batch), default=None)
        if below is not None and above is not None:
            return known[below] + (known[above] - known[below]) * (batch - below) / (above - below)
        nearest = below if above is None else above
        if nearest is not None and max(nearest, batch) <= REACH * min(nearest, batch):
            return known[nearest]
        return None

    def ratio(self, batch: int, depth: int) -> float | None:
        """How many plain steps a round costs: the tokens a round must give to break even."""
        plain, round_cost = self.cost(batch, 0), self.cost(batch, depth)
        return None if plain is None or round_cost is None or plain <= 0 else round_cost / plain

    def smallest_batch(self, depth: int) -> int | None:
        """The smallest batch at which both this depth and plain decoding were measured."""
        return min((b for b in self._costs.get(depth, {}) if self.ratio(b, depth) is not None), default=None)

    def copy(self) -> "CostTable":
        twin = CostTable()
        twin._costs = {depth: dict(costs) for depth, costs in self._costs.items()}
        return twin
