"""Sentences about results (verdict.jinja, overall.jinja, losses.jinja). Each names the section with its figures.

Nothing is called faster or slower unless the interval of the ratio excludes 1.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from statistics import fmean
from typing import Any

from fledge.bench.figures import ratio, speed_ratio
from fledge.bench.rows import Row
from fledge.bench.summary import Summary, Sweep, load_text
from fledge.errors import ConfigError
from fledge.evaluation.report import NOVEL, acceptance, complete_cells
from fledge.evaluation.results import Load, Rounds
from fledge.evaluation.workloads import grouped
from fledge.report.intervals import Interval
from fledge.report.page import Card, said
from fledge.report.prose import Sentence, Tone, ratio_tone


@dataclass(frozen=True)
class Reference:
    """Ratios by concurrency that others have reported, on other hardware and with other models."""

    name: str
    points: Mapping[int, float]

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Read 'NAME:1=2.03,4=1.71'."""
        name, _, rest = text.rpartition(":")
        try:
            points = {int(at): float(ratio) for at, ratio in (part.split("=") for part in rest.split(","))}
        except ValueError:
            points = {}
        if not name.strip() or not points or any(c < 1 or not 0 < r < 1000 for c, r in points.items()):
            raise ConfigError(f"--reference {text!r}: expected NAME:CONCURRENCY=RATIO,..., as in 'Paper:1=2.03,4=1.71'")
        return cls(name.strip(), dict(sorted(points.items())))


def _said(template: str, summary: Summary, **values: Any) -> list[Sentence]:
    words = {"load_text": load_text, "noise": "no difference beyond noise", "NOVEL": NOVEL}
    return said("fledge.bench", f"{template}.jinja", summary=summary, **words, **values)


def warnings(summary: Summary) -> list[str]:
    """Return warnings about the figures, most important first, then the notes of the results."""
    return list(dict.fromkeys([*(one.text for one in _said("warnings", summary)), *summary.notes]))


def verdicts(summary: Summary) -> list[Card]:
    """Return a card for each contender with a ratio or an acceptance length, the most important first."""
    names = dict.fromkeys([*leaders(summary), *_ranked(summary, summary.challengers)])
    return [card for card in (_card(summary, name) for name in names) if card.sentences]


def leaders(summary: Summary) -> list[str]:
    """Return the contenders, the fastest first; of a drafter with many depths only the fastest depth."""
    return _ranked(summary, [_ranked(summary, sweep.depths)[0] for sweep in summary.sweeps])


def _ranked(summary: Summary, names: Iterable[str]) -> list[str]:
    """Sort by the mean ratio over all loads and workloads, the highest first."""

    def mean(name: str) -> float:
        return fmean([row.per_user.value for row in summary.rows_of(name) if row.per_user] or [0])

    return sorted(names, key=mean, reverse=True)


def _card(summary: Summary, name: str) -> Card:
    lengths = summary.lengths_of(name)
    tiles: list[tuple[str, str, Tone]] = []
    for workload in summary.workloads if summary.baseline else ():
        known = [(row.load, row.per_user) for row in summary.rows_of(name, workload) if row.per_user]
        where = f", {workload}" if len(summary.workloads) > 1 else ""
        for load, value in known[:1] + known[1:][-1:]:
            tiles.append((f"{value.value:.2f}x", f"per user, {load}{where}", ratio_tone(value)))
    for workload, value in lengths.items():
        tiles.append((f"{value.value:.2f}", f"acceptance length, {workload}", "neutral"))
    headline, *sentences = _said("verdict", summary, name=name, lengths=lengths, gain=gain)
    return Card(
        name=name,
        headline=headline.text,
        tone=headline.tone,
        tiles=tuple(tiles),
        sentences=tuple(sentences),
        colour=summary.colour(name),
        badge=summary.badge(name),
    )


def gain(rows: Sequence[Row]) -> tuple[str, str]:
    """Return which kind of gain these rows show, and at which loads."""
    known = grouped((row for row in rows if row.per_user), lambda row: row.load)
    signs = {load: {row.sign for row in several} for load, several in known.items()}
    gains = [load for load, found in signs.items() if 1 in found]
    if not gains:
        is_known = any(row.per_user and row.per_user.low is not None for row in rows)
        is_loss = any(-1 in found for found in signs.values())
        return "none" if is_loss else "noise" if is_known else "once" if signs else "unknown", ""
    is_clear = all(row.per_user for row in rows) and all(signs[load] == {1} for load in gains)
    if is_clear and gains == list(signs)[: len(gains)]:
        return "all" if len(gains) == len(signs) else "until", load_text(gains[-1])
    return "some", load_text(*gains)


