"""Confidence intervals over prompts and over repeats of a measurement (`docs/bench.md`).

Rounds and requests of one prompt are correlated, so the bootstrap resamples whole prompts. There are too few repeats to
resample: their spread gives a standard error, which is scaled by draws of Student's t.

Most figures are pooled means, sum of totals / sum of counts over prompts: acceptance length is accepted drafts / rounds
plus one, an attention share is its sum over rounds / rounds, a speed is tokens / seconds.
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
_BLOCK = 4_000_000  # draws in memory as floats at a time

Floats = NDArray[np.float64]
Counts = Mapping[str, tuple[float, float]]  # prompt -> (total, count): its part in a pooled mean
Statistic = Callable[[Sequence[Floats]], Floats]  # of the totals of each panel, [..., repeats, columns]


@dataclass(frozen=True, kw_only=True)
class Interval(Record):
    """A figure and its confidence interval. `low` and `high` are None if there is too little data."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval, or the value twice if there is none."""
        return self.value if self.low is None else self.low, self.value if self.high is None else self.high

    @property
    def half_width(self) -> float | None:
        """Half the width, for a plus-minus sign."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """A run compared with a base, over the prompts that both have."""

    difference: Interval
    ratio: Interval
    base: float  # the base's figure over the same prompts
    prompts: int  # of the run that are compared
    is_paired: bool  # with the same prompts on both sides, resampled together


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Sums for each prompt in each repeat."""

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
        """Both panels side by side, over common prompts and repeats, so that they are resampled together."""
        prompts = self.common_prompts(other)
        repeats = [repeat for repeat in self.repeats if repeat in other.repeats]
        values = [panel.only(prompts, repeats).values for panel in (self, other)]
        return Panel(repeats=tuple(repeats), prompts=tuple(prompts), values=np.concatenate(values, axis=2))

    def value(self, statistic: Statistic) -> float | None:
        """The statistic of this panel; None if it is not defined."""
        value = float(statistic([self.values.sum(axis=1)])) if self.values.size else np.nan
        return value if np.isfinite(value) else None


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Computes intervals. The same seed gives the same interval."""

    resamples: int = RESAMPLES
    level: float = LEVEL
    seed: int = 0

    def interval(self, panels: Sequence[Panel], statistic: Statistic, *, is_share: bool = False) -> Interval | None:
        """Return the statistic of all panels and its interval; None if it is not defined.

        If all panels have the same prompts, these are resampled together, else separately. Repeats of different panels
        are independent. If a panel has only one prompt and one repeat, there is a value without interval. `is_share`:
        noise is additive; by default it is multiplicative, as in times.
        """
        if any(panel.values.size == 0 for panel in panels):
            return None
        whole = [panel.values.sum(axis=1) for panel in panels]
        value = float(statistic(whole))
        if not np.isfinite(value):
            return None
        # If only one prompt has data, all resamples are equal, which would look like certainty.
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
            # Quantiles of all values are interpolated; in resamples the nearest rank is good enough.
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

        Prompts that both runs have are resampled together, which makes the interval narrower. If no prompt is shared,
        the runs are resampled separately.
        """
        return self.compare_panels(_panel(run), _panel(base), offset=offset)

    def compare_panels(self, run: Panel, base: Panel, *, offset: float = 0.0) -> Comparison | None:
        """The same for panels of two columns, totals and counts, with independent repeats."""
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
        """Totals [resamples, repeats, columns] of resampled prompts; each `number` is resampled independently."""
        repeats, prompts, columns = panel.values.shape
        drawn = _draws(prompts, self.resamples, self.seed + number)
        flat = panel.values.transpose(1, 0, 2).reshape(prompts, repeats * columns)
        step = max(1, _BLOCK // prompts)
        blocks = [drawn[i : i + step].astype(np.float64) @ flat for i in range(0, self.resamples, step)]
        return np.concatenate(blocks).reshape(-1, repeats, columns)

    def _spread(self, value: float, drawn: Floats, by_repeat: Sequence[Floats], *, is_share: bool) -> Interval:
        """Combine the variation of resampled prompts with that of repeats."""
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
    """Return one cluster's part of the sums of `cluster_interval`; parts can be added and subtracted."""
    products = {"total_total": total * total, "total_count": total * count, "count_count": count * count}
    return {"clusters": 1, "total": total, "count": count, **products}


def cluster_interval(sums: Mapping[str, float], *, level: float = LEVEL) -> Interval | None:
    """A pooled mean, sum of totals / sum of counts over clusters, from running sums; None where nothing was counted.

    A first-order approximation of resampling clusters, for streams that are too long to keep. With fewer than about
    thirty clusters the interval is too narrow.
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

    Each repeat is compared with itself, because noise of the machine affects both sides of a repeat.
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
    """Return [resamples, count]: how often each of `count` items is drawn with replacement."""
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
    return drawn.astype(np.uint16)


@lru_cache(maxsize=8)
def _students(freedom: int, resamples: int, seed: int) -> Floats:
    """Return draws of Student's t with so many degrees of freedom."""
    return np.random.default_rng([seed, freedom]).standard_t(freedom, size=resamples)


def _places(known: Iterable[object]) -> dict[object, int]:
    return {one: i for i, one in enumerate(known)}
