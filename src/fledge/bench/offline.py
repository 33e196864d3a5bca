"""Benchmarks engines in a closed loop: with and without drafters, at several depths and concurrencies.

Our own contenders share the target's weights; each has its own drafter, draft mode and KV cache. Those of vLLM run in
processes of their own.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from fledge.bench.contenders import contenders, vllm_contenders
from fledge.bench.inflate import inflate_drafter, inflate_target, shape_named
from fledge.bench.run import INTERRUPTED, BenchRun, RunSettings, cell_name
from fledge.checkpoints.contract import INFLATED
from fledge.checkpoints.drafter import load_drafter
from fledge.checkpoints.reading import read_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import load_target, sketch_target_config, stop_ids
from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.devices import choose_device, choose_dtype
from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.engine.engine import LLMEngine
from fledge.engine.outputs import RequestUpdate
from fledge.engine.protocol import DeadEngineError, Engine
from fledge.engine.tokenizer import load_tokenizer
from fledge.engine.vllm_engine import VllmEngine
from fledge.errors import ConfigError
from fledge.evaluation.results import (
    Cell,
    Contender,
    DraftMode,
    RequestRecord,
    Results,
    Status,
    answer_facts,
    tally_triples,
)
from fledge.evaluation.workloads import Prompt, spread, tokenised
from fledge.files import read_json
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel
from fledge.progress import Advance
from fledge.vllm_process.client import VllmError

INFLATED_NOTE = (
    "Inflated to the shape {shape}: cost is that of the shape, text and acceptance are those of the small pair. Much "
    "of what is multiplied is zero, which draws less power than trained weights would. In 16 bits the rescaled weights "
    "are rounded anew, so answers may differ from the small pair's."
)


@dataclass(frozen=True, kw_only=True)
class Models:
    """A target, and its drafters by name."""

    target: TargetModel
    drafters: Mapping[str, Drafter]
    eos_ids: tuple[int, ...]
    inflated: str | None = None  # the shape that they were enlarged to, now or in their checkpoints

    @property
    def parameters(self) -> dict[str, int]:
        """Number of parameters of the target, and of each drafter without those shared with the target."""
        own = set(self.target.parameters())
        drafters = {name: {*one.parameters()} - own for name, one in self.drafters.items()}
        return {name: sum(p.numel() for p in several) for name, several in {"target": own, **drafters}.items()}


def load_models(
    target: str, drafters: Sequence[str], *, dtype: str, device: str, inflate: str | None, seed: int = 0
) -> Models:
    """Load the models, and enlarge them on the device to the shape `inflate`, unless that is None."""
    directory, place = resolve(target), choose_device(device)
    precision = choose_dtype(dtype) or (torch.float32 if place.type == "cpu" else None)
    if inflate is None:
        model = load_target(directory, dtype=precision, device=place)
        loaded = {name: load_drafter(resolve(name), model) for name in drafters}
    else:
        shape = shape_named(inflate)
        small = load_target(directory)
        model = inflate_target(small, shape, precision or torch.bfloat16, place, seed=seed)
        loaded = {
            name: inflate_drafter(load_drafter(resolve(name), small), small, model, shape=shape, seed=seed)
            for name in drafters
        }
    own = getattr(load_tokenizer(directory), "eos_token_id", None)
    eos_ids = tuple(sorted({*model.config.eos_ids, *(() if own is None else (own,))}))
    label = (read_json(directory / "config.json") or {}).get(INFLATED) or {"shape": None}
    inflated = inflate or label["shape"]
    return Models(target=model.requires_grad_(False), drafters=loaded, eos_ids=eos_ids, inflated=inflated)


def make_engine(models: Models, contender: Contender, base: EngineConfig, batch_sizes: Sequence[int]) -> LLMEngine:
    """Make an engine on the shared weights, with CUDA graphs for `batch_sizes`; other sizes are padded to these."""
    config, way = replace(base, cudagraph_capture_sizes=tuple(batch_sizes)), contender.speculation
    if way is not None:
        config = replace(config, speculative_config=SpeculativeConfig.from_dict({"adaptive": False, **way}))
    engine = LLMEngine(models.target, models.drafters.get(contender.drafter or ""), config)
    engine.warm_up()
    while engine.work_ahead():
        pass
    return engine


def graph_sizes(concurrencies: Sequence[int]) -> list[int]:
    """Return the concurrencies and the powers of two below: capturing graphs of all sizes would take too long."""
    largest = max(concurrencies)
    return sorted({*concurrencies, *(2**i for i in range(largest.bit_length()) if 2**i <= largest)})


@dataclass(kw_only=True)
class ClosedLoop:
    """Keeps `concurrency` requests in flight until all prompts (by their `token_ids`) are answered."""

    engine: Engine
    prompts: Sequence[Prompt]
    concurrency: int
    params: SamplingParams
    eos_ids: tuple[int, ...]
    seed: int = 0
    failure: str | None = None  # why it did not finish
    started: float = 0.0
    _tokens: dict[int, list[int]] = field(default_factory=dict)  # by index of the prompts that were sent
    _last: dict[int, RequestUpdate] = field(default_factory=dict)

    def run(self) -> None:
        """Answer all prompts. After an interruption, the requests in flight are aborted."""
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
        return tuple(map(self._record, self._tokens))

    def _record(self, place: int) -> RequestRecord:
        prompt, last, tokens = self.prompts[place], self._last[place], self._tokens[place]
        metrics, error = last.metrics, last.error
        assert metrics is not None
        if error is None and last.finish_reason not in ("stop", "length"):
            error = self.failure or f"ended with {last.finish_reason}"
        # Seconds from the start, rounded to microseconds to keep the results small.
        sent, first, done = (
            None if seconds is None else round(metrics.arrived - self.started + seconds, 6)
            for seconds in (0.0, metrics.time_to_first_token, metrics.seconds)
        )
        return RequestRecord(
            prompt=prompt.id,
            sent=sent or 0.0,
            first_token=first,
            done=None if error is not None else done,
            error=error,
            **answer_facts(
                tokens,
                prompt=prompt.token_ids,
                acceptance=metrics.acceptance,
                rounds=metrics.rounds,
            ),
        )

    @property
    def seconds(self) -> float:
        ends = [one.metrics.arrived + one.metrics.seconds for one in self._last.values() if one.metrics is not None]
        return round(max(ends, default=self.started) - self.started, 6)


def cycled(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` prompts, at equal distances in the list if it has more; if it has fewer, they are repeated."""
    return list(itertools.islice(itertools.cycle(spread(prompts, count)), count))


