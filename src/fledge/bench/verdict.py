"""What results mean, in sentences: each states a figure and its interval, and names the section that shows it.

Nothing is called faster or slower unless the interval of the ratio says so. Where speculation disappoints, the loss is
split: a ratio is the tokens that a round yields over what the round costs, in steps of plain decoding. The first is
measured as acceptance length, so the second follows.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from fledge.bench.figures import speed_ratio
from fledge.bench.summary import Row, Summary, Sweep
from fledge.errors import ConfigError
from fledge.evaluation.results import Load
from fledge.report.page import Card
from fledge.report.prose import Sentence, Tone, number, ratio_tone, sign_of, times_text, with_interval

SPEED, CAPACITY, LATENCY, ACCEPTANCE, WHY, ANSWERS = "speed", "capacity", "latency", "acceptance", "why", "answers"
NOISE = "no difference beyond noise"
FEW_ACCEPTED = 1.5  # an acceptance length below this is little to live on
# What kind of gain a contender has: in a headline, its tone, and in a sentence.
_GAINS: dict[str, tuple[str, Tone, str]] = {
    "all": ("Faster under every load", "good", "it pays under every load"),
    "until": ("Faster up to {}", "good", "it stops paying above {}"),
    "some": ("Faster under some loads", "neutral", "it pays at {} only"),
    "noise": ("No difference that is more than noise", "neutral", NOISE),
    "once": ("Measured once", "neutral", "noise is not known"),
    "none": ("Not faster under any load", "bad", "no gain shows"),
    "unknown": ("No ratio: a side is not whole", "bad", ""),
}
DEARER = 1.25  # times the round's cost at the lowest load: from here on, load is what makes it dear


@dataclass(frozen=True)
class Reference:
    """Ratios that others reported, by concurrency: on other hardware, with other models."""

    name: str
    points: Mapping[int, float]

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Read 'NAME:1=2.03,4=1.71'."""
        name, _, rest = text.rpartition(":")
        try:
            points = {int(part.split("=")[0]): float(part.split("=")[1]) for part in rest.split(",")}
        except (ValueError, IndexError):
            points = {}
        if not name.strip() or not points or any(c < 1 or not 0 < r < 1000 for c, r in points.items()):
            raise ConfigError(f"--reference {text!r}: expected NAME:CONCURRENCY=RATIO,..., as in 'Paper:1=2.03,4=1.71'")
        return cls(name.strip(), dict(sorted(points.items())))


def anchor(section: str, summary: Summary) -> str:
    return f"{section}-{summary.number}"


def colour(summary: Summary, name: str) -> str:
    """The style sheet's name of a contender's colour."""
    place = summary.colour_number(name)
    return "var(--ink)" if place is None else f"var(--series-{place})"


def badge(summary: Summary, name: str) -> str:
    shape = summary.contenders[name].inflated
    return f"inflated: {shape}" if shape else ""


def load_text(*loads: Load) -> str:
    """Write "concurrency 1, 4, 16", or "0.5, 2 requests per second"."""
    sizes = ", ".join(f"{load.size:g}" for load in loads)
    return f"{sizes} requests per second" if any(load.rate is not None for load in loads) else f"concurrency {sizes}"


# On each contender.


def verdicts(summary: Summary) -> list[Card]:
    """One for each contender that a ratio or an acceptance length can be given for, the most telling first."""
    names = dict.fromkeys([*leaders(summary), *_ranked(summary, summary.challengers)])
    return [card for card in (_card(summary, name) for name in names) if card.sentences]


def leaders(summary: Summary) -> list[str]:
    """Of a drafter with many depths the fastest one, and every other contender; the fastest first."""
    return _ranked(summary, [_ranked(summary, sweep.depths)[0] for sweep in summary.sweeps])


def _ranked(summary: Summary, names: Iterable[str]) -> list[str]:
    """By the mean ratio of all loads and workloads alike, the highest first."""

    def mean(name: str) -> float:
        return fmean([row.per_user.value for row in summary.rows_of(name) if row.per_user] or [0])

    return sorted(names, key=mean, reverse=True)


