"""What results mean, in sentences: each states a figure and its interval, and names the section that shows it.

Nothing is called faster or slower unless the interval of the ratio says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from fledge.bench.part import Part
from fledge.bench.side_by_side import accepted_more, best_against_best, fastest, same_answers
from fledge.bench.tables import with_interval
from fledge.bench.words import ACCEPTANCE, CAPACITY, SPEED, anchor, load_text, loads_text, times_text
from fledge.evaluation.results import Load
from fledge.report.intervals import Interval
from fledge.report.prose import Sentence, Tone, ratio_tone, sign_of


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """On one contender."""

    contender: str
    headline: str
    tone: Tone
    tiles: tuple[tuple[str, str, Tone], ...]  # value, text, tone
    sentences: tuple[Sentence, ...]


def verdicts(part: Part) -> list[Verdict]:
    """One for each contender that a ratio or an acceptance length can be given for, the most telling first."""
    leading = leaders(part)
    rest = [name for name in part.challengers if name not in leading]
    names = leading + sorted(rest, key=lambda name: -_mean_ratio(part, name))
    return [one for one in (_verdict(part, name) for name in names) if one.sentences]


def leaders(part: Part) -> list[str]:
    """Of a drafter with many depths the fastest one, and every other contender; the fastest first."""
    found = []
    for family in part.families:
        several = sorted(family.names, key=lambda name: -_mean_ratio(part, name))
        found += several[:1] if family.has_many_depths else several
    return sorted(found, key=lambda name: -_mean_ratio(part, name))


def _mean_ratio(part: Part, name: str) -> float:
    """Of all loads and workloads alike; only to put contenders in an order."""
    values = [value.value for workload in part.workloads for _, value in part.ratios_of(name, workload)]
    return sum(values) / len(values) if values else 0.0


def overall(part: Part) -> list[Sentence]:
    """What holds between contenders: which is the fastest where, and which drafter is accepted more."""
    speeds = [*best_against_best(part), *fastest(part)] if part.has_speed else []
    return [*speeds, *accepted_more(part), *same_answers(part)]


def _verdict(part: Part, name: str) -> Verdict:
    sentences, tiles = [], []
    if part.baseline:
        for workload in part.workloads:
            sentences += _speed(part, name, workload)
        tiles += _speed_tiles(part, name)
    sentences += _acceptance(part, name)
    headline, tone = _headline(part, name)
    for workload in part.workloads:
        for row in part.rows:
            if row.contender == name and row.workload == workload and row.figures.acceptance_length is not None:
                tiles.append(
                    (f"{row.figures.acceptance_length.value:.2f}", f"acceptance length, {workload}", "neutral")
                )
                break
    return Verdict(contender=name, headline=headline, tone=tone, tiles=tuple(tiles), sentences=tuple(sentences))


def _headline(part: Part, name: str) -> tuple[str, Tone]:
    if not part.baseline:
        return "Nothing to compare it with", "neutral"
    found = {workload: part.ratios_of(name, workload) for workload in part.workloads}
    signs = [sign_of(value, around=1.0) for several in found.values() for _, value in several]
    if not signs:
        return "No ratio: a side is not whole", "bad"
    missing = any(row.contender == name and row.per_user is None for row in part.ratios)
    if min(signs) > 0:
        return ("Faster wherever it can be compared" if missing else "Faster under every load"), "good"
    if max(signs) <= 0:
        slower = min(signs) < 0
        return ("Not faster under any load", "bad") if slower else ("No difference that is more than noise", "neutral")
    ends = {_paying_to(several) for several in found.values()}
    end = ends.pop() if len(ends) == 1 and not missing else None
    return (f"Faster up to {load_text(end)}", "good") if end else ("Faster under some loads", "neutral")


def _paying_to(several: Sequence[tuple[Load, Interval]]) -> Load | None:
    """The last load of an unbroken run of gains that begins at the lowest and after which there is no gain."""
    paying = list(takewhile(lambda one: sign_of(one[1], around=1.0) > 0, several))
    rest = several[len(paying) :]
    return paying[-1][0] if paying and all(sign_of(value, around=1.0) <= 0 for _, value in rest) else None


def _speed(part: Part, name: str, workload: str) -> list[Sentence]:
    several = part.ratios_of(name, workload)
    section = anchor(SPEED, part)
    where = f" on {workload}" if len(part.workloads) > 1 else ""
    if not several:
        reasons = dict.fromkeys(r.reason for r in part.ratios if (r.contender, r.workload) == (name, workload))
        text = f"No ratio{where}: {'; '.join(reason for reason in reasons if reason) or 'nothing was decoded'}."
        return [Sentence(text=text, section=section, tone="bad")] if reasons else []
    (load, first), rest = several[0], several[1:]
    sign = sign_of(first, around=1.0)
    text = f"{name} is {times_text(first)} as fast per user as {part.baseline} at {load_text(load)}{where}"
    if first.low is not None and sign == 0:
        text += ", which is no difference beyond noise"
    missing = [r.load for r in part.ratios if (r.contender, r.workload) == (name, workload) and r.per_user is None]
    if rest:
        text += _continued(several, is_whole=not missing)
    if missing:
        text += f"; there is no ratio at {loads_text(missing)}"
    sentences = [Sentence(text=f"{text}.", section=section, tone=ratio_tone(first))]
    whole = part.ratio(name, workload, several[-1][0])
    if whole is not None and whole.total is not None and rest:
        text = (
            f"At {load_text(whole.load)}{where} all users together get {times_text(whole.total)} the tokens per second."
        )
        sentences.append(Sentence(text=text, section=anchor(CAPACITY, part), tone=ratio_tone(whole.total)))
    return sentences


def _continued(several: Sequence[tuple[Load, Interval]], *, is_whole: bool) -> str:
    """How it goes on from the lowest load. Where loads are missing, nothing is said about where a gain ends."""
    last_load, last = several[-1]
    signs = [sign_of(value, around=1.0) for _, value in several]
    if min(signs) > 0:
        load, least = min(several, key=lambda one: one[1].value)
        text = f", and pays under {'every load' if is_whole else 'all others'} up to {load_text(last_load)}"
        return f"{text} (least at {load_text(load)}: {times_text(least)})"
    end = _paying_to(several) if is_whole else None
    if end is not None:
        load, value = several[[one for one, _ in several].index(end) + 1]
        how = "it is slower" if sign_of(value, around=1.0) < 0 else "no gain can be told from noise"
        return f", and stops paying above {load_text(end)}: at {load_text(load)} {how}, {times_text(value)}"
    paying = [load for (load, _), sign in zip(several, signs, strict=True) if sign > 0]
    if paying:
        return f"; it pays at {loads_text(paying)} only, and at {load_text(last_load)} it is {times_text(last)} as fast"
    return f"; no gain shows under any load up to {load_text(last_load)} ({times_text(last)} there)"


def _speed_tiles(part: Part, name: str) -> list[tuple[str, str, Tone]]:
    tiles: list[tuple[str, str, Tone]] = []
    for workload in part.workloads:
        several = part.ratios_of(name, workload)
        for load, value in (several[:1] + several[-1:]) if len(several) > 1 else several:
            text = f"per user, {load}" + (f", {workload}" if len(part.workloads) > 1 else "")
            tiles.append((f"{value.value:.2f}x", text, ratio_tone(value)))
    return tiles


def _acceptance(part: Part, name: str) -> list[Sentence]:
    lengths = _lengths(part, name)
    if not lengths:
        return []
    depth = part.depth(name)
    ahead = f", drafting {depth} ahead" if depth else ""
    best, worst = max(lengths, key=lambda one: one[1].value), min(lengths, key=lambda one: one[1].value)
    text = f"Acceptance length {with_interval(best[1], '{:.2f}')} on {best[0]}{ahead}"
    if worst != best:
        text += f"; it is least on {worst[0]}: {with_interval(worst[1], '{:.2f}')}"
    return [Sentence(text=f"{text}.", section=anchor(ACCEPTANCE, part))]


def _lengths(part: Part, name: str) -> list[tuple[str, Interval]]:
    """By workload, at the lowest load."""
    found: dict[str, Interval] = {}
    for row in part.rows:
        if row.contender == name and row.figures.acceptance_length is not None and not row.figures.partial:
            found.setdefault(row.workload, row.figures.acceptance_length)
    return list(found.items())
