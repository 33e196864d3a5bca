"""What a suite means, in sentences (data/sentences.yaml): each states figures and names the section that shows them.

Nothing is called better or worse unless the interval of the difference says so.
"""

import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fledge.drift.perturb import UNPERTURBED, texts
from fledge.drift.result import DriftResult, Results
from fledge.drift.summary import (
    GROUPS,
    CellSummary,
    SuiteResult,
    acceptance_counts,
    compare_own_attention,
    worst_of,
)
from fledge.records import Record
from fledge.report.intervals import Bootstrap, Comparison
from fledge.report.prose import Sentence, Tone, interval_text, percent, sign_of

LEVEL_GROWTH = 1.25  # a state that grows by less stays level
DOMINANCE = 1.5  # times its even share: from here on a layer dominates the fused input
POOR_CALIBRATION = 0.1
MANY_OUTSIDE = 0.2  # of the misses
FEW_PROMPTS = 10  # fewer do not show how much prompts differ
_SAID = {name: (section, text) for section, several in texts("sentences").items() for name, text in several.items()}
_TONES: dict[int, Tone] = {-1: "bad", 0: "neutral", 1: "good"}  # by the sign of what should be large


@dataclass(frozen=True, kw_only=True)
class DrafterVerdict(Record):
    """On one drafter."""

    drafter: str
    title: str
    headline: str
    tone: Tone
    sentences: tuple[Sentence, ...]


class _Formatter(string.Formatter):
    def convert_field(self, value: Any, conversion: Any) -> Any:
        return percent(value) if conversion == "p" else super().convert_field(value, conversion)


def _text(name: str, **values: Any) -> str:
    return _Formatter().format(_SAID[name][1], **values)


def _say(name: str, tone: Tone = "neutral", **values: Any) -> Sentence:
    return Sentence(text=_text(name, **values), section=_SAID[name][0], tone=tone)


def verdict(suite: SuiteResult, drafter: str, result: DriftResult) -> DrafterVerdict:
    """`result` is the drafter's unperturbed one."""
    cell = suite.cell(drafter)
    headline, *sentences = _attention(result, cell.drift or {})
    sentences += [*_states(result, cell.drift or {}), *_acceptance(suite, cell, result)]
    sentences += [*_perturbations(suite, drafter), *_misses(cell.drift or {})]
    return DrafterVerdict(
        drafter=drafter,
        title=suite.titles[drafter],
        headline=headline.text,
        tone=sentences[0].tone,
        sentences=tuple(sentences),
    )


def _attention(result: DriftResult, drift: dict[str, Any]) -> Iterator[Sentence]:
    """The headline, and what backs it."""
    if len(result.by_depth) < 2:
        yield Sentence(text="Not measured", section="attention")
        yield _say("shallow" if drift else "nothing")
        return
    last = result.by_depth[-1]
    several = [one.depth for one in result.by_depth if one.has_drifted]
    if not several:
        headline = f"No drift to depth {last.depth}"
    elif len(several) <= last.depth - several[0]:
        headline = f"Drifts at some depths ({', '.join(map(str, several))})"
    else:
        headline = f"Drifts at depth {last.depth}" if len(several) == 1 else f"Drifts from depth {several[0]} on"
    yield Sentence(text=headline, section="attention")
    even = last.uniform_mass["drafted"]
    yield _say(
        "drifts" if several else "steady",
        "bad" if several else "good",
        how=headline[0].lower() + headline[1:],
        own=last.own_attention,
        depth=last.depth,
        prompt=last.prompt_attention,
        before=_text("before", share=result.by_depth[1].own_attention) if last.depth > 2 else "",
        # Own drafts are a large part of a short text, so that a share says little by itself.
        even=_text("no_more" if last.has_drifted and last.own_attention <= even else "even", share=even),
    )
    first, kept = drift["sink_attention_depth_1"], drift["sink_attention_last"]
    if max(first, kept) >= 0.05:
        yield _say("sink", "bad" if kept < first / 2 else "neutral", kept=kept, depth=last.depth, first=first)


def _states(result: DriftResult, drift: dict[str, Any]) -> Iterator[Sentence]:
    if not drift:
        return
    fed, hidden, share = drift["feature_growth"], drift["hidden_growth"], drift["top_layer_share"]
    tone: Tone = "bad" if fed > LEVEL_GROWTH else "neutral" if fed < 1 / LEVEL_GROWTH else "good"
    before = _text("hidden", hidden=_grown(hidden)) if abs(fed - hidden) > 0.02 else ""
    yield _say("growth", tone, fed=_grown(fed), depth=drift["last_depth"], hidden=before)
    even = 1 / max(1, len(result.fusion_shares))
    if share is not None and share >= DOMINANCE * even:
        yield _say("dominates", "bad", share=share, even=even)


def _grown(growth: float) -> str:
    if 1 / LEVEL_GROWTH <= growth <= LEVEL_GROWTH:
        return f"has stayed level ({growth:.2f} times its size)"
    return f"has {'grown' if growth > 1 else 'shrunk'} to {growth:.2g} times its size"


