"""What results mean, in sentences: each states a figure and its interval, and names the section that shows it.

Nothing is called faster or slower unless the interval of the ratio says so. Where speculation disappoints, the loss is
split: a ratio is the tokens that a round yields over what the round costs, in steps of plain decoding. The first is
measured as acceptance length, so the second follows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from fledge.bench.figures import speed_ratio
from fledge.bench.summary import Summary, Sweep
from fledge.errors import ConfigError
from fledge.evaluation.results import Load
from fledge.report.intervals import Interval
from fledge.report.page import Card
from fledge.report.prose import Sentence, Tone, number, ratio_tone, sign_of, times_text, with_interval

SPEED, CAPACITY, LATENCY, ACCEPTANCE, WHY, ANSWERS = "speed", "capacity", "latency", "acceptance", "why", "answers"
NOISE = "no difference beyond noise"
FEW_ACCEPTED = 1.5  # an acceptance length below this is little to live on
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
    shape = summary.contender(name).inflated
    return f"inflated: {shape}" if shape else ""


def loads_text(loads: Sequence[Load]) -> str:
    """Write "concurrency 1, 4, 16", or "0.5, 2 requests per second"."""
    if all(load.rate is None for load in loads):
        return f"concurrency {', '.join(str(load.concurrency) for load in loads)}"
    return ", ".join(f"{load.size:g}" for load in loads) + " requests per second"


def load_text(load: Load) -> str:
    return loads_text([load])


# On each contender.


def verdicts(summary: Summary) -> list[Card]:
    """One for each contender that a ratio or an acceptance length can be given for, the most telling first."""
    leading = leaders(summary)
    rest = sorted((n for n in summary.challengers if n not in leading), key=lambda n: -_mean_ratio(summary, n))
    return [card for card in (_card(summary, name) for name in leading + rest) if card.sentences]


def leaders(summary: Summary) -> list[str]:
    """Of a drafter with many depths the fastest one, and every other contender; the fastest first."""
    found: list[str] = []
    for sweep in summary.sweeps:
        several = sorted(sweep.names, key=lambda name: -_mean_ratio(summary, name))
        found += several[:1] if sweep.is_deep else several
    return sorted(found, key=lambda name: -_mean_ratio(summary, name))


def _mean_ratio(summary: Summary, name: str) -> float:
    """Of all loads and workloads alike; only to put contenders in an order."""
    values = [value.value for workload in summary.workloads for _, value in summary.ratios_of(name, workload)]
    return sum(values) / len(values) if values else 0.0


def _card(summary: Summary, name: str) -> Card:
    lengths = summary.lengths_of(name)
    tiles: list[tuple[str, str, Tone]] = []
    sentences: list[Sentence] = []
    for workload in summary.workloads if summary.baseline else ():
        several = summary.ratios_of(name, workload)
        where = f", {workload}" if len(summary.workloads) > 1 else ""
        for load, value in several[:1] + several[1:][-1:]:
            tiles.append((f"{value.value:.2f}x", f"per user, {load}{where}", ratio_tone(value)))
        sentences += _speed(summary, name, workload)
    tiles += [
        (f"{value.value:.2f}", f"acceptance length, {workload}", "neutral") for workload, value in lengths.items()
    ]
    if lengths:
        depth = summary.depth(name)
        ahead = f", drafting {depth} ahead" if depth else ""
        best, worst = (pick(lengths, key=lambda one: lengths[one].value) for pick in (max, min))
        text = f"Acceptance length {with_interval(lengths[best], '{:.2f}')} on {best}{ahead}"
        if worst != best:
            text += f"; it is least on {worst}: {with_interval(lengths[worst], '{:.2f}')}"
        sentences.append(Sentence(text=f"{text}.", section=anchor(ACCEPTANCE, summary)))
    headline, tone = _headline(summary, name)
    return Card(
        name=name,
        headline=headline,
        tone=tone,
        tiles=tuple(tiles),
        sentences=tuple(sentences),
        colour=colour(summary, name),
        badge=badge(summary, name),
    )


def _headline(summary: Summary, name: str) -> tuple[str, Tone]:
    if not summary.baseline:
        return "Nothing to compare it with", "neutral"
    found = [summary.ratios_of(name, workload) for workload in summary.workloads]
    signs = [sign_of(value, around=1.0) for several in found for _, value in several]
    if not signs:
        return "No ratio: a side is not whole", "bad"
    missing = any(row.contender == name and row.per_user is None for row in summary.ratios)
    if min(signs) > 0:
        return ("Faster wherever it can be compared" if missing else "Faster under every load"), "good"
    if max(signs) <= 0:
        slower = min(signs) < 0
        return ("Not faster under any load", "bad") if slower else ("No difference that is more than noise", "neutral")
    ends = {_paying_to(several) for several in found}
    end = ends.pop() if len(ends) == 1 and not missing else None
    return (f"Faster up to {load_text(end)}", "good") if end else ("Faster under some loads", "neutral")


def _paying_to(several: Sequence[tuple[Load, Interval]]) -> Load | None:
    """The last load of an unbroken run of gains that begins at the lowest and after which there is no gain."""
    paying = list(takewhile(lambda one: sign_of(one[1], around=1.0) > 0, several))
    rest = several[len(paying) :]
    return paying[-1][0] if paying and all(sign_of(value, around=1.0) <= 0 for _, value in rest) else None


def _speed(summary: Summary, name: str, workload: str) -> Iterator[Sentence]:
    """The ratio at every load, and where it pays; then what all users together get at the highest."""
    rows = [row for row in summary.ratios if (row.contender, row.workload) == (name, workload)]
    several, missing = summary.ratios_of(name, workload), [row.load for row in rows if row.per_user is None]
    where = f" on {workload}" if len(summary.workloads) > 1 else ""
    section = anchor(SPEED, summary)
    if not several:
        if rows:
            reasons = "; ".join(dict.fromkeys(row.reason for row in rows if row.reason)) or "nothing was decoded"
            yield Sentence(text=f"No ratio{where}: {reasons}.", section=section, tone="bad")
        return
    by_load = ", ".join(f"{times_text(value)} at {load_text(load)}" for load, value in several)
    text = f"{name} is {by_load} as fast per user as {summary.baseline}{where}: {_paying(several, bool(missing))}"
    text += f"; there is no ratio at {loads_text(missing)}" if missing else ""
    yield Sentence(text=f"{text}.", section=section, tone=ratio_tone(several[0][1]))
    last = summary.ratio(name, workload, several[-1][0])
    if last is not None and last.total is not None and len(several) > 1:
        text = (
            f"At {load_text(last.load)}{where} all users together get {times_text(last.total)} the tokens per second."
        )
        yield Sentence(text=text, section=anchor(CAPACITY, summary), tone=ratio_tone(last.total))


def _paying(several: Sequence[tuple[Load, Interval]], is_missing: bool) -> str:
    """Where it pays. Where loads are missing, nothing is said about where a gain ends."""
    signs = [sign_of(value, around=1.0) for _, value in several]
    gains = [load for (load, _), sign in zip(several, signs, strict=True) if sign > 0]
    losses = [load for (load, _), sign in zip(several, signs, strict=True) if sign < 0]
    if all(value.low is None for _, value in several):
        return "noise is not known"
    if not gains and not losses:
        return NOISE
    end = None if is_missing else _paying_to(several)
    if len(gains) == len(several):
        text = "it pays wherever it was compared" if is_missing else "it pays under every load"
    elif end is not None:
        text = f"it stops paying above {load_text(end)}"
    else:
        text = f"it pays at {loads_text(gains)} only" if gains else "no gain shows"
    return text + (f" and is slower at {loads_text(losses)}" if losses else "")


# Between contenders.


def overall(summary: Summary) -> list[Sentence]:
    """Which is the fastest where, which drafter is accepted more, and whether all said the same."""
    speeds = [*_best_against_best(summary), *_fastest(summary)] if summary.has_speed else []
    return [*speeds, *_accepted_more(summary), *_same_answers(summary)]


def _best_against_best(summary: Summary) -> Iterator[Sentence]:
    """Every drafter of many depths against the first that drafts for the same target on the same engine."""
    groups: dict[tuple[str, str, str | None], list[Sweep]] = {}
    for sweep in summary.deep_sweeps:
        one = summary.contender(sweep.names[0])
        groups.setdefault((one.kind, one.target, one.inflated), []).append(sweep)
    for first, *others in groups.values():
        for sweep in others:
            for workload in summary.workloads:
                yield from _against(summary, sweep, first, workload)


def _against(summary: Summary, sweep: Sweep, other: Sweep, workload: str) -> Iterator[Sentence]:
    texts, ahead, behind = [], list[Load](), list[Load]()
    for load in summary.loads:
        mine, theirs = (summary.best_depths.get((one, workload, load)) for one in (sweep, other))
        value = mine and theirs and speed_ratio(summary.cells[mine.key], summary.cells[theirs.key])
        if not mine or not theirs or not value:
            continue
        depths = f"K={sweep.depth_of(mine.contender)} against K={other.depth_of(theirs.contender)}"
        texts.append(f"{times_text(value)} at {load_text(load)} ({depths})")
        {1: ahead, -1: behind, 0: []}[sign_of(value, around=1.0)].append(load)
    ends = [
        f"{how} beyond noise at {loads_text(loads)}" for how, loads in (("ahead", ahead), ("behind", behind)) if loads
    ]
    if texts:
        text = f"{sweep.title} against {other.title} on {workload}, each at its fastest depth, in speed per user: "
        text += f"{', '.join(texts)}: {'; '.join(ends) or NOISE}."
        yield Sentence(text=text, section=anchor(SPEED, summary))


def _fastest(summary: Summary) -> Iterator[Sentence]:
    """Which contender decodes the fastest under each load, and which cannot be told from it."""
    for workload in summary.workloads:
        by_winner: dict[str, list[tuple[Load, float]]] = {}
        for load in summary.loads:
            rows = [row for row in summary.rows if (row.workload, row.load) == (workload, load)]
            speeds = {
                row.contender: row.figures.per_user_tokens_per_second.value
                for row in rows
                if not row.figures.partial and row.figures.per_user_tokens_per_second is not None
            }
            if len(speeds) < 2:
                continue
            best = max(speeds, key=lambda name: speeds[name])
            near = [n for n in speeds if n != best and not summary.is_slower(n, best, workload, load)]
            text = best + (f" (not to be told from {_names_text(summary, near)})" if near else "")
            by_winner.setdefault(text, []).append((load, speeds[best]))
        parts = []
        for name, where in by_winner.items():
            speed = ", ".join(number(value) for _, value in where)
            parts.append(f"{name} at {loads_text([load for load, _ in where])} ({speed} tokens/s)")
        if parts:
            yield Sentence(text=f"Fastest per user on {workload}: {'; '.join(parts)}.", section=anchor(SPEED, summary))


def _names_text(summary: Summary, names: Sequence[str]) -> str:
    """Names in order, with those of one drafter at many depths in one: "EAGLE-3 K=3/4/5, EAGLE-3.1 K=2"."""
    texts: list[str] = []
    for name in names:
        sweep = None if name == summary.baseline else summary.sweep(name)
        depths = [str(depth) for depth, other in sweep.chains if other in names] if sweep and sweep.is_deep else []
        texts.append(f"{sweep.title} K={'/'.join(depths)}" if sweep and len(depths) > 1 else name)
    return ", ".join(dict.fromkeys(texts))


def _accepted_more(summary: Summary) -> Iterator[Sentence]:
    """Drafters of the same target that draft in the same way, against the first of them, over all workloads."""
    groups: dict[str, list[str]] = {}
    for one in summary.results.contenders:
        if one.drafter is not None and one.speculation is not None:
            way = {key: value for key, value in one.speculation.items() if key not in ("model", "method")}
            same = (one.kind, one.target, one.inflated, one.temperature, sorted(way.items()))
            groups.setdefault(repr(same), []).append(one.name)
    pairs: dict[tuple[str, str], list[str]] = {}  # by what is compared, many depths in one
    for first, *others in groups.values():
        for name in others:
            value = summary.acceptance_ratio(name, first)
            if value is not None:
                noise = "" if sign_of(value, around=1.0) else f" ({NOISE})"
                depth = f" at K={summary.depth(name)}" if _stem(summary, name) != name else ""
                pairs.setdefault((_stem(summary, name), _stem(summary, first)), []).append(
                    f"{times_text(value)}{depth}{noise}"
                )
    for (stem, first_stem), texts in pairs.items():
        text = f"The acceptance length of {stem} over that of {first_stem}, both drafting as far ahead: "
        yield Sentence(text=f"{text}{', '.join(texts)}.", section=anchor(ACCEPTANCE, summary))


def _stem(summary: Summary, name: str) -> str:
    """What contenders have in common that are one drafter at many depths."""
    if name == summary.baseline:
        return name
    sweep = summary.sweep(name)
    return sweep.title if sweep.is_deep else name


def _same_answers(summary: Summary) -> Iterator[Sentence]:
    compared, different = (sum(counts[i] for counts in summary.answers.values()) for i in (0, 1))
    against = f"{summary.baseline} at temperature 0"
    section = anchor(ANSWERS, summary)
    if different:
        text = f"{different:,} of {compared:,} answers differ from those of {against}."
        yield Sentence(text=text, section=section, tone="bad")
    elif compared:
        text = f"All contenders gave the same answers as {against} ({compared:,} compared)."
        yield Sentence(text=text, section=section, tone="good")


# Where it disappoints, and why.


def disappointments(summary: Summary, references: Sequence[Reference] = ()) -> list[Sentence]:
    """Where a contender does not gain, or gains less than others reported, and what the data say about why."""
    if not summary.has_speed or not summary.baseline:
        return []
    found: list[Sentence] = []
    for name in summary.challengers:
        for workload in summary.workloads:
            found += _losses(summary, name, workload)
    for sweep in summary.sweeps:
        for workload in summary.workloads:
            found += _short_of(summary, sweep, workload, references)
    return found


def _losses(summary: Summary, name: str, workload: str) -> Iterator[Sentence]:
    for load, value in summary.ratios_of(name, workload):
        sign = sign_of(value, around=1.0)
        if sign <= 0 and value.low is not None:
            how = "is slower than" if sign < 0 else "is no faster than"
            text = f"{name} {how} {summary.baseline} on {workload} at {load_text(load)}: {times_text(value)}. "
            text += _why(summary, name, workload, load)
            yield Sentence(text=text, section=anchor(SPEED, summary), tone="bad")


def round_cost(summary: Summary, name: str, workload: str, load: Load) -> float | None:
    """Plain steps that a round costs: acceptance length over the ratio, since ratio = tokens per round / cost."""
    row, found = summary.row(name, workload, load), summary.ratio(name, workload, load)
    if row is None or found is None or found.per_user is None or row.figures.acceptance_length is None:
        return None
    return row.figures.acceptance_length.value / found.per_user.value


def _why(summary: Summary, name: str, workload: str, load: Load) -> str:
    cost, value = round_cost(summary, name, workload, load), dict(summary.ratios_of(name, workload))[load].value
    if cost is None:
        return "Acceptance is not reported here, so the loss cannot be split into few accepted drafts and dear rounds."
    length, depth = cost * value, summary.depth(name)
    lowest = summary.ratios_of(name, workload)[0][0]
    cost_low = round_cost(summary, name, workload, lowest)
    text = f"A round yields {length:.2f} tokens and costs {cost:.2f} plain steps"
    if cost_low is not None and lowest != load and cost > DEARER * cost_low:
        text += f", {cost_low:.2f} at {load_text(lowest)}"
        if load.concurrency is not None and depth is not None:
            users = load.concurrency
            text += (
                f": verifying {users} x {depth + 1} = {users * (depth + 1)} tokens at once is no longer free beside "
            )
            text += f"the {users} of plain decoding"
    if length < FEW_ACCEPTED:
        text += "; few drafts stand"
    return f"{text}. To break even it would need an acceptance length of {cost:.2f}."


def _short_of(summary: Summary, sweep: Sweep, workload: str, references: Sequence[Reference]) -> Iterator[Sentence]:
    """Of a drafter with many depths the fastest at each load: where that stays below, so do the others."""
    lines: dict[str, list[tuple[Load, Interval | None, str]]]
    if sweep.is_deep:
        bests = [summary.best_depths.get((sweep, workload, load)) for load in summary.loads]
        points = [(b.load, b.over_baseline, f" (K={sweep.depth_of(b.contender)})") for b in bests if b is not None]
        lines = {f"{sweep.title} at its fastest depth": points}
    else:
        lines = {name: [(load, value, "") for load, value in summary.ratios_of(name, workload)] for name in sweep.names}
    for reference in references:
        for name, line in lines.items():
            short = []
            for load, value, depth in line:
                reported = reference.points.get(load.concurrency or 0)
                if reported is not None and value is not None and value.high is not None and value.high < reported:
                    figure = f"{with_interval(value, '{:.2f}')}{depth}"
                    short.append(f"{figure} against {reported:.2f} at {load_text(load)}")
            if short:
                text = f"{name} on {workload} stays below what is reported for {reference.name}: {', '.join(short)}. "
                text += "That is another model on other hardware, so part of it need not be the engine's doing."
                yield Sentence(text=text, section=anchor(SPEED, summary))
