"""Confidence intervals of a benchmark: what other prompts and other repeats might have given.

Two things make a measured speed a chance: which prompts were asked (an easy answer is fast in every repeat), and when
(the machine was busy for all prompts of a repeat). Requests are no independent draws of either. Prompts are many, so
they are drawn anew, with replacement, and each brings its turns and its requests of all repeats. Repeats are few, and
drawing from three says little about a fourth; so the spread between them gives a standard error, and Student's t with
its heavy tails says how far off that may be. Both together make the interval. Where there is one repeat only, its
noise is unknown and the interval tells of prompts alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from fledge.evaluation.results import conversation_of
from fledge.report.intervals import Bootstrap, Floats, Interval

BOOTSTRAP = Bootstrap()
Side: TypeAlias = tuple[Floats, Floats]  # totals [..., repeats, columns] and the repeats' weights [..., repeats]
Statistic = Callable[[Sequence[Side]], Floats]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Sums of something over the requests of each prompt in each repeat."""

    repeats: tuple[int, ...]
    prompts: tuple[str, ...]
    values: Floats  # [repeats, prompts, columns]

    @classmethod
    def collect(cls, rows: Iterable[tuple[int, str, Sequence[float]]], columns: int) -> "Panel":
        """Sum rows of (repeat, prompt, one value per column)."""
        sums: dict[tuple[int, str], Floats] = {}
        for repeat, prompt, values in rows:
            added = np.asarray(values, dtype=np.float64)
            sums[repeat, prompt] = sums[repeat, prompt] + added if (repeat, prompt) in sums else added
        repeats = tuple(sorted({repeat for repeat, _ in sums}))
        prompts = tuple(dict.fromkeys(prompt for _, prompt in sums))
        found = np.zeros((len(repeats), len(prompts), columns))
        places = {prompt: i for i, prompt in enumerate(prompts)}
        for (repeat, prompt), total in sums.items():
            found[repeats.index(repeat), places[prompt]] = total
        return cls(repeats=repeats, prompts=prompts, values=found)

    def only(self, *, prompts: Sequence[str] | None = None, repeats: Sequence[int] | None = None) -> "Panel":
        """These prompts and repeats, in this order; all must be there."""
        prompts = self.prompts if prompts is None else tuple(prompts)
        repeats = self.repeats if repeats is None else tuple(repeats)
        columns, rows = _places(self.prompts, prompts), _places(self.repeats, repeats)
        return Panel(repeats=repeats, prompts=prompts, values=self.values[np.ix_(rows, columns)])


def common_prompts(one: Panel, other: Panel) -> list[str]:
    known = set(other.prompts)
    return [prompt for prompt in one.prompts if prompt in known]


def together(one: Panel, other: Panel) -> Panel:
    """Two panels of one run side by side, over the prompts and repeats that both have: these are drawn together."""
    prompts = common_prompts(one, other)
    repeats = [repeat for repeat in one.repeats if repeat in other.repeats]
    sides = [panel.only(prompts=prompts, repeats=repeats) for panel in (one, other)]
    values = np.concatenate([side.values for side in sides], axis=2)
    return Panel(repeats=tuple(repeats), prompts=tuple(prompts), values=values)


def interval(
    panels: Sequence[Panel], statistic: Statistic, bootstrap: Bootstrap = BOOTSTRAP, *, is_share: bool = False
) -> Interval | None:
    """Return the statistic of all panels and its interval; None where it is not defined.

    Prompts are drawn together where all panels have the same ones, else apart. Repeats of different panels vary apart.
    Without a second prompt or repeat there is a value and no interval. `is_share`: noise adds to the statistic, where
    it else multiplies it, as it does times.
    """
    if any(panel.values.size == 0 for panel in panels):
        return None
    whole = [(panel.values.sum(axis=1), np.ones(len(panel.repeats))) for panel in panels]
    value = float(statistic(whole))
    if not np.isfinite(value):
        return None
    if all(max(len(panel.repeats), len(_conversations(panel.prompts))) < 2 for panel in panels):
        return Interval(value=value)
    paired = len({panel.prompts for panel in panels}) == 1
    sides = []
    for number, panel in enumerate(panels):
        repeats, prompts, columns = panel.values.shape
        drawn = _drawn_prompts(panel.prompts, bootstrap.resamples, bootstrap.seed + (0 if paired else number))
        flat = panel.values.transpose(1, 0, 2).reshape(prompts, repeats * columns)
        sides.append(((drawn @ flat).reshape(-1, repeats, columns), np.ones((bootstrap.resamples, repeats))))
    by_repeat = [_by_repeat(statistic, whole, number) for number in range(len(panels))]
    return _spread(value, statistic(sides), by_repeat, bootstrap, is_share=is_share)


def value_of(panel: Panel, statistic: Statistic) -> float | None:
    """The statistic of one panel alone; None where it is not defined."""
    value = float(statistic([(panel.values.sum(axis=1), np.ones(len(panel.repeats)))])) if panel.values.size else np.nan
    return value if np.isfinite(value) else None


def _by_repeat(statistic: Statistic, whole: Sequence[Side], number: int) -> Floats:
    """The statistic with each repeat of one panel alone."""
    totals, weights = whole[number]
    alone = [[*whole[:number], (totals, row), *whole[number + 1 :]] for row in np.eye(len(weights))]
    return np.array([float(statistic(sides)) for sides in alone])


