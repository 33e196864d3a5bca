"""Measured speeds of vLLM by depth and concurrency: the table of depths for vLLM, and the costs of its rounds.

`fledge bench serve --tune` measures them and writes a file for each pair, vLLM version, machine and set of options that
affect speed. `fledge serve --engine vllm` uses its table of depths unless one is given, and the page estimates the
speed-up from it.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fledge.engine.arms import PLAIN, Arm
from fledge.engine.costs import CostTable
from fledge.errors import FledgeError
from fledge.files import cache_directory, digest, file_digest, read_json, write_json
from fledge.provenance import run_provenance

MARGIN = 1.02  # a deeper draft must be faster by this factor: less may be noise
LARGEST_BATCH = 4096  # end of the last row


@dataclass(frozen=True, kw_only=True)
class TunePoint:
    """The measurement of one depth at one concurrency."""

    concurrency: int
    depth: int  # 0: without a drafter
    tokens_per_second: float
    acceptance_length: float | None

    @property
    def round_seconds(self) -> float | None:
        """Mean time of a round, with its share of prefill; None if the acceptance length is not known."""
        tokens = 1.0 if self.depth == 0 else self.acceptance_length
        return None if tokens is None else self.concurrency * tokens / self.tokens_per_second


@dataclass(frozen=True, kw_only=True)
class VllmTuning:
    """All points of one tuning run."""

    points: Sequence[TunePoint]
    date: str = ""

    @staticmethod
    def file(target: Path, drafter: Path, version: str, options: Mapping[str, Any]) -> Path | None:
        """Return the file for a pair; None if nothing is to be written. `options`: those of vLLM that affect speed."""
        if os.environ.get("FLEDGE_COSTS") == "0":
            return None
        machine = run_provenance()
        weights = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in drafter.glob("*.safetensors")]
        facts = {
            "machine": [machine[name] for name in ("device", "cpu", "cpus")],
            "vllm": version,
            "models": [file_digest(one / "config.json") for one in (target, drafter)],
            "drafter": sorted(weights),  # changes when it is trained again
            "options": dict(options),
        }
        try:
            return cache_directory() / "costs" / f"vllm-{digest(facts)}.json"
        except FledgeError:  # there is no home
            return None

    def keep(self, path: Path) -> None:
        """Write the file. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        written = time.strftime("%Y-%m-%d", time.gmtime())
        write_json(path, {"date": written, "points": [asdict(point) for point in self.points]})

    @classmethod
    def recall(cls, path: Path | None) -> "VllmTuning | None":
        """Read the file; None if it is missing or damaged."""
        found = None if path is None else read_json(path)
        try:
            return None if found is None else cls(points=[_point(one) for one in found["points"]], date=found["date"])
        except (KeyError, TypeError, ValueError):
            return None

    def costs(self) -> CostTable:
        """Return the measured costs of rounds."""
        table = CostTable()
        for point in self.points:
            if (seconds := point.round_seconds) is not None:
                arm = Arm(point.depth) if point.depth else PLAIN
                table.expect(batch=point.concurrency, arm=arm, seconds=seconds)
        return table

    def table(self, deepest: int) -> list[list[int]] | None:
        """Return the table for a vLLM with this largest depth; None if it would always use that depth."""
        rows = schedule(best_depths([point for point in self.points if point.depth <= deepest]))
        return None if not rows or rows == [[1, LARGEST_BATCH, deepest]] else rows


def _point(value: Mapping[str, Any]) -> TunePoint:
    point = TunePoint(**value)
    numbers = [point.tokens_per_second, 1.0 if point.acceptance_length is None else point.acceptance_length]
    is_whole = type(point.concurrency) is int and type(point.depth) is int
    if not (is_whole and point.concurrency > 0 and point.depth >= 0 and all(0 < one < math.inf for one in numbers)):
        raise ValueError(f"found {value}")
    return point


def best_depths(points: Sequence[TunePoint]) -> dict[int, int]:
    """Return the depth for each concurrency: the fastest, but a deeper one only if it is faster by `MARGIN`."""
    chosen: dict[int, int] = {}
    for concurrency in sorted({point.concurrency for point in points}):
        speeds = {point.depth: point.tokens_per_second for point in points if point.concurrency == concurrency}
        best = 0
        for depth in sorted(speeds):
            best = depth if speeds[depth] >= MARGIN * speeds[best] else best
        chosen[concurrency] = best
    return chosen


def schedule(depths: Mapping[int, int]) -> list[list[int]]:
    """Return rows [first, last, depth] of vLLM's table; the limit between two concurrencies is their geometric mean."""
    rows: list[list[int]] = []
    sizes = sorted(depths)
    for size, following in zip(sizes, [*sizes[1:], None], strict=True):
        last = LARGEST_BATCH if following is None else max(size, math.isqrt(size * following))
        if rows and rows[-1][2] == depths[size]:
            rows[-1][1] = last
        else:
            rows.append([rows[-1][1] + 1 if rows else 1, last, depths[size]])
    return rows


def speculative_config(drafter: str, depths: Mapping[int, int]) -> dict[str, Any] | None:
    """Return the speculative config for vLLM; None if no drafter is fastest everywhere."""
    rows, deepest = schedule(depths), max(depths.values())
    if deepest == 0:
        return None
    table = {} if len(rows) == 1 else {"num_speculative_tokens_per_batch_size": rows}
    return {"model": drafter, "num_speculative_tokens": deepest, **table}


def drafted_round(speculation: Mapping[str, Any], batch: int) -> tuple[int, int]:
    """Return batch size and depth of a typical round with drafts, for about `batch` requests per step.

    If the table does not draft at that size, the nearest size at which it does.
    """
    table = speculation.get("num_speculative_tokens_per_batch_size") or ()
    whole = [1, LARGEST_BATCH, int(speculation.get("num_speculative_tokens") or 0)]
    rows = [row for row in table if row[2] > 0] or [whole]
    first, last, depth = min(rows, key=lambda row: max(row[0] - batch, batch - row[1], 0))
    return min(max(batch, first), last), depth
