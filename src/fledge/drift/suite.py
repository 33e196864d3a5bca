"""Probes every drafter under every perturbation, and compares each cell with the drafter's unperturbed run.

    DIRECTORY/conversations.json           the workload, with the target's answers to earlier turns that had none
    DIRECTORY/cells/DRAFTER/NAME.json      one probe's full result, or why there is none
    DIRECTORY/suite.json                   the comparison

A cell's file is written atomically and contains a digest of everything it depends on: an interrupted run is resumed,
and a cell is probed again if the drafter, workload or settings have changed. The named figures of the comparison
(data/figures.yaml) are those in verdicts and in conditions such as `--fail-if 'al_drop>0.2'`.
"""

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fledge.drift.change import FEW_PROMPTS, AttentionChange, attention_change, compare_changes
from fledge.drift.perturb import UNPERTURBED, Perturbation, parse_perturbation, texts
from fledge.drift.probe import VERSION, Prober
from fledge.drift.prompts import ProbePrompt, has_open_turns
from fledge.drift.result import DriftResult, Results
from fledge.errors import ConfigError, nearest_name_hint
from fledge.evaluation.workloads import Workload
from fledge.files import digest, distinct_names, json_line, read_json, write_json, write_text
from fledge.progress import Advance, Progress
from fledge.records import Record
from fledge.report.intervals import Bootstrap, Comparison, Counts, Interval
from fledge.report.prose import sign_of

NO_MEMORY = "the device's memory does not suffice for prompts of this length"
FIGURES: dict[str, str] = texts("figures")["figures"]
GROUPS: dict[str, dict[str, Any]] = texts("figures")["groups"]
_COMPARISONS = {">=": "ge", "<=": "le", ">": "gt", "<": "lt", "==": "eq", "!=": "ne"}  # of `operator`
_CONDITION = re.compile(r"\s*([A-Za-z_0-9]+)\s*(>=|<=|==|!=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


@dataclass(frozen=True, kw_only=True)
class SuiteCell(Record):
    """One drafter under one perturbation, with its figures if it was measured."""

    drafter: str
    perturbation: str
    kinds: tuple[str, ...]
    left_out: dict[str, str]  # prompt id -> reason
    skip: str | None  # why there is no result
    prompts: int = 0
    rounds: int = 0
    acceptance_length: Interval | None = None  # without rounds that begin in repetition, as in all comparisons
    acceptance_length_with_repetition: float | None = None  # over all rounds
    acceptance_length_without_copies: float | None = None  # also without rounds that begin in a copy of the prompt
    repeated_share: float | None = None  # of the output tokens
    copied_share: float | None = None  # of the output tokens, from the prompt
    compared: Comparison | None = None  # acceptance length against the unperturbed run
    drift: dict[str, Any] | None = None  # see `drift_figures`
    attention: AttentionChange | None = None  # None if fewer than two depths were drafted
    recent_compared: Interval | None = None  # change of recent attention minus that of the unperturbed run


@dataclass(frozen=True, kw_only=True)
class SuiteDrafter(Record):
    name: str
    variant: str
    trained_depth: int | None


@dataclass(frozen=True, kw_only=True)
class SuiteResult(Record):
    """All cells, drafter by drafter, each drafter's unperturbed one first."""

    schema: int = 2
    target: str
    workload: str
    depth: int
    level: float  # of the intervals
    drafters: tuple[SuiteDrafter, ...]
    perturbations: tuple[str, ...]
    cells: tuple[SuiteCell, ...]

    def cell(self, drafter: str, perturbation: str = UNPERTURBED) -> SuiteCell:
        return next(cell for cell in self.cells if (cell.drafter, cell.perturbation) == (drafter, perturbation))

    def perturbed(self, drafter: str, group: str | None = None) -> list[SuiteCell]:
        """A drafter's perturbed cells, skipped ones too; with `group` (see GROUPS), only those of kinds in it."""
        cells = [cell for cell in self.cells if cell.drafter == drafter and cell.perturbation != UNPERTURBED]
        return [cell for cell in cells if group is None or set(cell.kinds) <= set(GROUPS[group]["kinds"])]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(drafter.name for drafter in self.drafters)

    @property
    def titles(self) -> dict[str, str]:
        """A title for each drafter: its variant, with a part of its name if others have the same variant."""
        variants = [drafter.variant for drafter in self.drafters]
        return {
            one.name: one.variant if variants.count(one.variant) == 1 else f"{one.variant} ({short})"
            for one, short in zip(self.drafters, distinct_names(self.names), strict=True)
        }


def run_suite(
    drafters: Sequence[str],
    workload: Workload,
    perturbations: Sequence[str],
    prober: Prober,
    directory: Path,
    *,
    bootstrap: Bootstrap | None = None,
    progress: Progress | None = None,
) -> tuple[SuiteResult, Results]:
    """Probe the cells that are not yet in `directory`. Returns the comparison, which is also saved, and all results."""
    parsed = {one.name: one for one in (Perturbation(), *map(parse_perturbation, perturbations))}
    if not drafters or len(set(drafters)) != len(drafters):
        raise ConfigError("drafters: expected at least one, each once")
    directory.mkdir(parents=True, exist_ok=True)
    progress = progress or Progress(quiet=True)
    prompts = probe_prompts(workload, drafters[0], prober, directory)
    cells: list[SuiteCell] = []
    results: dict[tuple[str, str], DriftResult] = {}
    for drafter in drafters:
        with progress.task(drafter, len(parsed)) as advance:
            for name, perturbation in parsed.items():
                saved = probe_cell(drafter, perturbation, prompts, prober, directory, advance)
                cells.append(SuiteCell.from_dict(saved, name))
                if saved["result"] is not None:
                    results[drafter, name] = DriftResult.from_dict(saved["result"], name)
                advance(1, note=f"{name}: {'skipped' if saved['skip'] else 'done'}")
    suite = summarise(cells, results, workload=workload.name, bootstrap=bootstrap or Bootstrap())
    write_json(directory / "suite.json", suite.to_dict())
    return suite, results


def cell_path(directory: Path, drafter: str, perturbation: Perturbation) -> Path:
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(drafter).name)
    return directory / "cells" / f"{readable}-{digest(drafter)[:6]}" / f"{perturbation.name.replace(':', '-')}.json"