def _spread(
    value: float, drawn: Floats, by_repeat: Sequence[Floats], bootstrap: Bootstrap, *, is_share: bool
) -> Interval:
    """Put what drawing prompts gave and what repeats differ by together."""
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) < bootstrap.resamples / 2:  # most resamples counted nothing: nothing can be said
        return Interval(value=value)
    forth, back = (_same, _same) if is_share or value <= 0 or (drawn <= 0).any() else (np.log, np.exp)
    moved = forth(drawn)
    for number, values in enumerate(by_repeat):
        known = values[np.isfinite(values)]
        if len(known) > 1 and not (forth is np.log and (known <= 0).any()):
            error = forth(known).std(ddof=1) / np.sqrt(len(known))
            moved = (
                moved + error * _students(len(known) - 1, bootstrap.resamples, bootstrap.seed + number)[: len(moved)]
            )
    low, high = back(np.quantile(moved, [(1 - bootstrap.level) / 2, (1 + bootstrap.level) / 2]))
    return Interval(value=value, low=min(float(low), value), high=max(float(high), value))


def pooled(*, offset: float = 0.0, scale: float = 1.0, top: int = 0, bottom: int = 1) -> Statistic:
    """offset + scale * sum of column `top` / sum of column `bottom`, over all repeats of the first panel."""

    def statistic(sides: Sequence[Side]) -> Floats:
        totals, weights = sides[0]
        sums = np.einsum("...r,...rk->...k", weights, totals)
        return offset + scale * divide(sums[..., top], sums[..., bottom])

    return statistic


def mean_ratio(side: Side, *, offset: float = 0.0) -> Floats:
    """Columns (a, b, c, d): the geometric mean over repeats of (offset + a / b) / (offset + c / d).

    A repeat is compared with itself, so whatever slowed the machine in it slowed both.
    """
    totals, weights = side
    upper, lower = divide(totals[..., 0], totals[..., 1]), divide(totals[..., 2], totals[..., 3])
    ratios = divide(offset + upper, offset + lower)
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithms = np.log(ratios)
    logarithms = np.where(weights > 0, logarithms, 0.0)  # what was not drawn must not matter
    found: Floats = np.exp((weights * logarithms).sum(axis=-1) / weights.sum(axis=-1))
    return found


def quantiles(
    found: Mapping[tuple[int, str], Sequence[float]], levels: Sequence[float], bootstrap: Bootstrap = BOOTSTRAP
) -> list[Interval] | None:
    """Quantiles of all values together, with intervals as above. `found`: the values of each (repeat, prompt)."""
    pairs = [(key, value) for key, values in found.items() for value in values]
    if not pairs:
        return None
    values = np.array([value for _, value in pairs])
    order = np.argsort(values, kind="stable")
    values = values[order]
    shown = np.quantile(values, levels)
    repeats = list(dict.fromkeys(repeat for (repeat, _), _ in pairs))
    prompts = list(dict.fromkeys(prompt for (_, prompt), _ in pairs))
    if max(len(repeats), len(_conversations(prompts))) < 2:
        return [Interval(value=float(value)) for value in shown]
    rows = np.array(_places(repeats, [key[0] for key, _ in pairs]))[order]
    columns = np.array(_places(prompts, [key[1] for key, _ in pairs]))[order]
    weights = _drawn_prompts(prompts, bootstrap.resamples, bootstrap.seed)
    step = max(1, 4_000_000 // len(values))
    drawn = []
    for start in range(0, bootstrap.resamples, step):
        reached = np.cumsum(weights[start : start + step][:, columns], axis=1)
        # Percentiles of the whole are interpolated; in a resample the nearest rank does, with ties everywhere.
        places = [(reached >= level * reached[:, -1:]).argmax(axis=1) for level in levels]
        drawn.append(values[np.stack(places, axis=1)])
    of_resamples = np.concatenate(drawn)  # [resamples, levels]
    of_repeats = np.array([np.quantile(values[rows == row], levels) for row in range(len(repeats))])
    return [
        _spread(float(value), of_resamples[:, i], [of_repeats[:, i]], bootstrap, is_share=False)
        for i, value in enumerate(shown)
    ]


def divide(top: Floats, bottom: Floats) -> Floats:
    """NaN where nothing was counted."""
    quotient: Floats = np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=np.asarray(bottom) > 0)
    return quotient


def _drawn_prompts(prompts: Sequence[str], resamples: int, seed: int) -> Floats:
    """[resamples, prompts]: how often each is drawn. The turns of a conversation are drawn together, or not at all."""
    conversations = _conversations(prompts)
    drawn: Floats = _draws(len(conversations), resamples, seed)[
        :, _places(conversations, [conversation_of(prompt) for prompt in prompts])
    ]
    return drawn


def _conversations(prompts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(map(conversation_of, prompts)))


@lru_cache(maxsize=8)
def _draws(count: int, resamples: int, seed: int) -> Floats:
    """[resamples, count]: how often each is drawn when `count` are, with replacement."""
    drawn = np.random.default_rng(seed).integers(count, size=(resamples, count))
    places = drawn + count * np.arange(resamples)[:, None]
    return np.bincount(places.ravel(), minlength=resamples * count).reshape(resamples, count).astype(np.float64)


@lru_cache(maxsize=8)
def _students(freedom: int, resamples: int, seed: int) -> Floats:
    """Draws of Student's t: how many standard errors a mean of freedom + 1 values may be off."""
    return np.random.default_rng([seed, freedom]).standard_t(freedom, size=resamples)


def _same(values: Floats) -> Floats:
    return values


def _places(known: Sequence[object], wanted: Sequence[object]) -> list[int]:
    places = {one: i for i, one in enumerate(known)}
    return [places[one] for one in wanted]
