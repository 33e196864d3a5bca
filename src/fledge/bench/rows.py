"""What is known of one contender under one load, and of the fastest of several."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fledge.bench.figures import Figures, figures_of, ratio, speed_ratio, throughput, why_no_ratio
from fledge.evaluation.results import Cell, Load
from fledge.records import Record, encode
from fledge.report.intervals import Interval
from fledge.report.prose import sign_of, times


@dataclass(frozen=True, kw_only=True)
class Row:
    """A contender on a workload under a load, in all repeats; beside the baseline there, unless it is that itself."""

    contender: str
    workload: str
    load: Load
    cells: list[Cell]
    baseline: str | None
    base: list[Cell]  # of the baseline
    held_out: Sequence[
        Cell
    ] = ()  # of the fastest of several, each prompt's chosen on other prompts: `figures.held_out`

    def to_dict(self, *names: str) -> dict[str, Any]:
        """These of its figures, as JSON values."""
        return {name: encode(getattr(self, name)) for name in ("contender", "workload", "load", *names)}

    @property
    def where(self) -> str:
        return f"{self.workload}, {self.load}"

    @cached_property
    def figures(self) -> Figures:
        return figures_of(self.cells)

    @property
    def speed(self) -> Interval | None:
        """Tokens per second of each user, if this was measured in full."""
        return None if self.figures.partial else self.figures.per_user_tokens_per_second

    @property
    def decoded(self) -> Sequence[Cell]:
        """What its ratios of speed per user are of."""
        return self.held_out or self.cells

    @property
    def is_compared(self) -> bool:
        return self.baseline not in (None, self.contender)

    @cached_property
    def reason(self) -> str | None:
        """Why there is no ratio: a side is not whole, or the two have nothing in common."""
        return why_no_ratio(self.contender, self.cells, self.baseline or "", self.base)

    @cached_property
    def per_user(self) -> Interval | None:
        """Speed over the baseline's, in the same repeats."""
        return speed_ratio(self.decoded, self.base) if self.is_compared and not self.reason else None

    @cached_property
    def total(self) -> Interval | None:
        """The same of all users together."""
        is_whole = self.is_compared and not self.reason
        return ratio(throughput(self.cells), throughput(self.base)) if is_whole else None

    @property
    def sign(self) -> int:
        """1 where it is faster than the baseline beyond noise, -1 where it is slower, else 0."""
        return sign_of(self.per_user, around=1.0) if self.per_user else 0

    @property
    def round_cost(self) -> float | None:
        """Plain steps that a round costs: acceptance length over the ratio, since ratio = tokens per round / cost."""
        length = self.figures.acceptance_length
        return length.value / self.per_user.value if length and self.per_user else None

    @property
    def compared(self) -> int:
        """Answers that have one of the baseline beside them, by prompt and repeat."""
        return self._shared(2)

    @property
    def different(self) -> int:
        """Of these, how many are not the baseline's."""
        return self._shared(2) - self._shared(3)

    def _shared(self, parts: int) -> int:
        """Answers of both sides that have the first so many of repeat, prompt and digest in common."""
        mine, theirs = (
            Counter((cell.repeat, one.prompt, one.digest)[:parts] for cell in cells for one in cell.good if one.digest)
            for cells in (self.cells, self.base)
        )
        return (mine & theirs).total()


@dataclass(frozen=True, kw_only=True)
class Best(Record):
    """The contender that is the fastest per user, of the ways to use one drafter that were measured in full.

    Its ratio is that of choosing: on each half of the prompts, of the one that is fastest on the other half.
    """

    contender: str
    workload: str
    load: Load
    drafter: str
    alike: tuple[str, ...]  # others that are not beyond noise slower
    baseline: str | None
    over_baseline: Interval | None
    chosen: tuple[str, ...] | None = None  # on either half; empty: too few prompts for halves; None: no choice

    def __str__(self) -> str:
        """Nothing is called the fastest that is not faster than the baseline beyond noise."""
        said, over = f"{self.contender} is the fastest per user", self.over_baseline
        if over and sign_of(over, around=1.0) > 0:
            said += f", {times(over)} the speed of {self.baseline}"
        elif over:
            how = "measured once" if over.low is None else "no faster beyond noise"
            how = "slower at best" if sign_of(over, around=1.0) < 0 else how
            said = f"{how}, {times(over)} the speed of {self.baseline} per user with {self.contender}"
        said += self.how_chosen if over else ""
        alike = f"; not told apart from it: {', '.join(self.alike)}" if self.alike else ""
        return f"{self.workload}, {self.load}, {self.drafter}: {said}{alike}"

    @property
    def how_chosen(self) -> str:
        if self.chosen is None:
            return ""
        return f" ({'chosen on other prompts' if self.chosen else 'chosen on the same prompts: too few for halves'})"
