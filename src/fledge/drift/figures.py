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
_FROM_DRIFT = (
    "own_attention_depth_1",
    "own_attention_middle",
    "own_attention_last",
    "prompt_attention_depth_1",
    "prompt_attention_last",
    "sink_attention_depth_1",
    "sink_attention_last",
    "hidden_growth",
    "feature_growth",
    "top_layer_share",
    "ece",
    "outside_vocabulary",
)
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}
_CONDITION = re.compile(r"\s*([A-Za-z_0-9]+)\s*(>=|<=|==|!=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


def figures(suite: SuiteResult, drafter: str | None = None) -> dict[str, float]:
    """Return the figures (see FIGURES) of a drafter, or of the only one. What was not measured is left out."""
    if drafter is None:
        if len(suite.drafters) > 1:
            raise ConfigError(f"figures are a drafter's; choose one of {', '.join(suite.names)}")
        drafter = suite.names[0]
    base = suite.cell(drafter)
    found: dict[str, float | None] = {}
    if base.acceptance_length is not None:
        found |= {"al": base.acceptance_length.value, "al_low": base.acceptance_length.low}
    found["al_drop"] = _drop(worst_cell(suite, drafter))
    found["al_drop_certain"] = _largest(
        1 - cell.compared.ratio.high for cell in _compared(suite, drafter) if cell.compared and cell.compared.ratio.high
    )
    for group in GROUPS:
        found[f"al_drop_{group}"] = _drop(worst_cell(suite, drafter, group))
    if base.drift is not None:
        found |= {name: getattr(base.drift, name) for name in _FROM_DRIFT}
        found["drift_depth"] = math.inf if base.drift.drift_depth is None else base.drift.drift_depth
    found["own_attention_rise"] = _largest(
        cell.own_attention_compared.difference.value
        for cell in _compared(suite, drafter)
        if cell.own_attention_compared is not None
    )
    return {name: float(value) for name in FIGURES if (value := found.get(name)) is not None and not math.isnan(value)}


def all_figures(suite: SuiteResult) -> dict[str, dict[str, float]]:
    """The figures of every drafter, by its name."""
    return {name: figures(suite, name) for name in suite.names}


def worst_cell(suite: SuiteResult, drafter: str, group: str | None = None) -> CellSummary | None:
    """The perturbation that costs the drafter the most acceptance length, of all or of a group (see GROUPS)."""
    cells = [cell for cell in cells_of(suite, drafter, group) if cell.compared is not None]
    return min(cells, key=lambda cell: cell.compared.ratio.value if cell.compared else math.inf, default=None)


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


def _compared(suite: SuiteResult, drafter: str) -> list[CellSummary]:
    return [cell for cell in cells_of(suite, drafter) if cell.compared is not None]


def _drop(cell: CellSummary | None) -> float | None:
    return None if cell is None or cell.compared is None else 1 - cell.compared.ratio.value


def _largest(values: Iterable[float]) -> float | None:
    return max(values, default=None)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A figure, a comparison and a number, such as `al_drop>0.2`."""

    text: str
    figure: str
    comparison: str
    bound: float

    def holds(self, figures: Mapping[str, float]) -> bool:
        if self.figure not in figures:
            raise ConfigError(f"condition '{self.text}': '{self.figure}' was not measured in this run")
        return _COMPARISONS[self.comparison](figures[self.figure], self.bound)


def parse_conditions(expressions: Iterable[str]) -> tuple[Condition, ...]:
    """Read conditions, several in one expression where commas part them. Unknown figures are refused."""
    conditions = []
    for text in (part.strip() for expression in expressions for part in expression.split(",")):
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise ConfigError(f"condition '{text}': expected a figure, a comparison and a number, such as al_drop>0.2")
        name, comparison, bound = match.groups()
        if name not in FIGURES:
            raise ConfigError(f"condition '{text}': unknown figure '{name}'.{nearest_name_hint(name, FIGURES)}")
        conditions.append(Condition(text=text, figure=name, comparison=comparison, bound=float(bound)))
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