def probe_cell(
    drafter: str,
    perturbation: Perturbation,
    prompts: Sequence[ProbePrompt],
    prober: Prober,
    directory: Path,
    advance: Advance = lambda *_, **__: None,
) -> dict[str, Any]:
    """Return the content of a cell's file. If there is none that is up to date, probe the cell and write it."""
    path = cell_path(directory, drafter, perturbation)
    key = digest([VERSION, prober.identity(drafter), [asdict(prompt) for prompt in prompts], perturbation.name])
    saved = read_json(path)
    if saved is not None and saved.get("key") == key:
        return saved
    prober.load(drafter)
    cell: dict[str, Any] = {"key": key, "drafter": drafter, "perturbation": perturbation.name}
    cell |= {"kinds": perturbation.kinds, "left_out": {}, "skip": None, "result": None}
    try:
        answered = prober.answered(prompts, perturbation, advance)
        cell |= {"left_out": answered.left_out, "skip": answered.skip}
        if answered.skip is None:
            cell["result"] = prober.probe(answered, perturbation, advance).to_dict()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json_line(cell))
    except torch.OutOfMemoryError:  # not saved: there may be enough memory the next time
        torch.cuda.empty_cache()
        cell["skip"] = NO_MEMORY
    return cell


def probe_prompts(workload: Workload, drafter: str, prober: Prober, directory: Path) -> Sequence[ProbePrompt]:
    """Return a workload's prompts with the target's answers to earlier turns.

    They are generated once for all drafters and perturbations: the text does not depend on which `drafter` is loaded.
    """
    prompts = [ProbePrompt(**vars(one)) for one in workload.prompts]
    if not any(has_open_turns(prompt) for prompt in prompts):
        return prompts
    key = digest([VERSION, prober.target_identity, prober.settings.max_tokens, [asdict(prompt) for prompt in prompts]])
    path = directory / "conversations.json"
    found = read_json(path)
    if found is None or found["key"] != key:
        prober.load(drafter)
        answered = prober.answer_earlier_turns(prompts)
        found = {"key": key, "messages": [prompt.messages for prompt in answered]}
        write_text(path, json_line(found))
    return [replace(one, messages=tuple(several)) for one, several in zip(prompts, found["messages"], strict=True)]


