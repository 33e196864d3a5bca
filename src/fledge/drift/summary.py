"""What a suite comes to: each drafter under each perturbation, with intervals, against its unperturbed run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fledge.drift.perturb import UNPERTURBED
from fledge.drift.result import DriftResult, SuiteCell
from fledge.drift.segments import Segment
from fledge.errors import ConfigError, nearest_name_hint
from fledge.records import Record
from fledge.report.intervals import Bootstrap, Comparison, Counts, Interval


@dataclass(frozen=True, kw_only=True)
class DriftSummary(Record):
    """Where attention went and how states grew, at the first, the middle and the last depth."""

    middle_depth: int
    last_depth: int
    own_attention_depth_1: float  # share of attention on the drafter's own drafts, mean over layers and heads
    own_attention_middle: float
    own_attention_last: float
    prompt_attention_depth_1: float  # on the prompt without the sink
    prompt_attention_last: float
    sink_attention_depth_1: float
    sink_attention_last: float
    drift_depth: int | None  # first depth at which attention drifts (see DRIFT_SHARE); None: at no depth
    hidden_growth: float  # RMS before the final norm, last depth over depth 1
    feature_growth: float  # RMS of what the next depth is fed, last depth over depth 1
    top_layer_share: float | None  # of the highest target layer in what fc sums up; None for EAGLE-1
    ece: float | None  # expected calibration error, all depths together
    outside_vocabulary: float | None  # share of misses whose right token cannot be drafted


@dataclass(frozen=True, kw_only=True)
class CellSummary(Record):
    """One drafter under one perturbation."""

    drafter: str
    perturbation: str
    kinds: tuple[str, ...]
    prompts: int
    rounds: int
    left_out: dict[str, str]  # prompt id -> reason
    skip: str | None  # why there are no figures
    acceptance_length: Interval | None
    compared: Comparison | None  # acceptance length against the unperturbed run
    drift: DriftSummary | None
    own_attention_compared: Comparison | None  # at the last depth, against the unperturbed run


@dataclass(frozen=True, kw_only=True)
class SuiteDrafter(Record):
    name: str
    variant: str
    trained_depth: int | None


@dataclass(frozen=True, kw_only=True)
class SuiteResult(Record):
    """All cells, drafter by drafter, each drafter's unperturbed one first."""

    schema: int = 1
    target: str
    workload: str
    depth: int
    level: float  # of the intervals
    drafters: tuple[SuiteDrafter, ...]
    perturbations: tuple[str, ...]
    cells: tuple[CellSummary, ...]

    def cell(self, drafter: str, perturbation: str = UNPERTURBED) -> CellSummary:
        for cell in self.cells:
            if (cell.drafter, cell.perturbation) == (drafter, perturbation):
                return cell
        name, known = (perturbation, self.perturbations) if drafter in self.names else (drafter, self.names)
        raise ConfigError(f"the suite has no '{name}'.{nearest_name_hint(name, known)}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(drafter.name for drafter in self.drafters)

    @property
    def titles(self) -> dict[str, str]:
        """What to call each drafter, by name: its variant, and as much of its name as tells it from the others."""
        variants = [drafter.variant for drafter in self.drafters]
        shown = {name: Path(name).name or name for name in self.names}
        if len(set(shown.values())) < len(shown):
            shown = {name: name for name in self.names}
        return {
            one.name: one.variant if variants.count(one.variant) == 1 else f"{one.variant} ({shown[one.name]})"
            for one in self.drafters
        }

    @property
    def skipped(self) -> tuple[CellSummary, ...]:
        return tuple(cell for cell in self.cells if cell.skip is not None)


def summarise(cells: Sequence[SuiteCell], *, workload: str, bootstrap: Bootstrap) -> SuiteResult:
    """Compare every cell with its drafter's unperturbed one."""
    bases = {cell.drafter: cell for cell in cells if cell.perturbation == UNPERTURBED}
    for name, base in bases.items():
        if base.result is None:
            raise ConfigError(f"{name}: nothing to compare with, the unperturbed workload cannot be run: {base.skip}")
    results = {name: base.result for name, base in bases.items() if base.result is not None}
    first = next(iter(results.values()))
    return SuiteResult(
        target=first.target,
        workload=workload,
        depth=first.depth,
        level=bootstrap.level,
        drafters=tuple(
            SuiteDrafter(name=name, variant=result.variant, trained_depth=result.trained_depth)
            for name, result in results.items()
        ),
        perturbations=tuple(dict.fromkeys(cell.perturbation for cell in cells)),
        cells=tuple(_summary(cell, results[cell.drafter], bootstrap) for cell in cells),
    )


def drift_summary(result: DriftResult) -> DriftSummary | None:
    """None where no draft was verified."""
    if not result.by_depth:
        return None
    first, middle, last = result.by_depth[0], result.by_depth[(len(result.by_depth) - 1) // 2], result.by_depth[-1]
    is_fused = bool(result.fusion_shares) and all(one.part.startswith("layer") for one in result.fusion_shares)
    return DriftSummary(
        middle_depth=middle.depth,
        last_depth=last.depth,
        own_attention_depth_1=first.own_attention,
        own_attention_middle=middle.own_attention,
        own_attention_last=last.own_attention,
        prompt_attention_depth_1=first.prompt_attention,
        prompt_attention_last=last.prompt_attention,
        sink_attention_depth_1=first.attention.mass[Segment.SINK.label],
        sink_attention_last=last.attention.mass[Segment.SINK.label],
        drift_depth=next((one.depth for one in result.by_depth if one.has_drifted), None),
        hidden_growth=last.hidden_growth,
        feature_growth=last.feature_growth,
        top_layer_share=result.fusion_shares[-1].share if is_fused else None,
        ece=result.calibration.error,
        outside_vocabulary=result.outside_vocabulary,
    )


def _summary(cell: SuiteCell, base: DriftResult, bootstrap: Bootstrap) -> CellSummary:
    result = cell.result
    length = compared = own_compared = None
    if result is not None:
        counts = acceptance_counts(result)
        length = bootstrap.acceptance_length(counts)
        if cell.perturbation != UNPERTURBED:
            compared = bootstrap.compare(counts, acceptance_counts(base), offset=1.0)
            last = min(len(result.by_depth), len(base.by_depth))
            if last > 0:
                own_compared = bootstrap.compare(own_attention_counts(result, last), own_attention_counts(base, last))
    return CellSummary(
        drafter=cell.drafter,
        perturbation=cell.perturbation,
        kinds=cell.kinds,
        prompts=0 if result is None else result.prompts,
        rounds=0 if result is None else result.rounds,
        left_out=cell.left_out,
        skip=cell.skip,
        acceptance_length=length,
        compared=compared,
        drift=None if result is None else drift_summary(result),
        own_attention_compared=own_compared,
    )


def acceptance_counts(*results: DriftResult) -> Counts:
    """(accepted, rounds) of each prompt, over several runs of it."""
    rows = [row for result in results for row in result.prompt_rows]
    counts = dict.fromkeys((row.id for row in rows), (0, 0))
    for row in rows:
        accepted, rounds = counts[row.id]
        counts[row.id] = (accepted + row.accepted, rounds + row.rounds)
    return counts


def own_attention_counts(result: DriftResult, depth: int) -> Counts:
    """Attention on own drafts at a depth from 1: sums over the rounds of each prompt, and the rounds."""
    return {row.id: row.own_attention(depth) for row in result.prompt_rows}
