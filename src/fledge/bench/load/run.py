"""A whole run: every server under every load, in turns, saved after every cell.

For each repeat, workload and load all servers take turns, never two at once, in an order that is another one in each
repeat. Prompts and arrival times are the same for all.
"""

import asyncio
import contextlib
import gc
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fledge.bench.load.cell import CellRun, Health, RequestSettings, failed_cell
from fledge.bench.load.servers import Endpoint, RemoteServer, ServerSpec, connect
from fledge.errors import ConfigError, nearest_name_hint
from fledge.evaluation.results import Cell, Load, Results, Status, write_results
from fledge.evaluation.workloads import Prompt, Workload
from fledge.progress import Progress

LEAST_REQUESTS = 16
ROUNDS_OF_LOAD = 4  # prompts for each place in flight
OPEN_LOOP_SECONDS = 20.0
INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What is measured."""

    servers: tuple[ServerSpec, ...]
    workloads: tuple[Workload, ...]
    loads: tuple[Load, ...]
    baseline: str | None = None  # None: the first server
    requests: int | None = None  # prompts per cell; None: by the load
    repeats: int = 3
    warmup: int | None = None  # prompts before a server's first cell of a load; None: as many as run at once
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None  # of arrival times, and sent with each request; None: 0, and not sent
    ignore_eos: bool = False
    stall_seconds: float = 120.0
    endpoint: Endpoint = "chat"
    title: str = "Servers under load"
    facts: Mapping[str, Any] = field(default_factory=dict)  # more to write down with the settings

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.servers]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"--url: two servers are called '{name}'; give them names, as in NAME=URL")
        if self.baseline is not None and self.baseline not in names:
            raise ConfigError(f"--baseline {self.baseline}: no such server.{nearest_name_hint(self.baseline, names)}")
        for load in self.loads:
            if self.requests is not None and self.requests < (load.concurrency or 1):
                raise ConfigError(f"--requests {self.requests}: fewer than --concurrency {load.concurrency} at once")

    def prompts_for(self, load: Load) -> int:
        if self.requests is not None:
            return self.requests
        if load.rate is not None:
            return max(LEAST_REQUESTS, math.ceil(OPEN_LOOP_SECONDS * load.rate))
        return max(LEAST_REQUESTS, ROUNDS_OF_LOAD * (load.concurrency or 1))

    def warmup_for(self, load: Load) -> int:
        return (load.concurrency or 4) if self.warmup is None else self.warmup

    @property
    def body_options(self) -> dict[str, Any]:
        """Fields of a request that all servers get alike."""
        options: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        if self.seed is not None:
            options["seed"] = self.seed
        if self.ignore_eos:
            options["ignore_eos"] = True
        return options

    def to_dict(self) -> dict[str, Any]:
        """What results say about how they were made. No keys and no headers."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
            "requests": {str(load): self.prompts_for(load) for load in self.loads},
            "repeats": self.repeats,
            "warmup": {str(load): self.warmup_for(load) for load in self.loads},
            "endpoint": self.endpoint,
            "timeout": self.stall_seconds,
            "extra_body": {spec.name: dict(spec.extra_body) for spec in self.servers if spec.extra_body},
            "workloads": [workload.facts for workload in self.workloads],
            **self.facts,
        }


Turn = tuple[int, Workload, Load, ServerSpec]  # repeat, ...


def schedule(settings: ServeSettings) -> list[Turn]:
    """All cells in the order they are measured."""
    order: list[Turn] = []
    for repeat in range(settings.repeats):
        shift = repeat % len(settings.servers)
        servers = settings.servers[shift:] + settings.servers[:shift]
        order += [(repeat, w, load, s) for w in settings.workloads for load in settings.loads for s in servers]
    return order


