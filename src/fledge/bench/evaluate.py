"""`fledge eval`: acceptance length by workload, drafter, depth and temperature.

The target answers every turn by itself first; its answers are the history of the turns after them and, without
randomness, what no drafter may change. Each turn is then a prompt of its own, the same one for every contender.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fledge.bench.evaluate_turns import Asked, different_turns, open_turns, request_record
from fledge.bench.results import Cell, Contender, Difference, Load, RequestRecord, Results, Status, write_results
from fledge.checkpoints.integrity import INFLATED
from fledge.checkpoints.source import resolve
from fledge.engine.config import MAX_DEPTH
from fledge.engine.llm import LLM
from fledge.errors import CheckpointError, ConfigError, FledgeError
from fledge.evaluation.workloads import Prompt, Workload, tokenised
from fledge.files import distinct_names, read_json
from fledge.progress import Progress
from fledge.provenance import run_provenance
from fledge.training.evaluation import (
    TIE,
    Question,
    Turn,
    answer_questions,
    answer_turns,
    clear_differences,
    release,
)
from fledge.training.recipe import DataSection, EvalSection, Recipe, TargetSection

# A step of a bfloat16 number between 16 and 32, where logits often lie, is 0.125; two ways to compute one may differ by
# two of them.
SIXTEEN_BIT_TIE = 0.25
_NAMED = 3  # prompts that a note names; the results have all


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """What is measured, and how."""

    target: str
    drafters: tuple[str, ...]
    depths: tuple[int, ...] = (3, 5, 7)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 128
    max_num_seqs: int = 32
    max_model_len: int | None = None
    sample: int | None = None  # what the workloads were sampled with, for the record
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("drafters", "depths", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ConfigError(f"{name}: found {list(values)}, expected at least one, each only once")
        for depth in self.depths:
            if not 1 <= depth <= MAX_DEPTH:
                raise ConfigError(f"depth: found {depth}, allowed is 1 to {MAX_DEPTH}")
        for temperature in self.temperatures:
            if not 0 <= temperature <= 2:
                raise ConfigError(f"temperature: found {temperature:g}, allowed is 0 to 2")


def run_eval(
    settings: EvalSettings, workloads: Sequence[Workload], progress: Progress, out: Path | None = None
) -> Results:
    """Measure everything. After Ctrl-C what was measured comes back, as partial results.

    A drafter that cannot be used or breaks down has failed cells; the others are measured all the same. `out` is
    written after every drafter and depth, whole or not at all, so that a killed run loses one of them.
    """
    for name in (settings.target, *settings.drafters):
        if not resolve(name).is_dir():  # a bundled one, which this installation does not have
            raise CheckpointError(
                f"{name}: this installation of Fledge has no bundled models; name your own with --target and --drafter"
            )
    run = _Run(settings, workloads, progress, out)
    try:
        run.answer()
        for drafter in settings.drafters:
            for depth in settings.depths:
                run.measure(drafter, depth)
                run.save(finished=False)
        run.judge()
    except KeyboardInterrupt:
        run.is_interrupted = True
    return run.save(finished=True)


class _Run:
    """What has been measured so far."""

    def __init__(
        self, settings: EvalSettings, workloads: Sequence[Workload], progress: Progress, out: Path | None
    ) -> None:
        self.settings = settings
        self.workloads = workloads
        self.progress = progress
        self.out = out
        self.provenance = run_provenance()
        self.names = dict(zip(settings.drafters, distinct_names(settings.drafters), strict=True))
        self.asked: dict[tuple[str, float], Asked] = {}  # by workload and temperature
        self.too_long: dict[str, list[str]] = {}  # prompts by workload
        self.cut_short: dict[str, list[str]] = {}  # prompts whose later turns do not fit
        self.cells: list[Cell] = []
        self.different: dict[int, dict[int, int]] = {}  # cell -> turns that differ -> the first token that does
        self.machine: dict[str, Any] = {}
        label = (read_json(resolve(settings.target) / "config.json") or {}).get(INFLATED) or {}
        self.inflated: str | None = label.get("shape")
        self.is_interrupted = False

    def answer(self) -> None:
        """Let the target answer everything at every temperature."""
        llm = self._open(None, 0)
        weight = llm.target.embed_tokens.weight
        self.machine = {"dtype": str(weight.dtype).removeprefix("torch."), "max_model_len": llm.max_model_len}
        self.machine["device"] = torch.cuda.get_device_name(weight.device) if weight.is_cuda else weight.device.type
        fitting = {workload.name: self._fitting(workload, llm) for workload in self.workloads}
        questions = [
            Question(source=name, category=prompt.category, messages=open_turns(prompt))
            for name, prompts in fitting.items()
            for prompt in prompts
        ]
        ids = [prompt.id for prompts in fitting.values() for prompt in prompts]
        if not questions:
            raise ConfigError(f"no prompt fits into {llm.max_model_len} tokens; choose other workloads")
        for temperature in self.settings.temperatures:
            count = sum(question.turns for question in questions)
            with self.progress.task(f"target T={temperature:g}", count) as advance:
                turns, _ = answer_questions(
                    llm, questions, self._recipe(temperature), advance, first_seed=self.settings.seed
                )
            for name in fitting:
                own = [turn for turn in turns if turn.source == name]
                self.asked[name, temperature] = Asked(
                    turns=tuple(own), prompts=tuple(ids[turn.question] for turn in own)
                )
            self._note_cut_short(questions, ids, turns)
        del llm, weight
        release()

    def measure(self, drafter: str, depth: int) -> None:
        """Add the cells of one drafter at one depth, all temperatures and workloads."""
        contenders = [self._contender(drafter, depth, temperature) for temperature in self.settings.temperatures]
        todo = [
            (contender, temperature, workload.name)
            for contender, temperature in zip(contenders, self.settings.temperatures, strict=True)
            for workload in self.workloads
            if self.asked[workload.name, temperature].turns
        ]
        total = sum(len(self.asked[name, temperature].turns) for _, temperature, name in todo)
        measured = 0
        llm = None
        try:
            llm = self._open(drafter, depth)
            with self.progress.task(f"{self.names[drafter]} K={depth}", total) as advance:
                for contender, temperature, name in todo:
                    self._add_cell(llm, contender, temperature, name, advance)
                    measured += 1
        except (FledgeError, RuntimeError) as error:  # of CUDA too
            reason = " ".join(str(error).split()) or type(error).__name__
            for contender, _, name in todo[measured:]:
                self._add(contender, name, 0.0, (), "failed", reason)
        finally:
            del llm
            release()

    def _add_cell(self, llm: LLM, contender: Contender, temperature: float, name: str, advance: Any) -> None:
        asked = self.asked[name, temperature]
        started = time.perf_counter()
        outputs = answer_turns(llm, asked.turns, self._recipe(temperature), advance)
        seconds = time.perf_counter() - started
        drafter = llm.drafter
        in_draft = None if drafter is None or drafter.vocabulary is None else drafter.vocabulary.in_draft.cpu()
        records = [
            request_record(prompt, output, in_draft) for prompt, output in zip(asked.prompts, outputs, strict=True)
        ]
        if temperature == 0:
            different = different_turns(asked.turns, outputs)
            self.different[len(self.cells)] = different
            records = [replace(r, differs="unchecked") if i in different else r for i, r in enumerate(records)]
        failure = llm.engine.stats().drafter_failure
        status: Status = "complete" if failure is None else "failed"
        note = None if failure is None else f"the drafter failed and was switched off: {failure}"
        self._add(contender, name, seconds, tuple(records), status, note)

    def judge(self) -> None:
        """Where answers parted from the target's own, find out whether its choice was a tie."""
        parted = {number: turns for number, turns in self.different.items() if turns}
        if not parted:
            return
        llm = self._open(None, 0)
        tie = TIE if self.machine["dtype"] == "float32" else SIXTEEN_BIT_TIE
        with self.progress.task("differences", len(parted)) as advance:
            for number, different in parted.items():
                cell = self.cells[number]
                turns = self.asked[cell.workload, 0.0].turns
                clear = set(clear_differences(llm, turns, different, self._recipe(0.0), tie=tie))
                found: dict[int, Difference] = {i: "clear" if i in clear else "tie" for i in different}
                requests = [replace(r, differs=found[i]) if i in found else r for i, r in enumerate(cell.requests)]
                self.cells[number] = replace(cell, requests=tuple(requests))
                advance()
        del llm
        release()

    def save(self, *, finished: bool) -> Results:
        """Return what there is, and write it if there is anything."""
        results = self.results(finished=finished)
        if self.out is not None and self.cells:
            try:
                write_results(results, self.out)
            except OSError as error:
                raise ConfigError(f"--out {self.out}: cannot be written: {error.strerror or error}") from None
        return results

    def results(self, *, finished: bool) -> Results:
        """`finished`: nothing more will come."""
        failed = [cell for cell in self.cells if cell.status == "failed"]
        status: Status = "partial" if self.is_interrupted or failed or not finished else "complete"
        done = {cell.contender for cell in self.cells}
        every = [
            self._contender(drafter, depth, temperature)
            for drafter in self.settings.drafters
            for depth in self.settings.depths
            for temperature in self.settings.temperatures
        ]
        return Results(
            kind="eval",
            title=f"Acceptance length of {', '.join(self.names.values())}",
            baseline=None,
            contenders=tuple(contender for contender in every if contender.name in done),
            cells=tuple(self.cells),
            settings={
                "depths": self.settings.depths,
                "temperatures": self.settings.temperatures,
                "max_tokens": self.settings.max_tokens,
                "max_num_seqs": self.settings.max_num_seqs,
                "sample": self.settings.sample,
                "seed": self.settings.seed,
                **self.machine,
                "workloads": {workload.name: self._facts(workload) for workload in self.workloads},
            },
            provenance=self.provenance,
            status=status,
            notes=tuple(self._notes(failed, finished=finished)),
        )

    def _facts(self, workload: Workload) -> dict[str, Any]:
        return {
            **workload.facts,
            "categories": workload.categories,
            "too_long": self.too_long.get(workload.name, []),
            "cut_short": self.cut_short.get(workload.name, []),
        }

    def _notes(self, failed: Sequence[Cell], *, finished: bool) -> list[str]:
        notes = [note for workload in self.workloads for note in workload.notes]
        if self.inflated:
            notes.append(f"inflated to the shape {self.inflated}: acceptance is that of the small pair")
        room = f"{self.machine.get('max_model_len', 0):,} tokens"
        for workload in self.workloads:
            if ids := self.too_long.get(workload.name):
                share = f"{len(ids)} of {len(workload.prompts)} prompts"
                notes.append(f"{workload.name}: {share} do not fit into {room} and were not asked: {_listed(ids)}")
            if ids := self.cut_short.get(workload.name):
                notes.append(
                    f"{workload.name}: later turns of {len(ids)} prompts do not fit into {room}: {_listed(ids)}"
                )
        notes += dict.fromkeys(f"{cell.contender}: {cell.note}" for cell in failed)
        if self.is_interrupted:
            notes.append("interrupted: what was not finished is missing")
        elif not finished:
            notes.append("still running, or killed: what was not finished is missing")
        return notes

    def _open(self, drafter: str | None, depth: int) -> LLM:
        settings = self.settings
        return LLM(
            settings.target,
            speculative_config=None if drafter is None else _speculation(drafter, depth),
            dtype=settings.dtype,
            device=settings.device,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            enable_prefix_caching=False,
            seed=settings.seed,
        )

    def _recipe(self, temperature: float) -> Recipe:
        """What `fledge.training.evaluation` reads its settings from."""
        settings = self.settings
        return Recipe(
            output="unused",
            target=TargetSection(path=settings.target),
            data=DataSection(sources=("unused",)),
            eval=EvalSection(
                max_tokens=settings.max_tokens, temperature=temperature, max_num_seqs=settings.max_num_seqs
            ),
            device=settings.device,
        )

    def _fitting(self, workload: Workload, llm: LLM) -> list[Prompt]:
        ids = tokenised(workload, self.settings.target)
        fits = [len(tokens) + 1 < llm.max_model_len for tokens in ids]
        pairs = list(zip(workload.prompts, fits, strict=True))
        if not all(fits):
            self.too_long[workload.name] = [prompt.id for prompt, fit in pairs if not fit]
        return [prompt for prompt, fit in pairs if fit]

    def _note_cut_short(self, questions: Sequence[Question], ids: Sequence[str], turns: Sequence[Turn]) -> None:
        answered = [0] * len(questions)
        for turn in turns:
            answered[turn.question] += 1
        for question, prompt, count in zip(questions, ids, answered, strict=True):
            named = self.cut_short.setdefault(question.source, []) if count < question.turns else None
            if named is not None and prompt not in named:  # at another temperature
                named.append(prompt)

    def _contender(self, drafter: str, depth: int, temperature: float) -> Contender:
        return Contender(
            name=f"{self.names[drafter]} K={depth} T={temperature:g}",
            kind="fledge",
            target=self.settings.target,
            drafter=drafter,
            speculation=_speculation(drafter, depth),
            inflated=self.inflated,
            temperature=temperature,
        )

    def _add(
        self,
        contender: Contender,
        workload: str,
        seconds: float,
        requests: tuple[RequestRecord, ...],
        status: Status,
        note: str | None,
    ) -> None:
        load = Load(concurrency=self.settings.max_num_seqs)
        self.cells.append(
            Cell(
                contender=contender.name,
                workload=workload,
                load=load,
                repeat=0,
                seconds=seconds,
                requests=requests,
                status=status,
                note=note,
            )
        )


def _speculation(drafter: str, depth: int) -> dict[str, Any]:
    return {"model": drafter, "num_speculative_tokens": depth}


def _listed(ids: Sequence[str]) -> str:
    return ", ".join(ids[:_NAMED]) + (f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else "")
