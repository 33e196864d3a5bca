"""The measurements of one contender under one load, and the fastest of several."""

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
    """A contender on a workload under a load, in all repeats, and the baseline's cells to compare it with."""

    contender: str
    workload: str
    load: Load
    cells: list[Cell]
    baseline: str | None
    base: list[Cell]  # of the baseline
    held_out: Sequence[Cell] = ()  # of the fastest of several, chosen on other prompts: `figures.held_out`

    def to_dict(self, *names: str) -> dict[str, Any]:
        """JSON values of these attributes."""
        return {name: encode(getattr(self, name)) for name in ("contender", "workload", "load", *names)}

    @property
    def where(self) -> str:
        return f"{self.workload}, {self.load}"

    @cached_property
    def figures(self) -> Figures:
        return figures_of(self.cells)

    @property
    def speed(self) -> Interval | None:
        """Tokens per second of each user, if the measurement is complete."""
        return None if self.figures.partial else self.figures.per_user_tokens_per_second

    @property
    def decoded(self) -> Sequence[Cell]:
        """The cells that its speed per user is computed from."""
        return self.held_out or self.cells

    @property
    def is_compared(self) -> bool:
        return self.baseline not in (None, self.contender)

    @cached_property
    def reason(self) -> str | None:
        """Why there is no ratio: a side is not complete, or they have nothing in common; None: there is one."""
        return why_no_ratio(self.contender, self.cells, self.baseline or "", self.base)

    @cached_property
    def per_user(self) -> Interval | None:
        """Ratio of the speed per user to the baseline's, in the same repeats."""
        return speed_ratio(self.decoded, self.base) if self.is_compared and not self.reason else None

    @cached_property
    def total(self) -> Interval | None:
        """The same for all users together."""
        is_whole = self.is_compared and not self.reason
        return ratio(throughput(self.cells), throughput(self.base)) if is_whole else None

    @property
    def sign(self) -> int:
        """1 if it is faster than the baseline beyond noise, -1 if it is slower, else 0."""
        return sign_of(self.per_user, around=1.0) if self.per_user else 0

    @property
    def round_cost(self) -> float | None:
        """Cost of a round in plain decode steps: acceptance length / ratio, as ratio = tokens per round / cost."""
        length = self.figures.acceptance_length
        return length.value / self.per_user.value if length and self.per_user else None

    @property
    def compared(self) -> int:
        """Number of answers for which the baseline has an answer to the same prompt in the same repeat."""
        return self._shared(2)

    @property
    def different(self) -> int:
        """How many of these differ from the baseline's."""
        return self._shared(2) - self._shared(3)

    def _shared(self, parts: int) -> int:
        """Number of answers of both sides that have the first `parts` of repeat, prompt and digest in common."""
        mine, theirs = (
            Counter((cell.repeat, one.prompt, one.digest)[:parts] for cell in cells for one in cell.good if one.digest)
            for cells in (self.cells, self.base)
        )
        return (mine & theirs).total()


@dataclass(frozen=True, kw_only=True)
class Best(Record):
    """The fastest contender per user among the modes of one drafter that were measured completely.

    Its ratio is cross-validated: on each half of the prompts it is that of the fastest on the other half.
    """

    contender: str
    workload: str
    load: Load
    drafter: str
    alike: tuple[str, ...]  # others that are not slower beyond noise
    baseline: str | None
    over_baseline: Interval | None
    chosen: tuple[str, ...] | None = None  # the fastest on each half; empty: too few prompts; None: nothing to choose

    def __str__(self) -> str:
        """One line. A contender is only called the fastest if it is faster than the baseline beyond noise."""
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
