"""Compares two results files: what changed beyond noise, what is missing, and what makes them hard to compare.

On the same machine, speeds are compared directly; between machines, ratios to the baseline of each file are compared.
Acceptance does not depend on the machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from fledge.bench.figures import decoding, latency, throughput, why_partial
from fledge.bench.rows import Row
from fledge.bench.summary import Key, Summary
from fledge.evaluation.report import NOVEL, acceptance
from fledge.evaluation.results import Cell, Load, Results
from fledge.records import Record, encode
from fledge.report.intervals import LEVEL, Bootstrap, Interval, Panel, Statistic, divide, mean_ratio, pooled
from fledge.report.prose import Tone, number, sign_of, with_interval
from fledge.report.tables import Table, TableCell, figure_cell

THRESHOLD = 0.05
Verdict = Literal["better", "worse", "same", "unknown"]
_MACHINE = ("device", "cpu", "cpus")
_SETUP = ("threads", "platform", "fledge_version", "git_commit")
_OF_THE_RUN = ("workloads", "repeats", "requests")  # settings that are compared separately, or may differ
_CONTENDER = ("kind", "target", "drafter", "speculation", "inflated", "temperature", "versions")
_TONES: dict[Verdict, Tone] = {"better": "good", "worse": "bad", "same": "neutral", "unknown": "neutral"}


@dataclass(frozen=True)
class Metric:
    """A figure that can be compared: the quotient of two sums."""

    title: str
    panel: Callable[[Sequence[Cell]], Panel]
    higher_is_better: bool = True
    is_speed: bool = True
    offset: float = 0.0


METRICS = {
    "per-user": Metric("tokens/s per user", decoding),
    "total": Metric("tokens/s in all", throughput),
    "ttft": Metric("mean TTFT, ms", latency, higher_is_better=False),
    "acceptance": Metric("acceptance length", acceptance, is_speed=False, offset=1.0),
    "fresh-acceptance": Metric(
        "acceptance length without repetition", partial(acceptance, rounds="fresh"), is_speed=False, offset=1.0
    ),
    "novel-acceptance": Metric(
        f"acceptance length {NOVEL}", partial(acceptance, rounds="novel"), is_speed=False, offset=1.0
    ),
}


@dataclass(frozen=True, kw_only=True)
class Change(Record):
    """One figure in both files. `ratio` is B / A; None if it cannot be computed, and `reason` says why."""

    contender: str
    workload: str
    load: Load
    metric: str
    before: float | None = None
    after: float | None = None
    ratio: Interval | None = None
    verdict: Verdict = "unknown"
    reason: str | None = None

    def __str__(self) -> str:
        where = f"{self.contender}, {self.workload}, {self.load}: {METRICS[self.metric].title}"
        if self.ratio is None:
            return f"{where}: {self.reason}"
        value, _, ends = with_interval(self.ratio, "{:.3f}").partition(" ")
        return f"{where} {self.verdict}, {value} times {ends}".rstrip()


@dataclass(frozen=True, kw_only=True)
class ResultsDiff(Record):
    """The output of `fledge bench compare`. `is_relative`: speeds are ratios to each file's own baseline."""

    is_relative: bool
    threshold: float
    level: float
    changes: tuple[Change, ...]
    missing: tuple[str, ...]  # complete in A, but not in B
    added: tuple[str, ...]  # complete in B, but not in A
    warnings: tuple[str, ...]

    def fails(self, on: str) -> list[str]:
        """Return why a job that fails on a "regression", or on any "change", fails; empty if it does not."""
        bad = ("worse",) if on == "regression" else ("worse", "better")
        lines = [str(change) for change in self.changes if change.verdict in bad]
        lines += [f"missing in B: {line}" for line in self.missing]
        return lines + ([f"only in B: {line}" for line in self.added] if on == "change" else [])

    def table(self, *, show_all: bool = False) -> Table:
        """The figures that changed or are unknown; with `show_all` also those that stayed the same."""
        body: list[list[TableCell | str]] = [
            [
                one.contender,
                one.workload,
                str(one.load),
                METRICS[one.metric].title,
                *("" if value is None else number(value) for value in (one.before, one.after)),
                figure_cell(one.ratio, "{:.3f}"),
                TableCell(text=f"unknown: {one.reason}" if one.reason else one.verdict, tone=_TONES[one.verdict]),
            ]
            for one in self.changes
            if show_all or one.verdict != "same"
        ]
        title = "Speeds as ratios to each file's own baseline" if self.is_relative else "B against A"
        header = ("contender", "workload", "load", "figure", "A", "B", f"B / A [{100 * self.level:g} %]", "")
        return Table.of(title, header, body, labels=4)

    @property
    def tally(self) -> list[str]:
        """The number of figures with each verdict, and how many of them may be due to chance."""
        verdicts = [one.verdict for one in self.changes]
        text = ", ".join(f"{verdicts.count(name)} {name}" for name in ("worse", "better", "same", "unknown"))
        lines = [f"{len(verdicts)} figures compared: {text}; threshold {100 * self.threshold:g} %."]
        chance = (1 - self.level) * (len(verdicts) - verdicts.count("unknown"))
        if chance >= 0.5 and {"worse", "better"}.intersection(verdicts):
            line = f"Chance alone would put about {chance:.0f} of them beyond their intervals"
            lines.append(f"{line}; --level 0.99 asks for more.")
        return lines


