"""Monitors acceptance drift: whether live traffic is accepted as in the drafter's baseline, and which traffic is not.

For each finished request, the tokens of its rounds are compared with those that the baseline predicts for the same
depths and temperature. Sums are kept for slices of the traffic, of the last ten minutes and in total. Intervals treat
requests as clusters, because rounds of one request are correlated. Drift is a drop of the acceptance length that
exceeds `TOLERANCE` with confidence `LEVEL`; smaller differences between kinds of prompts are normal.
"""

import logging
import math
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fledge.engine.outputs import RequestMetrics
from fledge.evaluation.baseline import Baseline
from fledge.report.intervals import Interval, cluster_interval, cluster_sums
from fledge.server.history import CONTEXT_BUCKETS, CONTEXT_EDGES, History, HistoryInterval, SpeculationNote, note
from fledge.server.prompts import NO_TEMPLATE, Template

_log = logging.getLogger("fledge.server")

TOLERANCE = 0.1  # of the acceptance length
LEVEL = 0.99  # of the intervals; high because checks are repeated
SIGNIFICANCE = 0.05  # probability of a wrong cause in one check
MIN_REQUESTS = 30  # for a check; for a slice a third of this
CAUSE_SHARE = 0.8  # slices that explain this share of what the best one does are named too
WINDOW_INTERVALS, INTERVAL_SECONDS = 10, 60.0
MAX_NAMED = 4  # workloads in a note
CHECK_SECONDS = 10.0  # between two checks
MAX_SHARE = 0.01  # of the time that counting may take; beyond that, requests are skipped
SPARE_SECONDS = 1.0  # that it may take in advance

_TEMPERATURES = (0.0, 0.5, 1.0)
_TEMPERATURE_NAMES = ("greedy", "over 0, up to 0.5", "over 0.5, up to 1", "over 1")
# First code points of coarse Unicode blocks.
_BLOCKS = (
    (0x0000, "Latin"),
    (0x00C0, "Latin with accents"),
    (0x0370, "Greek"),
    (0x0400, "Cyrillic"),
    (0x0530, "other"),
    (0x0590, "Hebrew"),
    (0x0600, "Arabic"),
    (0x0700, "other"),
    (0x0900, "Devanagari"),
    (0x0980, "other"),
    (0x0E00, "Thai"),
    (0x0E80, "other"),
    (0x1E00, "Latin with accents"),
    (0x1F00, "Greek"),
    (0x2000, "other"),
    (0x3040, "Japanese"),
    (0x3100, "other"),
    (0x3400, "Han"),
    (0xA000, "other"),
    (0xAC00, "Korean"),
    (0xD7B0, "other"),
)
_STARTS = [start for start, _ in _BLOCKS]
_SAMPLED = 1024, 4  # the last characters of a prompt, of which every fourth is used


def script_of(text: str) -> str:
    """Return the script at the end of a prompt, as a cheap substitute for its language.

    A fifth of the letters is enough for another script than Latin: templates add Latin words, Japanese is mostly Han.
    """
    end, step = _SAMPLED
    text = text[-end:]
    if text.isascii():
        return "Latin"
    found = Counter(_BLOCKS[bisect_right(_STARTS, ord(letter)) - 1][1] for letter in text[::step] if letter.isalpha())
    letters = found.total()
    if found["Japanese"] * 20 >= letters > 0:
        return "Japanese"
    foreign = [(count, name) for name, count in found.items() if not name.startswith("Latin")]
    most, name = max(foreign, default=(0, ""))
    if most * 5 >= letters > 0:
        return name
    return "Latin with accents" if found["Latin with accents"] * 50 >= letters > 0 else "Latin"


class RequestTraits(NamedTuple):
    """Properties of a request on which its acceptance may depend."""

    template: Template = NO_TEMPLATE
    script: str = "Latin"
    temperature: float = 0.0
    has_two_drafters: bool = False  # the drafter was swapped while it ran


class Slice(NamedTuple):
    """A part of the traffic, as a key of sums. Kind "depth": drafts whose predecessors were accepted."""

    kind: str
    name: str | int


SliceSums = dict[Slice, dict[str, float]]
ALL = Slice("all", "")
_PHRASES = {  # for slices that can be causes
    "template": "requests with the template {}",
    "context": "contexts of {} tokens",
    "script": "prompts in the script {}",
    "temperature": "requests at temperature {}",
}


