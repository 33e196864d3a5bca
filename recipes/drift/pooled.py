"""What the probes of an experiment come to: figures of each arm over its seeds, arms beside each other, sentences.

Intervals hold both doubts: prompts are drawn anew, and what seeds differ by is added (`fledge.report.intervals`). With
three seeds that is wide, and honest: a difference that three drafters do not show is none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fledge.drift.change import LIMITS, AttentionChange, attention_change, compare_changes, shares_by_depth
from fledge.drift.perturb import UNPERTURBED, parse_perturbation
from fledge.drift.result import DriftResult
from fledge.drift.suite import GROUPS, acceptance_counts
from fledge.errors import ConfigError
from fledge.files import read_json
from fledge.records import Record
from fledge.report.intervals import Bootstrap, Comparison, Counts, Interval, Panel, pooled
from fledge.report.page import said
from fledge.report.prose import Sentence
from recipes.drift.experiment import Arm, Experiment, Fit

Runs = Mapping[str, Sequence[DriftResult]]  # of one arm: condition -> results, a seed each


@dataclass(frozen=True, kw_only=True)
class ConditionResult(Record):
    """An arm under one condition."""

    prompts: int
    prompt_tokens: float  # mean
    repeated_share: float  # of the output tokens
    accepted: Interval  # drafts per round, without rounds that begin in repetition; acceptance length is one more
    accepted_by_seed: tuple[float, ...]
    left: Comparison | None  # accepted drafts against the unperturbed run; None: that is this
    attention: AttentionChange | None


@dataclass(frozen=True, kw_only=True)
class ArmResult(Record):
    """An arm: all its drafters together. Curves are of the unperturbed workload, by depth."""

    title: str
    variant: str
    trained_depth: int
    seeds: int
    recent: tuple[Interval, ...]  # attention on the last tokens
    sink: tuple[Interval, ...]  # on the first
    hidden_rms: tuple[Interval, ...]  # of the state before the final norm; what seeds differ by
    hidden_growth: tuple[Interval, ...]  # the same against depth 1
    conditions: dict[str, ConditionResult]

    @property
    def unperturbed(self) -> ConditionResult:
        return self.conditions[UNPERTURBED]


@dataclass(frozen=True, kw_only=True)
class ArmComparison(Record):
    """One arm against another, over the same prompts."""

    arm: str
    base: str
    recent: Interval | None  # change of attention from depth 1 to the last, less the other's
    sink: Interval | None
    accepted: dict[str, Comparison]  # drafts per round, by condition
    lengths: dict[str, Comparison]  # acceptance lengths, by condition


@dataclass(frozen=True, kw_only=True)
class DriftExperiment(Record):
    """The outcome."""

    schema: int = 1
    target: str
    workload: str
    depth: int
    level: float
    arms: tuple[ArmResult, ...]
    comparisons: tuple[ArmComparison, ...]  # with the first variant of the same trained depth
    deeper: tuple[ArmComparison, ...]  # of each variant, its deepest training with its shallowest
    skipped: dict[str, str]  # condition -> reason
    verdicts: tuple[Sentence, ...] = ()  # on each arm, and on training deeper
    side_by_side: tuple[Sentence, ...] = ()  # on the comparisons


def read_probes(experiment: Experiment, out: Path) -> tuple[dict[Arm, Runs], dict[str, str]]:
    """What `probe` left, and why conditions were skipped. A condition counts where every seed of the arm has it."""
    found: dict[Fit, dict[str, DriftResult]] = {}
    skipped: dict[str, str] = {}
    for fit in experiment.fits:
        path = out / "probes" / f"{fit.name}.json"
        values = read_json(path)
        if values is None:
            raise ConfigError(f"{path}: is not there; run --stage probe first")
        skipped |= values["skipped"]
        found[fit] = {name: DriftResult.from_dict(one, str(path)) for name, one in values["results"].items()}
    runs: dict[Arm, Runs] = {}
    for arm in experiment.arms:
        several = [found[Fit(arm, seed)] for seed in experiment.seeds]
        shared = [name for name in several[0] if all(name in one for one in several)]
        runs[arm] = {name: [one[name] for one in several] for name in shared}
    return runs, skipped


def pool(
    experiment: Experiment, runs: Mapping[Arm, Runs], skipped: Mapping[str, str], bootstrap: Bootstrap
) -> DriftExperiment:
    pairs = [(arm, base) for arm in experiment.arms if (base := experiment.base_of(arm)) is not None]
    deepened = []
    for name, variant in experiment.variants.items():
        if len(variant.depths) > 1:
            deepened.append((Arm(name, max(variant.depths)), Arm(name, min(variant.depths))))
    first = runs[experiment.arms[0]][UNPERTURBED][0]
    values: dict[str, Any] = {
        "target": Path(first.target).name,
        "workload": first.workload,
        "depth": first.depth,
        "level": bootstrap.level,
        "arms": tuple(_arm_result(arm, runs[arm], bootstrap) for arm in experiment.arms),
        "comparisons": tuple(_compared(arm, base, runs, bootstrap) for arm, base in pairs),
        "deeper": tuple(_compared(arm, base, runs, bootstrap) for arm, base in deepened),
        "skipped": dict(skipped),
    }
    outcome = DriftExperiment(**values)
    return replace(outcome, verdicts=tuple(_verdicts(outcome)), side_by_side=tuple(_side_by_side(outcome)))


def _arm_result(arm: Arm, runs: Runs, bootstrap: Bootstrap) -> ArmResult:
    plain = runs[UNPERTURBED]
    depths = range(min(len(run.by_depth) for run in plain))

    def of_states(name: str) -> tuple[Interval, ...]:
        return tuple(_over_seeds([getattr(run.by_depth[d], name) for run in plain], bootstrap) for d in depths)

    return ArmResult(
        title=arm.title,
        variant=arm.variant,
        trained_depth=arm.depth,
        seeds=len(plain),
        recent=tuple(shares_by_depth(bootstrap, "recent", *plain)),
        sink=tuple(shares_by_depth(bootstrap, "sink", *plain)),
        hidden_rms=of_states("hidden_rms"),
        hidden_growth=of_states("hidden_growth"),
        conditions={
            name: found
            for name, several in runs.items()
            if (found := _condition_result(several, plain, bootstrap)) is not None
        },
    )


def _condition_result(
    several: Sequence[DriftResult], plain: Sequence[DriftResult], bootstrap: Bootstrap
) -> ConditionResult | None:
    """None where no draft was verified."""
    panel = _panel(acceptance_counts(run) for run in several)
    accepted = bootstrap.interval([panel], pooled())
    if accepted is None:
        return None
    left = None
    if several is not plain:
        left = bootstrap.compare_panels(panel, _panel(acceptance_counts(run) for run in plain))
    totals = panel.values.sum(axis=1)  # [seeds, columns]
    return ConditionResult(
        prompts=several[0].prompts,
        prompt_tokens=several[0].prompt_tokens / max(1, several[0].prompts),
        repeated_share=several[0].repeated_share,
        accepted=accepted,
        accepted_by_seed=tuple((totals[:, 0] / totals[:, 1].clip(min=1)).tolist()),
        left=left,
        attention=attention_change(bootstrap, *several),
    )


def _compared(arm: Arm, base: Arm, runs: Mapping[Arm, Runs], bootstrap: Bootstrap) -> ArmComparison:
    shared = [name for name in runs[arm] if name in runs[base]]
    # Conditions one by one, and those of a group together.
    groups = {name: [name] for name in shared}
    for name, about in GROUPS.items():
        kinds = {one: set(parse_perturbation(one).kinds) for one in shared if one != UNPERTURBED}
        alike = [one for one, found in kinds.items() if found <= set(about["kinds"])]
        groups |= {name: alike} if len(alike) > 1 and name != "state" else {}  # noise and pin are not alike

    def compared(names: Sequence[str], offset: float) -> Comparison | None:
        sides = []
        for one in (runs[arm], runs[base]):
            by_seed = zip(*(one[name] for name in names), strict=True)
            sides.append(_panel(acceptance_counts(*several) for several in by_seed))
        return bootstrap.compare_panels(*sides, offset=offset)

    def of_all(offset: float) -> dict[str, Comparison]:
        found = {name: compared(names, offset) for name, names in groups.items()}
        return {name: one for name, one in found.items() if one is not None}

    sides = runs[arm][UNPERTURBED], runs[base][UNPERTURBED]
    return ArmComparison(
        arm=arm.title,
        base=base.title,
        recent=compare_changes(bootstrap, "recent", *sides),
        sink=compare_changes(bootstrap, "sink", *sides),
        accepted=of_all(0.0),
        lengths=of_all(1.0),
    )


def _panel(by_seed: Iterable[Counts]) -> Panel:
    """Accepted drafts and rounds of each prompt; a seed is a repeat."""
    return Panel.collect(((seed, id, pair) for seed, one in enumerate(by_seed) for id, pair in one.items()), 2)


def _over_seeds(values: Sequence[float], bootstrap: Bootstrap) -> Interval:
    """A mean, and how far off it may be by what seeds differ by."""
    panel = Panel.collect(((seed, "", (value, 1.0)) for seed, value in enumerate(values)), 2)
    found = bootstrap.interval([panel], pooled())
    assert found is not None
    return found


def in_points(share: Interval) -> Interval:
    """A difference of shares of attention, in points."""
    low, high = (None if end is None else 100 * end for end in (share.low, share.high))
    return Interval(value=100 * share.value, low=low, high=high)


def _verdicts(outcome: DriftExperiment) -> list[Sentence]:
    """By the definition of drift."""
    return said("recipes.drift", "verdict.md.jinja", outcome=outcome, limits=LIMITS)


def _side_by_side(outcome: DriftExperiment) -> list[Sentence]:
    """In the words of `fledge drift`."""
    attention = {arm.title: arm.unperturbed.attention for arm in outcome.arms}
    names = {UNPERTURBED: "On the unperturbed workload"}
    names |= {name: f"Under {about['name']}" for name, about in GROUPS.items()}
    found: list[Sentence] = []
    for one in outcome.comparisons:
        found += said(
            "fledge.drift",
            "comparison.md.jinja",
            suite=outcome,
            one=one.arm,
            other=one.base,
            depth=outcome.depth,
            changes=[attention[one.arm], attention[one.base]],
            difference=one.recent,
            places=[(names[name], "acceptance", one.lengths[name]) for name in names if name in one.lengths],
            tones={-1: "bad", 0: "neutral", 1: "good"},
        )
    return found
