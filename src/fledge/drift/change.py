"""Drift: how the attention at each depth differs from depth 1, in windows of equal size, with intervals.

How much attention a drafter gives to recent tokens or to the sink varies between drafters. Drift is a change of these
shares while it drafts. A drafter *drifts* from the depth on at which recent tokens have gained, or the sink has lost,
at least the bound in data/figures.yaml, with an interval that excludes 0. It is *steady* if the intervals at the last
depth lie within the bound. Otherwise the result is *unclear*.

The same can be asked of a way to train drafters: `runs` are then the results of drafters that differ only in their
seed, and the differences between them widen the intervals.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fledge.decoding.statistics import COPYING, LOOPING
from fledge.drift.perturb import texts
from fledge.drift.result import Curve, DriftResult, PromptRow
from fledge.records import Record
from fledge.report.intervals import Bootstrap, Floats, Interval, Panel, Statistic, divide
from fledge.report.prose import sign_of

Status = Literal["drifts", "steady", "unclear", "few"]
CURVES: dict[str, Callable[[PromptRow], Curve]] = {
    "recent": lambda row: row.recent_attention,
    "sink": lambda row: row.sink_attention,
}
# Limits for the text, shared with `fledge eval`, and for the drafter, from the file.
LIMITS = {"looping": LOOPING, "copying": COPYING, **texts("figures")["limits"]}
BOUND: float = LIMITS["drift"]
FEW_PROMPTS: int = LIMITS["few_prompts"]


@dataclass(frozen=True, kw_only=True)
class MassChange(Record):
    """How one share of attention changes with depth. Means are pooled over rounds, intervals are over prompts."""

    first: float  # at depth 1
    since_first: tuple[Interval, ...]  # at depths 2, 3, ...: the share minus that at depth 1
    slope: Interval  # per depth, by least squares

    @property
    def change(self) -> Interval:
        """From depth 1 to the last."""
        return self.since_first[-1]

    @property
    def last(self) -> float:
        return self.first + self.change.value


@dataclass(frozen=True, kw_only=True)
class AttentionChange(Record):
    """Both symptoms of drift, and the verdict."""

    recent: MassChange
    sink: MassChange
    prompts: int  # with at least one round

    @property
    def drift_depth(self) -> int | None:
        """The first depth from which on attention has drifted up to the last depth; None: it has not at the last."""
        found = None
        for depth, pair in enumerate(zip(self.recent.since_first, self.sink.since_first, strict=True), start=2):
            found = (found or depth) if _has_drifted(*pair) else None
        return found

    @property
    def status(self) -> Status:
        if self.prompts < FEW_PROMPTS:
            return "few"
        recent, sink = self.recent.change, self.sink.change
        if _has_drifted(recent, sink):
            return "drifts"
        return "steady" if recent.ends[1] < BOUND and sink.ends[0] > -BOUND else "unclear"


def _has_drifted(recent: Interval, sink: Interval) -> bool:
    rises = sign_of(recent) > 0 and recent.value >= BOUND
    return rises or (sign_of(sink) < 0 and sink.value <= -BOUND)


def attention_change(bootstrap: Bootstrap, *runs: DriftResult) -> AttentionChange | None:
    """None where fewer than two depths were drafted."""
    depths = _depths(runs)
    if depths < 2:
        return None

    def change(name: str) -> MassChange:
        panel = _panel(runs, name, depths)
        changes = [_interval(bootstrap, [panel], _since_first(depth)) for depth in range(1, depths)]
        slope = _interval(bootstrap, [panel], lambda sides: _slope(_means(sides[0])))
        first = panel.value(lambda sides: _means(sides[0])[..., 0])
        assert first is not None, "every depth of a result has rounds"
        return MassChange(first=first, since_first=tuple(changes), slope=slope)

    prompts = len({row.id for run in runs for row in run.prompt_rows if row.rounds_by_depth[0] > 0})
    return AttentionChange(recent=change("recent"), sink=change("sink"), prompts=prompts)


def compare_changes(
    bootstrap: Bootstrap, name: str, runs: Sequence[DriftResult], base: Sequence[DriftResult]
) -> Interval | None:
    """The change from depth 1 to the last common depth of `runs` minus that of `base`, over the prompts of both."""
    depths = min(_depths(runs), _depths(base))
    if depths < 2:
        return None
    panels = [_panel(several, name, depths) for several in (runs, base)]
    if common := panels[0].common_prompts(panels[1]):
        panels = [panel.only(common) for panel in panels]
    last = _since_first(depths - 1)
    return bootstrap.interval(panels, lambda sides: last(sides[:1]) - last(sides[1:]), is_share=True)


def shares_by_depth(bootstrap: Bootstrap, name: str, *runs: DriftResult) -> list[Interval]:
    """A share of attention at each depth."""
    depths = _depths(runs)
    panel = _panel(runs, name, depths)
    return [_interval(bootstrap, [panel], _at(depth)) for depth in range(depths)]


def _depths(runs: Sequence[DriftResult]) -> int:
    """The depth that all of them reach."""
    return min(len(run.by_depth) for run in runs)


def _panel(runs: Sequence[DriftResult], name: str, depths: int) -> Panel:
    """Rows are prompts of each run; columns are the sums over rounds at each depth, then the numbers of rounds."""
    rows = []
    for number, row in ((number, row) for number, run in enumerate(runs) for row in run.prompt_rows):
        pairs = list(zip(CURVES[name](row), row.rounds_by_depth, strict=True))[:depths]
        sums = [(share or 0.0) * rounds for share, rounds in pairs] + [rounds for _, rounds in pairs]
        rows.append((number, row.id, sums))
    return Panel.collect(rows, 2 * depths)


def _means(totals: Floats) -> Floats:
    """Shares [..., depths] of one panel's totals."""
    sums = totals.sum(axis=-2)
    depths = sums.shape[-1] // 2
    return divide(sums[..., :depths], sums[..., depths:])


def _at(depth: int) -> Statistic:
    return lambda sides: _means(sides[0])[..., depth]


def _since_first(depth: int) -> Statistic:
    return lambda sides: _means(sides[0])[..., depth] - _means(sides[0])[..., 0]


def _slope(shares: Floats) -> Floats:
    places = np.arange(shares.shape[-1]) - (shares.shape[-1] - 1) / 2
    found: Floats = shares @ (places / (places**2).sum())
    return found


def _interval(bootstrap: Bootstrap, panels: Sequence[Panel], statistic: Statistic) -> Interval:
    found = bootstrap.interval(panels, statistic, is_share=True)
    assert found is not None, "every depth of a result has rounds"
    return found
