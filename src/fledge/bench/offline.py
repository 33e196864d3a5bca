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

from fledge.bench.closed_loop import ClosedLoop, TokenPrompt, cycled
from fledge.bench.engines import (
    NO_SPECULATION,
    DraftMode,
    Models,
    contenders,
    graph_sizes,
    load_models,
    make_engine,
)
from fledge.decoding.params import SamplingParams
from fledge.engine.engine import Engine
from fledge.engine.recovery import DeadEngineError
from fledge.engine.sizing import EngineConfig
from fledge.errors import ConfigError
from fledge.evaluation.results import Cell, Contender, Load, Results, Status, write_results
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
    modes: tuple[DraftMode, ...]
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


OfflineTurn = tuple[int, str, int, str]  # repeat, workload, concurrency, contender


@dataclass(kw_only=True)
class OfflineRun:
    """Measures, and keeps what was measured. `run` it once.

    After Ctrl-C, or when the time is over, the results are what there is, with status "partial".
    """

    settings: OfflineSettings
    out: Path | None = None  # written after every cell, whole or not at all
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))
    interrupted: bool = False
    _cells: list[Cell] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)
    _facts: dict[str, Any] = field(default_factory=dict)
    _contenders: list[Contender] = field(default_factory=list)
    _provenance: Mapping[str, Any] = field(default_factory=dict)
    _dead: dict[str, str] = field(default_factory=dict)  # contender -> why nothing more is asked of it
    _unmeasured: list[OfflineTurn] = field(default_factory=list)

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
        self._contenders = contenders(models, settings.target, settings.modes)
        prompts, longest = self._prompts(models)
        weight = models.target.embed_tokens.weight
        self._facts |= {"max_model_len": longest, "dtype": str(weight.dtype).removeprefix("torch.")}
        self._facts |= {"device": weight.device.type, "parameters": models.parameters}
        deadline = None if settings.minutes is None else started + 60 * settings.minutes
        order = schedule(settings, [one.name for one in self._contenders])
        try:
            engines = self._engines(models, longest)
            self._warm_up(engines, models, prompts)
            self._measure_all(order, engines, models, prompts, deadline)
        except KeyboardInterrupt:
            self.interrupted = True
            self._unmeasured = order[len(self._cells) :]
        return self._save()

    def _prompts(self, models: Models) -> tuple[dict[str, list[TokenPrompt]], int]:
        """The prompts of each workload that fit, and the length that all engines are set up for."""
        settings, limit = self.settings, models.target.config.max_positions
        longest = min(settings.max_model_len or limit, limit)
        found: dict[str, list[TokenPrompt]] = {}
        for workload in settings.workloads:
            ids = tokenised(workload, settings.target)
            several = [TokenPrompt(id=p.id, tokens=t) for p, t in zip(workload.prompts, ids, strict=True)]
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

    def _engines(self, models: Models, longest: int) -> dict[str, Engine]:
        settings = self.settings
        base = EngineConfig(
            max_model_len=longest,
            max_num_seqs=max(settings.concurrencies),
            enable_prefix_caching=False,  # prompts come again in every repeat
            enforce_eager=settings.enforce_eager,
        )
        engines = {}
        with self.progress.task("engines", len(self._contenders)) as advance:
            for one in self._contenders:
                engines[one.name] = make_engine(models, one, base, graph_sizes(settings.concurrencies))
                advance(note=one.name)
        return engines

    def _warm_up(
        self, engines: Mapping[str, Engine], models: Models, prompts: Mapping[str, Sequence[TokenPrompt]]
    ) -> None:
        """Every engine at every concurrency, a few rounds: kernels are compiled and graphs captured when first met."""
        several = list(itertools.chain.from_iterable(prompts.values()))
        with self.progress.task("warm-up", len(engines) * len(self.settings.concurrencies)) as advance:
            for name, engine in engines.items():
                for concurrency in self.settings.concurrencies:
                    loop = self._loop(engine, models, cycled(several, concurrency), concurrency, max_tokens=16)
                    try:
                        loop.run()
                    except DeadEngineError as error:
                        self._dead[name] = str(error)
                        break
                    advance(note=name)

    def _loop(
        self, engine: Engine, models: Models, prompts: Sequence[TokenPrompt], concurrency: int, max_tokens: int
    ) -> ClosedLoop:
        params = SamplingParams(
            temperature=self.settings.temperature,
            max_tokens=min(max_tokens, self.settings.max_tokens),
            ignore_eos=self.settings.ignore_eos,
        )
        return ClosedLoop(
            engine=engine,
            prompts=prompts,
            concurrency=concurrency,
            params=params,
            eos_ids=models.eos_ids,
            seed=self.settings.seed,
        )

    def _measure_all(
        self,
        order: Sequence[OfflineTurn],
        engines: Mapping[str, Engine],
        models: Models,
        prompts: Mapping[str, Sequence[TokenPrompt]],
        deadline: float | None,
    ) -> None:
        with self.progress.task("cells", len(order)) as advance:
            for number, turn in enumerate(order):
                if deadline is not None and time.monotonic() > deadline:
                    self._unmeasured = list(order[number:])
                    return
                repeat, workload, concurrency, name = turn
                chosen = cycled(prompts[workload], self.settings.requests_at(concurrency))
                loop = self._loop(engines[name], models, chosen, concurrency, self.settings.max_tokens)
                try:
                    self._measure(turn, loop, engines[name])
                finally:  # also when it is interrupted: what was answered is kept
                    self._cells.append(_cell(turn, loop, self._dead.get(name)))
                    self._save()
                advance(note=f"{name}, {workload}, C={concurrency}, repeat {repeat + 1}")

    def _measure(self, turn: OfflineTurn, loop: ClosedLoop, engine: Engine) -> None:
        name = turn[3]
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
        if engine.statistics.drafter_failure is not None and name not in self._dead:
            self._dead[name] = loop.failure = f"the drafter failed: {engine.statistics.drafter_failure}"

    def _save(self) -> Results:
        results = self.results()
        if self.out is not None:
            write_results(results, self.out)
        return results

    def results(self) -> Results:
        """What is known so far."""
        settings = self.settings
        notes = list(self._notes)
        if self._unmeasured:
            why = INTERRUPTED if self.interrupted else OUT_OF_TIME
            notes.append(f"{why}: {len(self._unmeasured)} cells were not measured: {_named(self._unmeasured)}")
        expected = settings.repeats * len(settings.workloads) * len(settings.concurrencies) * len(self._contenders)
        whole = len(self._cells) == expected and all(cell.status == "complete" for cell in self._cells)
        return Results(
            kind="offline",
            title=settings.title,
            baseline=NO_SPECULATION,
            contenders=tuple(self._contenders),
            cells=tuple(self._cells),
            settings={**settings.to_dict(), **self._facts},
            provenance=self._provenance,
            status="complete" if whole else "partial",
            notes=tuple(dict.fromkeys(notes)),
        )


