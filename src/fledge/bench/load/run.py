"""A run against servers: all of them under the same load, with the same prompts and arrival times."""

import asyncio
import contextlib
import gc
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fledge.bench.load.cell import CellRun, Health, RequestSettings, failed_cell
from fledge.bench.load.servers import Endpoint, RemoteServer, ServerSpec, connect
from fledge.bench.run import BenchRun, CellTurn, RunSettings
from fledge.errors import ConfigError, nearest_name_hint
from fledge.evaluation.results import Load, Results
from fledge.evaluation.workloads import Prompt, Workload
from fledge.progress import Advance

OPEN_LOOP_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class ServeSettings(RunSettings):
    """What is measured."""

    least_requests: ClassVar[int] = 16
    rounds_of_load: ClassVar[int] = 4

    servers: tuple[ServerSpec, ...]
    baseline: str | None = None  # None: the first server
    warmup: int | None = None  # prompts before a server's first cell of a load; None: as many as run at once
    seed: int | None = None  # of arrival times, and sent with each request; None: 0, and not sent
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
        if self.requests is None and load.rate is not None:
            return max(self.least_requests, math.ceil(OPEN_LOOP_SECONDS * load.rate))
        return super().prompts_for(load)

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
        """No keys and no headers."""
        return {
            **super().to_dict(),
            "seed": self.seed,
            "warmup": {str(load): self.warmup_for(load) for load in self.loads},
            "endpoint": self.endpoint,
            "timeout": self.stall_seconds,
            "extra_body": {spec.name: dict(spec.extra_body) for spec in self.servers if spec.extra_body},
            **self.facts,
        }


@dataclass(kw_only=True)
class ServeRun(BenchRun):
    kind: ClassVar[Literal["serve", "offline"]] = "serve"

    settings: ServeSettings
    _loop: asyncio.Runner = field(default_factory=asyncio.Runner)
    _servers: dict[str, RemoteServer] = field(default_factory=dict)
    _health: dict[str, Health] = field(default_factory=dict)
    _warm: set[tuple[str, str, Load]] = field(default_factory=set)

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.settings.servers]

    @property
    def baseline(self) -> str | None:
        return self.settings.baseline or super().baseline

    @property
    def notes(self) -> list[str]:
        notes = [f"{workload.name}: {note}" for workload in self.settings.workloads for note in workload.notes]
        notes += [f"{name} died in the run: {one.dead}" for name, one in self._health.items() if one.dead is not None]
        for name in self._servers:
            remarks = (cell.note for cell in self.cells if cell.contender == name and cell.status == "complete")
            notes += [f"{name}: {remark}" for remark in dict.fromkeys(remarks) if remark]
        return notes

    def run(self) -> Results:
        _allow_connections()
        gc.collect()
        gc.freeze()  # what is loaded by now (torch, for one) need not be looked through while requests are timed
        try:
            with self._loop:
                try:
                    return super().run()
                finally:
                    for server in self._servers.values():
                        server.close()
        finally:
            gc.unfreeze()

    def prepare(self) -> None:
        for spec in self.settings.servers:
            server = self._loop.run(connect(spec))
            self._servers[spec.name] = server
            self._health[spec.name] = Health()
            self.contenders.append(server.contender())

    def measure(self, turn: CellTurn, advance: Advance) -> None:
        self._loop.run(self._measure(turn, advance))

    async def _measure(self, turn: CellTurn, advance: Advance) -> None:
        repeat, workload, load, name = turn
        server, health = self._servers[name], self._health[name]
        count = self.settings.prompts_for(load)
        label = f"{turn} of {self.settings.repeats}"
        if health.dead is None:
            advance(0, note=label)
            await self._warm_up(server, workload, load)
        if health.dead is not None:
            self.cells.append(failed_cell(name, workload.name, load, repeat, health.dead))
            advance(count, note=f"{name} is dead")
            return
        cell = self._cell(server, workload.name, load, repeat, chosen(workload, count, self.settings.seed or 0))
        cell.advance = lambda: advance(note=label)
        if load.rate is not None:
            seed = f"{self.settings.seed or 0}/{workload.name}/{load.rate}/{repeat}"
            cell.arrivals = arrival_times(count, load.rate, seed=seed)
        try:
            await cell.run()
            if cell.finished < count:  # it died
                advance(count - cell.finished, note=label)
        finally:
            result = cell.result()
            self.cells.append(result)
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


def _allow_connections() -> None:
    """Let the process open as many connections as the system permits: the usual limit is a thousand."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # noqa: PLC0415 - not on Windows

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def arrival_times(count: int, rate: float, *, seed: str) -> list[float]:
    """Seconds after the start at which `count` requests arrive, `rate` per second, independently of each other."""
    chance = random.Random(seed)
    return list(itertools.accumulate(chance.expovariate(rate) for _ in range(count)))


def chosen(workload: Workload, count: int, seed: int) -> list[Prompt]:
    """`count` prompts: a sample that is spread over the categories, or all of them over and over."""
    prompts = workload.sampled(min(count, len(workload.prompts)), seed).prompts
    return list(itertools.islice(itertools.cycle(prompts), count))
