"""What a suite means, in sentences: each states figures and names the section of the report that shows them.

Nothing is called better or worse unless the interval of the difference says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fledge.drift.figures import cells_of
from fledge.drift.perturb import UNPERTURBED
from fledge.drift.result import DepthMetrics, DriftResult, PromptRow, Results
from fledge.drift.summary import CellSummary, DriftSummary, SuiteResult, acceptance_counts, own_attention_counts
from fledge.records import Record
from fledge.report.intervals import Bootstrap, Comparison, Interval
from fledge.report.prose import Sentence, Tone, interval_text, percent, sign_of

# Sections of the report, by their anchors.
ATTENTION, STATES, LAYERS = "attention", "states", "layers"
ACCEPTANCE, CALIBRATION, PERTURBATIONS = "acceptance", "calibration", "perturbations"

LEVEL_GROWTH = 1.25  # a state that grows by less stays level
DOMINANCE = 1.5  # times its even share: from here on a layer dominates the fused input
POOR_CALIBRATION = 0.1
MANY_OUTSIDE = 0.2  # of the misses
FEW_PROMPTS = 10  # fewer do not show how much prompts differ
TASK_GROUPS = ("format", "temperature")  # these change the answer itself, so part of the loss is the task's
GROUP_NAMES = {
    "template": "template changes",
    "system": "other system prompts",
    "long_context": "long contexts",
    "history": "earlier turns",
    "format": "tools, JSON and switches of style",
    "temperature": "temperatures above 0",
}
_TONES: dict[int, Tone] = {-1: "bad", 0: "neutral", 1: "good"}  # by the sign of what should be large


@dataclass(frozen=True, kw_only=True)
class DrafterVerdict(Record):
    """On one drafter."""

    drafter: str
    title: str
    headline: str
    tone: Tone
    sentences: tuple[Sentence, ...]


def verdict(suite: SuiteResult, drafter: str, result: DriftResult) -> DrafterVerdict:
    """`result` is the drafter's unperturbed one."""
    cell = suite.cell(drafter)
    headline, attention = _attention(result, cell.drift)
    states = () if cell.drift is None else _states(result, cell.drift)
    misses = () if cell.drift is None else _misses(cell.drift)
    sentences = (*attention, *states, *_acceptance(suite, cell, result), *_perturbations(suite, drafter), *misses)
    title = suite.titles[drafter]
    return DrafterVerdict(drafter=drafter, title=title, headline=headline, tone=sentences[0].tone, sentences=sentences)


def _say(section: str, text: str, tone: Tone = "neutral") -> Sentence:
    return Sentence(text=text, section=section, tone=tone)


def _attention(result: DriftResult, drift: DriftSummary | None) -> tuple[str, list[Sentence]]:
    """The headline, and what backs it."""
    if drift is None:
        text = "No draft was verified: the answers are too short to say anything."
        return "Not measured", [_say(ATTENTION, text)]
    if len(result.by_depth) < 2:
        text = "Depth 1 has no drafts of its own to look at; probe with a --depth of 2 or more to see drift."
        return "Not measured", [_say(ATTENTION, text)]
    last = result.by_depth[-1]
    shares = f"{percent(last.own_attention)} of its attention is on its own drafts at depth {last.depth}, "
    shares += f"{percent(last.prompt_attention)} on the prompt"
    if drift.drift_depth is None:
        headline = f"No drift to depth {last.depth}"
        text = f"Its attention does not drift: {shares}."
    else:
        headline = _drifting(drift.drift_depth, result.by_depth)
        before = f"; at depth 2 it was {percent(result.by_depth[1].own_attention)}" if last.depth > 2 else ""
        text = f"This drafter {headline[0].lower()}{headline[1:]}: {shares}{before}."
    sentences = [_say(ATTENTION, f"{text} {_even(last)}", "good" if drift.drift_depth is None else "bad")]
    first, kept = drift.sink_attention_depth_1, drift.sink_attention_last
    if max(first, kept) >= 0.05:
        text = f"The first token keeps {percent(kept)} of attention at depth {last.depth}, of {percent(first)} at 1."
        sentences.append(_say(ATTENTION, text, "bad" if kept < first / 2 else "neutral"))
    return headline, sentences


def _drifting(first: int, depths: Sequence[DepthMetrics]) -> str:
    several = [one.depth for one in depths if one.has_drifted]
    if len(several) < sum(one.depth >= first for one in depths):
        return f"Drifts at some depths ({', '.join(map(str, several))})"
    return f"Drifts from depth {first} on" if first < depths[-1].depth else f"Drifts at depth {first}"