def _card(summary: Summary, name: str) -> Card:
    lengths = summary.lengths_of(name)
    tiles: list[tuple[str, str, Tone]] = []
    sentences: list[Sentence] = []
    for workload in summary.workloads if summary.baseline else ():
        known = [(row.load, row.per_user) for row in summary.rows_of(name, workload) if row.per_user]
        where = f", {workload}" if len(summary.workloads) > 1 else ""
        for load, value in known[:1] + known[1:][-1:]:
            tiles.append((f"{value.value:.2f}x", f"per user, {load}{where}", ratio_tone(value)))
        sentences += _speed(summary, name, workload)
    for workload, value in lengths.items():
        tiles.append((f"{value.value:.2f}", f"acceptance length, {workload}", "neutral"))
    if lengths:
        depth = summary.depth(name)
        best, worst = (pick(lengths, key=lambda one: lengths[one].value) for pick in (max, min))
        text = f"Acceptance length {with_interval(lengths[best], '{:.2f}')} on {best}"
        text += f", drafting {depth} ahead" if depth else ""
        text += f"; it is least on {worst}: {with_interval(lengths[worst], '{:.2f}')}" if worst != best else ""
        sentences.append(Sentence(text=f"{text}.", section=anchor(ACCEPTANCE, summary)))
    kind, at = _gain(summary.rows_of(name))
    headline, tone, _ = _GAINS[kind] if summary.baseline else ("Nothing to compare it with", "neutral", "")
    return Card(
        name=name,
        headline=headline.format(at),
        tone=tone,
        tiles=tuple(tiles),
        sentences=tuple(sentences),
        colour=colour(summary, name),
        badge=badge(summary, name),
    )


def _gain(rows: Sequence[Row]) -> tuple[str, str]:
    """Which of `_GAINS` these rows show, and at which loads. Where a ratio is missing, no end of a gain is told."""
    signs: dict[Load, set[int]] = defaultdict(set)
    for row in rows:
        if row.per_user:
            signs[row.load].add(row.sign)
    gains = [load for load, found in signs.items() if 1 in found]
    if not gains:
        is_known = any(row.per_user and row.per_user.low is not None for row in rows)
        is_loss = any(-1 in found for found in signs.values())
        return "none" if is_loss else "noise" if is_known else "once" if signs else "unknown", ""
    is_clear = all(row.per_user for row in rows) and all(signs[load] == {1} for load in gains)
    if is_clear and gains == list(signs)[: len(gains)]:
        return "all" if len(gains) == len(signs) else "until", load_text(gains[-1])
    return "some", load_text(*gains)


def _speed(summary: Summary, name: str, workload: str) -> Iterator[Sentence]:
    """The ratio at every load, and where it pays; then what all users together get at the highest."""
    rows = summary.rows_of(name, workload)
    known = [(row, row.per_user) for row in rows if row.per_user]
    missing, losses = [row.load for row in rows if not row.per_user], [row.load for row in rows if row.sign < 0]
    where = f" on {workload}" if len(summary.workloads) > 1 else ""
    section = anchor(SPEED, summary)
    if not known:
        reasons = "; ".join(dict.fromkeys(row.reason or "nothing was decoded" for row in rows))
        if rows:
            yield Sentence(text=f"No ratio{where}: {reasons}.", section=section, tone="bad")
        return
    by_load = ", ".join(f"{times_text(ratio)} at {load_text(row.load)}" for row, ratio in known)
    kind, at = _gain(rows)
    text = f"{name} is {by_load} as fast per user as {summary.baseline}{where}: {_GAINS[kind][2].format(at)}"
    text += f" and is slower at {load_text(*losses)}" if losses else ""
    text += f"; there is no ratio at {load_text(*missing)}" if missing else ""
    yield Sentence(text=f"{text}.", section=section, tone=ratio_tone(known[0][1]))
    last = known[-1][0]
    if last.total is not None and len(known) > 1:
        text = (
            f"At {load_text(last.load)}{where} all users together get {times_text(last.total)} the tokens per second."
        )
        yield Sentence(text=text, section=anchor(CAPACITY, summary), tone=ratio_tone(last.total))


