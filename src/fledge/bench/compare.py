"""Two results files: what changed beyond noise, what is missing on either side, and what makes them hard to compare.

Speeds are compared as they are on one machine. Between machines only ratios are, each to the baseline of its own file.
Acceptance does not depend on the machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fledge.bench.figures import (
    Key,
    acceptance,
    cells_by_key,
    decoding,
    latencies,
    ratio_reason,
    throughput,
    why_partial,
)
from fledge.bench.part import workload_facts
from fledge.bench.resampling import (
    Panel,
    Statistic,
    common_prompts,
    divide,
    interval,
    mean_ratio,
    pooled,
    together,
    value_of,
)
from fledge.evaluation.results import Cell, Load, Results
from fledge.records import Record
from fledge.report.intervals import Bootstrap, Interval
from fledge.report.prose import sign_of

THRESHOLD, LEVEL = 0.05, 0.95
LEAST_REPEATS = 2  # of each side: one repeat says nothing about how much the machine varies
Verdict = Literal["better", "worse", "same", "unknown"]
FailOn = Literal["regression", "change"]
_MACHINE = ("device", "cpu", "cpus")
_SETUP = ("threads", "platform", "fledge_version", "git_commit")
_OF_THE_RUN = ("workloads", "repeats", "requests")  # settings that are compared otherwise, or need not be the same


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure that can be compared: a sum over another, and which way is better."""

    name: str
    title: str
    panel: Callable[[Sequence[Cell]], Panel]
    higher_is_better: bool = True
    is_speed: bool = True
    offset: float = 0.0


def _first_tokens(cells: Sequence[Cell]) -> Panel:
    found = latencies(cells, "ttft").items()
    return Panel.collect(((r, prompt, (sum(values), len(values))) for (r, prompt), values in found), columns=2)


METRICS = {
    one.name: one
    for one in (
        Metric(name="per-user", title="tokens/s per user", panel=decoding),
        Metric(name="total", title="tokens/s in all", panel=throughput),
        Metric(name="ttft", title="mean TTFT, ms", panel=_first_tokens, higher_is_better=False),
        Metric(name="acceptance", title="acceptance length", panel=acceptance, is_speed=False, offset=1.0),
    )
}


@dataclass(frozen=True, kw_only=True)
class Change(Record):
    """One figure on both sides. `ratio` is B over A; None where it cannot be given, and `reason` says why."""

    contender: str
    workload: str
    load: Load
    metric: str
    before: float | None
    after: float | None
    ratio: Interval | None
    verdict: Verdict
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """Everything that `fledge bench compare` says. `is_relative`: speeds are ratios to each file's own baseline."""

    is_relative: bool
    threshold: float
    level: float
    changes: tuple[Change, ...]
    missing: tuple[str, ...]  # there in A, whole, and not so in B
    added: tuple[str, ...]  # the other way round
    warnings: tuple[str, ...]

    def fails(self, on: FailOn) -> list[str]:
        """Why a job that fails on this fails; empty where it does not."""
        bad = ("worse",) if on == "regression" else ("worse", "better")
        lines = [describe(change) for change in self.changes if change.verdict in bad]
        lines += [f"missing in B: {line}" for line in self.missing]
        return lines + ([f"only in B: {line}" for line in self.added] if on == "change" else [])


def describe(change: Change) -> str:
    """One line."""
    where = f"{change.contender}, {change.workload}, {change.load}: {METRICS[change.metric].title}"
    if change.ratio is None:
        return f"{where}: {change.reason}"
    ends = "" if change.ratio.low is None else f" [{change.ratio.low:.3f}, {change.ratio.high:.3f}]"
    return f"{where} {change.verdict}, {change.ratio.value:.3f} times{ends}"


def compare(
    a: Results,
    b: Results,
    *,
    metrics: Sequence[str] = tuple(METRICS),
    threshold: float = THRESHOLD,
    level: float = LEVEL,
    is_relative: bool | None = None,
) -> Comparison:
    """Compare B with A. `is_relative` None: where the machines differ."""
    if is_relative is None:
        is_relative = bool(different_machines(a, b))
    sides = (cells_by_key(a), cells_by_key(b))
    missing, added = _absent(sides[0], sides[1]), _absent(sides[1], sides[0])
    bootstrap = Bootstrap(level=level)
    changes = []
    for key in sides[0]:
        if key not in sides[1]:
            continue
        for name in metrics:
            metric = METRICS[name]
            if metric.is_speed and "eval" in (a.kind, b.kind):
                continue  # its times are no speeds
            change = _change(a, b, key, metric, sides, is_relative and metric.is_speed, bootstrap, threshold)
            if change is not None:
                changes.append(change)
    return Comparison(
        is_relative=is_relative,
        threshold=threshold,
        level=level,
        changes=tuple(changes),
        missing=tuple(missing),
        added=tuple(added),
        warnings=tuple(warnings(a, b)),
    )


Sides = tuple[Mapping[Key, Sequence[Cell]], Mapping[Key, Sequence[Cell]]]