def _even(last: DepthMetrics) -> str:
    """Own drafts are a large part of a short text, so that a share says little by itself."""
    even = last.uniform_mass["drafted"]
    if last.has_drifted and last.own_attention <= even:
        return f"That is no more than the {percent(even)} that even attention would give: try longer prompts."
    return f"Even attention would give them {percent(even)}."


def _states(result: DriftResult, drift: DriftSummary) -> Iterator[Sentence]:
    fed, hidden, share = drift.feature_growth, drift.hidden_growth, drift.top_layer_share
    text = f"The state fed from depth to depth {_grown(fed)} by depth {drift.last_depth}"
    if abs(fed - hidden) > 0.02:
        text += f"; before the final norm it {_grown(hidden)}"
    yield _say(STATES, f"{text}.", "bad" if fed > LEVEL_GROWTH else "neutral" if fed < 1 / LEVEL_GROWTH else "good")
    even = 1 / max(1, len(result.fusion_shares))
    if share is not None and share >= DOMINANCE * even:
        text = f"The highest target layer dominates the fused input: {percent(share)} of it, where an even part is "
        yield _say(LAYERS, f"{text}{percent(even)}.", "bad")


def _grown(growth: float) -> str:
    if 1 / LEVEL_GROWTH <= growth <= LEVEL_GROWTH:
        return f"has stayed level ({growth:.2f} times its size)"
    return f"has {'grown' if growth > 1 else 'shrunk'} to {growth:.2g} times its size"


def _acceptance(suite: SuiteResult, cell: CellSummary, result: DriftResult) -> Iterator[Sentence]:
    length, trained = cell.acceptance_length, result.trained_depth
    if length is None:
        return
    interval = interval_text(length, suite.level)
    yield _say(ACCEPTANCE, f"Acceptance length {length.value:.2f}{interval}, drafting {suite.depth} ahead.")
    if length.low is not None and cell.prompts < FEW_PROMPTS:
        text = f"These are {cell.prompts} prompts: intervals from so few are too narrow to rely on."
        yield _say(ACCEPTANCE, text)
    if trained is None or trained >= len(result.by_depth):
        return
    within = {row.id: _stood(row, 0, trained) for row in result.prompt_rows}
    beyond = {row.id: _stood(row, trained, suite.depth) for row in result.prompt_rows}
    compared = Bootstrap(level=suite.level).compare(beyond, within)
    if compared is None:
        yield _say(ACCEPTANCE, f"No round got beyond the {trained} depths it was trained for.")
        return
    after = compared.base + compared.difference.value
    text = (
        f"Beyond the {trained} depths it was trained for, {percent(after)} of the drafts that follow right ones are "
        f"right too, against {percent(compared.base)} up to there."
    )
    yield _say(ACCEPTANCE, text, _TONES[sign_of(compared.difference)])


def _stood(row: PromptRow, begin: int, end: int) -> tuple[float, float]:
    """Accepted drafts, and those up for acceptance, at depths from `begin` (0 is the first) to before `end`."""
    found = row.acceptance
    return sum(found.accepted_by_depth[begin:end]), sum(found.reached_by_depth[begin:end])


def _misses(drift: DriftSummary) -> Iterator[Sentence]:
    if drift.ece is not None and drift.ece > POOR_CALIBRATION:
        text = f"Its confidence is {100 * drift.ece:.0f} points off the share of drafts that are right, on average."
        yield _say(CALIBRATION, text, "bad")
    if drift.outside_vocabulary is not None and drift.outside_vocabulary > MANY_OUTSIDE:
        text = f"{percent(drift.outside_vocabulary)} of its misses are tokens that its vocabulary does not have."
        yield _say(ACCEPTANCE, text, "bad")


def _perturbations(suite: SuiteResult, drafter: str) -> Iterator[Sentence]:
    unmeasured = []
    for group, name in GROUP_NAMES.items():
        cells = cells_of(suite, drafter, group)
        worst = worst_of(cells)
        if worst is not None:
            measured = sum(cell.compared is not None for cell in cells)
            yield _cost(group, *worst, measured, suite.level)
        elif cells:
            reasons = list(dict.fromkeys(cell.skip or "no draft was verified" for cell in cells))
            unmeasured.append(f"{name} ({'; '.join(reasons[:2])})")
        elif len(suite.perturbations) > 1:
            unmeasured.append(f"{name} (not asked for)")
    if len(suite.perturbations) == 1:
        unmeasured.append("other prompts (no perturbation was asked for)")
    if unmeasured:
        yield _say(PERTURBATIONS, f"Not measured: {'; '.join(unmeasured)}.")


