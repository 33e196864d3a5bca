"""Does speculation pay? An estimate from what was measured, and the reason in words.

A speculation round of `batch` requests costs `cost(batch, depth)` seconds and gives some tokens. Plain decoding needs
`tokens / batch` steps of `cost(batch, 0)` seconds for as many. The speed-up is the ratio of the two times. Where no
plain step was ever measured near a batch size, it is unknown, and that is what is said.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.controller import CostTable
from fledge.server.history import HistoryInterval, Shape

MIN_ROUNDS = 30  # rounds before an acceptance length is believed
KNOWN_SHARE = 0.5  # of the rounds must have both costs, or the whole is unknown
PAYS = 1.05  # below, speculation is called not worth it
LOSES = 0.97  # below, it is called a loss


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """Tokens per second of decoding, over what it would be without speculation."""

    value: float | None  # None: unknown
    tokens_per_round: float | None = None  # of one request, rounds without drafts of its own included
    break_even: float | None = None  # tokens per round at which speculation costs as much as it saves
    batch: int = 0  # the typical batch
    depth: int = 0


def speed_up(rounds: Mapping[Shape, int], tokens: Mapping[Shape, int], costs: CostTable) -> SpeedUp:
    """Estimate the speed-up of speculation rounds: how many of each shape there were, and the tokens they gave.

    Plain steps among them are left out.
    """
    speculative = {shape: count for shape, count in rounds.items() if shape[1] > 0 and count > 0}
    total = sum(speculative.values())
    if total == 0:
        return SpeedUp(value=None)
    rows = sum(batch * count for (batch, _), count in speculative.items())
    per_round = sum(tokens[shape] for shape in speculative) / rows
    batch = round(rows / total)
    _, depth = max(speculative, key=lambda shape: speculative[shape])
    spent = plain = break_even = 0.0
    known_rounds = known_rows = 0
    for shape, count in speculative.items():
        step, cost = costs.cost(shape[0], 0), costs.cost(*shape)
        if step is not None and cost is not None and step > 0:
            spent += count * cost
            plain += tokens[shape] / shape[0] * step
            break_even += count * shape[0] * cost / step
            known_rounds += count
            known_rows += count * shape[0]
    if known_rounds < KNOWN_SHARE * total or spent <= 0:
        return SpeedUp(value=None, tokens_per_round=per_round, batch=batch, depth=depth)
    return SpeedUp(
        value=plain / spent,
        tokens_per_round=per_round,
        break_even=break_even / known_rows,
        batch=batch,
        depth=depth,
    )


Level = Literal["good", "info", "warning", "bad"]


class SpeculationNote(NamedTuple):
    """One sentence or two for people, the most important first."""

    level: Level
    text: str


def explain(
    seen: HistoryInterval, costs: CostTable, *, has_drafter: bool = True, fallback: bool = False
) -> list[SpeculationNote]:
    """Say whether speculation pays in what was seen of late and, where it does not, for what traffic and why."""
    if not has_drafter:
        return [SpeculationNote("info", "No drafter is loaded: every step is plain decoding.")]
    if fallback:
        return [
            SpeculationNote(
                "bad",
                "The drafter failed and is switched off. The service decodes without it: the text is the same, the "
                "speed-up is gone. The log says why; restart the service to use the drafter again.",
            )
        ]
    length = seen.acceptance.acceptance_length
    if length is None:
        plain = sum(seen.rounds.values())
        text = "No speculation round lately: every step was plain decoding." if plain else "Nothing was decoded lately."
        return [SpeculationNote("info", text)]
    estimate = speed_up(seen.rounds, seen.round_tokens, costs)
    if estimate.value is None or estimate.break_even is None:
        return [_unknown(estimate, length), *_dead_drafter(seen.acceptance)]
    per_round, break_even = estimate.tokens_per_round or 0.0, estimate.break_even
    numbers = f"a round gives {per_round:.2f} tokens per request and costs {break_even:.2f} plain steps"
    if estimate.value >= PAYS:
        verdict = SpeculationNote("good", f"Speculation pays: {estimate.value:.2f}x as fast as without; {numbers}.")
        return [verdict, *_slow_parts(seen, break_even)]
    words = "Speculation costs more than it saves" if estimate.value < LOSES else "Speculation hardly pays"
    verdict = SpeculationNote("bad", f"{words}: {estimate.value:.2f}x the speed without it; {numbers}.")
    reasons = [
        *_dead_drafter(seen.acceptance),
        *_batch(seen.acceptance, costs, estimate),
        *_slow_parts(seen, break_even),
        *_depth(seen.acceptance, break_even),
    ]
    return [verdict, *reasons]


def _unknown(estimate: SpeedUp, length: float) -> SpeculationNote:
    return SpeculationNote(
        "info",
        f"A round gives {length:.2f} tokens. Whether that pays is not known yet: no plain step was measured near a "
        f'batch of {estimate.batch}. One request alone with "speculation": {{"enabled": false}} measures it for a '
        "batch of 1; so does the side-by-side chat below.",
    )


def _dead_drafter(acceptance: AcceptanceStatistics) -> list[SpeculationNote]:
    """Nothing at all is accepted: that is no matter of templates."""
    if acceptance.rounds < MIN_ROUNDS or acceptance.rate_by_depth[0] >= 0.05:
        return []
    return [
        SpeculationNote(
            "bad",
            f"Of the first drafts only {acceptance.rate_by_depth[0]:.0%} are accepted. A drafter made for this target "
            "does better on any text: check the pair with `fledge inspect DRAFTER --target TARGET`.",
        )
    ]


def _batch(acceptance: AcceptanceStatistics, costs: CostTable, estimate: SpeedUp) -> list[SpeculationNote]:
    """The drafts are good enough for small batches, but not for these."""
    smallest = costs.smallest_batch(estimate.depth)
    at_smallest = None if smallest is None else costs.ratio(smallest, estimate.depth)
    here = costs.ratio(estimate.batch, estimate.depth) or estimate.break_even
    length = acceptance.acceptance_length
    if smallest is None or at_smallest is None or here is None or length is None:
        return []
    if estimate.batch < 2 * smallest or not at_smallest * PAYS <= length < here * PAYS:
        return []
    return [
        SpeculationNote(
            "warning",
            f"Batch of {estimate.batch}: rounds cost {here:.1f}x a step, against {at_smallest:.1f}x at a batch of "
            f"{smallest}, where {length:.2f} tokens per round would pay. Draft less when it is busy: "
            f'"num_speculative_tokens_per_batch_size": [[{max(2, estimate.batch // 2)}, 4096, 0]] in the speculative '
            "config.",
        )
    ]


def _slow_parts(seen: HistoryInterval, break_even: float) -> list[SpeculationNote]:
    """The templates and context lengths that lie below the break-even."""
    findings = []
    templates = {template.label: part for template, part in seen.acceptance_by_template.items()}
    low, fine = _divide(templates.items(), break_even)
    for name, length in low[:3]:
        cause = (
            f"the drafter does not know this template (others reach {max(length for _, length in fine):.1f})"
            if fine
            else "no template does better, so the drafter does not know this traffic"
        )
        findings.append(
            SpeculationNote(
                "warning",
                f"Template {name}: {length:.2f} tokens per round against a break-even of {break_even:.2f}: {cause}.",
            )
        )
    if len(low) > 3:
        findings.append(
            SpeculationNote("warning", f"{len(low) - 3} more templates lie below the break-even: see the table.")
        )
    low, fine = _divide(seen.acceptance_by_context.items(), break_even)
    if low and fine:
        bucket, length = low[-1]
        findings.append(
            SpeculationNote(
                "warning",
                f"Contexts of {bucket} tokens: {length:.2f} tokens per round against a break-even of {break_even:.2f}, "
                f"while contexts of {fine[0][0]} reach {fine[0][1]:.2f}: the drafter loses its way with length "
                "(`fledge drift` shows where).",
            )
        )
    return findings


def _divide(
    parts: Iterable[tuple[str, AcceptanceStatistics]], break_even: float
) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """Split parts with enough rounds into those below the break-even and the others, with their acceptance lengths."""
    low: list[tuple[str, float]] = []
    fine: list[tuple[str, float]] = []
    for name, acceptance in parts:
        length = acceptance.acceptance_length
        if length is not None and acceptance.rounds >= MIN_ROUNDS:
            (low if length < break_even else fine).append((name, length))
    return low, fine


def _depth(acceptance: AcceptanceStatistics, break_even: float) -> list[SpeculationNote]:
    """Drafts nobody accepts: they are paid for in every round."""
    rates = acceptance.rate_by_depth
    useful = sum(rate >= 0.1 for rate in rates)
    if acceptance.rounds < MIN_ROUNDS or not 0 < useful < len(rates) or break_even < PAYS:
        return []
    return [
        SpeculationNote(
            "warning",
            f"Drafts beyond depth {useful} are accepted in {rates[useful]:.0%} of the rounds at most: "
            f'"num_speculative_tokens": {useful} would cost less and lose little.',
        )
    ]
