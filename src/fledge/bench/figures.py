"""Figures of cells: speeds, latencies, acceptance and ratios, each with its interval (formulas: `docs/bench.md`).

Incomplete cells are only used if there is no complete one, and there is no ratio to or from them, but a reason why.
"""

import hashlib
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fledge.evaluation.report import BOOTSTRAP, ROUNDS, acceptance_length, acceptance_rates
from fledge.evaluation.results import Cell, Rounds, conversation_of, token_share
from fledge.records import Record
from fledge.report.intervals import Interval, Panel, mean_ratio, pooled

Latency = Literal["ttft", "tpot"]
Spread = Mapping[str, Interval]  # of a latency in milliseconds over requests: mean, p50, p90 and p99


@dataclass(frozen=True, kw_only=True)
class Figures(Record):
    """Figures of one contender on one workload under one load, all repeats pooled. None: cannot be computed."""

    per_user_tokens_per_second: Interval | None
    total_tokens_per_second: Interval | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    acceptance_length: Interval | None
    fresh_acceptance_length: Interval | None  # without the rounds in repetition
    novel_acceptance_length: Interval | None  # also without the rounds in copies of the prompt
    repeated: float | None  # share of the answers' tokens
    copied: float | None  # the same, from the prompt
    rate_by_depth: tuple[Interval, ...]
    rounds: int  # in the cells of these figures
    requests: int  # in the cells of these figures
    errors: int  # failed requests in any cell
    cells: int  # that these figures are computed from
    failed_cells: int  # that are not complete
    partial: bool  # something is missing from these figures
    reason: str | None  # why it is partial

    def length_of(self, rounds: Rounds) -> Interval | None:
        """Acceptance length of all rounds, of the fresh ones, or of the novel ones."""
        lengths = (self.acceptance_length, self.fresh_acceptance_length, self.novel_acceptance_length)
        return dict(zip(ROUNDS, lengths, strict=True))[rounds]


def figures_of(cells: Sequence[Cell]) -> Figures:
    """Pool the repeats. Incomplete ones are only used if there is no complete one; `partial` says so."""
    used = [cell for cell in cells if cell.status == "complete"] or [cell for cell in cells if cell.good]
    reason = why_partial(cells)
    return Figures(
        per_user_tokens_per_second=BOOTSTRAP.interval([decoding(used)], pooled()),
        total_tokens_per_second=BOOTSTRAP.interval([throughput(used)], pooled()),
        ttft_ms=_spread(used, "ttft"),
        tpot_ms=_spread(used, "tpot"),
        acceptance_length=acceptance_length(used),
        fresh_acceptance_length=acceptance_length(used, "fresh"),
        novel_acceptance_length=acceptance_length(used, "novel"),
        repeated=token_share((one for cell in used for one in cell.good), "repeated_tokens"),
        copied=token_share((one for cell in used for one in cell.good), "copied_tokens"),
        rate_by_depth=tuple(acceptance_rates(used).values()),
        rounds=sum(cell.acceptance_statistics.rounds for cell in used),
        requests=sum(len(cell.good) for cell in used),
        errors=_errors(cells),
        cells=len(used),
        failed_cells=sum(cell.status != "complete" for cell in cells),
        partial=reason is not None,
        reason=reason,
    )


def why_partial(cells: Sequence[Cell]) -> str | None:
    """Return in one line what is missing from these repeats; None if nothing is."""
    if not cells:
        return "not measured"
    broken = [cell for cell in cells if cell.status != "complete"]
    if broken:
        how = "failed" if all(cell.status == "failed" for cell in broken) else "incomplete"
        notes = "; ".join(dict.fromkeys(cell.note for cell in broken if cell.note))
        repeats = "repeat" if len(cells) == 1 else "repeats"
        return f"{len(broken)} of {len(cells)} {repeats} {how}" + (f": {notes}" if notes else "")
    errors, total = _errors(cells), sum(len(cell.requests) for cell in cells)
    if errors:
        first = next((r.error for cell in cells for r in cell.requests if r.error), "no answer")
        return f"{errors} of {total} requests failed: {first}"
    return None if total else "no requests"


def why_no_ratio(contender: str, cells: Sequence[Cell], baseline: str, base: Sequence[Cell]) -> str | None:
    """Return why these two have no ratio; None if they have one."""
    for name, side in ((contender, cells), (baseline, base)):
        if reason := why_partial(side):
            return f"{name}: {reason}"
    if not {cell.repeat for cell in cells} & {cell.repeat for cell in base}:
        return "no repeat in common"
    both = [{request.prompt for cell in side for request in cell.good} for side in (cells, base)]
    return None if both[0] & both[1] else "no prompt in common"


