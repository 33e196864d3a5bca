"""Our engine without HTTP: with and without drafters, at several depths and concurrencies, in turns.

A closed loop: so many requests are in flight at all times, and when one ends the next prompt joins, as in a server that
is never idle. All contenders share the same weights.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fledge.bench.closed_loop import ClosedLoop, TokenPrompt, cycled
from fledge.bench.engines import DraftMode, Models, contenders, graph_sizes, load_models, make_engine
from fledge.bench.run import INTERRUPTED, BenchRun, CellTurn, RunSettings
from fledge.decoding.params import SamplingParams
from fledge.engine.config import EngineConfig
from fledge.engine.engine import LLMEngine
from fledge.engine.protocol import DeadEngineError
from fledge.errors import ConfigError
from fledge.evaluation.results import Cell, Status
from fledge.evaluation.workloads import tokenised
from fledge.progress import Advance

INFLATED_NOTE = (
    "Inflated to the shape {shape}: cost is that of the shape, text and acceptance are those of the small pair. Much "
    "of what is multiplied is zero, which draws less power than trained weights would. In 16 bits the rescaled weights "
    "are rounded anew, so answers may differ from the small pair's."
)


@dataclass(frozen=True, kw_only=True)
class OfflineSettings(RunSettings):
    """What is measured: loads are concurrencies."""

    target: str
    drafters: tuple[str, ...]
    modes: tuple[DraftMode, ...]
    seed: int = 0
    inflate: str | None = None  # a named shape
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None  # None: what the longest prompt and its answer need
    enforce_eager: bool = False
    title: str = "Fledge, offline"
    notes: tuple[str, ...] = ()

    @property
    def concurrencies(self) -> list[int]:
        return [load.concurrency or 1 for load in self.loads]

    def to_dict(self) -> dict[str, Any]:
        own = {"seed": self.seed, "inflate": self.inflate, "dtype": self.dtype, "enforce_eager": self.enforce_eager}
        return {**super().to_dict(), **own}


@dataclass(kw_only=True)
class OfflineRun(BenchRun):
    kind: ClassVar[Literal["serve", "offline"]] = "offline"

    settings: OfflineSettings
    _notes: list[str] = field(default_factory=list)
    _facts: dict[str, Any] = field(default_factory=dict)
    _models: Models | None = None
    _tokens: dict[str, list[TokenPrompt]] = field(default_factory=dict)  # by workload
    _engines: dict[str, LLMEngine] = field(default_factory=dict)
    _dead: dict[str, str] = field(default_factory=dict)  # contender -> why nothing more is asked of it

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.contenders]

    @property
    def facts(self) -> dict[str, Any]:
        return self._facts

    @property
    def notes(self) -> list[str]:
        return [*self.settings.notes, *self._notes]

    def prepare(self) -> None:
        settings = self.settings
        self.progress.say(f"loading {settings.target}" + (f" as {settings.inflate}" if settings.inflate else ""))
        self._models = models = load_models(
            settings.target,
            settings.drafters,
            dtype=settings.dtype,
            device=settings.device,
            inflate=settings.inflate,
            seed=settings.seed,
        )
        if models.inflated is not None:
            self._notes.append(INFLATED_NOTE.format(shape=models.inflated))
        longest = self._read_prompts(models)
        weight = models.target.embed_tokens.weight
        self._facts |= {"max_model_len": longest, "dtype": str(weight.dtype).removeprefix("torch.")}
        self._facts |= {"device": weight.device.type, "parameters": models.parameters}
        self.contenders = contenders(models, settings.target, settings.modes)
        self._make_engines(models, longest)
        self._warm_up()

    def _read_prompts(self, models: Models) -> int:
        """Keep the prompts of each workload that fit; return the length that all engines are set up for."""
        settings, limit = self.settings, models.target.config.max_positions
        longest = min(settings.max_model_len or limit, limit)
        found = self._tokens
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
        return settings.max_model_len or needed

    def _make_engines(self, models: Models, longest: int) -> None:
        settings = self.settings
        base = EngineConfig(
            max_model_len=longest,
            max_num_seqs=max(settings.concurrencies),
            enable_prefix_caching=False,  # prompts come again in every repeat
            enforce_eager=settings.enforce_eager,
        )
        with self.progress.task("engines", len(self.contenders)) as advance:
            for one in self.contenders:
                self._engines[one.name] = make_engine(models, one, base, graph_sizes(settings.concurrencies))
                advance(note=one.name)

    def _warm_up(self) -> None:
        """Every engine at every concurrency, a few rounds: kernels are compiled and graphs captured when first met."""
        several = list(itertools.chain.from_iterable(self._tokens.values()))
        with self.progress.task("warm-up", len(self._engines) * len(self.settings.loads)) as advance:
            for name, engine in self._engines.items():
                for concurrency in self.settings.concurrencies:
                    loop = self._loop(engine, cycled(several, concurrency), concurrency, max_tokens=16)
                    try:
                        loop.run()
                    except DeadEngineError as error:
                        self._dead[name] = str(error)
                        break
                    advance(note=name)

    def _loop(self, engine: LLMEngine, prompts: Sequence[TokenPrompt], concurrency: int, max_tokens: int) -> ClosedLoop:
        assert self._models is not None, "prepared"
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
            eos_ids=self._models.eos_ids,
            seed=self.settings.seed,
        )

    def measure(self, turn: CellTurn, advance: Advance) -> None:
        name, count = turn.contender, self.settings.prompts_for(turn.load)
        prompts = cycled(self._tokens[turn.workload.name], count)
        loop = self._loop(self._engines[name], prompts, turn.load.concurrency or 1, self.settings.max_tokens)
        try:
            self._measure(turn, loop, self._engines[name])
        finally:  # also when it is interrupted: what was answered is kept
            self.cells.append(_cell(turn, loop, self._dead.get(name)))
        advance(count, note=str(turn))

    def _measure(self, turn: CellTurn, loop: ClosedLoop, engine: LLMEngine) -> None:
        name = turn.contender
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


def _cell(turn: CellTurn, loop: ClosedLoop, dead: str | None) -> Cell:
    requests = loop.records
    note = loop.failure or (dead if not requests else None)
    status: Status = "complete" if note is None else "partial" if any(r.error is None for r in requests) else "failed"
    return Cell(
        contender=turn.contender,
        workload=turn.workload.name,
        load=turn.load,
        repeat=turn.repeat,
        seconds=loop.seconds,
        requests=requests,
        status=status,
        note=note,
    )