def compare(
    a: Results,
    b: Results,
    *,
    metrics: Sequence[str] = tuple(METRICS),
    threshold: float = THRESHOLD,
    level: float = LEVEL,
    is_relative: bool | None = None,
) -> ResultsDiff:
    """Compare B with A. `is_relative` None: relative if the machines differ."""
    if is_relative is None:
        is_relative = bool(_differences(a.provenance, b.provenance, _MACHINE))
    before, after = (Summary(one, one.baseline).rows for one in (a, b))
    changes = []
    for key in (key for key in before if key in after):
        digests = [one.workload_facts.get(key[1], {}).get("digest") for one in (a, b)]
        reason = "the workload has other prompts" if None not in digests and digests[0] != digests[1] else None
        for name in metrics:
            if METRICS[name].is_speed and "eval" in (a.kind, b.kind):
                continue  # an eval does not measure speed
            speed_ratios = is_relative and METRICS[name].is_speed
            change = _change((before[key], after[key]), name, reason, speed_ratios, Bootstrap(level=level), threshold)
            changes += [] if change is None else [change]
    return ResultsDiff(
        is_relative=is_relative,
        threshold=threshold,
        level=level,
        changes=tuple(changes),
        missing=tuple(_absent(before, after)),
        added=tuple(_absent(after, before)),
        warnings=tuple(_warnings(a, b)),
    )


def _change(
    sides: tuple[Row, Row], name: str, reason: str | None, is_relative: bool, bootstrap: Bootstrap, threshold: float
) -> Change | None:
    """Return None if neither file has the figure, or if it would be the ratio of a baseline to itself."""
    metric, one = METRICS[name], sides[0]
    where: Any = {"contender": one.contender, "workload": one.workload, "load": one.load, "metric": name}
    panels = [metric.panel(side.cells) for side in sides]
    is_baseline = sides[0].contender in [side.baseline for side in sides]
    if (is_relative and is_baseline) or not any(panel.values.size for panel in panels):
        return None
    figure: Statistic = pooled(offset=metric.offset)
    if is_relative:
        panels = [panel.beside(metric.panel(side.base)) for panel, side in zip(panels, sides, strict=True)]
        figure = lambda several: mean_ratio(several[0])  # noqa: E731
    reasons = [_why_not(side, metric, is_relative) for side in sides]
    reason = reason or next((f"{letter}: {why}" for letter, why in zip("AB", reasons, strict=True) if why), None)
    common = panels[0].common_prompts(panels[1])
    if reason is None and not common:
        empty = [letter for letter, panel in zip("AB", panels, strict=True) if not panel.values.size]
        reason = f"not reported in {empty[0]}" if empty else "no prompt in common"
    if reason is not None:
        return Change(**where, reason=reason)
    panels = [panel.only(common) for panel in panels]
    ratio = bootstrap.interval(panels, lambda both: divide(figure(both[1:]), figure(both[:1])))
    verdict: Verdict = "same"
    if ratio is None or ratio.low is None:
        verdict, reason = "unknown", "measured once: noise is not known" if ratio else "nothing to compare"
    elif (sign := sign_of(ratio, around=1.0)) and abs(ratio.value - 1) > threshold:
        verdict = "better" if (sign > 0) == metric.higher_is_better else "worse"
    before, after = (panel.value(figure) for panel in panels)
    return Change(**where, before=before, after=after, ratio=ratio, verdict=verdict, reason=reason)


def _why_not(side: Row, metric: Metric, is_relative: bool) -> str | None:
    """Return why a figure cannot be compared; None if it can."""
    reason = (side.reason if side.baseline else "no baseline") if is_relative else why_partial(side.cells)
    is_single = metric.is_speed and len({cell.repeat for cell in side.cells}) < 2
    return reason or ("one repeat only, so noise is not known" if is_single else None)


def _absent(here: Mapping[Key, Row], there: Mapping[Key, Row]) -> list[str]:
    """Return the rows that are complete `here` and not `there`, one line each."""
    whole = [(row, there.get(key)) for key, row in here.items() if not why_partial(row.cells)]
    reasons = [(row, why_partial(other.cells if other else [])) for row, other in whole]
    return [f"{row.contender}, {row.where} ({reason})" for row, reason in reasons if reason]


def _warnings(a: Results, b: Results) -> list[str]:
    """Return the differences in machines, versions and settings of both files."""
    before, after = (one.provenance.get("versions") or {} for one in (a, b))
    contenders = [{one.name: vars(one) for one in results.contenders} for results in (a, b)]
    pairs: list[tuple[str, Mapping[str, Any], Mapping[str, Any], Sequence[str]]] = [
        ("other machine: ", a.provenance, b.provenance, _MACHINE),
        ("", a.provenance, b.provenance, _SETUP),
        ("version of ", before, after, sorted(before | after)),
        ("", vars(a), vars(b), ("kind", "baseline")),
        ("setting ", a.settings, b.settings, sorted({*a.settings, *b.settings} - {*_OF_THE_RUN})),
    ]
    for name, facts in a.workload_facts.items():
        pairs.append((f"workload {name}: ", facts, b.workload_facts.get(name, facts), ("digest",)))
    for name, facts in contenders[0].items():
        pairs.append((f"contender {name}, ", facts, contenders[1].get(name, facts), _CONTENDER))
    return [f"{what}{line}" for what, one, other, keys in pairs for line in _differences(one, other, keys)]


def _differences(one: Mapping[str, Any], other: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    def shown(value: Any) -> str:
        text = "nothing" if value is None else str(value)
        return text if len(text) <= 60 else f"{text[:57]}..."

    pairs = {key: (encode(one.get(key)), encode(other.get(key))) for key in keys}  # JSON knows no tuples
    return [f"{key}: {shown(x)} in A, {shown(y)} in B" for key, (x, y) in pairs.items() if x != y]
