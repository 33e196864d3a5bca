"""Two results files: what changed beyond noise, what is missing on either side, and what makes them hard to compare.

Speeds are compared as they are on one machine. Between machines only ratios are, each to the baseline of its own file.
Acceptance does not depend on the machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fledge.bench.figures import acceptance, decoding, first_tokens, throughput, why_no_ratio, why_partial
from fledge.bench.summary import Key, Summary
from fledge.evaluation.results import Cell, Load, Results
from fledge.records import Record
from fledge.report.intervals import (
    LEVEL,
    Bootstrap,
    Floats,
    Interval,
    Panel,
    Side,
    Statistic,
    divide,
    mean_ratio,
    pooled,
)
from fledge.report.prose import number, sign_of, with_interval
from fledge.report.tables import Table, TableCell, figure_cell

THRESHOLD = 0.05
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


METRICS = {
    one.name: one
    for one in (
        Metric(name="per-user", title="tokens/s per user", panel=decoding),
        Metric(name="total", title="tokens/s in all", panel=throughput),
        Metric(name="ttft", title="mean TTFT, ms", panel=first_tokens, higher_is_better=False),
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
class ResultsDiff(Record):
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

    def table(self, *, show_all: bool = False) -> Table:
        """What changed or cannot be told; with `show_all` also what stayed the same."""
        body: list[list[TableCell | str]] = [
            [
                one.contender,
                one.workload,
                str(one.load),
                METRICS[one.metric].title,
                "" if one.before is None else number(one.before),
                "" if one.after is None else number(one.after),
                figure_cell(one.ratio, "{:.3f}"),
                TableCell(
                    text=one.verdict if one.reason is None else f"unknown: {one.reason}",
                    tone="bad" if one.verdict == "worse" else "good" if one.verdict == "better" else "neutral",
                ),
            ]
            for one in self.changes
            if show_all or one.verdict != "same"
        ]
        title = "Speeds as ratios to each file's own baseline" if self.is_relative else "B against A"
        header = ("contender", "workload", "load", "figure", "A", "B", f"B / A [{100 * self.level:g} %]", "")
        return Table.of(title, header, body, labels=4)


def describe(change: Change) -> str:
    """One line."""
    where = f"{change.contender}, {change.workload}, {change.load}: {METRICS[change.metric].title}"
    if change.ratio is None:
        return f"{where}: {change.reason}"
    value, _, ends = with_interval(change.ratio, "{:.3f}").partition(" ")
    return f"{where} {change.verdict}, {value} times {ends}".rstrip()


def compare(
    a: Results,
    b: Results,
    *,
    metrics: Sequence[str] = tuple(METRICS),
    threshold: float = THRESHOLD,
    level: float = LEVEL,
    is_relative: bool | None = None,
) -> ResultsDiff:
    """Compare B with A. `is_relative` None: where the machines differ."""
    if is_relative is None:
        is_relative = bool(different_machines(a, b))
    sides = Summary(a, a.baseline), Summary(b, b.baseline)
    bootstrap = Bootstrap(level=level)
    changes = []
    for key in sides[0].cells:
        for metric in (METRICS[name] for name in metrics):
            if key not in sides[1].cells or (metric.is_speed and "eval" in (a.kind, b.kind)):
                continue  # an eval's times are no speeds
            change = _change(sides, key, metric, is_relative and metric.is_speed, bootstrap, threshold)
            changes += [] if change is None else [change]
    return ResultsDiff(
        is_relative=is_relative,
        threshold=threshold,
        level=level,
        changes=tuple(changes),
        missing=tuple(_absent(*sides)),
        added=tuple(_absent(*reversed(sides))),
        warnings=tuple(warnings(a, b)),
    )


def _change(
    sides: Sequence[Summary],
    key: Key,
    metric: Metric,
    is_relative: bool,
    bootstrap: Bootstrap,
    threshold: float,
) -> Change | None:
    """None where neither side has the figure, or it is that of a baseline as a ratio to itself."""
    if is_relative and key[0] in [side.baseline for side in sides]:
        return None
    panels = [metric.panel(side.cells[key]) for side in sides]
    if not any(panel.values.size for panel in panels):
        return None
    figure: Statistic = pooled(offset=metric.offset)
    if is_relative:
        bases = [side.cells.get((side.baseline or "", *key[1:]), []) for side in sides]
        panels = [panel.beside(metric.panel(base)) for panel, base in zip(panels, bases, strict=True)]
        figure = _mean_ratio
    reason = _why_not(sides, key, metric, is_relative)
    common = panels[0].common_prompts(panels[1])
    if reason is None and not common:
        empty = [letter for letter, panel in zip("AB", panels, strict=True) if not panel.values.size]
        reason = f"not reported in {empty[0]}" if empty else "no prompt in common"
    values: list[float | None] = [None, None]
    found = None
    if reason is None:
        panels = [panel.only(prompts=common) for panel in panels]
        values = [panel.value(figure) for panel in panels]
        found = bootstrap.interval(panels, lambda both: divide(figure(both[1:]), figure(both[:1])))
        if found is None or found.low is None:
            reason = "nothing to compare" if found is None else "measured once: noise is not known"
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


def _mean_ratio(sides: Sequence[Side]) -> Floats:
    return mean_ratio(sides[0])


def _verdict(ratio: Interval, metric: Metric, threshold: float) -> Verdict:
    """A change is one whose interval is all on one side of 1, and which is larger than the threshold."""
    sign = sign_of(ratio, around=1.0)
    if sign == 0 or abs(ratio.value - 1) <= threshold:
        return "same"
    return "better" if (sign > 0) == metric.higher_is_better else "worse"


def _why_not(sides: Sequence[Summary], key: Key, metric: Metric, is_relative: bool) -> str | None:
    """Why a figure cannot be compared; None where it can."""
    digests = [side.results.workload_facts.get(key[1], {}).get("digest") for side in sides]
    if None not in digests and digests[0] != digests[1]:
        return "the workload has other prompts"
    for letter, side in zip("AB", sides, strict=True):
        cells = side.cells[key]
        reason = why_partial(cells)
        if is_relative and side.baseline is None:
            reason = "no baseline"
        elif is_relative and side.baseline is not None:
            base = side.cells.get((side.baseline, *key[1:]), [])
            reason = why_no_ratio(key[0], cells, side.baseline, base)
        if reason:
            return f"{letter}: {reason}"
        if metric.is_speed and len({cell.repeat for cell in cells}) < LEAST_REPEATS:
            return f"{letter}: one repeat only, so noise is not known"
    return None


def _absent(here: Summary, there: Summary) -> list[str]:
    """What is whole here and not there, one line each."""
    reasons = {
        key: why_partial(there.cells.get(key, [])) for key, cells in here.cells.items() if not why_partial(cells)
    }
    return [f"{name}, {workload}, {load} ({reason})" for (name, workload, load), reason in reasons.items() if reason]


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
    facts = a.workload_facts, b.workload_facts
    for name in sorted(facts[0].keys() & facts[1].keys()):
        lines += [f"workload {name}: {line}" for line in _differences(facts[0][name], facts[1][name], ("digest",))]
    contenders = [{one.name: one for one in results.contenders} for results in (a, b)]
    for name in (name for name in contenders[0] if name in contenders[1]):
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
