"""One cell: one server under one load, every request recorded."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fledge.bench.load.acceptance import SpeculationCounters, tally_between
from fledge.bench.load.client import StreamedAnswer, ask
from fledge.bench.load.servers import PATHS, Endpoint, RemoteServer
from fledge.evaluation.conversations import ASKING_ROLES
from fledge.evaluation.results import Cell, Load, RequestRecord, Status, Tally, turn_name
from fledge.evaluation.workloads import Prompt

LAG_INTERVAL = 0.005
TOO_LATE_MS = 20.0
DEAD_AFTER = 3  # failures one after another, without an answer or a refusal between them
COUNTED = "tokens are pieces of text counted, too few where a piece has several: the server tells no usage"
LAGGED = f"the load generator could not keep up: 1 % of its turns came over {TOO_LATE_MS:.0f} ms late; give it a core"


@dataclass(frozen=True, kw_only=True)
class RequestSettings:
    """How every request is made."""

    endpoint: Endpoint
    options: Mapping[str, Any]  # fields of the body that all servers get alike
    max_tokens: int
    stall_seconds: float


@dataclass(kw_only=True)
class Health:
    """Whether a server is still there. One for each server, over all its cells."""

    dead: str | None = None  # why nothing more is sent to it
    _failures: int = 0

    async def observe(self, answer: StreamedAnswer, server: RemoteServer) -> None:
        """Count failures in a row; when there are enough, see whether anybody is there at all."""
        if answer.failure not in ("connection", "stall"):
            self._failures = 0
            return
        self._failures += 1
        if self._failures < DEAD_AFTER or self.dead is not None:
            return
        if answer.failure == "connection" and await server.is_there():
            self._failures = 0
        else:
            self.dead = f"{DEAD_AFTER} failures in a row, the last: {answer.error}"


class LagMeter:
    """Whether the load generator keeps up: sleeps and looks how much longer it took. `late` holds seconds."""

    def __init__(self) -> None:
        self.late: list[float] = []

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self.late.append(max(0.0, loop.time() - due))

    @property
    def p99_ms(self) -> float:
        ordered = sorted(self.late)
        return 1e3 * ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0


@dataclass(kw_only=True)
class CellRun:
    """Runs a cell. `result` may be asked at any time, also after a cancelled `run`: it labels what is missing."""

    server: RemoteServer
    workload: str
    load: Load
    repeat: int
    prompts: Sequence[Prompt]
    arrivals: Sequence[float] = ()  # for a rate: when each prompt is sent
    asking: RequestSettings
    health: Health
    advance: Callable[[], None] = lambda: None  # after each prompt
    lag: LagMeter = field(default_factory=LagMeter)
    chunks_counted: bool = False
    finished: int = 0  # prompts
    _records: list[RequestRecord] = field(default_factory=list)
    _begun: float = 0.0
    _last: float = 0.0  # when a request ended
    _before: SpeculationCounters | None = None
    _acceptance: Tally = ()
    _remarks: list[str] = field(default_factory=list)
    _ended: bool = False

    async def run(self) -> None:
        reads_counters = self.server.has_counters and not self.server.reports
        if reads_counters:
            self._before = await self.server.counters()
        self._begun = time.perf_counter()
        async with self.lag.watching(), asyncio.TaskGroup() as group:
            if self.load.concurrency is not None:
                waiting = iter(self.prompts)
                for _ in range(min(self.load.concurrency, len(self.prompts))):
                    group.create_task(self._work(waiting))
            else:
                await self._release(group)
        self._ended = True
        if reads_counters and self.health.dead is None:
            await self._read_counters()

    async def _work(self, waiting: Iterator[Prompt]) -> None:
        """Take the next prompt as soon as the last one is answered."""
        for prompt in waiting:
            if self.health.dead is not None:
                return
            await self._converse(prompt)

    async def _release(self, group: asyncio.TaskGroup) -> None:
        """Send each prompt at its time, whatever became of the ones before."""
        for prompt, due in zip(self.prompts, self.arrivals, strict=True):
            await asyncio.sleep(max(0.0, self._begun + due - time.perf_counter()))
            if self.health.dead is not None:
                return
            group.create_task(self._converse(prompt))

    async def _converse(self, prompt: Prompt) -> None:
        """Ask a prompt's turns one after another; the server's own answers are the history of the next."""
        parts = turns(prompt.messages)
        history: list[Mapping[str, Any]] = []
        failed = False
        for number, part in enumerate(parts, start=1):
            name = prompt.id if len(parts) == 1 else turn_name(prompt.id, number)
            if failed:
                now = time.perf_counter() - self._begun
                self._records.append(RequestRecord(prompt=name, sent=now, error="not asked: an earlier turn failed"))
                continue
            history += part
            asking = self.asking
            answer = await ask(
                self.server.client,
                PATHS[asking.endpoint],
                self.server.body(history, asking.endpoint, asking.options),
                stall_seconds=asking.stall_seconds,
                max_pieces=4 * asking.max_tokens + 1000,
            )
            self._last = time.perf_counter()
            self._records.append(self._record(name, answer))
            await self.health.observe(answer, self.server)
            failed = answer.error is not None
            history.append({"role": "assistant", "content": "".join(answer.text)})
        self.finished += 1
        self.advance()

    def _record(self, name: str, answer: StreamedAnswer) -> RequestRecord:
        def after_start(moment: float | None) -> float | None:
            return None if moment is None else round(moment - self._begun, 6)

        good = answer.error is None
        self.chunks_counted |= good and answer.counted
        return RequestRecord(
            prompt=name,
            sent=round(answer.sent - self._begun, 6),
            first_token=after_start(answer.first_token),
            done=after_start(answer.done) if good else None,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            error=answer.error,
            digest=answer.digest if good else None,
            acceptance=answer.acceptance,
        )

    async def _read_counters(self) -> None:
        after = await self.server.counters()
        if self._before is None or after is None:
            self._remarks.append("acceptance unknown: /metrics did not answer")
            return
        try:
            self._acceptance = tally_between(self._before, after)
        except ValueError as error:
            self._remarks.append(f"acceptance unknown: {error}")

    def result(self) -> Cell:
        records = tuple(sorted(self._records, key=lambda record: record.sent))
        good = [record for record in records if record.error is None]
        expected = sum(len(turns(prompt.messages)) for prompt in self.prompts)
        remarks = []
        if len(good) < expected:
            remarks.append(
                _missing(records, expected, f"asked: {self.health.dead}" if self._ended else "finished: interrupted")
            )
        if self.chunks_counted:
            remarks.append(COUNTED)
        if self.lag.p99_ms > TOO_LATE_MS:
            remarks.append(LAGGED)
        remarks += self._remarks
        status: Status = "complete" if len(good) == expected else "partial" if good else "failed"
        return Cell(
            contender=self.server.name,
            workload=self.workload,
            load=self.load,
            repeat=self.repeat,
            seconds=self._last - self._begun - records[0].sent if records else 0.0,  # failed ones took their time too
            requests=records,
            status=status,
            note="; ".join(remarks) or None,
            acceptance=self._acceptance,
        )


def failed_cell(server: str, workload: str, load: Load, repeat: int, why: str) -> Cell:
    """A cell that was not tried."""
    return Cell(
        contender=server,
        workload=workload,
        load=load,
        repeat=repeat,
        seconds=0.0,
        requests=(),
        status="failed",
        note=f"not measured: {why}",
    )


def _missing(records: Sequence[RequestRecord], expected: int, why_unsent: str) -> str:
    """Say how many requests were not answered, and why; the most frequent reasons first."""
    reasons = Counter(record.error for record in records if record.error is not None)
    shown = [f"{count} x {reason}" for reason, count in reasons.most_common(3)]
    if len(reasons) > 3:
        shown.append(f"{len(reasons) - 3} other reasons")
    unsent = expected - len(records)
    if unsent:
        shown.append(f"{unsent} not {why_unsent}")
    return f"{sum(reasons.values()) + unsent} of {expected} requests failed: {'; '.join(shown)}"


def turns(messages: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Split a conversation after every message that the server has to answer.

    One that an assistant's message follows has its answer already; the others are asked, each after the answers to
    those before it. What comes after the last one is dropped.
    """
    parts: list[list[Mapping[str, Any]]] = []
    part: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        part.append(message)
        following = messages[i + 1]["role"] if i + 1 < len(messages) else "user"
        if message["role"] in ASKING_ROLES and following not in ("assistant", "tool"):
            parts.append(part)
            part = []
    return parts