class DriftCause(NamedTuple):
    """A slice of the traffic with lower acceptance than the rest."""

    slice: Slice
    length: float
    expected: float
    share: float  # of recent rounds
    share_before: float | None  # of the rounds before

    @property
    def text(self) -> str:
        name = "0 (greedy)" if self.slice.name == "greedy" else self.slice.name
        phrase = f"{_PHRASES[self.slice.kind].format(name)} ({self.length:.2f} against {self.expected:.2f}"
        before = "" if self.share_before is None else f", {self.share_before:.0%} before"
        return f"{phrase}; {self.share:.0%} of the rounds{before})"


@dataclass(frozen=True, kw_only=True)
class LiveDrift:
    """The recent acceptance length, and the one that the baseline predicts for the same rounds."""

    length: Interval
    expected: float
    depths: tuple[tuple[int, Interval, float], ...]  # depth, conditional acceptance rate, the baseline's
    causes: tuple[DriftCause, ...] = ()

    @property
    def drop(self) -> float:
        return 1 - self.length.value / self.expected

    @property
    def is_significant(self) -> bool:
        return self.length.ends[1] < (1 - TOLERANCE) * self.expected


class DriftMonitor:
    """Compares the acceptance of requests with a baseline; logs when drift begins and when it ends."""

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline
        self.latest: LiveDrift | None = None  # None: not enough traffic yet
        self.is_drifting = False
        self.started = self.checked = time.monotonic()
        self.seconds_spent = 0.0  # on counting
        self._history = History(interval_seconds=INTERVAL_SECONDS, kept=WINDOW_INTERVALS)
        self._total = HistoryInterval()
        self._rates = lru_cache(maxsize=256)(baseline.rates)

    @property
    def significant_drop(self) -> float:
        """Relative drop of the acceptance length below the baseline's; 0 while there is no drift."""
        return self.latest.drop if self.is_drifting and self.latest is not None else 0.0

    def on_finished(self, metrics: RequestMetrics, traits: RequestTraits) -> None:
        """Count a request, and check every `CHECK_SECONDS`. Requests are skipped if counting takes too long."""
        began = time.monotonic()
        if not metrics.acceptance.rounds or self.seconds_spent > SPARE_SECONDS + MAX_SHARE * (began - self.started):
            return
        whole, by_depth = self._sums(metrics, traits)
        self._total.add(whole)
        self._history.current().add(whole | by_depth)
        if began - self.checked >= CHECK_SECONDS:
            self.check()
        self.seconds_spent += time.monotonic() - began

    def _sums(self, metrics: RequestMetrics, traits: RequestTraits) -> tuple[SliceSums, SliceSums]:
        """Return what a request adds to its slices, and to the slices of depths."""
        acceptance = metrics.acceptance
        rates = self._rates(round(traits.temperature, 1), acceptance.depth)
        drafted, accepted = acceptance.drafted_by_depth, acceptance.accepted_by_depth
        expected = sum(rate * count for rate, count in zip(rates, drafted, strict=True))
        rounds = acceptance.rounds  # each has one token of the target
        whole = _sums(rounds + sum(accepted), rounds + expected, rounds)
        start = metrics.rounds[len(metrics.rounds) // 2].start if metrics.rounds else metrics.prompt_tokens
        temperature = _TEMPERATURE_NAMES[bisect_left(_TEMPERATURES, traits.temperature)]
        slices = (
            ALL,
            Slice("template", traits.template.label),
            Slice("context", CONTEXT_BUCKETS[bisect_left(CONTEXT_EDGES, start)]),
            Slice("script", traits.script),
            Slice("temperature", temperature),
        )
        by_depth = {}
        for depth, reached in enumerate(acceptance.reached_by_depth):
            before = rates[depth - 1] if depth else 1.0
            if reached and rates[depth] and before:
                conditional = rates[depth] / before
                by_depth[Slice("depth", depth)] = _sums(accepted[depth], reached * conditional, reached)
        return dict.fromkeys(slices, whole), by_depth

    def check(self) -> None:
        """Check the recent traffic for drift."""
        self.checked = time.monotonic()
        recent = self._history.latest(WINDOW_INTERVALS)
        if recent[ALL]["clusters"] < MIN_REQUESTS:
            return
        length, expected = _observed_and_expected(recent[ALL])
        slices = sorted(part for part in recent.sums if part.kind == "depth")
        depths = tuple((part.name, *_observed_and_expected(recent[part])) for part in slices)
        found = LiveDrift(length=length, expected=expected, depths=depths)
        was_drifting = self.is_drifting
        # Hysteresis: it begins when the drop is significant, and ends when the drop is within the tolerance.
        self.is_drifting = found.drop > TOLERANCE if was_drifting else found.is_significant
        causes = _find_causes(recent, self._total) if self.is_drifting else ()
        self.latest = LiveDrift(length=length, expected=expected, depths=depths, causes=causes)
        if self.is_drifting and not was_drifting:
            _log.warning("%s", self.note.text)
        elif was_drifting and not self.is_drifting:
            words = "live traffic is accepted as the drafter's baseline says again: %.2f tokens per round against %.2f"
            _log.info(words, length.value, expected)

    @property
    def note(self) -> SpeculationNote:
        """The note on the present drift."""
        latest = self.latest
        assert latest is not None, "nothing was seen yet"
        what = "; ".join(cause.text for cause in latest.causes) or "no kind of request more than another"
        low, high = latest.length.ends
        figures = {"length": latest.length.value, "low": low, "high": high, "expected": latest.expected}
        named = self.baseline.measured_on
        measured_on = ", ".join(named if len(named) <= MAX_NAMED else (*named[: MAX_NAMED - 1], "others"))
        return note("drift", **figures, what=what, measured_on=measured_on)


def _sums(found: float, expected: float, rounds: int) -> dict[str, float]:
    return {**cluster_sums(found - expected, expected), "rounds": rounds}


def _observed_and_expected(sums: Mapping[str, float]) -> tuple[Interval, float]:
    """Return the observed tokens per round with an interval, and the expected tokens per round."""
    expected = sums["count"] / sums["rounds"]
    above = cluster_interval(sums, level=LEVEL)
    assert above is not None, "sums of nothing"
    value, low, high = (expected * (1 + share) for share in (above.value, *above.ends))
    return Interval(value=value, low=low, high=high), expected


def _find_causes(recent: HistoryInterval, total: HistoryInterval) -> tuple[DriftCause, ...]:
    """Return the slices that explain the drop best, one of each kind, the worst first.

    A slice counts if it is significantly further below expectation than all other traffic, past traffic included, so
    that a slice with all of the present traffic is found too. Other traffic that exceeds its expectation, such as
    requests with sampled drafts, counts as meeting it.
    """
    found: list[tuple[float, float, DriftCause]] = []
    rounds = recent[ALL]["rounds"]
    before = total[ALL]["rounds"] - rounds
    others = {part: Counter(total[ALL]) for part in recent.sums if part.kind in _PHRASES}
    for part, rest in others.items():
        rest.subtract(total[part])
    enough = [p for p, rest in others.items() if min(recent[p]["clusters"], rest["clusters"]) >= MIN_REQUESTS / 3]
    for part in enough:
        # Bonferroni: of many slices, one is the worst by chance.
        sums, level = recent[part], 1 - SIGNIFICANCE / len(enough)
        mine, theirs = cluster_interval(sums, level=level), cluster_interval(others[part], level=level)
        assert mine is not None
        assert theirs is not None
        worse = theirs.value - mine.value
        if worse <= math.hypot(mine.half_width or 0.0, theirs.half_width or 0.0):
            continue
        length, expected = _observed_and_expected(sums)
        share, drop = sums["rounds"] / rounds, min(theirs.value, 0.0) - mine.value
        share_before = (total[part]["rounds"] - sums["rounds"]) / before if before else None
        found.append((share * drop, drop, DriftCause(part, length.value, expected, share, share_before)))
    most = max((pull for pull, *_ in found), default=0.0)
    best: dict[str, DriftCause] = {}
    for _, _, cause in sorted((one for one in found if one[0] >= CAUSE_SHARE * most), key=lambda one: -one[1]):
        best.setdefault(cause.slice.kind, cause)
    return tuple(best.values())
