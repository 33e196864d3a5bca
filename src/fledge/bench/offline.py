"""Our engine without HTTP: with and without drafters, at several depths and concurrencies, in turns.

A closed loop: so many requests are in flight at all times, and when one ends the next prompt joins, as in a server that
is never idle. For each repeat, workload and concurrency all contenders take turns, in an order that is another one in
each repeat, on the same prompts and the same weights.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fledge.bench.closed_loop import ClosedLoop, Question, asked
from fledge.bench.offline_engines import (
    NO_SPECULATION,
    Entrant,
    Mode,
    Models,
    entrants,
    graph_sizes,
    load_models,
    make_engine,
)
from fledge.bench.results import Cell, Load, Results, Status, write_results
from fledge.decoding.params import SamplingParams
from fledge.engine.config import EngineConfig
from fledge.engine.engine import LLMEngine
from fledge.engine.protocol import DeadEngineError
from fledge.errors import ConfigError
from fledge.evaluation.workloads import Workload, tokenised
from fledge.progress import Progress
from fledge.provenance import run_provenance

LEAST_REQUESTS = 8
ROUNDS_OF_LOAD = 2  # requests for each place in flight
INTERRUPTED = "interrupted"
OUT_OF_TIME = "out of time"
INFLATED_NOTE = (
    "Inflated to the shape {shape}: cost is that of the shape, text and acceptance are those of the small pair. Much "
    "of what is multiplied is zero, which draws less power than trained weights would. In 16 bits the rescaled weights "
    "are rounded anew, so answers may differ from the small pair's."
)


@dataclass(frozen=True, kw_only=True)
class OfflineSettings:
    """What is measured."""

    target: str
    drafters: tuple[str, ...]
    modes: tuple[Mode, ...]
    workloads: tuple[Workload, ...]
    concurrencies: tuple[int, ...] = (1, 4, 16)
    requests: int | None = None  # per cell; None: by the concurrency
    repeats: int = 3
    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int = 0
    inflate: str | None = None  # a named shape
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None  # None: what the longest prompt and its answer need
    enforce_eager: bool = False
    minutes: float | None = None  # no new cell after this
    title: str = "Fledge, offline"
    notes: tuple[str, ...] = ()

    def requests_at(self, concurrency: int) -> int:
        """Never fewer than are in flight."""
        wanted = max(LEAST_REQUESTS, ROUNDS_OF_LOAD * concurrency) if self.requests is None else self.requests
        return max(wanted, concurrency)

    def to_dict(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
            "seed": self.seed,
            "requests": {str(Load(concurrency=c)): self.requests_at(c) for c in self.concurrencies},
            "repeats": self.repeats,
            "inflate": self.inflate,
            "dtype": self.dtype,
            "enforce_eager": self.enforce_eager,
            "workloads": [workload.facts for workload in self.workloads],
        }


Turn = tuple[int, str, int, Entrant]  # repeat, workload, concurrency, contender


def run_offline(settings: OfflineSettings, *, out: Path | None = None, progress: Progress | None = None) -> Results:
    """Measure everything. After Ctrl-C, or when the time is over, return what there is, with status "partial"."""
    return OfflineRun(settings=settings, out=out, progress=progress or Progress(quiet=True)).run()


@dataclass(kw_only=True)
class OfflineRun:
    """Measures, and keeps what was measured. `run` it once."""

    settings: OfflineSettings
    out: Path | None = None  # written after every cell, whole or not at all
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))
    interrupted: bool = False
    _cells: list[Cell] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)
    _facts: dict[str, Any] = field(default_factory=dict)
    _entrants: list[Entrant] = field(default_factory=list)
    _provenance: Mapping[str, Any] = field(default_factory=dict)
    _dead: dict[str, str] = field(default_factory=dict)  # contender -> why nothing more is asked of it
    _unmeasured: list[Turn] = field(default_factory=list)

    def run(self) -> Results:
        settings, started = self.settings, time.monotonic()
        self._provenance = run_provenance()
        self._notes += settings.notes
        self.progress.say(f"loading {settings.target}" + (f" as {settings.inflate}" if settings.inflate else ""))
        models = load_models(
            settings.target,
            settings.drafters,
            dtype=settings.dtype,
            device=settings.device,
            inflate=settings.inflate,
            seed=settings.seed,
        )
        if models.inflated is not None:
            self._notes.append(INFLATED_NOTE.format(shape=models.inflated))
        self._entrants = entrants(models, settings.target, settings.modes)
        questions, longest = self._questions(models)
        weight = models.target.embed_tokens.weight
        self._facts |= {"max_model_len": longest, "dtype": str(weight.dtype).removeprefix("torch.")}
        self._facts |= {"device": weight.device.type, "parameters": sizes_of(models)}
        deadline = None if settings.minutes is None else started + 60 * settings.minutes
        order = schedule(settings, self._entrants)
        try:
            engines = self._engines(models, longest)
            self._warm_up(engines, models, questions)
            self._measure_all(order, engines, models, questions, deadline)
        except KeyboardInterrupt:
            self.interrupted = True
            self._unmeasured = order[len(self._cells) :]
        return self._save()

    def _questions(self, models: Models) -> tuple[dict[str, list[Question]], int]:
        """The prompts of each workload that fit, and the length that all engines are set up for."""
        settings, limit = self.settings, models.target.config.max_positions
        longest = min(settings.max_model_len or limit, limit)
        found: dict[str, list[Question]] = {}
        for workload in settings.workloads:
            ids = tokenised(workload, settings.target)
            several = [Question(id=p.id, tokens=t) for p, t in zip(workload.prompts, ids, strict=True)]
            found[workload.name] = [q for q in several if len(q.tokens) + settings.max_tokens <= longest]
            if left_out := len(several) - len(found[workload.name]):
                self._notes.append(f"{workload.name}: {left_out} of {len(several)} prompts are too long and left out")
            if not found[workload.name]:
                raise ConfigError(
                    f"workload {workload.name}: no prompt fits into {longest} tokens "
                    f"together with {settings.max_tokens} of an answer"
                )
        needed = max(len(q.tokens) for several in found.values() for q in several) + settings.max_tokens
        return found, settings.max_model_len or needed

    def _engines(self, models: Models, longest: int) -> dict[str, LLMEngine]:
        settings = self.settings
        base = EngineConfig(
            max_model_len=longest,
            max_num_seqs=max(settings.concurrencies),
            enable_prefix_caching=False,  # prompts come again in every repeat
            enforce_eager=settings.enforce_eager,
        )
        engines = {}
        with self.progress.task("engines", len(self._entrants)) as advance:
            for entrant in self._entrants:
                name = entrant.contender.name
                engines[name] = make_engine(models, entrant, base, graph_sizes(settings.concurrencies))
                advance(note=name)
        return engines

    def _warm_up(
        self, engines: Mapping[str, LLMEngine], models: Models, questions: Mapping[str, Sequence[Question]]
    ) -> None:
        """Every engine at every concurrency, a few rounds: kernels are compiled and graphs captured when first met."""
        several = list(itertools.chain.from_iterable(questions.values()))
        with self.progress.task("warm-up", len(engines) * len(self.settings.concurrencies)) as advance:
            for name, engine in engines.items():
                for concurrency in self.settings.concurrencies:
                    loop = self._loop(engine, models, asked(several, concurrency), concurrency, max_tokens=16)
                    try:
                        loop.run()
                    except DeadEngineError as error:
                        self._dead[name] = str(error)
                        break
                    advance(note=name)

    def _loop(
        self, engine: LLMEngine, models: Models, questions: Sequence[Question], concurrency: int, max_tokens: int
    ) -> ClosedLoop:
        params = SamplingParams(
            temperature=self.settings.temperature,
            max_tokens=min(max_tokens, self.settings.max_tokens),
            ignore_eos=self.settings.ignore_eos,
        )
        return ClosedLoop(
            engine=engine,
            questions=questions,
            concurrency=concurrency,
            params=params,
            eos_ids=models.eos_ids,
            seed=self.settings.seed,
        )

    def _measure_all(
        self,
        order: Sequence[Turn],
        engines: Mapping[str, LLMEngine],
        models: Models,
        questions: Mapping[str, Sequence[Question]],
        deadline: float | None,
    ) -> None:
        with self.progress.task("cells", len(order)) as advance:
            for number, turn in enumerate(order):
                if deadline is not None and time.monotonic() > deadline:
                    self._unmeasured = list(order[number:])
                    return
                repeat, workload, concurrency, entrant = turn
                name = entrant.contender.name
                prompts = asked(questions[workload], self.settings.requests_at(concurrency))
                loop = self._loop(engines[name], models, prompts, concurrency, self.settings.max_tokens)
                try:
                    self._measure(turn, loop, engines[name])
                finally:  # also when it is interrupted: what was answered is kept
                    self._cells.append(_cell(turn, loop, self._dead.get(name)))
                    self._save()
                advance(note=f"{name}, {workload}, C={concurrency}, repeat {repeat + 1}")

    def _measure(self, turn: Turn, loop: ClosedLoop, engine: LLMEngine) -> None:
        name = turn[3].contender.name
        if name in self._dead:
            return
        try:
            loop.run()
        except KeyboardInterrupt:
            loop.failure = INTERRUPTED
            raise
        except DeadEngineError as error:
            loop.failure = self._dead[name] = str(error)
        except Exception as error:  # ours to repair: it ends the run, but not with a cell that looks whole
            loop.failure = f"{type(error).__name__}: {error}"
            raise
        failure = engine.stats().drafter_failure
        if failure is not None and name not in self._dead:
            self._dead[name] = loop.failure = f"the drafter failed: {failure}"

    def _save(self) -> Results:
        results = self.results()
        if self.out is not None:
            try:
                write_results(results, self.out)
            except OSError as error:
                raise ConfigError(f"--out {self.out}: cannot be written: {error.strerror or error}") from None
        return results

    def results(self) -> Results:
        """What is known so far."""
        settings = self.settings
        notes = list(self._notes)
        if self._unmeasured:
            why = INTERRUPTED if self.interrupted else OUT_OF_TIME
            notes.append(f"{why}: {len(self._unmeasured)} cells were not measured: {_named(self._unmeasured)}")
        expected = settings.repeats * len(settings.workloads) * len(settings.concurrencies) * len(self._entrants)
        whole = len(self._cells) == expected and all(cell.status == "complete" for cell in self._cells)
        return Results(
            kind="offline",
            title=settings.title,
            baseline=NO_SPECULATION,
            contenders=tuple(entrant.contender for entrant in self._entrants),
            cells=tuple(self._cells),
            settings={**settings.to_dict(), **self._facts},
            provenance=self._provenance,
            status="complete" if whole else "partial",
            notes=tuple(dict.fromkeys(notes)),
        )


def schedule(settings: OfflineSettings, contenders: Sequence[Entrant]) -> list[Turn]:
    """All cells in the order they are measured."""
    order: list[Turn] = []
    for repeat in range(settings.repeats):
        shift = repeat % len(contenders)
        turns = [*contenders[shift:], *contenders[:shift]]
        names = [workload.name for workload in settings.workloads]
        order += [(repeat, name, c, entrant) for name in names for c in settings.concurrencies for entrant in turns]
    return order


def _cell(turn: Turn, loop: ClosedLoop, dead: str | None) -> Cell:
    repeat, workload, concurrency, entrant = turn
    requests = loop.records
    note = loop.failure or (dead if not requests else None)
    status: Status = "complete" if note is None else "partial" if any(r.error is None for r in requests) else "failed"
    return Cell(
        contender=entrant.contender.name,
        workload=workload,
        load=Load(concurrency=concurrency),
        repeat=repeat,
        seconds=loop.seconds,
        requests=requests,
        status=status,
        note=note,
    )


def _named(turns: Sequence[Turn], most: int = 4) -> str:
    named = [f"{e.contender.name}, {workload}, C={c}, repeat {repeat + 1}" for repeat, workload, c, e in turns[:most]]
    return "; ".join(named) + (f"; and {len(turns) - most} more" if len(turns) > most else "")


def sizes_of(models: Models) -> dict[str, int]:
    """Parameters of the target, and of each drafter what is its own."""
    shared = {id(parameter) for parameter in models.target.parameters()}
    own = {
        name: sum(p.numel() for p in drafter.parameters() if id(p) not in shared)
        for name, drafter in models.drafters.items()
    }
    return {"target": sum(p.numel() for p in models.target.parameters()), **own}
