"""The engine's side of the service: commands in, steps, frames out. Runs in a thread or in a process of its own.

A frame is what one step has brought, for all requests together: handing it over costs the same however many clients
there are. Commands and frames are plain values, so that they can travel between processes.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fledge.decoding.params import SamplingParams
from fledge.engine.constraint import TokenConstraint
from fledge.engine.llm import LLM
from fledge.engine.outputs import RequestMetrics, RequestUpdate, TokenLogprobs
from fledge.engine.protocol import DeadEngineError, Engine, EngineInfo
from fledge.errors import describe
from fledge.server.observing import FinishedRequest, StepReport, StepWatch
from fledge.server.structured import Grammar, ReasoningMarkers

_log = logging.getLogger("fledge.server")


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What the rest of the service needs to know of an engine."""

    bounds: EngineInfo
    max_num_seqs: int
    eos_ids: tuple[int, ...]
    has_drafter: bool

    @classmethod
    def of(cls, llm: LLM) -> "EngineFacts":
        return cls(
            bounds=llm.engine.info,
            max_num_seqs=llm.engine.info.max_num_seqs,
            eos_ids=llm.eos_ids,
            has_drafter=llm.engine.info.drafter is not None,
        )


@dataclass(frozen=True, kw_only=True)
class GrammarSource:
    """A grammar that has been found good, to be compiled again where it is needed."""

    grammar: Grammar
    reasoning: ReasoningMarkers | None


@dataclass(frozen=True, kw_only=True)
class Submit:
    """Begin a request, known to both sides by its number."""

    number: int
    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int
    draft_limit: int | None = None
    constraint: TokenConstraint | GrammarSource | None = None
    template_name: str | None = None
    template_hash: str | None = None


@dataclass(frozen=True, kw_only=True)
class Abort:
    number: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Call:
    """Run a function between two steps. Only within one process."""

    function: Callable[[Engine], None]


@dataclass(frozen=True, kw_only=True)
class Stop:
    """End all requests and stop."""


Command = Submit | Abort | Call | Stop


class Tokens(NamedTuple):
    """New tokens of a request; the first `accepted` had been drafted. `ends`: the last one is a stop id."""

    number: int
    tokens: list[int]
    accepted: int
    ends: bool
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The engine is done with a request."""

    number: int
    finish_reason: str
    failure: str | None = None  # with "error"
    metrics: RequestMetrics | None = None
    finished: FinishedRequest | None = None


@dataclass(kw_only=True)
class Frame:
    """What has happened since the last frame. `death`: why there will be no more."""

    tokens: list[Tokens] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    report: StepReport | None = None
    death: str | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.tokens or self.ended or self.report or self.death)

    def pack(self) -> tuple[Any, ...]:
        """Return it as plain tuples, which are quick to pickle."""
        return [tuple(tokens) for tokens in self.tokens], self.ended, self.report, self.death

    @classmethod
    def unpack(cls, packed: tuple[Any, ...]) -> "Frame":
        tokens, ended, report, death = packed
        return cls(tokens=[Tokens(*one) for one in tokens], ended=ended, report=report, death=death)


class Inbox(Protocol):
    """Where commands come from."""

    def take(self, *, wait: bool) -> Command | None:
        """Return the next command; None if there is none and nobody is to wait."""
        ...


class EngineWorker:
    """Runs an engine until it is told to stop, or dies."""

    def __init__(self, llm: LLM, inbox: Inbox, emit: Callable[[Frame], None]) -> None:
        self._llm = llm
        self._inbox = inbox
        self._emit = emit
        self._frame = Frame()
        self._known: dict[str, Submit] = {}
        self._ids: dict[int, str] = {}

    def run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            self._frame.death = describe(error)
            _log.critical(
                "the engine has stopped: %s", describe(error), exc_info=not isinstance(error, DeadEngineError)
            )
        self._send()

    def _serve(self) -> None:
        engine, watch = self._llm.engine, StepWatch(self._llm.engine)
        while self._obey(wait=not engine.has_unfinished):
            if engine.has_unfinished:
                started = time.perf_counter()
                for update in engine.step():
                    self._take(update)
                self._frame.report = watch.after_step(seconds=time.perf_counter() - started)
            self._send()

    def _send(self) -> None:
        if not self._frame.is_empty:
            frame, self._frame = self._frame, Frame()
            self._emit(frame)

    def _obey(self, *, wait: bool) -> bool:
        """Do what was asked for meanwhile; with `wait`, sleep until something is. False: no more."""
        while (command := self._inbox.take(wait=wait)) is not None:
            wait = False
            if isinstance(command, Submit):
                self._submit(command)
            elif isinstance(command, Abort):
                self._abort(command.number, command.reason)
            elif isinstance(command, Call):
                command.function(self._llm.engine)
            else:
                for number in list(self._ids):
                    self._abort(number, "shutdown")
                return False
        return True

    def _submit(self, asked: Submit) -> None:
        assert not isinstance(asked.constraint, GrammarSource), "the inbox compiles grammars"
        try:
            self._llm.engine.add_request(
                asked.request_id,
                asked.prompt_ids,
                asked.params,
                seed=asked.seed,
                eos_ids=self._llm.eos_ids,
                draft_limit=asked.draft_limit,
                constraint=asked.constraint,
            )
        except Exception as error:  # whatever it is, it is this request's
            self._frame.ended.append(Ended(number=asked.number, finish_reason="error", failure=describe(error)))
            return
        self._known[asked.request_id] = asked
        self._ids[asked.number] = asked.request_id

    def _abort(self, number: int, reason: str) -> None:
        request_id = self._ids.get(number)
        if request_id is not None:
            last = self._llm.engine.abort(request_id, reason)
            if last is not None:
                self._end(last)

    def _take(self, update: RequestUpdate) -> None:
        known = self._known.get(update.request_id)
        if known is None:
            return
        if update.token_ids:
            ends = update.stop_token_id is not None
            tokens = Tokens(known.number, update.token_ids, update.accepted, ends, update.logprobs)
            self._frame.tokens.append(tokens)
        if update.finish_reason is not None:
            self._end(update)

    def _end(self, last: RequestUpdate) -> None:
        asked = self._known.pop(last.request_id)
        del self._ids[asked.number]
        self._frame.ended.append(
            Ended(
                number=asked.number,
                finish_reason=last.finish_reason or "abort",
                failure=last.error,
                metrics=last.metrics,
                finished=FinishedRequest.of(last, template_name=asked.template_name, template_hash=asked.template_hash),
            )
        )