def overall(summary: Summary) -> list[Sentence]:
    """Return which contender is the fastest, which drafter is accepted more, and whether all answers agree."""
    against = list(_best_against_best(summary)) if summary.has_speed else []
    fastest = _fastest(summary) if summary.has_speed else {}
    lengths, novel = _accepted_more(summary), _accepted_more(summary, "novel")
    return _said("overall", summary, against=against, fastest=fastest, lengths=lengths, novel=novel)


def _best_against_best(summary: Summary) -> Iterator[tuple[Sweep, Sweep, str, list[tuple[Load, Interval, int, int]]]]:
    """Compare every drafter of many depths with the first one for the same target on the same engine."""
    engine = attrgetter("kind", "target", "inflated")
    groups = grouped(summary.depth_sweeps, lambda sweep: engine(summary.contenders[sweep.first])).values()
    pairs = [(sweep, first) for first, *others in groups for sweep in others]
    for (sweep, other), workload in product(pairs, summary.workloads):
        points = []
        for load in summary.loads:
            mine, theirs = (summary.shown(one, workload, load) for one in (sweep, other))
            if mine and theirs and (value := speed_ratio(mine.decoded, theirs.decoded)):
                points.append((load, value, sweep.depths[mine.contender], other.depths[theirs.contender]))
        if points:
            yield sweep, other, workload, points


def _fastest(summary: Summary) -> dict[str, dict[str, list[Row]]]:
    """Return by workload the fastest contender, with those not slower beyond noise, and under which loads."""
    found: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for workload, load in product(summary.workloads, summary.loads):
        whole = [row for key, row in summary.rows.items() if key[1:] == (workload, load) and row.speed]
        best = summary.best("", [row.contender for row in whole], workload, load)
        if best and len(whole) > 1:
            near = f" (not to be told from {_names_text(summary, best.alike)})" if best.alike else ""
            found[workload][f"{best.contender}{near}"].append(summary.rows[best.contender, workload, load])
    return found


def _names_text(summary: Summary, names: Sequence[str]) -> str:
    """Join names, those of one drafter at many depths as one: "EAGLE-3 K=3/4/5, EAGLE-3.1 K=2"."""
    texts: list[str] = []
    for name in names:
        line = summary.line(name)
        depths = [str(depth) for other, depth in line.depths.items() if other in names]
        texts.append(f"{line.title} K={'/'.join(depths)}" if len(depths) > 1 else name)
    return ", ".join(dict.fromkeys(texts))


def _accepted_more(
    summary: Summary, rounds: Rounds = "all"
) -> dict[tuple[str, str], list[tuple[Interval, int | None]]]:
    """Compare drafters of the same target and mode with the first of them, over all workloads.

    Returns for each pair the ratios of acceptance length, each with its depth if there are many.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for one in summary.results.contenders:
        if one.drafter is not None and one.speculation is not None:
            mode = {key: value for key, value in one.speculation.items() if key not in ("model", "method")}
            groups[repr((one.kind, one.target, one.inflated, one.temperature, sorted(mode.items())))].append(one.name)
    pairs: dict[tuple[str, str], list[tuple[Interval, int | None]]] = defaultdict(list)
    for first, *others in groups.values():
        for name in others:
            panels = [acceptance(complete_cells(summary.results, of), rounds=rounds) for of in (name, first)]
            if (value := ratio(*panels, offset=1.0)) is not None:
                line, base = summary.line(name), summary.line(first)
                pairs[line.title, base.title].append((value, line.depths[name] if line.has_many_depths else None))
    return pairs


def disappointments(summary: Summary, references: Sequence[Reference] = ()) -> list[Sentence]:
    """Return where a contender does not gain, or gains less than others have reported, and possible reasons.

    Of a drafter with many depths, the fastest at each load is compared with the references.
    """
    if not summary.has_speed:
        return []
    rows = [row for name in summary.challengers for row in summary.rows_of(name)]
    losses = [row for row in rows if row.per_user and row.per_user.low is not None and row.per_user.low <= 1]
    short = []
    for sweep, workload, reference in product(summary.sweeps, summary.workloads, references):
        shown = [summary.shown(sweep, workload, load) for load in summary.loads]
        known = [(row, row.per_user, reference.points.get(row.load.concurrency or 0)) for row in shown if row]
        points = [(row, at) for row, own, at in known if at and own and own.high is not None and own.high < at]
        if points:
            short.append((sweep, workload, reference, points))
    return _said("losses", summary, losses=losses, short=short)
