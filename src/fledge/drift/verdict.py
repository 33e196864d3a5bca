"""What a suite means, in sentences (verdict.jinja, comparison.jinja): each names the section that shows its figures.

Nothing is called better or worse unless the interval of the difference says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from fledge.drift.perturb import UNPERTURBED
from fledge.drift.result import DriftResult, Results
from fledge.drift.summary import GROUPS, SuiteResult, acceptance_counts, compare_own_attention, worst_of
from fledge.records import Record
from fledge.report.intervals import Bootstrap
from fledge.report.prose import Sentence, Tone, interval_text, percent, sign_of

LEVEL_GROWTH = 1.25  # a state that grows by less stays level
DOMINANCE = 1.5  # times its even share: from here on a layer dominates the fused input
POOR_CALIBRATION = 0.1
MANY_OUTSIDE = 0.2  # of the misses
FEW_PROMPTS = 10  # fewer do not show how much prompts differ
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
    cell, trained = suite.cell(drafter), result.trained_depth or 0
    beyond, within = (
        {
            row.id: (sum(row.acceptance.accepted_by_depth[depths]), sum(row.acceptance.reached_by_depth[depths]))
            for row in result.prompt_rows
        }
        for depths in (slice(trained, None), slice(trained))
    )
    groups = [(about, suite.perturbed(drafter, group)) for group, about in GROUPS.items()]
    headline, *sentences = _said(
        "verdict",
        suite,
        cell=cell,
        drift=cell.drift,
        result=result,
        beyond=Bootstrap(level=suite.level).compare(beyond, within) if trained and cell.acceptance_length else None,
        groups=[(about, cells, worst_of(cells, prefer_certain=True)) for about, cells in groups],
        level_growth=LEVEL_GROWTH,
        dominance=DOMINANCE,
        poor_calibration=POOR_CALIBRATION,
        many_outside=MANY_OUTSIDE,
        few_prompts=FEW_PROMPTS,
    )
    named = {"drafter": drafter, "title": suite.titles[drafter], "headline": headline.text}
    return DrafterVerdict(tone=sentences[0].tone, sentences=tuple(sentences), **named)


def side_by_side(suite: SuiteResult, results: Results, one: str, other: str) -> list[Sentence]:
    """One drafter against another, over the prompts that both have."""
    bootstrap = Bootstrap(level=suite.level)
    pair = results[one, UNPERTURBED], results[other, UNPERTURBED]
    depth = min(len(result.by_depth) for result in pair)
    places = [("On the unperturbed workload", "acceptance", [UNPERTURBED])]
    for group in ("template", "long_context"):
        several = [cell.perturbation for cell in suite.perturbed(one, group)]
        places.append((f"Under {GROUPS[group]['name']}", "perturbations", several))
    lengths = []
    for place, section, names in places:
        shared = [name for name in names if (one, name) in results and (other, name) in results]
        sides = [acceptance_counts(*(results[drafter, name] for name in shared)) for drafter in (one, other)]
        lengths.append((place, section, bootstrap.compare(sides[0], sides[1], offset=1.0) if shared else None))
    return _said(
        "comparison",
        suite,
        one=suite.titles[one],
        other=suite.titles[other],
        depth=depth,
        attention=compare_own_attention(bootstrap, *pair) if depth > 1 else None,
        lengths=lengths,
    )


def _said(name: str, suite: SuiteResult, **values: Any) -> list[Sentence]:
    """The sentences of a template, in the order of its calls of `say`."""
    said: list[Sentence] = []

    def say(section: str, tone: Tone = "neutral", *, caller: Callable[[], str]) -> str:
        said.append(Sentence(text=" ".join(caller().split()), section=section, tone=tone))
        return ""

    words = {"percent": percent, "interval_text": interval_text, "sign_of": sign_of, "tones": _TONES}
    _template(name).render(suite=suite, say=say, **words, **values)
    return said


@cache
def _template(name: str) -> Template:
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((files("fledge.drift") / f"{name}.jinja").read_text(encoding="utf-8"))
