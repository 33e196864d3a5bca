"""How deep to draft, step by step, and the measured costs to decide it by."""

from collections.abc import Collection
from typing import Protocol

from fledge.engine.config import SpeculativeConfig
from fledge.engine.request import Request

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


class DepthPolicy(Protocol):
    """Chooses how deep to draft. Asked before every step, in the engine's process, so it must be quick."""

    @property
    def depths(self) -> Collection[int]:
        """All depths it may choose: graphs are captured for these."""
        ...

    def depth(self, requests: Collection[Request], costs: CostTable) -> int:
        """Return how many tokens to draft in the next step; 0 is plain decoding.

        `requests` run or wait to; each knows its acceptance so far and its own limit. The drafts of a request that
        wants fewer are cut by the engine.
        """
        ...


class FixedDepth:
    """The depth that the config has for a batch size, and no more than some request wants."""

    def __init__(self, config: SpeculativeConfig | None, max_num_seqs: int) -> None:
        """No config: never draft."""
        self._by_batch = [0 if config is None else config.depth_at(size) for size in range(max_num_seqs + 1)]

    @property
    def depths(self) -> Collection[int]:
        return set(self._by_batch[1:])

    def depth(self, requests: Collection[Request], costs: CostTable) -> int:  # noqa: ARG002 - costs do not change it
        depth = self._by_batch[min(len(requests), len(self._by_batch) - 1)]
        wanted = 0
        for request in requests:
            wanted = max(wanted, request.draft_limit if request.draft_until else 0)
            if wanted >= depth:
                return depth
        return wanted
