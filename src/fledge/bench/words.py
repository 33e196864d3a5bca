"""Words that verdicts, explanations and pictures share, and the names of a report's sections."""

from collections.abc import Sequence

from fledge.bench.part import Part
from fledge.evaluation.results import Load
from fledge.report.intervals import Interval

SPEED, ACCEPTANCE, LATENCY, CAPACITY = "speed", "acceptance", "latency", "capacity"
WHY, ANSWERS = "why", "answers"


def anchor(section: str, part: Part) -> str:
    return f"{section}-{part.number}"


def load_text(load: Load) -> str:
    return f"concurrency {load.concurrency}" if load.rate is None else f"{load.rate:g} requests per second"


def loads_text(loads: Sequence[Load]) -> str:
    """Write "concurrency 1, 4, 16"."""
    if all(load.rate is None for load in loads):
        return f"concurrency {', '.join(str(load.concurrency) for load in loads)}"
    return ", ".join(map(load_text, loads))


def times_text(interval: Interval) -> str:
    """Write "1.90 times [1.80, 2.00]"."""
    if interval.low is None or interval.high is None:
        return f"{interval.value:.2f} times (measured once: no interval)"
    return f"{interval.value:.2f} times [{interval.low:.2f}, {interval.high:.2f}]"


def names_text(part: Part, names: Sequence[str]) -> str:
    """Names in order, with those of one drafter at many depths in one: "EAGLE-3 K=3/4/5, EAGLE-3.1 K=2"."""
    texts: list[str] = []
    for name in names:
        family = None if name == part.baseline else part.family(name)
        if family is None or not family.has_many_depths:
            texts.append(name)
            continue
        depths = [str(depth) for depth, other in family.chains if other in names]
        texts.append(name if len(depths) == 1 else f"{family.title} K={'/'.join(depths)}")
    return ", ".join(dict.fromkeys(texts))
