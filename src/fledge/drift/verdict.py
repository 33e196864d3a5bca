"""What a suite means, in sentences: each states figures and names the section of the report that shows them.

Nothing is called better or worse unless the interval of the difference says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fledge.drift.figures import GROUPS, cells_of
from fledge.drift.perturb import UNPERTURBED
from fledge.drift.result import DepthMetrics, DriftResult, PromptRow
from fledge.drift.summary import CellSummary, DriftSummary, SuiteResult, has_drifted, own_share, prompt_share
from fledge.records import Record
from fledge.report.intervals import Bootstrap, Comparison, Interval
from fledge.report.prose import Sentence, Tone, interval_text, percent, sign_of

Results = Mapping[tuple[str, str], DriftResult]  # (drafter, perturbation) -> what the probe found

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


@dataclass(frozen=True, kw_only=True)
class Verdict(Record):
    """On one drafter."""

    drafter: str
    title: str
    headline: str
    tone: Tone
    sentences: tuple[Sentence, ...]


def verdicts(suite: SuiteResult, results: Results) -> tuple[Verdict, ...]:
    """One for each drafter. `results` has at least the unperturbed ones."""
    return tuple(_verdict(suite, name, results[name, UNPERTURBED]) for name in suite.names)


def _verdict(suite: SuiteResult, drafter: str, result: DriftResult) -> Verdict:
    cell = suite.cell(drafter)
    headline, tone, attention = _attention(result, cell.drift)
    sentences = [*attention]
    if cell.drift is not None:
        sentences.append(_growth(cell.drift))
        sentences += _layers(result, cell.drift)
    sentences += _acceptance(suite, cell, result)
    sentences += _perturbations(suite, drafter)
    if cell.drift is not None:
        sentences += _misses(cell.drift)
    return Verdict(
        drafter=drafter, title=suite.titles[drafter], headline=headline, tone=tone, sentences=tuple(sentences)
    )


def _attention(result: DriftResult, drift: DriftSummary | None) -> tuple[str, Tone, list[Sentence]]:
    if drift is None:
        text = "No draft was verified: the answers are too short to say anything."
        return "Not measured", "neutral", [Sentence(text=text, section=ATTENTION)]
    if len(result.by_depth) < 2:
        text = "Depth 1 has no drafts of its own to look at; probe with a --depth of 2 or more to see drift."
        return "Not measured", "neutral", [Sentence(text=text, section=ATTENTION)]
    last, second = result.by_depth[-1], result.by_depth[1]
    tone: Tone
    share = f"{percent(own_share(last))} of its attention is on its own drafts at depth {last.depth}"
    if drift.drift_depth is None:
        headline, tone = f"No drift to depth {last.depth}", "good"
        text = f"Its attention does not drift: {share}, {percent(prompt_share(last))} on the prompt."
    else:
        headline, tone = _drifting(drift.drift_depth, result.by_depth), "bad"
        text = f"This drafter {headline[0].lower()}{headline[1:]}: {share}"
        text += f", {percent(prompt_share(last))} on the prompt"
        text += f"; at depth 2 it was {percent(own_share(second))}." if last.depth > 2 else "."
    sentences = [Sentence(text=f"{text} {_even(last)}", section=ATTENTION, tone=tone)]
    before, after = drift.sink_attention_depth_1, drift.sink_attention_last
    if before >= 0.05 or after >= 0.05:
        moved: Tone = "bad" if after < before / 2 else "neutral"
        text = f"The first token keeps {percent(after)} of attention at depth {last.depth}, of {percent(before)} at 1."
        sentences.append(Sentence(text=text, section=ATTENTION, tone=moved))
    return headline, tone, sentences


def _drifting(first: int, depths: Sequence[DepthMetrics]) -> str:
    if all(has_drifted(one) for one in depths if one.depth >= first):
        return f"Drifts from depth {first} on" if first < depths[-1].depth else f"Drifts at depth {first}"
    several = [str(one.depth) for one in depths if has_drifted(one)]
    return f"Drifts at some depths ({', '.join(several)})"


def _even(last: DepthMetrics) -> str:
    """Own drafts are a large part of a short text, so that a share says little by itself."""
    even = last.uniform_mass["drafted"]
    if has_drifted(last) and own_share(last) <= even:
        return f"That is no more than the {percent(even)} that even attention would give: try longer prompts."
    return f"Even attention would give them {percent(even)}."


def _growth(drift: DriftSummary) -> Sentence:
    fed, hidden, depth = drift.feature_growth, drift.hidden_growth, drift.last_depth
    text, tone = _grown(f"The state fed from depth to depth {{}} by depth {depth}", fed)
    if abs(fed - hidden) > 0.02:
        text += f"; before the final norm it {_grown('{}', hidden)[0]}"
    return Sentence(text=f"{text}.", section=STATES, tone=tone)


def _grown(text: str, growth: float) -> tuple[str, Tone]:
    if growth > LEVEL_GROWTH:
        return text.format(f"has grown to {growth:.2g} times its size"), "bad"
    if growth < 1 / LEVEL_GROWTH:
        return text.format(f"has shrunk to {growth:.2g} times its size"), "neutral"
    return text.format(f"has stayed level ({growth:.2f} times its size)"), "good"


def _layers(result: DriftResult, drift: DriftSummary) -> list[Sentence]:
    if drift.top_layer_share is None or drift.top_layer_share < DOMINANCE / len(result.fusion_shares):
        return []
    text = f"The highest target layer dominates the fused input: {percent(drift.top_layer_share)} of it, where an even "
    return [Sentence(text=f"{text}part is {percent(1 / len(result.fusion_shares))}.", section=LAYERS, tone="bad")]


def _acceptance(suite: SuiteResult, cell: CellSummary, result: DriftResult) -> list[Sentence]:
    length = cell.acceptance_length
    if length is None:
        return []
    text = f"Acceptance length {length.value:.2f}{interval_text(length, suite.level)}, drafting {suite.depth} ahead."
    sentences = [Sentence(text=text, section=ACCEPTANCE)]
    if length.low is not None and cell.prompts < FEW_PROMPTS:
        text = f"These are {cell.prompts} prompts: intervals from so few are too narrow to rely on."
        sentences.append(Sentence(text=text, section=ACCEPTANCE))
    trained = result.trained_depth
    if trained is None or trained >= len(result.by_depth):
        return sentences
    within = {row.id: _stood(row, 0, trained) for row in result.prompt_rows}
    beyond = {row.id: _stood(row, trained, suite.depth) for row in result.prompt_rows}
    compared = Bootstrap(level=suite.level).compare(beyond, within)
    if compared is None:
        text = f"No round got beyond the {trained} depths it was trained for."
        return [*sentences, Sentence(text=text, section=ACCEPTANCE)]
    after = compared.base + compared.difference.value
    text = (
        f"Beyond the {trained} depths it was trained for, {percent(after)} of the drafts that follow right ones are "
        f"right too, against {percent(compared.base)} up to there."
    )
    tone: Tone = (
        "bad" if sign_of(compared.difference) < 0 else "good" if sign_of(compared.difference) > 0 else "neutral"
    )
    return [*sentences, Sentence(text=text, section=ACCEPTANCE, tone=tone)]


def _stood(row: PromptRow, begin: int, end: int) -> tuple[float, float]:
    """Accepted drafts, and those up for acceptance, at depths from `begin` (0 is the first) to before `end`."""
    return (
        sum(row.acceptance.accepted_by_depth[begin:end]),
        sum(row.acceptance.reached_by_depth[begin:end]),
    )


def _perturbations(suite: SuiteResult, drafter: str) -> list[Sentence]:
    sentences, unmeasured = [], []
    for group in GROUPS:
        cells = cells_of(suite, drafter, group)
        worst = worst_of(cells)
        if worst is not None:
            measured = sum(cell.compared is not None for cell in cells)
            sentences.append(_cost(group, *worst, measured, suite.level))
        elif cells:
            unmeasured.append(f"{GROUP_NAMES[group]} ({_why(cells)})")
        elif len(suite.perturbations) > 1:
            unmeasured.append(f"{GROUP_NAMES[group]} (not asked for)")
    if len(suite.perturbations) == 1:
        unmeasured.append("other prompts (no perturbation was asked for)")
    if unmeasured:
        sentences.append(Sentence(text=f"Not measured: {'; '.join(unmeasured)}.", section=PERTURBATIONS))
    return sentences


def worst_of(cells: Sequence[CellSummary]) -> tuple[CellSummary, Comparison] | None:
    """The cell of lowest ratio to the unperturbed run: of those that surely lose, if any do."""
    compared = [(cell, cell.compared) for cell in cells if cell.compared is not None]
    losing = [pair for pair in compared if sign_of(pair[1].ratio, around=1.0) < 0]
    return min(losing or compared, key=lambda pair: pair[1].ratio.value, default=None)


def _cost(group: str, worst: CellSummary, compared: Comparison, measured: int, level: float) -> Sentence:
    name = GROUP_NAMES[group]
    loss = Interval(
        value=1 - compared.ratio.value,
        low=None if compared.ratio.high is None else 1 - compared.ratio.high,
        high=None if compared.ratio.low is None else 1 - compared.ratio.low,
    )
    which = f"the worst of {measured}: {worst.perturbation}" if measured > 1 else worst.perturbation
    task = " The answers change too, so part of this is the task's." if group in TASK_GROUPS else ""
    if sign_of(loss) > 0:
        up_to = "up to " if measured > 1 else ""
        text = (
            f"{_capital(name)} cost {up_to}{percent(loss.value)} of acceptance length{_percents(loss, level)}; {which}."
        )
        return Sentence(text=text + task, section=PERTURBATIONS, tone="bad")
    if sign_of(loss) < 0:
        gain = Interval(
            value=-loss.value,
            low=None if loss.high is None else -loss.high,
            high=None if loss.low is None else -loss.low,
        )
        text = f"{_capital(name)} gain {percent(gain.value)} of acceptance length{_percents(gain, level)}; {which}."
        return Sentence(text=text + task, section=PERTURBATIONS, tone="good")
    if loss.low is None:
        text = (
            f"{_capital(name)} change acceptance length by {percent(-loss.value)} ({which}); one prompt says no more."
        )
        return Sentence(text=text, section=PERTURBATIONS)
    text = f"No loss from {name} can be told from chance: {percent(loss.value)}{_percents(loss, level)}; {which}."
    return Sentence(text=text, section=PERTURBATIONS, tone="neutral")


def _why(cells: Sequence[CellSummary]) -> str:
    reasons = dict.fromkeys(cell.skip or "no draft was verified" for cell in cells)
    return "; ".join(list(reasons)[:2])


def _misses(drift: DriftSummary) -> list[Sentence]:
    sentences = []
    if drift.ece is not None and drift.ece > POOR_CALIBRATION:
        text = f"Its confidence is {100 * drift.ece:.0f} points off the share of drafts that are right, on average."
        sentences.append(Sentence(text=text, section=CALIBRATION, tone="bad"))
    if drift.outside_vocabulary is not None and drift.outside_vocabulary > MANY_OUTSIDE:
        text = f"{percent(drift.outside_vocabulary)} of its misses are tokens that its vocabulary does not have."
        sentences.append(Sentence(text=text, section=ACCEPTANCE, tone="bad"))
    return sentences


def _percents(interval: Interval, level: float) -> str:
    if interval.low is None or interval.high is None:
        return ""
    return f" ({percent(level)} interval {100 * interval.low:.0f} to {100 * interval.high:.0f})"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
