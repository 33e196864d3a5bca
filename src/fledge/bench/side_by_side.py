"""What holds between contenders, in sentences: which is the fastest where, and which drafter is ahead."""

from collections.abc import Iterable

from fledge.bench.families import BestDepth, Family
from fledge.bench.figures import decoding, ratio
from fledge.bench.part import Part
from fledge.bench.tables import number
from fledge.bench.words import ACCEPTANCE, ANSWERS, SPEED, anchor, load_text, loads_text, names_text, times_text
from fledge.evaluation.results import Load
from fledge.report.intervals import Interval
from fledge.report.prose import Sentence, sign_of


def best_against_best(part: Part) -> list[Sentence]:
    """Every drafter of many depths against the first that drafts for the same target on the same engine."""
    groups: dict[tuple[str, str, str | None], list[Family]] = {}
    for family in part.deep_families:
        one = part.contender(family.names[0])
        groups.setdefault((one.kind, one.target, one.inflated), []).append(family)
    return [
        sentence
        for first, *others in groups.values()
        for family in others
        for workload in part.workloads
        for sentence in _against(part, family, first, workload)
    ]


def _against(part: Part, family: Family, other: Family, workload: str) -> Iterable[Sentence]:
    found: list[tuple[Load, Interval, BestDepth, BestDepth]] = []
    for load in part.loads:
        mine, theirs = (part.best_depths.get((one, workload, load)) for one in (family, other))
        if mine is None or theirs is None:
            continue
        value = ratio(*(decoding(part.cells[best.name, workload, load]) for best in (mine, theirs)))
        if value is not None:
            found.append((load, value, mine, theirs))
    if not found:
        return
    text = f"{family.title} against {other.title} on {workload}, each at its fastest depth, in speed per user: "
    text += ", ".join(
        f"{times_text(value)} at {load_text(load)} (K={mine.depth} against K={theirs.depth})"
        for load, value, mine, theirs in found
    )
    ends = []
    for how, wanted in (("ahead", 1), ("behind", -1)):
        if loads := [load for load, value, *_ in found if sign_of(value, around=1.0) == wanted]:
            ends.append(f"{how} beyond noise at {loads_text(loads)}")
    yield Sentence(text=f"{text}: {'; '.join(ends) or 'no difference beyond noise'}.", section=anchor(SPEED, part))


def fastest(part: Part) -> list[Sentence]:
    """Which contender decodes the fastest under each load, and which cannot be told from it."""
    return [sentence for workload in part.workloads for sentence in _fastest(part, workload)]


def _fastest(part: Part, workload: str) -> Iterable[Sentence]:
    by_winner: dict[str, list[tuple[Load, float]]] = {}
    for load in part.loads:
        panels = {
            name: decoding(part.cells[name, workload, load])
            for name in part.names
            if (row := part.row(name, workload, load)) is not None and not row.figures.partial
        }
        values = {
            row.contender: row.figures.per_user_tokens_per_second.value
            for row in part.rows
            if row.key == (row.contender, workload, load)
            and row.contender in panels
            and row.figures.per_user_tokens_per_second is not None
        }
        if len(values) < 2:
            continue
        best = max(values, key=lambda name: values[name])
        against = {name: ratio(panels[best], panels[name]) for name in values if name != best}
        near = [name for name, value in against.items() if value is None or sign_of(value, around=1.0) <= 0]
        text = f"{best}" + (f" (not to be told from {names_text(part, near)})" if near else "")
        by_winner.setdefault(text, []).append((load, values[best]))
    if by_winner:
        parts = []
        for name, where in by_winner.items():
            speeds = ", ".join(number(speed) for _, speed in where)
            parts.append(f"{name} at {loads_text([load for load, _ in where])} ({speeds} tokens/s)")
        yield Sentence(text=f"Fastest per user on {workload}: {'; '.join(parts)}.", section=anchor(SPEED, part))


def accepted_more(part: Part) -> list[Sentence]:
    """Drafters of the same target that draft in the same way, against the first of them, over all workloads."""
    groups: dict[str, list[str]] = {}
    for one in part.results.contenders:
        if one.drafter is not None and one.speculation is not None:
            way = {key: value for key, value in one.speculation.items() if key not in ("model", "method")}
            same = (one.kind, one.target, one.inflated, one.temperature, sorted(way.items()))
            groups.setdefault(repr(same), []).append(one.name)
    pairs: dict[tuple[str, str], list[tuple[str, str, Interval]]] = {}  # by what is compared, many depths in one
    for first, *others in groups.values():
        for name in others:
            value = part.acceptance_ratio(name, first)
            if value is not None:
                pairs.setdefault((_stem(part, name), _stem(part, first)), []).append((name, first, value))
    sentences = []
    for (stem, first_stem), several in pairs.items():
        if len(several) == 1:
            ((name, first, value),) = several
            end = "" if sign_of(value, around=1.0) else ", which is no difference beyond noise"
            text = f"The acceptance length of {name} is {times_text(value)} that of {first}{end}."
        else:
            by_depth = ", ".join(_at_depth(part, name, value) for name, _, value in several)
            text = f"The acceptance length of {stem} over that of {first_stem}, both drafting as far ahead: {by_depth}."
        sentences.append(Sentence(text=text, section=anchor(ACCEPTANCE, part)))
    return sentences


def _at_depth(part: Part, name: str, value: Interval) -> str:
    end = "" if sign_of(value, around=1.0) else " (no difference beyond noise)"
    return f"{times_text(value)} at K={part.depth(name)}{end}"


def _stem(part: Part, name: str) -> str:
    """What contenders have in common that are one drafter at many depths."""
    if name == part.baseline:
        return name
    family = part.family(name)
    return family.title if family.has_many_depths else name


def same_answers(part: Part) -> list[Sentence]:
    compared, different = (sum(getattr(one, what) for one in part.agreements) for what in ("compared", "different"))
    if not compared:
        return []
    section = anchor(ANSWERS, part)
    if not different:
        text = f"All contenders gave the same answers as {part.baseline} at temperature 0 ({compared:,} compared)."
        return [Sentence(text=text, section=section, tone="good")]
    text = f"{different:,} of {compared:,} answers differ from those of {part.baseline} at temperature 0."
    return [Sentence(text=text, section=section, tone="bad")]