# Between contenders.


def overall(summary: Summary) -> list[Sentence]:
    """Which is the fastest where, which drafter is accepted more, and whether all said the same."""
    speeds = [*_best_against_best(summary), *_fastest(summary)] if summary.has_speed else []
    return [*speeds, *_accepted_more(summary), *_same_answers(summary)]


def _best_against_best(summary: Summary) -> Iterator[Sentence]:
    """Every drafter of many depths against the first that drafts for the same target on the same engine."""
    groups: dict[object, list[Sweep]] = defaultdict(list)
    for sweep in summary.deep_sweeps:
        one = summary.contenders[sweep.first]
        groups[one.kind, one.target, one.inflated].append(sweep)
    pairs = [(sweep, first) for first, *others in groups.values() for sweep in others]
    for (sweep, other), workload in product(pairs, summary.workloads):
        texts, loads = [], defaultdict[int, list[Load]](list)
        for load in summary.loads:
            mine, theirs = (summary.shown(one, workload, load) for one in (sweep, other))
            cells = [summary.rows[one, workload, load].cells for one in (mine, theirs) if one]
            if mine and theirs and (value := speed_ratio(*cells)):
                depths = f"K={sweep.depths[mine]} against K={other.depths[theirs]}"
                texts.append(f"{times_text(value)} at {load_text(load)} ({depths})")
                loads[sign_of(value, around=1.0)].append(load)
        signs = {1: "ahead", -1: "behind"}
        ends = [f"{how} beyond noise at {load_text(*loads[sign])}" for sign, how in signs.items() if loads[sign]]
        if texts:
            text = f"{sweep.title} against {other.title} on {workload}, each at its fastest depth, in speed per user: "
            text += f"{', '.join(texts)}: {'; '.join(ends) or NOISE}."
            yield Sentence(text=text, section=anchor(SPEED, summary))


def _fastest(summary: Summary) -> Iterator[Sentence]:
    """Which contender decodes the fastest under each load, and which cannot be told from it."""
    for workload in summary.workloads:
        winners: dict[str, list[Row]] = defaultdict(list)
        for load in summary.loads:
            whole = [row for key, row in summary.rows.items() if key[1:] == (workload, load) and row.speed]
            best = summary.best("", [row.contender for row in whole], workload, load)
            if best and len(whole) > 1:
                near = f" (not to be told from {_names_text(summary, best.alike)})" if best.alike else ""
                winners[f"{best.contender}{near}"].append(summary.rows[best.contender, workload, load])
        parts = []
        for name, rows in winners.items():
            speeds = ", ".join(number(row.speed.value) for row in rows if row.speed)
            parts.append(f"{name} at {load_text(*(row.load for row in rows))} ({speeds} tokens/s)")
        if parts:
            yield Sentence(text=f"Fastest per user on {workload}: {'; '.join(parts)}.", section=anchor(SPEED, summary))


def _names_text(summary: Summary, names: Sequence[str]) -> str:
    """Names in order, with those of one drafter at many depths in one: "EAGLE-3 K=3/4/5, EAGLE-3.1 K=2"."""
    texts: list[str] = []
    for name in names:
        line = summary.line(name)
        depths = [str(depth) for other, depth in line.depths.items() if other in names]
        texts.append(f"{line.title} K={'/'.join(depths)}" if len(depths) > 1 else name)
    return ", ".join(dict.fromkeys(texts))


def _accepted_more(summary: Summary) -> Iterator[Sentence]:
    """Drafters of the same target that draft in the same way, against the first of them, over all workloads."""
    groups: dict[str, list[str]] = defaultdict(list)
    for one in summary.results.contenders:
        if one.drafter is not None and one.speculation is not None:
            way = {key: value for key, value in one.speculation.items() if key not in ("model", "method")}
            groups[repr((one.kind, one.target, one.inflated, one.temperature, sorted(way.items())))].append(one.name)
    pairs: dict[tuple[str, str], list[str]] = defaultdict(list)  # by what is compared, many depths in one
    for first, *others in groups.values():
        for name in others:
            value, line = summary.acceptance_ratio(name, first), summary.line(name)
            if value is not None:
                noise = "" if sign_of(value, around=1.0) else f" ({NOISE})"
                depth = f" at K={line.depths[name]}" if line.is_deep else ""
                pairs[line.title, summary.line(first).title].append(f"{times_text(value)}{depth}{noise}")
    for (title, first_title), texts in pairs.items():
        text = f"The acceptance length of {title} over that of {first_title}, both drafting as far ahead: "
        yield Sentence(text=f"{text}{', '.join(texts)}.", section=anchor(ACCEPTANCE, summary))