def _change(
    a: Results,
    b: Results,
    key: Key,
    metric: Metric,
    sides: Sides,
    is_relative: bool,
    bootstrap: Bootstrap,
    threshold: float,
) -> Change | None:
    """None where neither side has the figure, or it is that of a baseline as a ratio to itself."""
    baselines = (a.baseline, b.baseline)
    if is_relative and key[0] in baselines:
        return None
    mine = [side[key] for side in sides]
    bases = [side.get((name or "", *key[1:]), []) for side, name in zip(sides, baselines, strict=True)]
    panels = [metric.panel(cells) for cells in mine]
    if not any(panel.values.size for panel in panels):
        return None
    statistic: Statistic
    if is_relative:
        panels = [together(panel, metric.panel(base)) for panel, base in zip(panels, bases, strict=True)]
        statistic = _of_ratios
    else:
        statistic = _of_figures(metric.offset)
    reason = _why_not(a, b, key, metric, mine, bases if is_relative else None)
    common = common_prompts(*panels)
    if reason is None and not common:
        empty = [letter for letter, panel in zip("AB", panels, strict=True) if not panel.values.size]
        reason = f"not reported in {empty[0]}" if empty else "no prompt in common"
    values: list[float | None] = [None, None]
    found = None
    if reason is None:
        panels = [panel.only(prompts=common) for panel in panels]
        values = [value_of(panel, _single(metric, is_relative)) for panel in panels]
        found = interval(panels, statistic, bootstrap)
        if found is None:
            reason = "nothing to compare"
        elif found.low is None:
            reason = "measured once: noise is not known"
    return Change(
        contender=key[0],
        workload=key[1],
        load=key[2],
        metric=metric.name,
        before=values[0],
        after=values[1],
        ratio=found,
        verdict="unknown" if reason or found is None else _verdict(found, metric, threshold),
        reason=reason,
    )


def _verdict(ratio: Interval, metric: Metric, threshold: float) -> Verdict:
    """A change is one whose interval is all on one side of 1, and which is larger than the threshold."""
    sign = sign_of(ratio, around=1.0)
    if sign == 0 or abs(ratio.value - 1) <= threshold:
        return "same"
    return "better" if (sign > 0) == metric.higher_is_better else "worse"


def _single(metric: Metric, is_relative: bool) -> Statistic:
    if is_relative:
        return lambda sides: mean_ratio(sides[0])
    return pooled(offset=metric.offset)


def _of_figures(offset: float) -> Statistic:
    one = pooled(offset=offset)
    return lambda sides: divide(one(sides[1:]), one(sides[:1]))


def _of_ratios(sides: Sequence[Any]) -> Any:
    return divide(mean_ratio(sides[1]), mean_ratio(sides[0]))


def _why_not(
    a: Results,
    b: Results,
    key: Key,
    metric: Metric,
    mine: Sequence[Sequence[Cell]],
    bases: Sequence[Sequence[Cell]] | None,
) -> str | None:
    """Why a figure cannot be compared; None where it can."""
    digests = [workload_facts(one).get(key[1], {}).get("digest") for one in (a, b)]
    if None not in digests and digests[0] != digests[1]:
        return "the workload has other prompts"
    for letter, results, side, base in zip("AB", (a, b), mine, bases or ((), ()), strict=True):
        reason = why_partial(side)
        if bases is not None:
            reason = ratio_reason(key[0], side, results.baseline, base) if results.baseline else "no baseline"
        if reason:
            return f"{letter}: {reason}"
        if metric.is_speed and len({cell.repeat for cell in side}) < LEAST_REPEATS:
            return f"{letter}: one repeat only, so noise is not known"
    return None


def _absent(here: Mapping[Key, Sequence[Cell]], there: Mapping[Key, Sequence[Cell]]) -> list[str]:
    """What is whole here and not there, one line each."""
    lines = []
    for key, cells in here.items():
        reason = why_partial(there.get(key, []))
        if reason and not why_partial(cells):
            lines.append(f"{key[0]}, {key[1]}, {key[2]} ({reason})")
    return lines


def different_machines(a: Results, b: Results) -> list[str]:
    """In what the machines differ, one line each."""
    return _differences(a.provenance, b.provenance, _MACHINE)


def warnings(a: Results, b: Results) -> list[str]:
    """Whatever is not the same on both sides, beside the code that is being compared."""
    lines = [f"other machine: {line}" for line in different_machines(a, b)]
    lines += _differences(a.provenance, b.provenance, _SETUP)
    before, after = (one.provenance.get("versions") or {} for one in (a, b))
    lines += [f"version of {line}" for line in _differences(before, after, sorted(before | after))]
    if a.kind != b.kind:
        lines.append(f"kind: {a.kind} in A, {b.kind} in B")
    keys = sorted((set(a.settings) | set(b.settings)) - set(_OF_THE_RUN))
    lines += [f"setting {line}" for line in _differences(a.settings, b.settings, keys)]
    facts = workload_facts(a), workload_facts(b)
    for name in sorted(facts[0].keys() & facts[1].keys()):
        lines += [f"workload {name}: {line}" for line in _differences(facts[0][name], facts[1][name], ("digest",))]
    contenders = [{one.name: one for one in results.contenders} for results in (a, b)]
    for name in contenders[0].keys() & contenders[1].keys():
        for field in ("kind", "target", "drafter", "speculation", "inflated", "temperature", "versions"):
            one, other = (getattr(side[name], field) for side in contenders)
            if one != other:
                lines.append(f"contender {name}, {field}: {_shown(one)} in A, {_shown(other)} in B")
    if a.baseline != b.baseline:
        lines.append(f"baseline: {_shown(a.baseline)} in A, {_shown(b.baseline)} in B")
    return lines


def _differences(one: Mapping[str, Any], other: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    return [
        f"{key}: {_shown(one.get(key))} in A, {_shown(other.get(key))} in B"
        for key in keys
        if _plain(one.get(key)) != _plain(other.get(key))
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value  # JSON knows no tuples


def _shown(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
