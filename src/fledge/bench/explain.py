"""Where speculation disappoints, and what the data say about why.

A ratio is the tokens that a round yields over what the round costs, in steps of plain decoding. The first is measured
as acceptance length, so the second follows, and a loss can be laid to either.
"""

from collections.abc import Iterable, Sequence

from fledge.bench.families import Family
from fledge.bench.part import Part, Reference
from fledge.bench.tables import with_interval
from fledge.bench.words import SPEED, anchor, load_text, times_text
from fledge.evaluation.results import Load
from fledge.report.prose import Sentence, sign_of

FEW_ACCEPTED = 1.5  # an acceptance length below this is little to live on
DEARER = 1.25  # times the round's cost at the lowest load: from here on, load is what makes it dear


def disappointments(part: Part, references: Sequence[Reference] = ()) -> list[Sentence]:
    """Where a contender does not gain, or gains less than others reported, and what the data say about why."""
    sentences: list[Sentence] = []
    if part.has_speed and part.baseline:
        for name in part.challengers:
            for workload in part.workloads:
                sentences += _losses(part, name, workload)
        for family in part.families:
            for workload in part.workloads:
                sentences += _below(part, family, workload, references)
    return sentences


def _losses(part: Part, name: str, workload: str) -> Iterable[Sentence]:
    several = part.ratios_of(name, workload)
    for load, value in several:
        if sign_of(value, around=1.0) <= 0 and value.low is not None:
            how = "is slower than" if sign_of(value, around=1.0) < 0 else "is no faster than"
            text = f"{name} {how} {part.baseline} on {workload} at {load_text(load)}: {times_text(value)}. "
            yield Sentence(text=text + _why(part, name, workload, load), section=anchor(SPEED, part), tone="bad")


def round_cost(part: Part, name: str, workload: str, load: Load) -> float | None:
    """Plain steps that a round costs: acceptance length over the ratio, since ratio = tokens per round / cost."""
    row, found = part.row(name, workload, load), part.ratio(name, workload, load)
    if row is None or found is None or found.per_user is None or row.figures.acceptance_length is None:
        return None
    return row.figures.acceptance_length.value / found.per_user.value


def _why(part: Part, name: str, workload: str, load: Load) -> str:
    cost, row = round_cost(part, name, workload, load), part.row(name, workload, load)
    if cost is None or row is None or row.figures.acceptance_length is None:
        return "Acceptance is not reported here, so the loss cannot be split into few accepted drafts and dear rounds."
    length, depth = row.figures.acceptance_length.value, part.depth(name)
    lowest = part.ratios_of(name, workload)[0][0]
    cost_low = round_cost(part, name, workload, lowest)
    text = f"A round yields {length:.2f} tokens and costs {cost:.2f} plain steps"
    if cost_low is not None and lowest != load and cost > DEARER * cost_low:
        text += f", {cost_low:.2f} at {load_text(lowest)}"
        if load.concurrency is not None and depth is not None:
            verified = load.concurrency * (depth + 1)
            text += (
                f": verifying {load.concurrency} x {depth + 1} = {verified} tokens at once is no longer free beside "
                f"the {load.concurrency} of plain decoding"
            )
    if length < FEW_ACCEPTED:
        text += "; few drafts stand"
    return f"{text}. To break even it would need an acceptance length of {cost:.2f}."


def _below(part: Part, family: Family, workload: str, references: Sequence[Reference]) -> Iterable[Sentence]:
    """Of a drafter with many depths the fastest at each load: where that stays below, so do the others."""
    if family.has_many_depths:
        bests = {load: part.best_depths.get((family, workload, load)) for load in part.loads}
        points = [(load, one.over_baseline, f" (K={one.depth})") for load, one in bests.items() if one is not None]
        lines = {f"{family.title} at its fastest depth": points}
    else:
        lines = {name: [(load, value, "") for load, value in part.ratios_of(name, workload)] for name in family.names}
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
                yield Sentence(text=text, section=anchor(SPEED, part), tone="neutral")
