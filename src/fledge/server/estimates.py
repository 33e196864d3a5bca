"""Does speculation pay? An estimate from what was measured, and the reason in words (notes.yaml).

A speculation round of `batch` requests costs `cost(batch, depth)` seconds and gives some tokens. Plain decoding needs
`tokens / batch` steps of `cost(batch, 0)` seconds for as many. The speed-up is the ratio of the two times. Where no
plain step was ever measured near a batch size, it is unknown, and that is what is said.
"""

from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

import yaml

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.controller import CostTable
from fledge.server.history import HistoryInterval

MIN_ROUNDS = 30  # rounds before an acceptance length is believed
KNOWN_SHARE = 0.5  # of the rounds must have both costs, or the whole is unknown
PAYS = 1.05  # below, speculation is called not worth it
LOSES = 0.97  # below, it is called a loss

_NOTES = yaml.safe_load((resources.files(__package__) / "notes.yaml").read_text(encoding="utf-8"))


class SpeedUp(NamedTuple):
    """Tokens per second of decoding, over what it would be without speculation."""

    value: float | None = None  # None: unknown
    tokens_per_round: float | None = None  # of one request, rounds without drafts of its own included
    break_even: float | None = None  # tokens per round at which speculation costs as much as it saves
    batch: int = 0  # the typical batch
    depth: int = 0


def speed_up(seen: HistoryInterval, costs: CostTable) -> SpeedUp:
    """Estimate the speed-up of the speculation rounds that were seen. Plain steps among them are left out."""
    speculative = {shape: count for shape, count in seen.rounds.items() if shape[1] > 0 and count > 0}
    total = sum(speculative.values())
    if total == 0:
        return SpeedUp()
    rows = sum(batch * count for (batch, _), count in speculative.items())
    estimate = SpeedUp(
        tokens_per_round=sum(seen.round_tokens[shape] for shape in speculative) / rows,
        batch=round(rows / total),
        depth=max(speculative, key=lambda shape: speculative[shape])[1],
    )
    spent = plain = break_even = 0.0
    known_rounds = known_rows = 0
    for shape, count in speculative.items():
        step, cost = costs.cost(shape[0], 0), costs.cost(*shape)
        if step is not None and cost is not None and step > 0:
            spent += count * cost
            plain += seen.round_tokens[shape] / shape[0] * step
            break_even += count * shape[0] * cost / step
            known_rounds += count
            known_rows += count * shape[0]
    if known_rounds < KNOWN_SHARE * total or spent <= 0:
        return estimate
    return estimate._replace(value=plain / spent, break_even=break_even / known_rows)


class SpeculationNote(NamedTuple):
    """One sentence or two for people, the most important first."""

    level: str  # good, info, warning or bad
    text: str


def explain(
    seen: HistoryInterval, costs: CostTable, *, has_drafter: bool = True, fallback: bool = False
) -> list[SpeculationNote]:
    """Say whether speculation pays in what was seen of late and, where it does not, for what traffic and why."""
    if not has_drafter or fallback:
        return [_note("failed" if has_drafter else "no_drafter")]
    acceptance = seen.acceptance
    length = acceptance.acceptance_length
    if length is None:
        return [_note("only_plain" if seen.rounds.total() else "idle")]
    rates, is_certain = acceptance.rate_by_depth, acceptance.rounds >= MIN_ROUNDS
    dead = [_note("dead_drafter", rate=rates[0])] if is_certain and rates[0] < 0.05 else []
    estimate = speed_up(seen, costs)
    value, break_even = estimate.value, estimate.break_even
    if value is None or break_even is None:
        return [_note("unknown", length=length, batch=estimate.batch), *dead]
    name = "pays" if value >= PAYS else "loses" if value < LOSES else "hardly_pays"
    verdict = _note(name, value=value, per_round=estimate.tokens_per_round, break_even=break_even)
    if value >= PAYS:
        return [verdict, *_slow_parts(seen, break_even)]
    useful = sum(rate >= 0.1 for rate in rates)
    is_too_deep = is_certain and 0 < useful < len(rates) and break_even >= PAYS
    depth = [_note("depth", useful=useful, rate=rates[useful])] if is_too_deep else []
    return [verdict, *dead, *_batch(length, costs, estimate), *_slow_parts(seen, break_even), *depth]


def _note(which: str, **figures: Any) -> SpeculationNote:
    level, text = _NOTES[which]
    return SpeculationNote(level, text.format(**figures))


def _batch(length: float, costs: CostTable, estimate: SpeedUp) -> list[SpeculationNote]:
    """The drafts are good enough for small batches, but not for these."""
    batch, depth = estimate.batch, estimate.depth
    smallest = costs.smallest_batch(depth)
    at_smallest = None if smallest is None else costs.ratio(smallest, depth)
    here = costs.ratio(batch, depth) or estimate.break_even
    if smallest is None or at_smallest is None or here is None:
        return []
    if batch < 2 * smallest or not at_smallest * PAYS <= length < here * PAYS:
        return []
    ratios = {"here": here, "at_smallest": at_smallest, "smallest": smallest}
    return [_note("batch", batch=batch, busy=max(2, batch // 2), length=length, **ratios)]


def _slow_parts(seen: HistoryInterval, break_even: float) -> list[SpeculationNote]:
    """The templates and context lengths that lie below the break-even."""
    low, fine = _divide({template.label: part for template, part in seen.templates.items()}, break_even)
    best = max(fine.values(), default=0.0)
    notes = [
        _note("template" if fine else "traffic", name=name, length=length, break_even=break_even, best=best)
        for name, length in list(low.items())[:3]
    ]
    if len(low) > 3:
        notes.append(_note("more_templates", count=len(low) - 3))
    low, fine = _divide(seen.contexts_in_order, break_even)
    if low and fine:
        (name, length), (reference, best) = list(low.items())[-1], next(iter(fine.items()))
        notes.append(_note("context", name=name, length=length, break_even=break_even, fine=reference, best=best))
    return notes


def _divide(parts: Mapping[str, AcceptanceStatistics], break_even: float) -> tuple[dict[str, float], dict[str, float]]:
    """Split parts with enough rounds into those below the break-even and the others, with their acceptance lengths."""
    lengths = {name: part.acceptance_length for name, part in parts.items() if part.rounds >= MIN_ROUNDS}
    known = {name: length for name, length in lengths.items() if length is not None}
    low = {name: length for name, length in known.items() if length < break_even}
    return low, {name: length for name, length in known.items() if name not in low}