def summarise(cells: Sequence[SuiteCell], results: Results, *, workload: str, bootstrap: Bootstrap) -> SuiteResult:
    """Compare every cell with its drafter's unperturbed one."""
    base = {drafter: result for (drafter, name), result in results.items() if name == UNPERTURBED}
    compared = []
    for cell in cells:
        if cell.drafter not in base:
            why = f"nothing to compare with, the unperturbed workload cannot be run: {cell.skip}"
            raise ConfigError(f"{cell.drafter}: {why}")
        found: dict[str, Any] = {}
        if (result := results.get((cell.drafter, cell.perturbation))) is not None:
            counts, first = acceptance_counts(result), base[cell.drafter]
            found = {"prompts": result.prompts, "rounds": result.acceptance.rounds, "drift": drift_figures(result)}
            found["acceptance_length"] = bootstrap.acceptance_length(counts)
            found["acceptance_length_with_repetition"] = result.acceptance.acceptance_length
            found["acceptance_length_without_copies"] = result.novel_acceptance.acceptance_length
            found["repeated_share"] = result.repeated_share
            found["copied_share"] = result.copied_share
            found["attention"] = attention_change(bootstrap, result)
            if result is not first:
                found["compared"] = bootstrap.compare(counts, acceptance_counts(first), offset=1.0)
                found["recent_compared"] = compare_changes(bootstrap, "recent", [result], [first])
        compared.append(replace(cell, **found))
    first = next(iter(base.values()))
    return SuiteResult(
        target=first.target,
        workload=workload,
        depth=first.depth,
        level=bootstrap.level,
        drafters=tuple(
            SuiteDrafter(name=name, variant=result.variant, trained_depth=result.trained_depth)
            for name, result in base.items()
        ),
        perturbations=tuple(dict.fromkeys(cell.perturbation for cell in cells)),
        cells=tuple(compared),
    )


def drift_figures(result: DriftResult) -> dict[str, Any] | None:
    """Return figures of attention and of the growth of states (see FIGURES). None if no draft was verified."""
    if not result.by_depth:
        return None
    first, last = result.by_depth[0], result.by_depth[-1]
    is_fused = bool(result.fusion_shares) and all(one.part.startswith("layer") for one in result.fusion_shares)
    return {
        "last_depth": last.depth,
        "recent_attention_depth_1": first.recent_attention,
        "recent_attention_last": last.recent_attention,
        "prompt_attention_depth_1": first.prompt_attention,
        "prompt_attention_last": last.prompt_attention,
        "sink_attention_depth_1": first.sink_attention,
        "sink_attention_last": last.sink_attention,
        "hidden_growth": last.hidden_growth,
        "feature_growth": last.feature_growth,
        "top_layer_share": result.fusion_shares[-1].share if is_fused else None,  # EAGLE-1 has no layers to share
        "ece": result.calibration.error,
        "outside_vocabulary": result.outside_vocabulary,
    }


