"""Measures a drafter's acceptance with every combination of its flags: its config may not say how it was trained.

Two of EAGLE-3's flags leave no trace in the tensors, and trainers do not agree on their meaning: SpecForge's
`norm_output` norms the state that the head reads, but feeds back the state before the norm, which is
`norm_output: false` here and in vLLM. With wrong flags a drafter loses acceptance from the second draft on, without any
error. So each combination is tried on a few prompts. Drafts are verified in any case, so only acceptance differs.
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
    """A drafter's acceptance with these flags."""

    flags: Mapping[str, bool]
    is_stated: bool  # these are the flags of its config
    acceptance_length: Interval | None  # None: it could not be run
    rate_by_depth: tuple[float, ...] = ()
    failure: str | None = None

    @property
    def name(self) -> str:
        return ", ".join(flag for flag, on in self.flags.items() if on) or "none"


def try_flags(checkpoint: DrafterCheckpoint, target: str, progress: Progress) -> tuple[Reading, ...]:
    """Measure every combination on a few prompts, greedily. The best comes first, failed ones last."""
    config = checkpoint.config
    if config.architecture is not Architecture.EAGLE3:
        raise CheckpointError(f"{checkpoint.directory}: EAGLE-1 has no flags to try")
    has_norms = any(name.startswith("fc_norm.") for name in checkpoint.stored_names)
    every = itertools.product((True, False) if has_norms else (False,), (True, False), (True, False))
    readings = [dict(zip(TRIED, values, strict=True)) for values in every]
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # `inspect` has shown them
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
    """Return what to do if other flags are clearly better than those of the config."""
    best, stated = readings[0], next((one for one in readings if one.is_stated), None)
    if best.acceptance_length is None or best is stated:
        return None
    if stated is None or stated.acceptance_length is None:
        return f"config.json cannot be run as it is; the best reading is {best.name}"
    if best.acceptance_length.ends[0] <= stated.acceptance_length.ends[1]:
        return None
    return f"it was probably trained with: {best.name}; correct these flags in config.json"


def _write(checkpoint: DrafterCheckpoint, flags: Mapping[str, bool], path: Path) -> None:
    """Write the checkpoint with these flags; weights are linked, or copied without the norms of fc."""
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