@dataclass(kw_only=True)
class ServeRun:
    """Measures, and keeps what was measured. `run` it once."""

    settings: ServeSettings
    provenance: Mapping[str, Any]
    out: Path | None = None  # written after every cell, whole or not at all
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))
    interrupted: bool = False
    _servers: dict[str, RemoteServer] = field(default_factory=dict)
    _health: dict[str, Health] = field(default_factory=dict)
    _cells: list[Cell] = field(default_factory=list)
    _warm: set[tuple[str, str, Load]] = field(default_factory=set)

    def run(self) -> Results:
        """Measure everything. After Ctrl-C the results so far, labelled, with `interrupted` set."""
        _allow_connections()
        gc.collect()
        gc.freeze()  # what is loaded by now (torch, for one) need not be looked through while requests are timed
        try:
            asyncio.run(self._run())
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            gc.unfreeze()
        return self._save(finished=True)

    async def _run(self) -> None:
        try:
            for spec in self.settings.servers:
                self._servers[spec.name] = await connect(spec)
                self._health[spec.name] = Health()
            order = schedule(self.settings)
            total = sum(self.settings.prompts_for(load) for _, _, load, _ in order)
            with self.progress.task("requests", total) as advance:
                for turn in order:
                    await self._measure(turn, advance)
                    self._save(finished=False)
        finally:
            for server in self._servers.values():
                server.close()

    async def _measure(self, turn: Turn, advance: Callable[..., None]) -> None:
        repeat, workload, load, spec = turn
        server, health = self._servers[spec.name], self._health[spec.name]
        count = self.settings.prompts_for(load)
        label = f"{spec.name}, {workload.name}, {load}, repeat {repeat + 1} of {self.settings.repeats}"
        if health.dead is None:
            advance(0, note=label)
            await self._warm_up(server, workload, load)
        if health.dead is not None:
            self._cells.append(failed_cell(spec.name, workload.name, load, repeat, health.dead))
            advance(count, note=f"{spec.name} is dead")
            return
        arrivals: Sequence[float] = ()
        if load.rate is not None:
            seed = f"{self.settings.seed or 0}/{workload.name}/{load.rate}/{repeat}"
            arrivals = arrival_times(count, load.rate, seed=seed)
        cell = self._cell(server, workload.name, load, repeat, chosen(workload, count, self.settings.seed or 0))
        cell.arrivals, cell.advance = arrivals, lambda: advance(note=label)
        try:
            await cell.run()
            if cell.finished < count:  # it died
                advance(count - cell.finished, note=label)
        finally:
            result = cell.result()
            self._cells.append(result)
            if result.note is not None:
                self.progress.say(f"{label}: {result.note}")

    async def _warm_up(self, server: RemoteServer, workload: Workload, load: Load) -> None:
        """Before a server's first cell of a load: graphs, compilers, allocators, connections. Failures show later."""
        count = self.settings.warmup_for(load)
        if not count or (server.name, workload.name, load) in self._warm:
            return
        self._warm.add((server.name, workload.name, load))
        at_once = Load(concurrency=min(count, load.concurrency or count))
        prompts = chosen(workload, count, (self.settings.seed or 0) + 1)  # others than those that are measured next
        await self._cell(server, workload.name, at_once, -1, prompts).run()

    def _cell(self, server: RemoteServer, workload: str, load: Load, repeat: int, prompts: Sequence[Prompt]) -> CellRun:
        asking = RequestSettings(
            endpoint=self.settings.endpoint,
            options=self.settings.body_options,
            max_tokens=self.settings.max_tokens,
            stall_seconds=self.settings.stall_seconds,
        )
        health = self._health[server.name]
        return CellRun(
            server=server, workload=workload, load=load, repeat=repeat, prompts=prompts, asking=asking, health=health
        )

    def _save(self, *, finished: bool) -> Results:
        results = self._results(finished=finished)
        if self.out is not None and self._servers:
            write_results(results, self.out)
        return results

    def _results(self, *, finished: bool) -> Results:
        wanted = len(schedule(self.settings))
        notes = [f"{workload.name}: {note}" for workload in self.settings.workloads for note in workload.notes]
        notes += [f"{name} died in the run: {one.dead}" for name, one in self._health.items() if one.dead is not None]
        for name in self._servers:
            remarks = (cell.note for cell in self._cells if cell.contender == name and cell.status == "complete")
            notes += [f"{name}: {remark}" for remark in dict.fromkeys(remarks) if remark]
        if self.interrupted:
            notes.append(f"{INTERRUPTED}: {len(self._cells)} of {wanted} cells were begun")
        elif not finished:
            notes.append(f"still running, or killed: {len(self._cells)} of {wanted} cells were measured")
        return Results(
            kind="serve",
            title=self.settings.title,
            baseline=self.settings.baseline or self.settings.servers[0].name,
            contenders=tuple(server.contender() for server in self._servers.values()),
            cells=tuple(self._cells),
            settings=self.settings.to_dict(),
            provenance=self.provenance,
            status=_status(self._cells, wanted),
            notes=tuple(notes),
        )


def _allow_connections() -> None:
    """Let the process open as many connections as the system permits: the usual limit is a thousand."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # noqa: PLC0415 - not on Windows

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _status(cells: Sequence[Cell], wanted: int) -> Status:
    if len(cells) == wanted and all(cell.status == "complete" for cell in cells):
        return "complete"
    return "partial" if any(cell.good for cell in cells) else "failed"


def arrival_times(count: int, rate: float, *, seed: str) -> list[float]:
    """Seconds after the start at which `count` requests arrive, `rate` per second, independently of each other."""
    chance = random.Random(seed)
    return list(itertools.accumulate(chance.expovariate(rate) for _ in range(count)))


def chosen(workload: Workload, count: int, seed: int) -> list[Prompt]:
    """`count` prompts: a sample that is spread over the categories, or all of them over and over."""
    prompts = workload.sampled(min(count, len(workload.prompts)), seed).prompts
    return list(itertools.islice(itertools.cycle(prompts), count))
