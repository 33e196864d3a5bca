"""Acceptance of a drafter under every reading of its flags: what its config says may not be how it was trained.

Two of EAGLE-3's flags leave no trace in the tensors, and trainers do not agree on what they mean: SpecForge's
`norm_output` norms what the head reads and feeds back the state before that, so its drafters are `norm_output: false`
here and in vLLM. Read wrongly, a drafter loses acceptance from the second draft on and nobody says why. So each reading
is tried on a few prompts. Drafts are verified whatever the reading: only acceptance differs.
"""

import itertools
import json
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.checkpoints.reading import DrafterCheckpoint
from fledge.checkpoints.tensors import write_model
from fledge.errors import CheckpointError, CheckpointWarning
from fledge.evaluation.evaluate import EvalSettings, run_eval
from fledge.evaluation.report import acceptance_length, complete_cells, eval_row
from fledge.evaluation.workloads import load_workloads
from fledge.models.config import Architecture
from fledge.progress import Progress
from fledge.records import Record
from fledge.report.intervals import Interval

TRIED = ("fc_norm", "norm_output", "norm_before_residual")
_WORKLOAD, _PROMPTS_OF_EACH, _MAX_TOKENS, _DEPTH = "short", 1, 48, 4


@dataclass(frozen=True, kw_only=True)
class Reading(Record):
    """How a drafter does if its flags are these."""

    flags: Mapping[str, bool]
    is_stated: bool  # by its config
    acceptance_length: Interval | None  # None: it could not be run
    rate_by_depth: tuple[float, ...] = ()
    failure: str | None = None

    @property
    def name(self) -> str:
        return ", ".join(flag for flag, on in self.flags.items() if on) or "none"


def try_flags(checkpoint: DrafterCheckpoint, target: str, progress: Progress) -> tuple[Reading, ...]:
    """Measure every reading on a few prompts, greedily. The best comes first, and those that failed last."""
    config = checkpoint.config
    if config.architecture is not Architecture.EAGLE3:
        raise CheckpointError(f"{checkpoint.directory}: EAGLE-1 has no flags to try")
    has_norms = any(name.startswith("fc_norm.") for name in checkpoint.stored_names)
    every = itertools.product((True, False) if has_norms else (False,), (True, False), (True, False))
    readings = [dict(zip(TRIED, values, strict=True)) for values in every]
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # `inspect` has told them
        names = ["+".join(flag for flag, on in flags.items() if on) or "none" for flags in readings]  # seen in progress
        paths = [Path(directory) / name for name in names]
        for path, flags in zip(paths, readings, strict=True):
            _write(checkpoint, flags, path)
        settings = EvalSettings(
            target=target,
            drafters=tuple(map(str, paths)),
            depths=(_DEPTH,),
            temperatures=(0.0,),
            max_tokens=_MAX_TOKENS,
        )
        results = run_eval(settings, load_workloads([_WORKLOAD], sample=_PROMPTS_OF_EACH), progress)
    rows = {one.drafter: (one, eval_row(results, one)) for one in results.contenders}
    found = []
    for path, flags in zip(paths, readings, strict=True):
        contender, row = rows[str(path)]
        found.append(
            Reading(
                flags=flags,
                is_stated=all(getattr(config, flag) == on for flag, on in flags.items()),
                acceptance_length=acceptance_length(complete_cells(results, contender.name)),
                rate_by_depth=row.rate_by_depth,
                failure=next(iter(row.failed.values()), None),
            )
        )
    return tuple(sorted(found, key=lambda one: -one.acceptance_length.value if one.acceptance_length else 0.0))


def advice(readings: tuple[Reading, ...]) -> str | None:
    """What to do, where another reading is clearly better than the stated one."""
    best, stated = readings[0], next((one for one in readings if one.is_stated), None)
    if best.acceptance_length is None or best is stated:
        return None
    if stated is None or stated.acceptance_length is None:
        return f"config.json cannot be run as it is; the best reading is {best.name}"
    if best.acceptance_length.ends[0] <= stated.acceptance_length.ends[1]:
        return None
    return f"it was probably trained with: {best.name}; correct these flags in config.json"


def _write(checkpoint: DrafterCheckpoint, flags: Mapping[str, bool], path: Path) -> None:
    """Write the checkpoint with these flags; the weights are linked, or copied to leave norms out."""
    values: dict[str, Any] = {**checkpoint.fields.values, **flags}
    if isinstance(nested := values.get("eagle_config"), dict):
        values["eagle_config"] = {name: value for name, value in nested.items() if name not in flags}
    if not flags["fc_norm"]:
        names = [name for ours, name in checkpoint.stored_names.items() if not ours.startswith("fc_norm.")]
        write_model(path, {name: checkpoint.files.read(name) for name in names}, {"config.json": values})
        return
    path.mkdir()
    (path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    for file in {*checkpoint.files.files, *checkpoint.directory.glob("*.index.json")}:
        (path / file.name).symlink_to(file.resolve())
