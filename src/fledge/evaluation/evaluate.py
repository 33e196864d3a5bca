"""`fledge eval`: acceptance length by workload, drafter, depth and temperature (how: `acceptance.py`)."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fledge.checkpoints.contract import INFLATED
from fledge.checkpoints.source import resolve
from fledge.engine.config import MAX_DEPTH, SpeculativeConfig
from fledge.errors import CheckpointError, ConfigError, FledgeError
from fledge.evaluation.acceptance import AcceptanceMeter, AcceptanceSettings, TargetTurn
from fledge.evaluation.results import (
    Cell,
    Contender,
    Difference,
    DraftMode,
    Load,
    RequestRecord,
    Results,
    mode_name,
    write_results,
)
from fledge.evaluation.workloads import Workload, with_token_ids
from fledge.files import distinct_names, read_json
from fledge.progress import Progress
from fledge.provenance import run_provenance

_RECORDED = (
    "depths",
    "temperatures",
    "max_tokens",
    "max_num_seqs",
    "sample",
    "seed",
    "kv_cache_dtype",
    "batch_invariant",
)  # settings that are part of the results
# Keys of a speculative config that have options of their own.
_OWN_KEYS = ("model", "num_speculative_tokens", "adaptive", "num_speculative_tokens_per_batch_size")
_NAMED = 3  # prompts that a note lists; the results have all


@dataclass(frozen=True, kw_only=True)
class EvalSettings(AcceptanceSettings):
    """What to measure, and how."""

    drafters: tuple[str, ...]
    depths: tuple[int, ...] = (3, 5, 7)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    speculative_config: DraftMode = field(default_factory=dict)  # further keys, for trees or sampled drafts
    sample: int | None = None  # how many prompts of each workload were sampled, for the record

    def __post_init__(self) -> None:
        for name in ("drafters", "depths", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ConfigError(f"{name}: found {list(values)}, expected at least one, each only once")
        for name, least, most in (("depth", 1, MAX_DEPTH), ("temperature", 0, 2)):
            for value in getattr(self, f"{name}s"):
                if not least <= value <= most:
                    raise ConfigError(f"{name}: found {value:g}, allowed is {least} to {most}")
        if own := [key for key in _OWN_KEYS if key in self.speculative_config]:
            raise ConfigError(f"speculative_config: leave out {', '.join(own)}: there are options for these")
        SpeculativeConfig.from_dict({"model": "any", **self.speculative_config})  # raises if it is invalid


def run_eval(
    settings: EvalSettings, workloads: Sequence[Workload], progress: Progress, out: Path | None = None
) -> Results:
    """Measure everything. After Ctrl-C, returns what was measured so far, as partial results.

    A drafter that cannot be used or fails has failed cells, and the others are still measured. `out` is written
    atomically after every drafter and depth, so that a killed run loses at most one of them.
    """
    for name in (settings.target, *settings.drafters):
        if not resolve(name).is_dir():  # a bundled model that this installation does not have
            raise CheckpointError(
                f"{name}: this installation of Fledge has no bundled models; name your own with --target and --drafter"
            )
    run = _EvalRun(settings, workloads, progress, out)
    try:
        run.answer()
        for drafter in settings.drafters:
            for depth in settings.depths:
                run.measure(drafter, depth)
                run.save(finished=False)
        if run.different:
            run.check_differences()
    except KeyboardInterrupt:
        run.is_interrupted = True
    finally:
        run.meter.close()
    return run.save(finished=True)


class _EvalRun:
    """What has been measured so far."""

    def __init__(
        self, settings: EvalSettings, workloads: Sequence[Workload], progress: Progress, out: Path | None
    ) -> None:
        self.settings, self.workloads, self.progress, self.out = settings, workloads, progress, out
        self.meter = AcceptanceMeter(settings)
        self.provenance = run_provenance()
        self.names = dict(zip(settings.drafters, distinct_names(settings.drafters), strict=True))
        self.turns: dict[tuple[str, float], list[TargetTurn]] = {}  # by workload and temperature
        # Prompts by workload whose first turn, or a later turn, does not fit.
        self.unfit: dict[str, dict[str, list[str]]] = {w.name: {"too_long": [], "cut_short": []} for w in workloads}
        self.cells: list[Cell] = []
        self.different: dict[int, tuple[tuple[int, int], ...]] = {}  # cell -> turns that differ, and where
        self.machine: dict[str, Any] = {}
        label = (read_json(resolve(settings.target) / "config.json") or {}).get(INFLATED) or {}
        self.inflated: str | None = label.get("shape")
        self.is_interrupted = False

    def answer(self) -> None:
        """Let the target answer all turns at every temperature."""
        meter = self.meter
        self.machine = {"dtype": meter.dtype, "max_model_len": meter.llm.max_model_len, "device": meter.device}
        workloads = [with_token_ids(workload, self.settings.target) for workload in self.workloads]
        total = sum(prompt.num_turns for workload in workloads for prompt in workload.prompts)
        for temperature in self.settings.temperatures:
            with self.progress.task(f"target T={temperature:g}", total) as advance:
                found = meter.answer(workloads, temperature, advance)
            if not found.turns:
                raise ConfigError(f"no prompt fits into {meter.llm.max_model_len} tokens; choose other workloads")
            for name, unfit in self.unfit.items():
                self.turns[name, temperature] = [turn for turn in found.turns if turn.workload == name]
                for why, ids in unfit.items():
                    ids += [one for where, one in getattr(found, why) if where == name and one not in ids]

    def measure(self, drafter: str, depth: int) -> None:
        """Add the cells of one drafter at one depth, for all temperatures and workloads."""
        load = Load(concurrency=self.settings.max_num_seqs)
        cells = {
            key: Cell(
                contender=self._contender(drafter, depth, key[1]).name,
                workload=key[0],
                load=load,
                repeat=0,
                seconds=0.0,
                requests=(),
            )
            for key, turns in self.turns.items()
            if turns
        }
        try:
            self.meter.set_drafter(drafter, depth, self.settings.speculative_config)
            total = sum(len(self.turns[key]) for key in cells)
            with self.progress.task(f"{self.names[drafter]} K={depth}", total) as advance:
                for key in list(cells):
                    measured = self.meter.measure(self.turns[key], key[1], advance)
                    requests = measured.requests
                    if key[1] == 0 and measured.different:
                        self.different[len(self.cells)] = measured.different
                        requests = _labelled(requests, {i: "unchecked" for i, _ in measured.different})
                    cell = replace(
                        cells.pop(key),
                        seconds=measured.seconds,
                        requests=requests,
                        acceptance=measured.counted,
                        state_growth=measured.state_growth,
                        reliability=measured.reliability,
                    )
                    if measured.failure is not None:
                        note = f"the drafter failed and was switched off: {measured.failure}"
                        cell = replace(cell, status="failed", note=note)
                    self.cells.append(cell)
        except (FledgeError, RuntimeError) as error:  # CUDA raises RuntimeError
            reason = " ".join(str(error).split()) or type(error).__name__
            self.cells += [replace(cell, status="failed", note=reason) for cell in cells.values()]

    def check_differences(self) -> None:
        """Where answers differ from the target's, find out whether its choice was a tie."""
        with self.progress.task("differences", len(self.different)) as advance:
            for number, different in self.different.items():
                cell = self.cells[number]
                clear = self.meter.clear_differences(self.turns[cell.workload, 0.0], different, 0.0)
                labels: dict[int, Difference] = {i: "clear" if i in clear else "tie" for i, _ in different}
                self.cells[number] = replace(cell, requests=_labelled(cell.requests, labels))
                advance()

    def save(self, *, finished: bool) -> Results:
        """Return the results so far, and write them if there are any. `finished`: the run is over."""
        settings = self.settings
        failed = [cell for cell in self.cells if cell.status == "failed"]
        done = {cell.contender for cell in self.cells}
        every = itertools.product(settings.drafters, settings.depths, settings.temperatures)
        facts = {
            workload.name: {**workload.facts, "categories": workload.categories, **self.unfit[workload.name]}
            for workload in self.workloads
        }
        how = mode_name({"num_speculative_tokens": 0, **settings.speculative_config}).removeprefix("K=0").strip()
        results = Results(
            kind="eval",
            title=f"Acceptance length of {', '.join(self.names.values())}{how and ', ' + how}",
            baseline=None,
            contenders=tuple(one for one in itertools.starmap(self._contender, every) if one.name in done),
            cells=tuple(self.cells),
            settings={**{name: getattr(settings, name) for name in _RECORDED}, **self.machine, "workloads": facts},
            provenance=self.provenance,
            status="partial" if self.is_interrupted or failed or not finished else "complete",
            notes=tuple(self._notes(failed, finished=finished)),
        )
        if self.out is not None and self.cells:
            write_results(results, self.out)
        return results

    def _notes(self, failed: Sequence[Cell], *, finished: bool) -> list[str]:
        notes = [note for workload in self.workloads for note in workload.notes]
        if self.inflated:
            notes.append(f"inflated to the shape {self.inflated}: acceptance is that of the small pair")
        room = f"do not fit into {self.machine.get('max_model_len', 0):,} tokens"
        for workload in self.workloads:
            too_long, cut_short = self.unfit[workload.name].values()
            whole = f"{len(too_long)} of {len(workload.prompts)} prompts {room} and were not asked"
            for ids, what in ((too_long, whole), (cut_short, f"later turns of {len(cut_short)} prompts {room}")):
                if ids:
                    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
                    notes.append(f"{workload.name}: {what}: {', '.join(ids[:_NAMED])}{more}")
        if any(cell.acceptance for cell in self.cells):
            notes.append("this vLLM counts acceptance of all requests together: no intervals, categories or lengths")
        notes += dict.fromkeys(f"{cell.contender}: {cell.note}" for cell in failed)
        if self.is_interrupted or not finished:
            why = "interrupted" if self.is_interrupted else "still running, or killed"
            notes.append(f"{why}: what was not finished is missing")
        return notes

    def _contender(self, drafter: str, depth: int, temperature: float) -> Contender:
        mode = {"num_speculative_tokens": depth, **self.settings.speculative_config}
        return Contender(
            name=f"{self.names[drafter]} {mode_name(mode)} T={temperature:g}",
            kind="fledge",
            target=self.settings.target,
            drafter=drafter,
            speculation={"model": drafter, **mode},
            inflated=self.inflated,
            temperature=temperature,
        )


def _labelled(requests: Sequence[RequestRecord], labels: Mapping[int, Difference]) -> tuple[RequestRecord, ...]:
    """Set `differs` of the requests whose indices are in `labels`."""
    return tuple(replace(one, differs=labels[i]) if i in labels else one for i, one in enumerate(requests))
