"""Statistics of the drafter's own outputs: growth of its hidden state with depth, calibration of its confidence.

The definitions are those of `fledge drift`, applied to rounds of an engine. Eval, baselines and the server use them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Self

BINS = 10  # of confidence, of equal width
Triples = tuple[tuple[float, float, float], ...]  # three sums for each depth or bin


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Three named sums at each index (a depth, or a bin). Can be merged and serialised as triples."""

    names: ClassVar[tuple[str, str, str]]
    sums: Counter[tuple[int, str]] = field(default_factory=Counter)  # by index and name

    @classmethod
    def of(cls, triples: Iterable[Sequence[float]]) -> Self:
        pairs = ((i, zip(cls.names, triple, strict=True)) for i, triple in enumerate(triples))
        return cls(sums=Counter({(i, name): value for i, named in pairs for name, value in named}))

    @classmethod
    def merge(cls, parts: Iterable["Sums"]) -> Self:
        pooled: Counter[tuple[int, str]] = Counter()
        for part in parts:
            pooled.update(part.sums)
        return cls(sums=pooled)

    @property
    def triples(self) -> Triples:
        """The sums at index 0, 1, ... up to the largest index that has any."""
        length = 1 + max((index for index, _ in self.sums), default=-1)
        one, two, three = self.names
        return tuple((self.sums[i, one], self.sums[i, two], self.sums[i, three]) for i in range(length))


class StateGrowth(Sums):
    """Norm of the drafter's hidden state at each depth, relative to the first depth.

    Norms are summed over sampled rounds, once per request. The ratio of two sums over the same rounds is
    `hidden_growth` of `fledge drift`. EAGLE-3 feeds this state back, so growth is drift; EAGLE-3.1 normalises it first,
    and growth shows what the norm removes.
    """

    names = ("rounds", "norm", "first")

    def plus(self, norms: Sequence[float]) -> "StateGrowth":
        """Return the sums with one round of one request added. `norms`: of the hidden state at each depth."""
        sums = self.sums.copy()
        for depth, norm in enumerate(norms):
            for name, amount in zip(self.names, (1, norm, norms[0]), strict=True):
                sums[depth, name] += amount  # type: ignore[assignment]  # norms can be counted too
        return StateGrowth(sums=sums)

    @property
    def by_depth(self) -> tuple[float, ...]:
        """The growth at each depth; 1 at the first."""
        return tuple(norm / first if first else 1.0 for _, norm, first in self.triples)


class ReliabilityBin(NamedTuple):
    """Drafts with confidence in one interval."""

    drafts: int
    confidence: float  # mean
    accepted: float  # fraction


class Reliability(Sums):
    """Acceptance by the drafter's confidence, in `BINS` bins, of drafts whose predecessors were all accepted."""

    names = ("drafts", "confidence", "accepted")

    @property
    def bins(self) -> tuple[ReliabilityBin | None, ...]:
        """One for each bin; None for bins without drafts."""
        return (*map(_bin, self.triples), *[None] * (BINS - len(self.triples)))

    @property
    def total(self) -> ReliabilityBin | None:
        """All bins as one; None without drafts."""
        drafts, confidence, accepted = (sum(self.sums[i, name] for i in range(BINS)) for name in self.names)
        return _bin((drafts, confidence, accepted))

    @property
    def error(self) -> float | None:
        """Expected calibration error: |mean confidence - acceptance rate| of each bin, weighted by its drafts."""
        drafts = sum(count for count, _, _ in self.triples)
        return sum(abs(confidence - accepted) for _, confidence, accepted in self.triples) / drafts if drafts else None


def _bin(sums: tuple[float, float, float]) -> ReliabilityBin | None:
    drafts, confidence, accepted = sums
    return ReliabilityBin(int(drafts), confidence / drafts, accepted / drafts) if drafts else None