def acceptance_counts(*results: DriftResult) -> Counts:
    """(accepted, rounds) of each prompt over several runs, without rounds that begin in repetition."""
    counts: dict[str, tuple[int, int]] = {}
    for row in (row for result in results for row in result.prompt_rows):
        (accepted, rounds), found = counts.get(row.id, (0, 0)), row.fresh_acceptance
        counts[row.id] = (accepted + sum(found.accepted_by_depth), rounds + found.rounds)
    return counts


def figures(suite: SuiteResult, drafter: str) -> dict[str, float]:
    """Return the figures (see FIGURES) of a drafter. What was not measured is left out."""
    base, cells = suite.cell(drafter), suite.perturbed(drafter)
    found: dict[str, float | None] = dict(base.drift or {})
    if base.acceptance_length is not None:
        found |= {"al": base.acceptance_length.value, "al_low": base.acceptance_length.low}
        found["accepted_per_round"] = base.acceptance_length.value - 1
    found |= {"al_with_repetition": base.acceptance_length_with_repetition, "repetition": base.repeated_share}
    found |= {"al_without_copies": base.acceptance_length_without_copies, "copies": base.copied_share}
    if (attention := base.attention) is not None:
        for name, one in (("recent", attention.recent), ("sink", attention.sink)):
            found |= {f"{name}_attention_change": one.change.value, f"{name}_attention_slope": one.slope.value}
        if attention.status != "few":  # it is the verdict as a number
            found["drift_depth"] = attention.drift_depth or math.inf
    for name, group in {"al_drop": None, **{f"al_drop_{group}": group for group in GROUPS}}.items():
        if (worst := worst_of(suite.perturbed(drafter, group))) is not None:
            found[name] = 1 - worst[1].ratio.value
    highs = [cell.compared.ratio.high for cell in cells if cell.compared is not None]
    found["al_drop_certain"] = max((1 - high for high in highs if high), default=None)
    rises = [cell.recent_compared for cell in cells]
    found["recent_attention_rise"] = max((rise.value for rise in rises if rise is not None), default=None)
    return {name: float(value) for name in FIGURES if (value := found.get(name)) is not None and not math.isnan(value)}


def worst_of(cells: Iterable[SuiteCell], *, prefer_certain: bool = False) -> tuple[SuiteCell, Comparison] | None:
    """The cell of lowest ratio to the unperturbed run; `prefer_certain`: one whose interval is below 1, if any."""
    compared = [(cell, cell.compared) for cell in cells if cell.compared is not None]
    losing = [pair for pair in compared if prefer_certain and sign_of(pair[1].ratio, around=1.0) < 0]
    return min(losing or compared, key=lambda pair: pair[1].ratio.value, default=None)


def parse_conditions(expressions: Iterable[str]) -> list[tuple[str, str, str, float]]:
    """Parse comma-separated conditions into text, figure, comparison and bound of each."""
    conditions = []
    for text in (part.strip() for expression in expressions for part in expression.split(",")):
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise ConfigError(f"condition '{text}': expected a figure, a comparison and a number, such as al_drop>0.2")
        name, comparison, bound = match.groups()
        if name not in FIGURES:
            raise ConfigError(f"condition '{text}': unknown figure '{name}'.{nearest_name_hint(name, FIGURES)}")
        conditions.append((text, name, comparison, float(bound)))
    return conditions


def check(expressions: Iterable[str], figures: Mapping[str, float]) -> list[str]:
    """Return the conditions that hold, as lines such as `al_drop>0.2 (al_drop is 0.31)`.

    A condition says what must not be the case: `al_drop>0.2` is violated by a drop of 0.31.
    """
    violated = []
    for text, name, comparison, bound in parse_conditions(expressions):
        if name not in figures:
            why = f": a verdict takes {FEW_PROMPTS} prompts" if name == "drift_depth" else ""
            raise ConfigError(f"condition '{text}': '{name}' was not measured in this run{why}")
        if getattr(operator, _COMPARISONS[comparison])(figures[name], bound):
            violated.append(f"{text} ({name} is {figures[name]:.4g})")
    return violated