@dataclass(frozen=True, kw_only=True)
class OfflineSettings(RunSettings):
    """What is measured: loads are concurrencies."""

    recorded = (*RunSettings.recorded, "inflate", "dtype", "kv_cache_dtype", "enforce_eager")

    target: str
    drafters: tuple[str, ...]
    modes: tuple[DraftMode, ...]
    seed: int = 0
    inflate: str | None = None  # a named shape
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None  # None: what the longest prompt and its answer need
    enforce_eager: bool = False
    title: str = "Fledge, offline"
    notes: tuple[str, ...] = ()
    vllm: bool = False  # measure vLLM too
    vllm_only: bool = False  # measure vLLM instead of our engine
    vllm_python: str | None = None
    vllm_options: tuple[str, ...] = ()  # arguments of its command line

    def __post_init__(self) -> None:
        if self.vllm_only and not self.vllm:
            raise ConfigError("--vllm-only is for --engine vllm; add it")
        if self.vllm and self.inflate is not None:
            raise ConfigError("--inflate: vLLM reads checkpoints; write one first with `fledge bench inflate`")

    @property
    def concurrencies(self) -> list[int]:
        return [load.concurrency or 1 for load in self.loads]


@dataclass(kw_only=True)
class OfflineRun(BenchRun):
    kind: ClassVar[Literal["serve", "offline"]] = "offline"

    settings: OfflineSettings
    _notes: list[str] = field(default_factory=list)
    _eos_ids: tuple[int, ...] = ()
    _prompts: dict[str, list[Prompt]] = field(default_factory=dict)  # by workload, with their token ids
    _engines: dict[str, Engine] = field(default_factory=dict)
    _dead: dict[str, str] = field(default_factory=dict)  # contender -> why it is not used any more

    @property
    def notes(self) -> list[str]:
        return [*self.settings.notes, *self._notes]

    def prepare(self) -> None:
        settings = self.settings
        models = None
        if settings.vllm_only:
            directory = resolve(settings.target)
            limit, inflated = sketch_target_config(directory)[0].max_positions, None
            self._eos_ids = stop_ids(directory, load_tokenizer(directory))
            configs = {name: read_drafter(resolve(name)).config for name in settings.drafters}
            self.facts["dtype"] = settings.dtype
        else:
            self.progress.say(f"loading {settings.target}" + (f" as {settings.inflate}" if settings.inflate else ""))
            options: Any = {name: getattr(settings, name) for name in ("dtype", "device", "inflate", "seed")}
            models = load_models(settings.target, settings.drafters, **options)
            limit, inflated, self._eos_ids = models.target.config.max_positions, models.inflated, models.eos_ids
            configs = {name: drafter.config for name, drafter in models.drafters.items()}
            weight = models.target.embed_tokens.weight
            self.facts |= {"dtype": str(weight.dtype).removeprefix("torch."), "device": weight.device.type}
            self.facts["parameters"] = models.parameters
        if inflated is not None:
            self._notes.append(INFLATED_NOTE.format(shape=inflated))
        longest = self._read_prompts(limit)
        self.facts["max_model_len"] = longest
        ours = contenders(configs, settings.target, settings.modes, inflated)
        theirs, notes = vllm_contenders(ours, settings.vllm_python) if settings.vllm else ([], [])
        self._notes += notes
        self.contenders = [*(ours if models is not None else ()), *theirs]
        base = EngineConfig(
            max_model_len=longest,
            max_num_seqs=max(settings.concurrencies),
            enable_prefix_caching=False,  # prompts come again in every repeat
            enforce_eager=settings.enforce_eager,
            kv_cache_dtype=settings.kv_cache_dtype,
        )
        with self.progress.task("engines", len(self.contenders)) as advance:
            for one in self.contenders:
                if one.kind == "vllm":
                    self._engines[one.name] = self._start_vllm(one, base)
                else:
                    assert models is not None
                    self._engines[one.name] = make_engine(models, one, base, graph_sizes(settings.concurrencies))
                advance(note=one.name)
        self._warm_up()

    def _start_vllm(self, contender: Contender, base: EngineConfig) -> Engine:
        """Start vLLM with the dtypes and limits of our engine."""
        names = ("max_model_len", "max_num_seqs", "enable_prefix_caching")
        options: dict[str, Any] = {name: getattr(base, name) for name in names}
        options |= {"enforce_eager": True} if base.enforce_eager else {}
        dtype = self.facts["dtype"]
        options |= {} if dtype == "auto" else {"dtype": dtype}
        options |= {} if base.kv_cache_dtype == "auto" else {"kv_cache_dtype": base.kv_cache_dtype}
        python, words = self.settings.vllm_python, self.settings.vllm_options
        return VllmEngine(
            contender.target, python=python, words=words, speculative_config=contender.speculation, **options
        )

    def run(self) -> Results:
        """Run, and end the vLLM processes."""
        try:
            return super().run()
        finally:
            for engine in self._engines.values():
                if isinstance(engine, VllmEngine):
                    engine.close()

    def _read_prompts(self, limit: int) -> int:
        """Keep the prompts of each workload that fit. Returns the maximum length for all engines."""
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
        """Run every engine at every concurrency for a few rounds, to compile kernels and capture graphs."""
        several = list(itertools.chain.from_iterable(self._prompts.values()))
        with self.progress.task("warm-up", len(self._engines) * len(self.settings.loads)) as advance:
            for name, concurrency in itertools.product(self._engines, self.settings.concurrencies):
                if name not in self._dead:
                    try:
                        self._loop(name, several, concurrency, concurrency, max_tokens=16).run()
                    except DeadEngineError as error:
                        self._dead[name] = str(error)
                advance(note=name)

    def _loop(
        self, name: str, prompts: Sequence[Prompt], count: int, concurrency: int, max_tokens: int | None = None
    ) -> ClosedLoop:
        settings = self.settings
        most = min(max_tokens or settings.max_tokens, settings.max_tokens)
        return ClosedLoop(
            engine=self._engines[name],
            prompts=cycled(prompts, count),
            concurrency=concurrency,
            params=SamplingParams(temperature=settings.temperature, max_tokens=most, ignore_eos=settings.ignore_eos),
            eos_ids=self._eos_ids,
            seed=settings.seed,
        )

    def measure(self, cell: Cell, advance: Advance) -> None:
        name, count = cell.contender, self.settings.prompts_for(cell.load)
        loop = self._loop(name, self._prompts[cell.workload], count, cell.load.concurrency or 1)
        counted = AcceptanceStatistics()  # the engine's counts for all requests together
        try:
            if name not in self._dead:
                before = self._engines[name].stats().acceptance
                loop.run()
                stats = self._engines[name].stats()
                counted = stats.acceptance.since(before)
                if failure := stats.drafter_failure:
                    loop.failure = self._dead[name] = f"the drafter failed: {failure}"
        except KeyboardInterrupt:
            loop.failure = INTERRUPTED
            raise
        except (DeadEngineError, VllmError) as error:
            loop.failure = self._dead[name] = str(error)
        except Exception as error:  # a bug: it ends the run, but the cell must not look complete
            loop.failure = f"{type(error).__name__}: {error}"
            raise
        finally:  # keep the answers so far, even if interrupted
            requests = loop.records
            note = loop.failure or (None if requests else self._dead.get(name))
            answered = any(request.error is None for request in requests)
            status: Status = "complete" if note is None else "partial" if answered else "failed"
            told = any(request.acceptance for request in requests)
            whole: Any = {"seconds": loop.seconds, "acceptance": () if told else tally_triples(counted)}
            self.cells.append(replace(cell, **whole, requests=requests, status=status, note=note))
        advance(count, note=cell_name(cell))