def _acceptance(suite: SuiteResult, cell: CellSummary, result: DriftResult) -> Iterator[Sentence]:
    length, trained = cell.acceptance_length, result.trained_depth
    if length is None:
        return
    yield _say("length", length=length, interval=interval_text(length, suite.level), depth=suite.depth)
    if length.low is not None and cell.prompts < FEW_PROMPTS:
        yield _say("few", prompts=cell.prompts)
    if trained is None or trained >= len(result.by_depth):
        return
    beyond, within = (
        {
            row.id: (sum(row.acceptance.accepted_by_depth[depths]), sum(row.acceptance.reached_by_depth[depths]))
            for row in result.prompt_rows
        }
        for depths in (slice(trained, None), slice(trained))
    )
    compared = Bootstrap(level=suite.level).compare(beyond, within)
    if compared is None:
        yield _say("unreached", trained=trained)
    else:
        after, tone = compared.base + compared.difference.value, _TONES[sign_of(compared.difference)]
        yield _say("beyond", tone, trained=trained, after=after, within=compared.base)


def _misses(drift: dict[str, Any]) -> Iterator[Sentence]:
    if (drift.get("ece") or 0) > POOR_CALIBRATION:
        yield _say("poor", "bad", points=100 * drift["ece"])
    if (drift.get("outside_vocabulary") or 0) > MANY_OUTSIDE:
        yield _say("outside", "bad", share=drift["outside_vocabulary"])


def _perturbations(suite: SuiteResult, drafter: str) -> Iterator[Sentence]:
    unmeasured = []
    for group, about in GROUPS.items():
        cells = suite.perturbed(drafter, group)
        worst = worst_of(cells, prefer_certain=True)
        if worst is not None:
            yield _cost(about, *worst, sum(cell.compared is not None for cell in cells), suite.level)
        elif cells:
            reasons = list(dict.fromkeys(cell.skip or "no draft was verified" for cell in cells))
            unmeasured.append(f"{about['name']} ({'; '.join(reasons[:2])})")
        else:
            unmeasured.append(f"{about['name']} (not asked for)")
    if len(suite.perturbations) == 1:
        unmeasured = ["other prompts (no perturbation was asked for)"]
    if unmeasured:
        yield _say("unmeasured", what="; ".join(unmeasured))


def _cost(about: dict[str, Any], worst: CellSummary, compared: Comparison, measured: int, level: float) -> Sentence:
    ratio, sign = compared.ratio, sign_of(compared.ratio, around=1.0)
    ends = sorted(100 * (end - 1 if sign > 0 else 1 - end) for end in ratio.ends)
    values = {
        "group": about["name"],
        "capital": about["name"][0].upper() + about["name"][1:],
        "which": f"the worst of {measured}: {worst.perturbation}" if measured > 1 else worst.perturbation,
        "change": ratio.value - 1,
        "loss": 1 - ratio.value,
        "size": abs(ratio.value - 1),
        "interval": _text("interval", level=level, low=ends[0], high=ends[1]),
        "verb": "gain" if sign > 0 else "cost up to" if measured > 1 else "cost",
        "task": _text("task") if "changes_task" in about else "",
    }
    return _say("once" if ratio.low is None else "cost" if sign else "chance", _TONES[sign], **values)


def side_by_side(suite: SuiteResult, results: Results, one: str, other: str) -> Iterator[Sentence]:
    """One drafter against another, over the prompts that both have."""
    names = suite.titles[one], suite.titles[other]
    bootstrap = Bootstrap(level=suite.level)
    pair = results[one, UNPERTURBED], results[other, UNPERTURBED]
    depth = min(len(result.by_depth) for result in pair)
    attention = compare_own_attention(bootstrap, *pair) if depth > 1 else None
    if attention is not None:
        yield _own_against(attention, names, depth, suite.level)
    where = {"On the unperturbed workload": [UNPERTURBED]} | {
        f"Under {GROUPS[group]['name']}": [cell.perturbation for cell in suite.perturbed(one, group)]
        for group in ("template", "long_context")
    }
    for place, perturbations in where.items():
        shared = [name for name in perturbations if (one, name) in results and (other, name) in results]
        sides = [acceptance_counts(*(results[drafter, name] for name in shared)) for drafter in (one, other)]
        compared = bootstrap.compare(sides[0], sides[1], offset=1.0)
        if compared is None:
            continue
        mine, ratio, sign = compared.base + compared.difference.value, compared.ratio, sign_of(compared.ratio, 1.0)
        text = _text(
            "differ" if sign else "same",
            where=place,
            one=names[0],
            which="longer" if sign > 0 else "shorter",
            lengths=_text("lengths", mine=mine, theirs=compared.base, other=names[1]),
            ratio=ratio.value,
            interval=interval_text(ratio, suite.level, "" if sign else "ratio "),
        )
        section = "acceptance" if UNPERTURBED in perturbations else "perturbations"
        yield Sentence(text=text, section=section, tone=_TONES[sign])


def _own_against(compared: Comparison, names: tuple[str, str], depth: int, level: float) -> Sentence:
    difference, sign, interval = compared.difference, sign_of(compared.difference), ""
    small, large = sorted((compared.base, compared.base + difference.value))
    if difference.low is not None:
        low, high = sorted(100 * end * (sign or 1) for end in difference.ends)
        interval = _text("points", level=level, low=low, high=high)
    shares = _text("shares", small=small, depth=depth, large=large, interval=interval)
    less, more = names[::-1] if sign > 0 else names
    return _say("drifts_less" if sign else "drifts_alike", _TONES[-sign], less=less, more=more, shares=shares)
