"""A run against servers: all of them under the same load, with the same prompts and arrival times."""

import asyncio
import contextlib
import gc
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from fledge.bench.load.client import StreamedAnswer, ask, tally_between
from fledge.bench.load.servers import PATHS, Endpoint, RemoteServer, ServerSpec, connect
from fledge.bench.run import BenchRun, RunSettings, cell_name
from fledge.errors import ConfigError, nearest_name_hint
from fledge.evaluation.conversations import split_turns
from fledge.evaluation.results import Cell, Load, RequestRecord, Results, Tally, turn_name
from fledge.evaluation.workloads import Prompt, Workload
from fledge.progress import Advance

OPEN_LOOP_SECONDS = 20.0
LAG_INTERVAL = 0.005
TOO_LATE_MS = 20.0
COUNTED = "tokens are pieces of text counted, too few where a piece has several: the server tells no usage"
LAGGED = f"the load generator could not keep up: 1 % of its turns came over {TOO_LATE_MS:.0f} ms late; give it a core"


@dataclass(frozen=True, kw_only=True)
class ServeSettings(RunSettings):
    """What is measured."""

    least_requests: ClassVar[int] = 16
    rounds_of_load: ClassVar[int] = 4
    recorded = (*RunSettings.recorded, "endpoint", "timeout", "sample")

    servers: tuple[ServerSpec, ...]
    baseline: str | None = None  # None: the first server
    warmup: int | None = None  # prompts before a server's first cell of a load; None: as many as run at once
    seed: int | None = None  # of arrival times, and sent with each request; None: 0, and not sent
    timeout: float = 120.0  # seconds without an event
    endpoint: Endpoint = "chat"
    title: str = "Servers under load"
    sample: int | None = None  # what the workloads were sampled with, for the record

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

    def to_dict(self) -> dict[str, Any]:
        """No keys and no headers."""
        return {
            **super().to_dict(),
            "warmup": {str(load): self.warmup_for(load) for load in self.loads},
            "extra_body": {spec.name: dict(spec.extra_body) for spec in self.servers if spec.extra_body},
        }


