"""What a suite comes to: each drafter under each perturbation, with intervals, against its unperturbed run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fledge.drift.perturb import UNPERTURBED
from fledge.drift.result import DepthMetrics, DriftResult, PromptRow
from fledge.drift.segments import Segment
from fledge.errors import ConfigError, nearest_name_hint
from fledge.records import Record
from fledge.report.intervals import Bootstrap, Comparison, Counts, Interval

# Attention drifts where the drafter's own drafts get more of it than the prompt does, and no less than this. The floor
# keeps a drafter that looks at neither (but at the sink, or at the answer so far) from counting as drifting.
DRIFT_SHARE = 0.2
PROMPT_SEGMENTS = tuple(
    segment.label
    for segment in (Segment.SYSTEM, Segment.USER, Segment.ASSISTANT, Segment.TOOL, Segment.TEMPLATE, Segment.PROMPT)
)


class Probed(Protocol):
    """A cell of the suite."""

    @property
    def drafter(self) -> str: ...
    @property
    def perturbation(self) -> str: ...
    @property
    def kinds(self) -> tuple[str, ...]: ...
    @property
    def left_out(self) -> Mapping[str, str]: ...
    @property
    def skip(self) -> str | None: ...
    @property
    def result(self) -> DriftResult | None: ...


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
        known = {cell.drafter for cell in self.cells} if drafter not in self.names else self.perturbations
        name = drafter if drafter not in self.names else perturbation
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


def summarise(cells: Iterable[Probed], *, workload: str, bootstrap: Bootstrap) -> SuiteResult:
    """Compare every cell with its drafter's unperturbed one."""
    several = list(cells)
    bases = {cell.drafter: cell for cell in several if cell.perturbation == UNPERTURBED}
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
        perturbations=tuple(dict.fromkeys(cell.perturbation for cell in several)),
        cells=tuple(_summary(cell, results[cell.drafter], bootstrap) for cell in several),
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
        own_attention_depth_1=own_share(first),
        own_attention_middle=own_share(middle),
        own_attention_last=own_share(last),
        prompt_attention_depth_1=prompt_share(first),
        prompt_attention_last=prompt_share(last),
        sink_attention_depth_1=first.attention.mass[Segment.SINK.label],
        sink_attention_last=last.attention.mass[Segment.SINK.label],
        drift_depth=next((one.depth for one in result.by_depth if has_drifted(one)), None),
        hidden_growth=last.hidden_growth,
        feature_growth=last.feature_growth,
        top_layer_share=result.fusion_shares[-1].share if is_fused else None,
        ece=result.calibration.error,
        outside_vocabulary=result.outside_vocabulary,
    )


def own_share(depth: DepthMetrics) -> float:
    return depth.attention.mass[Segment.DRAFTED.label]


def prompt_share(depth: DepthMetrics) -> float:
    """Attention on the prompt, whatever part of it, but for the sink."""
    return sum(depth.attention.mass[label] for label in PROMPT_SEGMENTS)


def has_drifted(depth: DepthMetrics) -> bool:
    """Whether attention has left the prompt for the drafter's own drafts (see DRIFT_SHARE)."""
    return own_share(depth) >= DRIFT_SHARE and own_share(depth) > prompt_share(depth)


def _summary(cell: Probed, base: DriftResult, bootstrap: Bootstrap) -> CellSummary:
    result = cell.result
    is_base = cell.perturbation == UNPERTURBED
    length = compared = own_compared = None
    if result is not None:
        counts = _acceptance_counts(result)
        length = bootstrap.acceptance_length(counts)
        if not is_base:
            compared = bootstrap.compare(counts, _acceptance_counts(base), offset=1.0)
            last = min(len(result.by_depth), len(base.by_depth)) - 1
            own_compared = bootstrap.compare(_own_counts(result, last), _own_counts(base, last)) if last >= 0 else None
    return CellSummary(
        drafter=cell.drafter,
        perturbation=cell.perturbation,
        kinds=cell.kinds,
        prompts=0 if result is None else result.prompts,
        rounds=0 if result is None else result.rounds,
        left_out=dict(cell.left_out),
        skip=cell.skip,
        acceptance_length=length,
        compared=compared,
        drift=None if result is None else drift_summary(result),
        own_attention_compared=own_compared,
    )


def _acceptance_counts(result: DriftResult) -> Counts:
    return {row.id: (row.accepted, row.rounds) for row in result.prompt_rows}


def _own_counts(result: DriftResult, depth: int) -> Counts:
    """Sums over the rounds of each prompt, at a depth from 0."""
    return {row.id: _own(row, depth) for row in result.prompt_rows}


def _own(row: PromptRow, depth: int) -> tuple[float, float]:
    rounds = row.rounds_by_depth[depth] if depth < len(row.rounds_by_depth) else 0
    share = row.drafted_attention[depth] if rounds else None
    return (share * rounds, rounds) if share is not None else (0.0, 0)
