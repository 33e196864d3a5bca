"""Confidence intervals: what other prompts, and other repeats of a measurement, might have given (`docs/bench.md`).

Rounds and requests of one prompt resemble each other, so prompts are what is drawn anew, each with all it has. Repeats
are too few to draw from: their spread gives a standard error, and Student's t says how far off that may be.

Most figures are pooled means, sum of totals / sum of counts over prompts: acceptance length with accepted drafts and
rounds (plus one), an attention share with its sum over rounds and the rounds, a speed with tokens and seconds.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from fledge.records import Record

RESAMPLES = 2000
LEVEL = 0.95
_BLOCK = 4_000_000  # draws that are held as floats at a time

Floats = NDArray[np.float64]
Counts = Mapping[str, tuple[float, float]]  # prompt -> (total, count): its part in a pooled mean
Statistic = Callable[[Sequence[Floats]], Floats]  # of the totals of each panel, [..., repeats, columns]


@dataclass(frozen=True, kw_only=True)
class Interval(Record):
    """A figure and where it may well lie. `low` and `high` are None where there is too little to say."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """Where it may lie; the value twice where that is not known."""
        return self.value if self.low is None else self.low, self.value if self.high is None else self.high

    @property
    def half_width(self) -> float | None:
        """What is written behind a plus-minus sign."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """A run against a base, over the prompts that both have."""

    difference: Interval
    ratio: Interval
    base: float  # the base's figure over the same prompts
    prompts: int  # of the run that are compared
    is_paired: bool  # with the same prompts on both sides, resampled together


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Sums of something over what each prompt has in each repeat."""

    repeats: tuple[int, ...]
    prompts: tuple[str, ...]
    values: Floats  # [repeats, prompts, columns]

    @classmethod
    def collect(cls, rows: Iterable[tuple[int, str, Sequence[float]]], columns: int) -> "Panel":
        """Sum rows of (repeat, prompt, one value per column)."""
        sums: defaultdict[tuple[int, str], Floats] = defaultdict(lambda: np.zeros(columns))
        for repeat, prompt, values in rows:
            sums[repeat, prompt] += values
        repeats = tuple(sorted({repeat for repeat, _ in sums}))
        prompts = tuple(dict.fromkeys(prompt for _, prompt in sums))
        found = [sums[repeat, prompt] for repeat in repeats for prompt in prompts]
        return cls(repeats=repeats, prompts=prompts, values=np.reshape(found, (len(repeats), len(prompts), columns)))

    def only(self, prompts: Sequence[str], repeats: Sequence[int] | None = None) -> "Panel":
        """These prompts and repeats (None: all), in this order; all must be there."""
        repeats = self.repeats if repeats is None else repeats
        rows_of, columns_of = _places(self.repeats), _places(self.prompts)
        chosen = np.ix_([rows_of[one] for one in repeats], [columns_of[one] for one in prompts])
        return Panel(repeats=tuple(repeats), prompts=tuple(prompts), values=self.values[chosen])

    def common_prompts(self, other: "Panel") -> list[str]:
        known = set(other.prompts)
        return [prompt for prompt in self.prompts if prompt in known]

    def beside(self, other: "Panel") -> "Panel":
        """Both, over the prompts and repeats that both have, the other's columns after these: drawn together."""
        prompts = self.common_prompts(other)
        repeats = [repeat for repeat in self.repeats if repeat in other.repeats]
        values = [panel.only(prompts, repeats).values for panel in (self, other)]
        return Panel(repeats=tuple(repeats), prompts=tuple(prompts), values=np.concatenate(values, axis=2))

    def value(self, statistic: Statistic) -> float | None:
        """The statistic of this panel alone; None where it is not defined."""
        value = float(statistic([self.values.sum(axis=1)])) if self.values.size else np.nan
        return value if np.isfinite(value) else None


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """How intervals are made. The same seed gives the same interval."""

    resamples: int = RESAMPLES
    level: float = LEVEL
    seed: int = 0

    def interval(self, panels: Sequence[Panel], statistic: Statistic, *, is_share: bool = False) -> Interval | None:
        """Return the statistic of all panels and its interval; None where it is not defined.

        Prompts are drawn together where all panels have the same ones, else apart. Repeats of different panels vary
        apart. Where a panel has no second prompt or repeat there is a value and no interval. `is_share`: noise adds to
        the statistic, where it else multiplies it, as it does times.
        """
        if any(panel.values.size == 0 for panel in panels):
            return None
        whole = [panel.values.sum(axis=1) for panel in panels]
        value = float(statistic(whole))
        if not np.isfinite(value):
            return None
        # One prompt that has something gives the same figure in every resample, which is no certainty.
        counted = [(panel.values != 0).any(axis=(0, 2)).sum() for panel in panels]
        if any(max(len(panel.repeats), prompts) < 2 for panel, prompts in zip(panels, counted, strict=True)):
            return Interval(value=value)
        paired = len({panel.prompts for panel in panels}) == 1
        sides = [self._resampled(panel, 0 if paired else number) for number, panel in enumerate(panels)]
        by_repeat = []
        for number, totals in enumerate(whole):
            alone = [[*whole[:number], row[None], *whole[number + 1 :]] for row in totals]
            by_repeat.append(np.array([float(statistic(several)) for several in alone]))
        return self._spread(value, statistic(sides), by_repeat, is_share=is_share)

    def quantiles(
        self, found: Mapping[tuple[int, str], Sequence[float]], levels: Sequence[float]
    ) -> list[Interval] | None:
        """Quantiles of all values together, with intervals as above. `found`: the values of each (repeat, prompt)."""
        several = ((value, *key) for key, values in found.items() for value in values)
        pairs = sorted(several, key=lambda pair: pair[0])
        if not pairs:
            return None
        values = np.array([value for value, *_ in pairs])
        shown = np.quantile(values, levels)
        repeats, prompts = (_places(dict.fromkeys(pair[i] for pair in pairs)) for i in (1, 2))
        if max(len(repeats), len(prompts)) < 2:
            return [Interval(value=float(value)) for value in shown]
        columns = np.array([prompts[prompt] for *_, prompt in pairs])
        rows = np.array([repeats[repeat] for _, repeat, _ in pairs])
        weights = _draws(len(prompts), self.resamples, self.seed)
        drawn = []
        for start in range(0, self.resamples, step := max(1, _BLOCK // len(values))):
            reached = np.cumsum(weights[start : start + step][:, columns], axis=1, dtype=np.int64)
            # Percentiles of the whole are interpolated; in a resample the nearest rank does, with ties everywhere.
            places = [(reached >= level * reached[:, -1:]).argmax(axis=1) for level in levels]
            drawn.append(values[np.stack(places, axis=1)])
        of_resamples = np.concatenate(drawn)  # [resamples, levels]
        of_repeats = np.array([np.quantile(values[rows == row], levels) for row in range(len(repeats))])
        return [
            self._spread(float(value), of_resamples[:, i], [of_repeats[:, i]], is_share=False)
            for i, value in enumerate(shown)
        ]

    def acceptance_length(self, counts: Counts) -> Interval | None:
        """1 + accepted / rounds. `counts`: (accepted, rounds) of each prompt; None where there was no round."""
        return self.pooled(counts, offset=1.0)

    def pooled(self, counts: Counts, *, offset: float = 0.0) -> Interval | None:
        """offset + sum of totals / sum of counts; None where nothing was counted."""
        return self.interval([_panel(counts)], pooled(offset=offset), is_share=True)

    def compare(self, run: Counts, base: Counts, *, offset: float = 0.0) -> Comparison | None:
        """Compare pooled means (with `offset` 1, acceptance lengths); None where either side counted nothing.

        Prompts that both runs have are compared with themselves: which prompts were drawn then moves both sides alike,
        and the interval is the narrower for it. Where no prompt is shared, the sides are resampled apart.
        """
        return self.compare_panels(_panel(run), _panel(base), offset=offset)

    def compare_panels(self, run: Panel, base: Panel, *, offset: float = 0.0) -> Comparison | None:
        """The same of panels of two columns, totals and counts, whose repeats differ apart."""
        panels = [run, base]
        if common := panels[0].common_prompts(panels[1]):
            panels = [panel.only(common) for panel in panels]
        mean = pooled(offset=offset)
        difference = self.interval(panels, lambda sides: mean(sides[:1]) - mean(sides[1:]), is_share=True)
        ratio = self.interval(panels, lambda sides: divide(mean(sides[:1]), mean(sides[1:])))
        before = panels[1].value(mean)
        if difference is None or ratio is None or before is None:
            return None
        prompts, is_paired = len(common or run.prompts), bool(common)
        return Comparison(difference=difference, ratio=ratio, base=before, prompts=prompts, is_paired=is_paired)

    def _resampled(self, panel: Panel, number: int) -> Floats:
        """Totals [resamples, repeats, columns] of drawn prompts. Panels of another `number` are drawn apart."""
        repeats, prompts, columns = panel.values.shape
        drawn = _draws(prompts, self.resamples, self.seed + number)
        flat = panel.values.transpose(1, 0, 2).reshape(prompts, repeats * columns)
        step = max(1, _BLOCK // prompts)
        blocks = [drawn[i : i + step].astype(np.float64) @ flat for i in range(0, self.resamples, step)]
        return np.concatenate(blocks).reshape(-1, repeats, columns)

    def _spread(self, value: float, drawn: Floats, by_repeat: Sequence[Floats], *, is_share: bool) -> Interval:
        """Put what drawing prompts gave and what repeats differ by together."""
        drawn = drawn[np.isfinite(drawn)]
        if len(drawn) < self.resamples / 2:  # most resamples counted nothing: nothing can be said
            return Interval(value=value)
        is_log = not (is_share or value <= 0 or (drawn <= 0).any())
        moved = np.log(drawn) if is_log else drawn
        for number, values in enumerate(by_repeat):
            known = values[np.isfinite(values)]
            if len(known) > 1 and not (is_log and (known <= 0).any()):
                error = (np.log(known) if is_log else known).std(ddof=1) / np.sqrt(len(known))
                moved = moved + error * _students(len(known) - 1, self.resamples, self.seed + number)[: len(moved)]
        ends = np.quantile(moved, [(1 - self.level) / 2, (1 + self.level) / 2])
        low, high = np.exp(ends) if is_log else ends
        return Interval(value=value, low=min(float(low), value), high=max(float(high), value))


def cluster_sums(total: float, count: float) -> dict[str, float]:
    """One cluster's part in what `cluster_interval` needs; parts add up, and can be taken away again."""
    products = {"total_total": total * total, "total_count": total * count, "count_count": count * count}
    return {"clusters": 1, "total": total, "count": count, **products}


def cluster_interval(sums: Mapping[str, float], *, level: float = LEVEL) -> Interval | None:
    """A pooled mean, sum of totals / sum of counts over clusters, from running sums; None where nothing was counted.

    What resampling the clusters would give, to first order, for a stream too long to keep. With fewer than some thirty
    clusters it is too narrow.
    """
    clusters, count = sums["clusters"], sums["count"]
    if count <= 0:
        return None
    mean = sums["total"] / count
    if clusters < 2:
        return Interval(value=mean)
    squares = sums["total_total"] - 2 * mean * sums["total_count"] + mean * mean * sums["count_count"]
    error = math.sqrt(max(squares, 0.0) * clusters / (clusters - 1)) / count
    reach = NormalDist().inv_cdf((1 + level) / 2) * error
    return Interval(value=mean, low=mean - reach, high=mean + reach)


def pooled(*, offset: float = 0.0, top: int = 0, bottom: int = 1) -> Statistic:
    """offset + sum of column `top` / sum of column `bottom`, over all repeats of the first panel."""

    def statistic(sides: Sequence[Floats]) -> Floats:
        sums = sides[0].sum(axis=-2)
        return offset + divide(sums[..., top], sums[..., bottom])

    return statistic


def mean_ratio(totals: Floats, *, offset: float = 0.0) -> Floats:
    """Columns (a, b, c, d): the geometric mean over repeats of (offset + a / b) / (offset + c / d).

    A repeat is compared with itself, so whatever slowed the machine in it slowed both.
    """
    upper, lower = divide(totals[..., 0], totals[..., 1]), divide(totals[..., 2], totals[..., 3])
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = np.exp(np.log(divide(offset + upper, offset + lower)).mean(axis=-1))
    return found


def divide(top: Floats, bottom: Floats) -> Floats:
    """NaN where nothing was counted."""
    quotient: Floats = np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=np.asarray(bottom) > 0)
    return quotient


def _panel(counts: Counts) -> Panel:
    """One repeat of two columns."""
    values = np.array(list(counts.values()), dtype=np.float64).reshape(1, -1, 2)
    return Panel(repeats=(0,), prompts=tuple(counts), values=values)


@lru_cache(maxsize=8)
def _draws(count: int, resamples: int, seed: int) -> NDArray[np.uint16]:
    """[resamples, count]: how often each is drawn when `count` are, with replacement."""
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
    return drawn.astype(np.uint16)


@lru_cache(maxsize=8)
def _students(freedom: int, resamples: int, seed: int) -> Floats:
    """Draws of Student's t: how many standard errors a mean of freedom + 1 values may be off."""
    return np.random.default_rng([seed, freedom]).standard_t(freedom, size=resamples)


def _places(known: Iterable[object]) -> dict[object, int]:
    return {one: i for i, one in enumerate(known)}
