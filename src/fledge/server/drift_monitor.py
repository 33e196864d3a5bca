"""Whether live traffic is what the drafter was measured on, and what of it is not.

Of every finished request: tokens its rounds gave, beside those that the drafter's baseline makes expect at the same
depths and temperature. Sums of that are kept by slice of the traffic, of the last ten minutes and of all time; requests
are the units that vary, as the rounds of one resemble each other. Drift is a fall of the acceptance length by more than
`TOLERANCE` that the interval leaves no doubt of: no two kinds of prompts are accepted alike, and less is no news.
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
LEVEL = 0.99  # of the intervals: it is looked at again and again
CHANCE = 0.05  # that at one look a slice is blamed where all are alike
MIN_REQUESTS = 30  # before anything is said; of a slice a third
ALIKE = 0.8  # slices that explain this share of what the best one does may be the same requests, and are named too
WINDOW_INTERVALS, INTERVAL_SECONDS = 10, 60.0
MAX_NAMED = 4  # workloads, in a note
CHECK_SECONDS = 10.0  # from one look to the next
MAX_SHARE = 0.01  # of the time that counting may take; beyond, requests are left out
SPARE_SECONDS = 1.0  # that it may be ahead of that

_TEMPERATURES = (0.0, 0.5, 1.0)
_TEMPERATURE_NAMES = ("greedy", "over 0, up to 0.5", "over 0.5, up to 1", "over 1")
# Where blocks of letters begin in Unicode, coarsely. What lies between is told apart by nobody here.
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
_SAMPLED = 1024, 4  # characters at the end of a prompt, of which each fourth is looked at


def script_of(text: str) -> str:
    """The script that the end of a prompt is written in: a cheap stand-in for its language.

    A template's words are Latin, and Japanese is mostly Han, so a fifth of the letters is enough for another script.
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


class Traits(NamedTuple):
    """What is known of a request before it is answered that its acceptance may depend on."""

    template: Template = NO_TEMPLATE
    script: str = "Latin"
    temperature: float = 0.0
    has_two_drafters: bool = False  # two drafters drafted for it, one after the other: it is like neither


class Slice(NamedTuple):
    """Part of the traffic, as a key of sums. Of the kind "depth": drafts that were up for acceptance."""

    kind: str
    name: str | int


SliceSums = dict[Slice, dict[str, float]]
ALL = Slice("all", "")
_SAID = {  # of a slice, in a sentence
    "template": "requests with the template {}",
    "context": "contexts of {} tokens",
    "script": "prompts in the script {}",
    "temperature": "requests at temperature {}",
}


class SliceDrift(NamedTuple):
    """A slice of the traffic that does worse than the rest."""

    slice: Slice
    length: float
    expected: float
    share: float  # of the rounds of late
    share_before: float | None  # None: there is no before

    @property
    def text(self) -> str:
        name = "0 (greedy)" if self.slice.name == "greedy" else self.slice.name
        said = f"{_SAID[self.slice.kind].format(name)} ({self.length:.2f} against {self.expected:.2f}"
        before = "" if self.share_before is None else f", {self.share_before:.0%} before"
        return f"{said}; {self.share:.0%} of the rounds{before})"


@dataclass(frozen=True, kw_only=True)
class LiveDrift:
    """The acceptance length of late beside the baseline's for the same rounds."""

    length: Interval
    expected: float
    depths: tuple[tuple[int, Interval, float], ...]  # depth, share accepted of what was up for it, the baseline's
    causes: tuple[SliceDrift, ...] = ()

    @property
    def fall(self) -> float:
        return 1 - self.length.value / self.expected

    @property
    def is_certain(self) -> bool:
        return self.length.ends[1] < (1 - TOLERANCE) * self.expected