def worst_of(cells: Sequence[CellSummary]) -> tuple[CellSummary, Comparison] | None:
    """The cell of lowest ratio to the unperturbed run: of those that surely lose, if any do."""
    compared = [(cell, cell.compared) for cell in cells if cell.compared is not None]
    losing = [pair for pair in compared if sign_of(pair[1].ratio, around=1.0) < 0]
    return min(losing or compared, key=lambda pair: pair[1].ratio.value, default=None)


def _cost(group: str, worst: CellSummary, compared: Comparison, measured: int, level: float) -> Sentence:
    name, ratio = GROUP_NAMES[group], compared.ratio
    which = f"the worst of {measured}: {worst.perturbation}" if measured > 1 else worst.perturbation
    change, sign = percent(abs(ratio.value - 1)), sign_of(ratio, around=1.0)
    capital = name[0].upper() + name[1:]
    if ratio.low is None or ratio.high is None:
        text = f"{capital} change acceptance length by {percent(ratio.value - 1)} ({which}); one prompt says no more."
        return _say(PERTURBATIONS, text)
    low, high = (ratio.low - 1, ratio.high - 1) if sign > 0 else (1 - ratio.high, 1 - ratio.low)
    interval = f" ({percent(level)} interval {100 * low:.0f} to {100 * high:.0f})"
    if sign == 0:
        text = f"No loss from {name} can be told from chance: {percent(1 - ratio.value)}{interval}; {which}."
        return _say(PERTURBATIONS, text)
    verb = "gain" if sign > 0 else "cost up to" if measured > 1 else "cost"
    task = " The answers change too, so part of this is the task's." if group in TASK_GROUPS else ""
    text = f"{capital} {verb} {change} of acceptance length{interval}; {which}.{task}"
    return _say(PERTURBATIONS, text, _TONES[sign])


def side_by_side(suite: SuiteResult, results: Results, one: str, other: str) -> Iterator[Sentence]:
    """One drafter against another, over the prompts that both have."""
    names = suite.titles[one], suite.titles[other]
    bootstrap = Bootstrap(level=suite.level)
    mine, theirs = results[one, UNPERTURBED], results[other, UNPERTURBED]
    depth = min(len(mine.by_depth), len(theirs.by_depth))
    if depth > 1:
        attention = bootstrap.compare(own_attention_counts(mine, depth), own_attention_counts(theirs, depth))
        if attention is not None:
            yield _own_against(attention, names, depth, suite.level)
    where = {"On the unperturbed workload": [UNPERTURBED]} | {
        f"Under {GROUP_NAMES[group]}": [cell.perturbation for cell in cells_of(suite, one, group)]
        for group in ("template", "long_context")
    }
    for place, perturbations in where.items():
        shared = [name for name in perturbations if (one, name) in results and (other, name) in results]
        sides = [acceptance_counts(*(results[drafter, name] for name in shared)) for drafter in (one, other)]
        compared = bootstrap.compare(sides[0], sides[1], offset=1.0) if shared else None
        if compared is not None:
            section = ACCEPTANCE if UNPERTURBED in perturbations else PERTURBATIONS
            yield _length_against(place, compared, names, section, suite.level)


def _own_against(compared: Comparison, names: tuple[str, str], depth: int, level: float) -> Sentence:
    difference = compared.difference
    small, large = sorted((compared.base, compared.base + difference.value))
    shares = f"{percent(small)} of attention is on own drafts at depth {depth}, against {percent(large)}"
    shares += _points(difference, level)
    sign = sign_of(difference)
    if sign == 0:
        text = f"Which of {names[0]} and {names[1]} drifts less cannot be told: {shares}."
    else:
        less, more = names if sign < 0 else names[::-1]
        text = f"{less} drifts less than {more}: {shares}."
    return _say(ATTENTION, text, _TONES[-sign])


def _points(interval: Interval, level: float) -> str:
    """Of a difference of shares, whichever way round."""
    if interval.low is None or interval.high is None:
        return ""
    low, high = (-interval.high, -interval.low) if interval.high < 0 else (interval.low, interval.high)
    return f" (difference, {percent(level)} interval: {100 * low:.0f} to {100 * high:.0f} points)"


def _length_against(where: str, compared: Comparison, names: tuple[str, str], section: str, level: float) -> Sentence:
    lengths = f"{compared.base + compared.difference.value:.2f} against {compared.base:.2f} of {names[1]}"
    sign = sign_of(compared.ratio, around=1.0)
    if sign == 0:
        text = f"{where}, no difference in acceptance length can be told: {names[0]} {lengths}"
        text += f"{interval_text(compared.ratio, level, 'ratio ')}."
    else:
        text = f"{where}, {names[0]} has the {'longer' if sign > 0 else 'shorter'} acceptance length: {lengths}"
        text += f", {compared.ratio.value:.2f} times{interval_text(compared.ratio, level)}."
    return _say(section, text, _TONES[sign])