def ratio(of: Panel, base: Panel, *, offset: float = 0.0) -> Interval | None:
    """Return the geometric mean over repeats of the ratio in each repeat, over the common prompts."""
    return BOOTSTRAP.interval([of.beside(base)], lambda sides: mean_ratio(sides[0], offset=offset))


def speed_ratio(cells: Sequence[Cell], base: Sequence[Cell]) -> Interval | None:
    """Return the ratio of the speeds per user."""
    return ratio(decoding(cells), decoding(base))


def fastest_by_half(several: Mapping[str, Sequence[Cell]], base: Sequence[Cell]) -> tuple[str, ...]:
    """Return the fastest per user on each half of the prompts; empty if a contender has no requests on a half.

    Compares ratios to `base`, or speeds if it is empty.
    """
    chosen = []
    for prompts in halves(cell for cells in several.values() for cell in cells):
        against = decoding(_only(base, prompts))
        panels = {name: decoding(_only(cells, prompts)) for name, cells in several.items()}
        values = {
            name: panel.beside(against).value(lambda sides: mean_ratio(sides[0])) if base else panel.value(pooled())
            for name, panel in panels.items()
        }
        known = {name: value for name, value in values.items() if value is not None}
        if not known or len(known) < len(several):
            return ()
        chosen.append(max(known, key=lambda name: known[name]))
    return tuple(chosen)


def held_out(first: Sequence[Cell], second: Sequence[Cell]) -> list[Cell]:
    """Cross-validation: cells of the choice on the first half, on the second half of the prompts, and vice versa."""
    one, other = halves([*first, *second])
    return _only(first, other) + _only(second, one)


def halves(cells: Iterable[Cell]) -> tuple[set[str], set[str]]:
    """Split the prompts in two halves by a hash of their ids: the same in all runs, whatever their order."""
    prompts = {conversation_of(request.prompt) for cell in cells for request in cell.requests}
    ordered = sorted(prompts, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())
    return set(ordered[::2]), set(ordered[1::2])


def _only(cells: Iterable[Cell], prompts: Container[str]) -> list[Cell]:
    """Return the cells with only the requests of these prompts."""
    return [
        replace(cell, requests=tuple(one for one in cell.requests if conversation_of(one.prompt) in prompts))
        for cell in cells
    ]


def decoding(cells: Iterable[Cell]) -> Panel:
    """Return a panel with the columns tokens after the first of each answer, and the seconds they took."""
    rows = ((repeat, prompt, (more, after)) for repeat, prompt, _, more, after in _timed(cells) if more > 0)
    return Panel.collect(rows, columns=2)


def throughput(cells: Iterable[Cell]) -> Panel:
    """Return a panel with the columns output tokens, and each request's share of the cell's seconds.

    Shares are in proportion to how long requests took. So the quotient of the sums is tokens per second, and a prompt
    that is resampled twice counts with its time.
    """
    rows = []
    for cell in cells:
        taken = [(request, (request.done or 0.0) - request.sent) for request in cell.good]
        whole = sum(seconds for _, seconds in taken)
        for request, seconds in taken:
            part = seconds / whole if whole > 0 else 1 / len(taken)
            rows.append((cell.repeat, conversation_of(request.prompt), (request.output_tokens, cell.seconds * part)))
    return Panel.collect(rows, columns=2)


def latencies(cells: Iterable[Cell], which: Latency) -> dict[tuple[int, str], list[float]]:
    """Return the milliseconds of each request, by repeat and prompt."""
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for repeat, prompt, to_first, more, after in _timed(cells):
        if which == "ttft":
            found[repeat, prompt].append(1e3 * to_first)
        elif more > 0:
            found[repeat, prompt].append(1e3 * after / more)
    return found


def latency(cells: Iterable[Cell], which: Latency = "ttft") -> Panel:
    """Return a panel with the columns milliseconds and requests."""
    found = latencies(cells, which)
    return Panel.collect(((*key, (sum(values), len(values))) for key, values in found.items()), columns=2)


def _spread(cells: Sequence[Cell], which: Latency) -> Spread | None:
    several = BOOTSTRAP.quantiles(latencies(cells, which), (0.5, 0.9, 0.99))
    mean = BOOTSTRAP.interval([latency(cells, which)], pooled())
    return dict(zip(("mean", "p50", "p90", "p99"), (mean, *several), strict=True)) if several and mean else None


def _timed(cells: Iterable[Cell]) -> Iterator[tuple[int, str, float, int, float]]:
    """Yield repeat, prompt, seconds to the first token, and tokens and seconds after it, of each good request."""
    for cell in cells:
        for one in cell.good:
            if one.first_token is not None and one.done is not None:
                times = one.first_token - one.sent, one.output_tokens - 1, one.done - one.first_token
                yield cell.repeat, conversation_of(one.prompt), *times


def _errors(cells: Iterable[Cell]) -> int:
    return sum(len(cell.requests) - len(cell.good) for cell in cells)