def schedule(settings: OfflineSettings, contenders: Sequence[str]) -> list[OfflineTurn]:
    """All cells in the order they are measured."""
    order: list[OfflineTurn] = []
    for repeat in range(settings.repeats):
        shift = repeat % len(contenders)
        turns = [*contenders[shift:], *contenders[:shift]]
        names = [workload.name for workload in settings.workloads]
        order += [(repeat, name, c, one) for name in names for c in settings.concurrencies for one in turns]
    return order


def _cell(turn: OfflineTurn, loop: ClosedLoop, dead: str | None) -> Cell:
    repeat, workload, concurrency, contender = turn
    requests = loop.records
    note = loop.failure or (dead if not requests else None)
    status: Status = "complete" if note is None else "partial" if any(r.error is None for r in requests) else "failed"
    return Cell(
        contender=contender,
        workload=workload,
        load=Load(concurrency=concurrency),
        repeat=repeat,
        seconds=loop.seconds,
        requests=requests,
        status=status,
        note=note,
    )


def _named(turns: Sequence[OfflineTurn], most: int = 4) -> str:
    named = [f"{name}, {workload}, C={c}, repeat {repeat + 1}" for repeat, workload, c, name in turns[:most]]
    return "; ".join(named) + (f"; and {len(turns) - most} more" if len(turns) > most else "")