def _same_answers(summary: Summary) -> Iterator[Sentence]:
    compared, different = (sum(counts[i] for counts in summary.answers.values()) for i in (0, 1))
    against = f"{summary.baseline} at temperature 0"
    text = f"All contenders gave the same answers as {against} ({compared:,} compared)."
    if different:
        text = f"{different:,} of {compared:,} answers differ from those of {against}."
    if compared:
        yield Sentence(text=text, section=anchor(ANSWERS, summary), tone="bad" if different else "good")


# Where it disappoints, and why.


def disappointments(summary: Summary, references: Sequence[Reference] = ()) -> list[Sentence]:
    """Where a contender does not gain, or gains less than others reported, and what the data say about why."""
    if not summary.has_speed:
        return []
    found = []
    for row in sorted(summary.ratios, key=lambda row: list(summary.contenders).index(row.contender)):
        if row.per_user and row.per_user.low is not None and row.per_user.low <= 1:
            how = "is slower than" if sign_of(row.per_user, around=1.0) < 0 else "is no faster than"
            where = f"{summary.baseline} on {row.workload} at {load_text(row.load)}"
            text = f"{row.contender} {how} {where}: {times_text(row.per_user)}. {_why(summary, row)}"
            found.append(Sentence(text=text, section=anchor(SPEED, summary), tone="bad"))
    for sweep in summary.sweeps:
        for workload in summary.workloads:
            found += _short_of(summary, sweep, workload, references)
    return found


def _why(summary: Summary, row: Row) -> str:
    cost, depth, users = row.round_cost, summary.depth(row.contender), row.load.concurrency
    if cost is None or row.per_user is None:
        return "Acceptance is not reported here, so the loss cannot be split into few accepted drafts and dear rounds."
    length = cost * row.per_user.value
    lowest = next(one for one in summary.rows_of(row.contender, row.workload) if one.per_user)
    text = f"A round yields {length:.2f} tokens and costs {cost:.2f} plain steps"
    if lowest.round_cost is not None and cost > DEARER * lowest.round_cost:
        text += f", {lowest.round_cost:.2f} at {load_text(lowest.load)}"
        if users is not None and depth is not None:
            text += (
                f": verifying {users} x {depth + 1} = {users * (depth + 1)} tokens at once is no longer free beside "
            )
            text += f"the {users} of plain decoding"
    text += "; few drafts stand" if length < FEW_ACCEPTED else ""
    return f"{text}. To break even it would need an acceptance length of {cost:.2f}."


def _short_of(summary: Summary, sweep: Sweep, workload: str, references: Sequence[Reference]) -> Iterator[Sentence]:
    """Of a drafter with many depths the fastest at each load: where that stays below, so do the others."""
    for reference in references:
        short = []
        for load in summary.loads:
            name, reported = summary.shown(sweep, workload, load), reference.points.get(load.concurrency or 0)
            row = summary.rows.get((name or "", workload, load))
            if row and row.per_user and reported and row.per_user.high is not None and row.per_user.high < reported:
                depth = f" (K={sweep.depths[row.contender]})" if sweep.is_deep else ""
                figure = with_interval(row.per_user, "{:.2f}")
                short.append(f"{figure}{depth} against {reported:.2f} at {load_text(load)}")
        if short:
            name = f"{sweep.title} at its fastest depth" if sweep.is_deep else sweep.title
            text = f"{name} on {workload} stays below what is reported for {reference.name}: {', '.join(short)}. "
            text += "That is another model on other hardware, so part of it need not be the engine's doing."
            yield Sentence(text=text, section=anchor(SPEED, summary))
