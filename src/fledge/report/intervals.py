"""Confidence intervals by resampling prompts.

Rounds of one answer resemble each other (an easy answer is easy throughout), so rounds are not independent draws;
prompts are. A resample draws as many prompts as there are, with replacement, and each brings all of its rounds. The
interval is that of the resampled figures' percentiles.

Every figure here is a pooled mean, sum of totals / sum of counts over prompts: acceptance length with accepted drafts
and rounds (plus one), an attention share with its sum over rounds and the rounds, a plain mean with counts of one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fledge.records import Record

RESAMPLES = 2000
LEVEL = 0.95
_HELD = 4_000_000  # weights that exist at a time

Floats = NDArray[np.float64]
Counts = Mapping[str, tuple[float, float]]  # prompt id -> (total, count): a prompt's part in a pooled mean


@dataclass(frozen=True, kw_only=True)
class Interval(Record):
    """A figure and where it may well lie. `low` and `high` are None where there are too few prompts to say."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """A perturbed run against the unperturbed one, over the prompts that both have."""

    difference: Interval
    ratio: Interval
    base: float  # the unperturbed figure over the same prompts
    prompts: int  # of the perturbed run that are compared
    is_paired: bool  # with the same prompts on both sides, resampled together


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """How intervals are made. The same seed gives the same interval."""

    resamples: int = RESAMPLES
    level: float = LEVEL
    seed: int = 0

    def acceptance_length(self, counts: Counts) -> Interval | None:
        """1 + accepted / rounds. `counts`: (accepted, rounds) of each prompt; None where there was no round."""
        return self.pooled(counts, offset=1.0)

    def mean(self, values: Sequence[float]) -> Interval | None:
        """The mean of one value per prompt; None where there is none."""
        return self.pooled({str(i): (value, 1.0) for i, value in enumerate(values)})

    def pooled(self, counts: Counts, *, offset: float = 0.0) -> Interval | None:
        """offset + sum of totals / sum of counts; None where nothing was counted."""
        return self._interval(lambda totals: offset + _divide(totals[0]), [_columns(counts, list(counts))])

    def compare(self, perturbed: Counts, base: Counts, *, offset: float = 0.0) -> Comparison | None:
        """Compare pooled means (with `offset` 1, acceptance lengths); None where either side counted nothing.

        Prompts that both runs have are compared with themselves: which prompts were drawn then moves both sides alike,
        and the interval is the narrower for it. Where no prompt is shared, the sides are resampled apart.
        """
        common = [prompt for prompt in perturbed if prompt in base]
        if common:
            sides = [np.concatenate([_columns(perturbed, common), _columns(base, common)], axis=1)]  # [prompts, 4]
        else:
            sides = [_columns(perturbed, list(perturbed)), _columns(base, list(base))]

        def means(totals: Sequence[Floats]) -> tuple[Floats, Floats]:
            joined = np.concatenate(totals, axis=-1)  # [..., 4]
            return offset + _divide(joined[..., :2]), offset + _divide(joined[..., 2:])

        def difference(totals: Sequence[Floats]) -> Floats:
            after, before = means(totals)
            return after - before

        def ratio(totals: Sequence[Floats]) -> Floats:
            after, before = means(totals)
            return _divide(np.stack([after, before], axis=-1))

        found = [self._interval(figure, sides) for figure in (difference, ratio)]
        if found[0] is None or found[1] is None:
            return None
        _, before = means([side.sum(axis=0) for side in sides])
        return Comparison(
            difference=found[0],
            ratio=found[1],
            base=float(before),
            prompts=len(common or perturbed),
            is_paired=bool(common),
        )

    def _interval(self, figure: Callable[[Sequence[Floats]], Floats], groups: Sequence[Floats]) -> Interval | None:
        """`figure` maps the totals of each group, [..., columns], to values [...]; groups are resampled apart."""
        # Prompts that counted something: one alone gives the same figure in every resample, which is no certainty.
        smallest = min(int((group[:, 1::2] > 0).sum(axis=0).min()) for group in groups)
        value = float(figure([group.sum(axis=0) for group in groups])) if smallest else float("nan")
        if np.isnan(value):
            return None
        if smallest < 2:
            return Interval(value=value)
        generator = np.random.default_rng(self.seed)
        drawn = np.concatenate([figure(totals) for totals in self._resampled(groups, generator)])
        drawn = drawn[~np.isnan(drawn)]
        if len(drawn) < self.resamples / 2:  # most resamples counted nothing: nothing can be said
            return Interval(value=value)
        low, high = np.quantile(drawn, [(1 - self.level) / 2, (1 + self.level) / 2])
        return Interval(value=value, low=float(low), high=float(high))

    def _resampled(self, groups: Sequence[Floats], generator: np.random.Generator) -> Iterator[list[Floats]]:
        """Yield the totals of each group, [some, columns], until there were `resamples` of them."""
        step = max(1, _HELD // max(len(group) for group in groups))
        for start in range(0, self.resamples, step):
            count = min(step, self.resamples - start)
            yield [
                # How often each prompt was drawn, [some, prompts], times what it brings.
                generator.multinomial(len(group), np.full(len(group), 1 / len(group)), size=count) @ group
                for group in groups
            ]


def _columns(counts: Counts, prompts: Sequence[str]) -> Floats:
    """[prompts, 2]: total, count."""
    return np.array([counts[prompt] for prompt in prompts], dtype=np.float64).reshape(-1, 2)


def _divide(sums: Floats) -> Floats:
    """[..., 2] -> [...]; NaN where nothing was counted."""
    total, count = sums[..., 0], sums[..., 1]
    quotient: Floats = np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0)
    return quotient
