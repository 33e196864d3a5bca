"""Named figures of a suite, for verdicts and for `--fail-if 'al_drop>0.2'`."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fledge.drift.perturb import UNPERTURBED
from fledge.drift.summary import CellSummary, SuiteResult
from fledge.errors import ConfigError, nearest_name_hint

# What perturbations are told apart in `al_drop_...`: only those made of nothing else count.
GROUPS: dict[str, frozenset[str]] = {
    "template": frozenset({"template", "template-noise"}),
    "system": frozenset({"system"}),
    "long_context": frozenset({"pad"}),
    "history": frozenset({"history"}),
    "format": frozenset({"tools", "json", "switch"}),
    "temperature": frozenset({"temperature"}),
}
FIGURES: dict[str, str] = {
    "al": "acceptance length of the unperturbed run, to the probe's depth",
    "al_low": "the low end of its interval",
    "al_drop": "largest relative loss of acceptance length under any perturbation: 1 - perturbed / unperturbed",
    "al_drop_certain": "the same at the end of the interval that is kinder to the drafter",
    **{f"al_drop_{group}": f"al_drop over {', '.join(sorted(kinds))} alone" for group, kinds in GROUPS.items()},
    "own_attention_depth_1": "share of attention on the drafter's own drafts at depth 1, unperturbed",
    "own_attention_middle": "the same at the middle depth",
    "own_attention_last": "the same at the last depth",
    "own_attention_rise": "largest rise of own_attention_last under any perturbation (a difference of shares)",
    "prompt_attention_depth_1": "share of attention on the prompt without the sink at depth 1, unperturbed",
    "prompt_attention_last": "the same at the last depth",
    "sink_attention_depth_1": "share of attention on the first tokens at depth 1, unperturbed",
    "sink_attention_last": "the same at the last depth",
    "drift_depth": "first depth at which own drafts get more attention than the prompt, and 20 % at least; inf if none",
    "hidden_growth": "RMS of the hidden state before the final norm, last depth over depth 1",
    "feature_growth": "RMS of what the next depth is fed, last depth over depth 1",
    "top_layer_share": "share of the highest target layer in the fused input",
    "ece": "expected calibration error of the drafter's confidence",
    "outside_vocabulary": "share of misses whose right token is outside the draft vocabulary",
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}
_CONDITION = re.compile(r"\s*([A-Za-z_0-9]+)\s*(>=|<=|==|!=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


def figures(suite: SuiteResult, drafter: str) -> dict[str, float]:
    """Return the figures (see FIGURES) of a drafter. What was not measured is left out."""
    base, cells = suite.cell(drafter), cells_of(suite, drafter)
    found: dict[str, float | None] = {}
    if base.acceptance_length is not None:
        found |= {"al": base.acceptance_length.value, "al_low": base.acceptance_length.low}
    if base.drift is not None:
        found |= {name: value for name, value in base.drift.to_dict().items() if name in FIGURES}
        found["drift_depth"] = math.inf if base.drift.drift_depth is None else base.drift.drift_depth
    for group in (None, *GROUPS):
        worst = worst_cell(suite, drafter, group)
        if worst is not None and worst.compared is not None:
            found["al_drop" if group is None else f"al_drop_{group}"] = 1 - worst.compared.ratio.value
    highs = [cell.compared.ratio.high for cell in cells if cell.compared is not None]
    found["al_drop_certain"] = max((1 - high for high in highs if high), default=None)
    rises = [cell.own_attention_compared for cell in cells if cell.compared is not None]
    found["own_attention_rise"] = max((rise.difference.value for rise in rises if rise is not None), default=None)
    return {name: float(value) for name in FIGURES if (value := found.get(name)) is not None and not math.isnan(value)}


def worst_cell(suite: SuiteResult, drafter: str, group: str | None = None) -> CellSummary | None:
    """The perturbation that costs the drafter the most acceptance length, of all or of a group (see GROUPS)."""
    ratios = [(cell.compared.ratio.value, cell) for cell in cells_of(suite, drafter, group) if cell.compared]
    return min(ratios, key=lambda pair: pair[0])[1] if ratios else None


def cells_of(suite: SuiteResult, drafter: str, group: str | None = None) -> list[CellSummary]:
    """A drafter's perturbed cells, skipped ones included; of a group, those made of nothing else."""
    kinds = None if group is None else GROUPS[group]
    return [
        cell
        for cell in suite.cells
        if cell.drafter == drafter
        and cell.perturbation != UNPERTURBED
        and (kinds is None or (cell.kinds and kinds.issuperset(cell.kinds)))
    ]


@dataclass(frozen=True, kw_only=True)
class FigureCondition:
    """A figure, a comparison and a number, such as `al_drop>0.2`."""

    text: str
    figure: str
    comparison: str
    bound: float

    def holds(self, figures: Mapping[str, float]) -> bool:
        if self.figure not in figures:
            raise ConfigError(f"condition '{self.text}': '{self.figure}' was not measured in this run")
        return _COMPARISONS[self.comparison](figures[self.figure], self.bound)


def parse_conditions(expressions: Iterable[str]) -> tuple[FigureCondition, ...]:
    """Read conditions, several in one expression where commas part them. Unknown figures are refused."""
    conditions = []
    for text in (part.strip() for expression in expressions for part in expression.split(",")):
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise ConfigError(f"condition '{text}': expected a figure, a comparison and a number, such as al_drop>0.2")
        name, comparison, bound = match.groups()
        if name not in FIGURES:
            raise ConfigError(f"condition '{text}': unknown figure '{name}'.{nearest_name_hint(name, FIGURES)}")
        conditions.append(FigureCondition(text=text, figure=name, comparison=comparison, bound=float(bound)))
    return tuple(conditions)


def check(expressions: Sequence[str], figures: Mapping[str, float]) -> list[str]:
    """Return what is violated, each as a line such as `al_drop>0.2 (al_drop is 0.31)`; empty if all is well.

    An expression says what must not be: `al_drop>0.2` is violated by a drop of 0.31.
    """
    return [
        f"{condition.text} ({condition.figure} is {figures[condition.figure]:.4g})"
        for condition in parse_conditions(expressions)
        if condition.holds(figures)
    ]
