"""What warming up measured, kept between starts of the same models on the same machine: a small file for each.

Nobody relies on it: a file that cannot be read or written is passed over, and rounds that run correct what it says.
FLEDGE_COSTS=0 does without.
"""

import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fledge.engine.arms import Arm, RequestKind
from fledge.engine.config import EngineConfig
from fledge.engine.costs import RoundCosts
from fledge.errors import FledgeError
from fledge.files import cache_directory, digest, read_json, write_json
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel
from fledge.provenance import run_provenance

MAX_AGE = 7 * 24 * 3600.0  # seconds; then rounds are measured anew

_log = logging.getLogger("fledge.engine")


class CostCache:
    """The file for one engine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, target: TargetModel, drafter: Drafter | None, config: EngineConfig) -> "CostCache | None":
        """That of an engine on these models; None where nothing is to be kept."""
        if os.environ.get("FLEDGE_COSTS") == "0":
            return None
        machine = run_provenance()
        models = [one for one in (target, drafter) if one is not None]
        facts = {
            "machine": [machine[name] for name in ("fledge_version", "git_commit", "device", "cpu", "cpus", "threads")],
            "torch": torch.__version__,
            "models": [repr(one.config) for one in models],
            "weights": [sorted({(str(w.dtype), str(w.device)) for w in one.state_dict().values()}) for one in models],
            "options": [
                *(config.max_num_seqs, config.pack_weights, config.enforce_eager, config.block_size),
                *(config.kv_cache_dtype, config.batch_invariant),
            ],
        }
        try:
            return cls(cache_directory() / "costs" / f"{digest(facts)}.json")
        except FledgeError:  # there is no home
            return None

    def recall(self, costs: RoundCosts) -> None:
        """Let the tables expect what the file says."""
        found = read_json(self.path)
        if found is None:
            if self.path.exists():
                _log.debug("%s: not readable, rounds are measured anew", self.path)
            return
        try:
            if not 0 <= time.time() - float(found["written"]) <= MAX_AGE:
                return
            entries = list(_entries(found["rounds"]))
        except (KeyError, TypeError, ValueError) as error:
            _log.debug("%s: damaged (%s), rounds are measured anew", self.path, error)
            return
        for kind, batch, arm, seconds in entries:
            costs.tables[kind].expect(batch=batch, arm=arm, seconds=seconds)

    def keep(self, costs: RoundCosts) -> None:
        """Write what the tables expect."""
        rounds = [
            {"kind": kind, "batch": batch, "depth": arm.depth, "is_tree": arm.is_tree, "seconds": seconds}
            for kind, table in costs.tables.items()
            for batch, arm, seconds in table.expectations()
        ]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, {"written": time.time(), "rounds": rounds})
        except OSError as error:
            _log.debug("%s: not written (%s)", self.path, error)


def _entries(rounds: Any) -> Iterator[tuple[RequestKind, int, Arm, float]]:
    for one in rounds:
        batch, arm = one["batch"], Arm(one["depth"], is_tree=one["is_tree"])
        seconds = float(one["seconds"])
        if type(batch) is not int or type(arm.depth) is not int or type(arm.is_tree) is not bool or batch < 1:
            raise ValueError(f"found {one}")
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"a round of {seconds} s")
        yield RequestKind(one["kind"]), batch, arm, seconds
