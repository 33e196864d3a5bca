"""Formats figures for sentences."""

from dataclasses import dataclass
from typing import Literal

from fledge.records import Record
from fledge.report.intervals import Interval

Tone = Literal["good", "bad", "neutral"]
DASH = "\N{EN DASH}"  # shown if there is no figure


@dataclass(frozen=True, kw_only=True)
class Sentence(Record):
    text: str
    section: str  # anchor of the section with its figures
    tone: Tone = "neutral"


def percent(share: float) -> str:
    """Write 0.61 as "61 %", and shares below 1 % with one more digit."""
    digits = 1 if 0 < abs(share) < 0.0095 else 0
    return f"{100 * share + 0.0:.{digits}f} %"  # adding 0 turns -0 into 0


def sign_of(interval: Interval, around: float = 0.0) -> int:
    """1 or -1 if the whole interval is above or below `around`; 0 otherwise, or if there is none."""
    if interval.low is None or interval.high is None:
        return 0
    return 1 if interval.low > around else -1 if interval.high < around else 0


def ratio_tone(ratio: Interval) -> Tone:
    """Good or bad if the whole interval is above or below 1."""
    sign = sign_of(ratio, around=1.0)
    return "bad" if sign < 0 else "good" if sign > 0 else "neutral"


def interval_text(interval: Interval, level: float, before: str = "") -> str:
    """Return " (95 % interval 1.2 to 1.4)", or an empty string if there is none."""
    if interval.low is None or interval.high is None:
        return ""
    return f" ({before}{percent(level)} interval {interval.low:.2f} to {interval.high:.2f})"


def points(difference: Interval, level: float) -> str:
    """Write a difference of shares: "+2.1 points", with its interval if there is one."""
    low, high = (100 * end for end in difference.ends)
    ends = "" if difference.low is None else f", {percent(level)} interval {low:+.1f} to {high:+.1f}"
    return f"{100 * difference.value:+.1f} points{ends}"


def number(value: float) -> str:
    """Write a number with three significant digits, or all digits before the point: 0.123, 1.23, 12.3, 1,234."""
    digits = max(0, 3 - len(str(int(abs(value))))) if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def with_interval(interval: Interval | None, form: str | None = None) -> str:
    """Write "1.90 [1.80, 2.00]", or only the value if there is no interval. `form`: a format; None: `number`."""
    if interval is None:
        return ""
    write = number if form is None else form.format
    ends = "" if interval.low is None else f" [{', '.join(map(write, interval.ends))}]"
    return f"{write(interval.value)}{ends}"


def times(interval: Interval | None) -> str:
    """Write a ratio as "1.90x [1.80, 2.00]", or a dash if there is none."""
    if interval is None:
        return DASH
    value, *ends = with_interval(interval, "{:.2f}").split(" ", 1)
    return " ".join([f"{value}x", *ends])


def times_text(interval: Interval) -> str:
    """Write "1.90 times [1.80, 2.00]"."""
    if interval.low is None:
        return f"{interval.value:.2f} times (measured once: no interval)"
    return times(interval).replace("x", " times", 1)
