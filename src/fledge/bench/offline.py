"""Our engine without HTTP: with and without drafters, at several depths and concurrencies, in turns.

A closed loop: so many requests are in flight at all times, and when one ends the next prompt joins, as in a server that
is never idle. All contenders share the same weights.
"""

import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from fledge.bench.engines import DraftMode, Models, contenders, graph_sizes, load_models, make_engine
from fledge.bench.run import INTERRUPTED, BenchRun, CellTurn, RunSettings
from fledge.decoding.params import SamplingParams
from fledge.engine.config import EngineConfig
from fledge.engine.engine import LLMEngine
from fledge.engine.outputs import RequestUpdate
from fledge.engine.protocol import DeadEngineError, Engine
from fledge.errors import ConfigError
from fledge.evaluation.results import RequestRecord, Status, tally_triples
from fledge.evaluation.workloads import Prompt, spread, tokenised
from fledge.progress import Advance

INFLATED_NOTE = (
    "Inflated to the shape {shape}: cost is that of the shape, text and acceptance are those of the small pair. Much "
    "of what is multiplied is zero, which draws less power than trained weights would. In 16 bits the rescaled weights "
    "are rounded anew, so answers may differ from the small pair's."
)


@dataclass(kw_only=True)
class ClosedLoop:
    """Keeps `concurrency` requests in flight until all prompts (their `token_ids`) are answered."""

    engine: Engine
    prompts: Sequence[Prompt]
    concurrency: int
    params: SamplingParams
    eos_ids: tuple[int, ...]
    seed: int = 0
    failure: str | None = None  # why it did not get to the end
    started: float = 0.0
    _tokens: dict[int, list[int]] = field(default_factory=dict)  # by the place of the prompt, for those asked
    _last: dict[int, RequestUpdate] = field(default_factory=dict)

    def run(self) -> None:
        """Answer everything. Whatever is left over from an interruption is aborted."""
        waiting = iter(range(len(self.prompts)))
        self.started = time.perf_counter()
        try:
            for place in itertools.islice(waiting, self.concurrency):
                self._ask(place)
            while self.engine.has_unfinished:
                for update in self.engine.step():
                    place = int(update.request_id)
                    self._tokens[place] += update.token_ids
                    if update.finish_reason is not None:
                        self._last[place] = update
                        if (following := next(waiting, None)) is not None:
                            self._ask(following)
        finally:
            for place in self._tokens.keys() - self._last.keys():
                if (last := self.engine.abort(str(place))) is not None:
                    self._last[place] = last

    def _ask(self, place: int) -> None:
        ids = self.prompts[place].token_ids
        self.engine.add_request(str(place), ids, self.params, seed=self.seed + place, eos_ids=self.eos_ids)
        self._tokens[place] = []

    @property
    def records(self) -> tuple[RequestRecord, ...]:
        return tuple(self._record(self.prompts[place], self._last[place], ids) for place, ids in self._tokens.items())

    def _record(self, prompt: Prompt, last: RequestUpdate, tokens: Sequence[int]) -> RequestRecord:
        metrics, error = last.metrics, last.error
        assert metrics is not None
        if error is None and last.finish_reason not in ("stop", "length"):
            error = self.failure or f"ended with {last.finish_reason}"

        def after(seconds: float | None) -> float | None:
            """From the start, in microseconds: a run has many thousand of them."""
            return None if seconds is None else round(metrics.arrived - self.started + seconds, 6)

        return RequestRecord(
            prompt=prompt.id,
            sent=round(metrics.arrived - self.started, 6),
            first_token=after(metrics.time_to_first_token),
            done=None if error is not None else after(metrics.seconds),
            prompt_tokens=len(prompt.token_ids),
            output_tokens=len(tokens),
            error=error,
            digest=token_digest(tokens),
            acceptance=tally_triples(metrics.acceptance),
        )

    @property
    def seconds(self) -> float:
        ends = [one.metrics.arrived + one.metrics.seconds for one in self._last.values() if one.metrics is not None]
        return round(max(ends, default=self.started) - self.started, 6)