class DriftMonitor:
    """Compares what requests had accepted with a baseline; says in the log when they begin to differ, and when not."""

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline
        self.latest: LiveDrift | None = None  # None: not enough traffic yet
        self.is_drifting = False
        self.started = self.checked = time.monotonic()
        self.spent = 0.0  # seconds
        self._history = History(interval_seconds=INTERVAL_SECONDS, kept=WINDOW_INTERVALS)
        self._total = HistoryInterval()
        self._rates = lru_cache(maxsize=256)(baseline.rates)

    @property
    def significant_drop(self) -> float:
        """Of the acceptance length below the baseline's, as a share of it; 0 while there is no drift."""
        return self.latest.fall if self.is_drifting and self.latest is not None else 0.0

    def on_finished(self, metrics: RequestMetrics, traits: Traits) -> None:
        """Count a request, and look at all of them now and then. Where that takes too long, some go uncounted."""
        began = time.monotonic()
        if not metrics.acceptance.rounds or self.spent > SPARE_SECONDS + MAX_SHARE * (began - self.started):
            return
        whole, by_depth = self._sums(metrics, traits)
        self._total.add(whole)
        self._history.current().add(whole | by_depth)
        if began - self.checked >= CHECK_SECONDS:
            self.check()
        self.spent += time.monotonic() - began

    def _sums(self, metrics: RequestMetrics, traits: Traits) -> tuple[SliceSums, SliceSums]:
        """What a request adds to the slices it is in, and to those of depths."""
        acceptance = metrics.acceptance
        rates = self._rates(round(traits.temperature, 1), acceptance.depth)
        drafted, accepted = acceptance.drafted_by_depth, acceptance.accepted_by_depth
        expected = sum(rate * count for rate, count in zip(rates, drafted, strict=True))
        rounds = acceptance.rounds  # each gives one more token, the target's own
        whole = _sums(rounds + sum(accepted), rounds + expected, rounds)
        start = metrics.rounds[len(metrics.rounds) // 2].start if metrics.rounds else metrics.prompt_tokens
        temperature = _TEMPERATURE_NAMES[bisect_left(_TEMPERATURES, traits.temperature)]
        mine = (
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
        return dict.fromkeys(mine, whole), by_depth

    def check(self) -> None:
        """Look at the traffic of late."""
        self.checked = time.monotonic()
        recent = self._history.latest(WINDOW_INTERVALS)
        if recent[ALL]["clusters"] < MIN_REQUESTS:
            return  # what was known is still the latest
        length, expected = _compared(recent[ALL])
        slices = sorted(part for part in recent.sums if part.kind == "depth")
        depths = tuple((part.name, *_compared(recent[part])) for part in slices)
        found = LiveDrift(length=length, expected=expected, depths=depths)
        was_drifting = self.is_drifting
        # It begins when there is no doubt, and ends when the figure itself says so: it does not flicker.
        self.is_drifting = found.fall > TOLERANCE if was_drifting else found.is_certain
        causes = _causes(recent, self._total) if self.is_drifting else ()
        self.latest = LiveDrift(length=length, expected=expected, depths=depths, causes=causes)
        if self.is_drifting and not was_drifting:
            _log.warning("%s", self.note.text)
        elif was_drifting and not self.is_drifting:
            words = "live traffic is accepted as the drafter's baseline says again: %.2f tokens per round against %.2f"
            _log.info(words, length.value, expected)

    @property
    def note(self) -> SpeculationNote:
        """What there is to say of the drift. There is one."""
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


def _compared(sums: Mapping[str, float]) -> tuple[Interval, float]:
    """What was found in a round, with its interval, and what was expected."""
    expected = sums["count"] / sums["rounds"]
    above = cluster_interval(sums, level=LEVEL)
    assert above is not None, "sums of nothing"
    value, low, high = (expected * (1 + share) for share in (above.value, *above.ends))
    return Interval(value=value, low=low, high=high), expected


def _causes(recent: HistoryInterval, total: HistoryInterval) -> tuple[SliceDrift, ...]:
    """The slices that pull the acceptance down most: further below what is expected than all other traffic ever was.

    With what was before, a slice is found too that all traffic is in now. Other traffic that does better than expected,
    as requests with drawn drafts do, is no reproach to the rest. Those that pull alike are told the worst first.
    """
    found: list[tuple[float, float, SliceDrift]] = []
    rounds = recent[ALL]["rounds"]
    before = total[ALL]["rounds"] - rounds
    others = {part: Counter(total[ALL]) for part in recent.sums if part.kind in _SAID}
    for part, rest in others.items():
        rest.subtract(total[part])
    enough = [p for p, rest in others.items() if min(recent[p]["clusters"], rest["clusters"]) >= MIN_REQUESTS / 3]
    for part in enough:
        # Of many slices one is the worst by chance: the more there are, the surer it must be (Bonferroni).
        sums, level = recent[part], 1 - CHANCE / len(enough)
        mine, theirs = cluster_interval(sums, level=level), cluster_interval(others[part], level=level)
        assert mine is not None, "sums of nothing"
        assert theirs is not None, "sums of nothing"
        worse = theirs.value - mine.value
        if worse <= math.hypot(mine.half_width or 0.0, theirs.half_width or 0.0):
            continue
        length, expected = _compared(sums)
        share, fall = sums["rounds"] / rounds, min(theirs.value, 0.0) - mine.value
        share_before = (total[part]["rounds"] - sums["rounds"]) / before if before else None
        found.append((share * fall, fall, SliceDrift(part, length.value, expected, share, share_before)))
    most = max((pull for pull, *_ in found), default=0.0)
    best: dict[str, SliceDrift] = {}
    for _, _, cause in sorted((one for one in found if one[0] >= ALIKE * most), key=lambda one: -one[1]):
        best.setdefault(cause.slice.kind, cause)
    return tuple(best.values())
