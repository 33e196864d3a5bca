"""How the drafter itself does in rounds, whatever comes of them: how its state grows, how far its confidence is right.

The definitions of `fledge drift`, over rounds that an engine has seen. Eval, baselines and the server use them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Self

BINS = 10  # of confidence, equally wide
Triples = tuple[tuple[float, float, float], ...]  # three sums for each depth, or for each bin


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Three sums for each of some places. Can be pooled, and written down as triples."""

    names: ClassVar[tuple[str, str, str]]
    sums: Counter[tuple[int, str]] = field(default_factory=Counter)  # by place and name

    @classmethod
    def of(cls, triples: Iterable[Sequence[float]]) -> Self:
        named = ((place, triple) for place, triple in enumerate(triples))
        return cls(sums=Counter({(i, name): x for i, three in named for name, x in zip(cls.names, three, strict=True)}))

    @classmethod
    def merge(cls, parts: Iterable["Sums"]) -> Self:
        pooled: Counter[tuple[int, str]] = Counter()
        for part in parts:
            pooled.update(part.sums)
        return cls(sums=pooled)

    @property
    def triples(self) -> Triples:
        """Of all places from the first to the last that has any."""
        places = range(1 + max((place for place, _ in self.sums), default=-1))
        one, two, three = self.names
        return tuple((self.sums[i, one], self.sums[i, two], self.sums[i, three]) for i in places)


class StateGrowth(Sums):
    """How large the drafter's hidden state is behind the draft at each depth, over that behind the first one.

    Norms are summed over sampled rounds, one for each request in them; the ratio of two sums over the same rounds is
    `hidden_growth` of `fledge drift`. What EAGLE-3 feeds back is this very state, so growth is drift; EAGLE-3.1 feeds
    it back normed, and growth shows what the norm takes away.
    """

    names = ("rounds", "norm", "first")

    def plus(self, norms: Sequence[float]) -> "StateGrowth":
        """These sums and one request's round, by the norms of the states behind its drafts."""
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
    """Drafts of which the drafter was about equally sure."""

    drafts: int
    confidence: float  # mean
    accepted: float  # share


class Reliability(Sums):
    """How often drafts stood, if all before them did, by how sure the drafter was, in tenths of its confidence."""

    names = ("drafts", "confidence", "accepted")

    @property
    def bins(self) -> tuple[ReliabilityBin | None, ...]:
        """None where there were no drafts."""
        found = (ReliabilityBin(int(n), sure / n, stood / n) if n else None for n, sure, stood in self.triples)
        return (*found, *[None] * (BINS - len(self.triples)))

    @property
    def total(self) -> ReliabilityBin | None:
        n, sure, stood = (sum(self.sums[i, name] for i in range(BINS)) for name in self.names)
        return ReliabilityBin(int(n), sure / n, stood / n) if n else None

    @property
    def error(self) -> float | None:
        """The expected calibration error: how far a draft's confidence is from the share that stands in its tenth."""
        apart = [(n, abs(sure - stood)) for n, sure, stood in self.triples]
        drafts = sum(n for n, _ in apart)
        return sum(off for _, off in apart) / drafts if drafts else None