def token_digest(tokens: Sequence[int]) -> str:
    """Of the token ids: whether two contenders said the same."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


def cycled(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts evenly over all of them, which may be sorted by subject; where that is more, over and over."""
    return list(itertools.islice(itertools.cycle(spread(prompts, count)), count))


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
    _models: Models | None = None
    _prompts: dict[str, list[Prompt]] = field(default_factory=dict)  # by workload, with their token ids
    _engines: dict[str, LLMEngine] = field(default_factory=dict)
    _dead: dict[str, str] = field(default_factory=dict)  # contender -> why nothing more is asked of it

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.contenders]

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
        longest = self._read_prompts(models.target.config.max_positions)
        weight = models.target.embed_tokens.weight
        self.facts |= {"max_model_len": longest, "dtype": str(weight.dtype).removeprefix("torch.")}
        self.facts |= {"device": weight.device.type, "parameters": models.parameters}
        self.contenders = contenders(models, settings.target, settings.modes)
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
        self._warm_up()

    def _read_prompts(self, limit: int) -> int:
        """Keep the prompts of each workload that fit; return the length that all engines are set up for."""
        settings = self.settings
        longest = min(settings.max_model_len or limit, limit)
        for workload in settings.workloads:
            ids = tokenised(workload, settings.target)
            fitting = [
                replace(prompt, token_ids=own)
                for prompt, own in zip(workload.prompts, ids, strict=True)
                if len(own) + settings.max_tokens <= longest
            ]
            if left_out := len(ids) - len(fitting):
                self._notes.append(f"{workload.name}: {left_out} of {len(ids)} prompts are too long and left out")
            if not fitting:
                raise ConfigError(
                    f"workload {workload.name}: no prompt fits into {longest} tokens "
                    f"together with {settings.max_tokens} of an answer"
                )
            self._prompts[workload.name] = fitting
        needed = max(len(prompt.token_ids) for several in self._prompts.values() for prompt in several)
        return settings.max_model_len or needed + settings.max_tokens

    def _warm_up(self) -> None:
        """Every engine at every concurrency, a few rounds: kernels are compiled and graphs captured when first met."""
        several = list(itertools.chain.from_iterable(self._prompts.values()))
        with self.progress.task("warm-up", len(self._engines) * len(self.settings.loads)) as advance:
            for name in self._engines:
                for concurrency in self.settings.concurrencies:
                    try:
                        self._loop(name, cycled(several, concurrency), concurrency, max_tokens=16).run()
                    except DeadEngineError as error:
                        self._dead[name] = str(error)
                        break
                    advance(note=name)

    def _loop(self, name: str, prompts: Sequence[Prompt], concurrency: int, max_tokens: int) -> ClosedLoop:
        assert self._models is not None, "prepared"
        settings = self.settings
        return ClosedLoop(
            engine=self._engines[name],
            prompts=prompts,
            concurrency=concurrency,
            params=SamplingParams(
                temperature=settings.temperature,
                max_tokens=min(max_tokens, settings.max_tokens),
                ignore_eos=settings.ignore_eos,
            ),
            eos_ids=self._models.eos_ids,
            seed=settings.seed,
        )

    def measure(self, turn: CellTurn, advance: Advance) -> None:
        name, count = turn.contender, self.settings.prompts_for(turn.load)
        prompts = cycled(self._prompts[turn.workload.name], count)
        loop = self._loop(name, prompts, turn.load.concurrency or 1, self.settings.max_tokens)
        try:
            if name not in self._dead:
                loop.run()
                if failure := self._engines[name].stats().drafter_failure:
                    loop.failure = self._dead[name] = f"the drafter failed: {failure}"
        except KeyboardInterrupt:
            loop.failure = INTERRUPTED
            raise
        except DeadEngineError as error:
            loop.failure = self._dead[name] = str(error)
        except Exception as error:  # ours to repair: it ends the run, but not with a cell that looks whole
            loop.failure = f"{type(error).__name__}: {error}"
            raise
        finally:  # also when it is interrupted: what was answered is kept
            requests = loop.records
            note = loop.failure or (None if requests else self._dead.get(name))
            answered = any(request.error is None for request in requests)
            status: Status = "complete" if note is None else "partial" if answered else "failed"
            self.cells.append(turn.cell(loop.seconds, requests, status, note))
        advance(count, note=str(turn))
