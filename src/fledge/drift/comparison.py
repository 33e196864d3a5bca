"""Drafters against each other, in sentences, over the prompts that both have."""

from collections.abc import Callable, Iterable, Sequence

from fledge.drift.figures import cells_of
from fledge.drift.perturb import UNPERTURBED
from fledge.drift.result import DriftResult, PromptRow
from fledge.drift.summary import SuiteResult
from fledge.drift.verdict import ACCEPTANCE, ATTENTION, GROUP_NAMES, PERTURBATIONS, Results
from fledge.report.intervals import Bootstrap, Comparison, Counts, Interval
from fledge.report.prose import Sentence, interval_text, percent, sign_of


def comparison(suite: SuiteResult, results: Results) -> tuple[Sentence, ...]:
    """The other drafters against the first, over the prompts that both have."""
    first, *others = suite.names
    return tuple(sentence for other in others for sentence in _against(suite, results, other, first))


def _against(suite: SuiteResult, results: Results, one: str, other: str) -> list[Sentence]:
    names = suite.titles[one], suite.titles[other]
    bootstrap = Bootstrap(level=suite.level)
    depth = min(len(results[name, UNPERTURBED].by_depth) for name in (one, other))
    sentences = []
    if depth > 1:
        sides = [_counts([results[name, UNPERTURBED]], lambda row: _own(row, depth - 1)) for name in (one, other)]
        attention = bootstrap.compare(sides[0], sides[1])
        if attention is not None:
            sentences.append(_own_against(attention, names, depth, suite.level))
    whole: dict[str, Sequence[str]] = {"On the unperturbed workload": (UNPERTURBED,)}
    whole |= {
        f"Under {GROUP_NAMES[group]}": [cell.perturbation for cell in cells_of(suite, one, group)]
        for group in ("template", "long_context")
    }
    for where, perturbations in whole.items():
        shared = [name for name in perturbations if (one, name) in results and (other, name) in results]
        lengths = [
            _counts([results[drafter, name] for name in shared], lambda row: (row.accepted, row.rounds))
            for drafter in (one, other)
        ]
        compared = bootstrap.compare(lengths[0], lengths[1], offset=1.0) if shared else None
        if compared is not None:
            section = ACCEPTANCE if perturbations == (UNPERTURBED,) else PERTURBATIONS
            sentences.append(_length_against(where, compared, names, section, suite.level))
    return sentences


def _own_against(compared: Comparison, names: tuple[str, str], depth: int, level: float) -> Sentence:
    difference = compared.difference
    low, high = sorted((compared.base, compared.base + difference.value))
    shares = f"{percent(low)} of attention is on own drafts at depth {depth}, against {percent(high)}"
    if sign_of(difference) == 0:
        text = f"Which of {names[0]} and {names[1]} drifts less cannot be told: {shares}{_points(difference, level)}."
        return Sentence(text=text, section=ATTENTION)
    less, more = names if difference.value < 0 else names[::-1]
    text = f"{less} drifts less than {more}: {shares}{_points(difference, level)}."
    return Sentence(text=text, section=ATTENTION, tone="good" if less == names[0] else "bad")


def _length_against(where: str, compared: Comparison, names: tuple[str, str], section: str, level: float) -> Sentence:
    lengths = f"{compared.base + compared.difference.value:.2f} against {compared.base:.2f}"
    sign = sign_of(compared.ratio, around=1.0)
    if sign == 0:
        text = f"{where}, no difference in acceptance length can be told: {names[0]} {lengths} of {names[1]}"
        return Sentence(text=f"{text}{interval_text(compared.ratio, level, 'ratio ')}.", section=section)
    text = (
        f"{where}, {names[0]} has the {'longer' if sign > 0 else 'shorter'} acceptance length: {lengths} of {names[1]}"
    )
    text += f", {compared.ratio.value:.2f} times{interval_text(compared.ratio, level)}."
    return Sentence(text=text, section=section, tone="good" if sign > 0 else "bad")


def _counts(results: Iterable[DriftResult], part: Callable[[PromptRow], tuple[float, float]]) -> Counts:
    """What each prompt adds, over several runs of it."""
    sums: dict[str, tuple[float, float]] = {}
    for result in results:
        for row in result.prompt_rows:
            total, count = part(row)
            before = sums.get(row.id, (0.0, 0.0))
            sums[row.id] = (before[0] + total, before[1] + count)
    return sums


def _own(row: PromptRow, depth: int) -> tuple[float, float]:
    rounds = row.rounds_by_depth[depth] if depth < len(row.rounds_by_depth) else 0
    share = row.drafted_attention[depth] if rounds else None
    return (share * rounds, rounds) if share is not None else (0.0, 0.0)


def _points(interval: Interval, level: float) -> str:
    """Of a difference of shares, whichever way round."""
    if interval.low is None or interval.high is None:
        return ""
    low, high = sorted((100 * interval.low, 100 * interval.high))
    if high < 0:
        low, high = -high, -low
    return f" (difference, {percent(level)} interval: {low:.0f} to {high:.0f} points)"