async def watch_lag(late: list[float]) -> None:
    """Whether the load generator keeps up: sleep again and again, and add to `late` how many seconds too long."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL
        await asyncio.sleep(LAG_INTERVAL)
        late.append(max(0.0, loop.time() - due))


def lag_ms(late: Sequence[float]) -> float:
    """The 99th percentile."""
    return 1e3 * sorted(late)[int(0.99 * (len(late) - 1))] if late else 0.0


@dataclass(kw_only=True)
class CellRun:
    """One server under one load, every request recorded.

    `result` may be asked at any time, also after a cancelled `run`: it labels what is missing.
    """

    settings: ServeSettings
    server: RemoteServer
    cell: Cell  # yet without requests
    prompts: Sequence[Prompt]
    arrivals: Sequence[float] = ()  # for a rate: when each prompt is sent
    advance: Callable[[], None] = lambda: None  # after each prompt
    finished: int = 0  # prompts
    late: list[float] = field(default_factory=list)  # see `watch_lag`
    _records: list[RequestRecord] = field(default_factory=list)
    _begun: float = 0.0
    _last: float = 0.0  # when a request ended
    _acceptance: Tally = ()
    _remarks: dict[str, None] = field(default_factory=dict)  # each once, in order
    _unsent: str = "finished: interrupted"  # why requests are missing

    async def run(self) -> None:
        reads_counters = self.server.has_counters and not self.server.reports
        before = await self.server.counters() if reads_counters else None
        self._begun = time.perf_counter()
        async with asyncio.TaskGroup() as watched:
            watch = watched.create_task(watch_lag(self.late))
            async with asyncio.TaskGroup() as group:
                if self.cell.load.concurrency is not None:
                    waiting = iter(self.prompts)
                    for _ in range(min(self.cell.load.concurrency, len(self.prompts))):
                        group.create_task(self._work(waiting))
                else:  # each prompt at its time, whatever became of the ones before
                    for prompt, due in zip(self.prompts, self.arrivals, strict=True):
                        await asyncio.sleep(max(0.0, self._begun + due - time.perf_counter()))
                        if self.server.dead is not None:
                            break
                        group.create_task(self._work(iter([prompt])))
            watch.cancel()
        self._unsent = f"asked: {self.server.dead}"
        if reads_counters and self.server.dead is None:
            try:
                self._acceptance = tally_between(before, await self.server.counters())
            except ValueError as error:
                self._remarks[f"acceptance unknown: {error}"] = None

    async def _work(self, waiting: Iterator[Prompt]) -> None:
        """Take the next prompt as soon as the last one is answered.

        Its turns are asked one after another; the server's own answers are the history of the next.
        """
        for prompt in waiting:
            if self.server.dead is not None:
                return
            parts = split_turns(prompt.messages, keep_answers=True)
            history: list[Mapping[str, Any]] = []
            failed = False
            for number, part in enumerate(parts, start=1):
                name = prompt.id if len(parts) == 1 else turn_name(prompt.id, number)
                if failed:
                    now, error = time.perf_counter() - self._begun, "not asked: an earlier turn failed"
                    self._records.append(RequestRecord(prompt=name, sent=now, error=error))
                    continue
                history += part
                answer = await self._ask(history)
                self._last = time.perf_counter()
                self._records.append(answer.record(name, self._begun))
                await self.server.observe(answer)
                failed = answer.error is not None
                if answer.counted and not failed:
                    self._remarks[COUNTED] = None
                history.append({"role": "assistant", "content": "".join(answer.text)})
            self.finished += 1
            self.advance()

    async def _ask(self, messages: Sequence[Mapping[str, Any]]) -> StreamedAnswer:
        settings = self.settings
        options = {name: getattr(settings, name) for name in ("max_tokens", "temperature", "seed")}
        options["ignore_eos"] = settings.ignore_eos or None  # which not every server knows
        given = {name: value for name, value in options.items() if value is not None}
        body = self.server.body(messages, settings.endpoint, given)
        stall, most = settings.timeout, 4 * settings.max_tokens + 1000
        return await ask(self.server.client, PATHS[settings.endpoint], body, stall_seconds=stall, max_pieces=most)

    def result(self) -> Cell:
        """Also says how many requests were not answered, and why; the most frequent reasons first."""
        records = sorted(self._records, key=lambda record: record.sent)
        expected = sum(len(split_turns(prompt.messages, keep_answers=True)) for prompt in self.prompts)
        reasons = Counter(record.error for record in records if record.error is not None)
        good, unsent, remarks = len(records) - reasons.total(), expected - len(records), list(self._remarks)
        if good < expected:
            shown = [f"{count} x {reason}" for reason, count in reasons.most_common(3)]
            shown += [f"{len(reasons) - 3} other reasons"] if len(reasons) > 3 else []
            shown += [f"{unsent} not {self._unsent}"] if unsent else []
            remarks.insert(0, f"{expected - good} of {expected} requests failed: {'; '.join(shown)}")
        if lag_ms(self.late) > TOO_LATE_MS:
            remarks.append(LAGGED)
        return replace(
            self.cell,
            seconds=self._last - self._begun - records[0].sent if records else 0.0,  # failed ones took their time too
            requests=tuple(records),
            status="complete" if good == expected else "partial" if good else "failed",
            note="; ".join(remarks) or None,
            acceptance=self._acceptance,
        )


@dataclass(kw_only=True)
class ServeRun(BenchRun):
    kind: ClassVar[Literal["serve", "offline"]] = "serve"

    settings: ServeSettings
    _loop: asyncio.Runner = field(default_factory=asyncio.Runner)
    _servers: dict[str, RemoteServer] = field(default_factory=dict)
    _warm: set[tuple[str, str, Load]] = field(default_factory=set)

    @property
    def baseline(self) -> str | None:
        return self.settings.baseline or super().baseline

    @property
    def notes(self) -> list[str]:
        notes = [f"{workload.name}: {note}" for workload in self.settings.workloads for note in workload.notes]
        notes += [f"{name} died in the run: {one.dead}" for name, one in self._servers.items() if one.dead is not None]
        return notes + [f"{c.contender}: {c.note}" for c in self.cells if c.status == "complete" and c.note]

    def run(self) -> Results:
        with contextlib.suppress(ImportError, OSError, ValueError):
            import resource  # noqa: PLC0415 - not on Windows

            # As many connections as the system permits: the usual limit is a thousand.
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        is_ours = gc.get_freeze_count() == 0  # whoever embeds us may have frozen what it has
        gc.collect()
        gc.freeze()  # what is loaded by now (torch, for one) need not be looked through while requests are timed
        with self._loop:
            try:
                return super().run()
            finally:
                for server in self._servers.values():
                    server.client.close()
                if is_ours:
                    gc.unfreeze()

    def prepare(self) -> None:
        for spec in self.settings.servers:
            self._servers[spec.name] = server = self._loop.run(connect(spec))
            self.contenders.append(server.contender())

    def measure(self, cell: Cell, advance: Advance) -> None:
        self._loop.run(self._measure(cell, advance))

    async def _measure(self, cell: Cell, advance: Advance) -> None:
        server, seed = self._servers[cell.contender], self.settings.seed or 0
        workload = next(one for one in self.settings.workloads if one.name == cell.workload)
        count = self.settings.prompts_for(cell.load)
        label = f"{cell_name(cell)} of {self.settings.repeats}"
        if server.dead is None:
            advance(0, note=label)
            await self._warm_up(server, cell, workload)
        if server.dead is not None:
            self.cells.append(replace(cell, status="failed", note=f"not measured: {server.dead}"))
            advance(count, note=f"{cell.contender} is dead")
            return
        run = CellRun(settings=self.settings, server=server, cell=cell, prompts=chosen(workload, count, seed))
        run.advance = lambda: advance(note=label)
        if (rate := cell.load.rate) is not None:
            run.arrivals = arrival_times(count, rate, seed=f"{seed}/{cell.workload}/{rate}/{cell.repeat}")
        try:
            await run.run()
            if run.finished < count:  # it died
                advance(count - run.finished, note=label)
        finally:
            result = run.result()
            self.cells.append(result)
            if result.note is not None:
                self.progress.say(f"{label}: {result.note}")

    async def _warm_up(self, server: RemoteServer, cell: Cell, workload: Workload) -> None:
        """Before a server's first cell of a load: graphs, compilers, allocators, connections. Failures show later."""
        count = self.settings.warmup_for(cell.load)
        key = (cell.contender, cell.workload, cell.load)
        if not count or key in self._warm:
            return
        self._warm.add(key)
        cell = replace(cell, load=Load(concurrency=min(count, cell.load.concurrency or count)))
        prompts = chosen(workload, count, (self.settings.seed or 0) + 1)  # others than are measured next
        await CellRun(settings=self.settings, server=server, cell=cell, prompts=prompts).run()


def arrival_times(count: int, rate: float, *, seed: str) -> list[float]:
    """Seconds after the start at which `count` requests arrive, `rate` per second, independently of each other."""
    chance = random.Random(seed)
    return list(itertools.accumulate(chance.expovariate(rate) for _ in range(count)))


def chosen(workload: Workload, count: int, seed: int) -> list[Prompt]:
    """`count` prompts: a sample that is spread over the categories, or all of them over and over."""
    prompts = workload.sampled(min(count, len(workload.prompts)), seed).prompts
    return list(itertools.islice(itertools.cycle(prompts), count))
