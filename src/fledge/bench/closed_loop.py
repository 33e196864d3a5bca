"""A closed loop through an engine: so many requests in flight at all times, each recorded."""

import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fledge.bench.results import RequestRecord, tally_triples
from fledge.decoding.params import SamplingParams
from fledge.engine.outputs import RequestUpdate
from fledge.engine.protocol import Engine
from fledge.training.evaluation import spread


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt as the engine takes it."""

    id: str
    tokens: tuple[int, ...]


@dataclass(kw_only=True)
class ClosedLoop:
    """Keeps `concurrency` requests in flight until all questions are answered."""

    engine: Engine
    questions: Sequence[Question]
    concurrency: int
    params: SamplingParams
    eos_ids: tuple[int, ...]
    seed: int = 0
    failure: str | None = None  # why it did not get to the end
    started: float = 0.0
    _asked: dict[str, Question] = field(default_factory=dict)  # by request
    _tokens: dict[str, list[int]] = field(default_factory=dict)
    _last: dict[str, RequestUpdate] = field(default_factory=dict)

    def run(self) -> None:
        """Answer everything. Whatever is left over from an interruption is aborted."""
        waiting = iter(enumerate(self.questions))
        self.started = time.perf_counter()
        try:
            for number, question in itertools.islice(waiting, self.concurrency):
                self._ask(number, question)
            while self.engine.has_unfinished:
                for update in self.engine.step():
                    self._tokens[update.request_id] += update.token_ids
                    if update.finish_reason is not None:
                        self._last[update.request_id] = update
                        if (following := next(waiting, None)) is not None:
                            self._ask(*following)
        finally:
            for request_id in self._asked.keys() - self._last.keys():
                if (last := self.engine.abort(request_id)) is not None:
                    self._last[request_id] = last

    def _ask(self, number: int, question: Question) -> None:
        request_id = str(number)
        self.engine.add_request(request_id, question.tokens, self.params, seed=self.seed + number, eos_ids=self.eos_ids)
        self._asked[request_id], self._tokens[request_id] = question, []

    @property
    def records(self) -> tuple[RequestRecord, ...]:
        return tuple(
            _record(question, self._tokens[request_id], self._last[request_id], self.started, self.failure)
            for request_id, question in self._asked.items()
        )

    @property
    def seconds(self) -> float:
        ends = [one.metrics.arrived + one.metrics.seconds for one in self._last.values() if one.metrics is not None]
        return round(max(ends, default=self.started) - self.started, 6)


def _record(
    question: Question, tokens: list[int], last: RequestUpdate, started: float, failure: str | None
) -> RequestRecord:
    metrics, error = last.metrics, last.error
    assert metrics is not None
    if error is None and last.finish_reason not in ("stop", "length"):
        error = failure or f"ended with {last.finish_reason}"

    def after(seconds: float | None) -> float | None:
        """From the start, in microseconds: a run has many thousand of them."""
        return None if seconds is None else round(metrics.arrived - started + seconds, 6)

    return RequestRecord(
        prompt=question.id,
        sent=round(metrics.arrived - started, 6),
        first_token=after(metrics.time_to_first_token),
        done=None if error is not None else after(metrics.seconds),
        prompt_tokens=len(question.tokens),
        output_tokens=len(tokens),
        error=error,
        digest=token_digest(tokens),
        acceptance=tally_triples(metrics.acceptance),
    )


def token_digest(tokens: Sequence[int]) -> str:
    """Of the token ids: whether two contenders said the same."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


def asked(questions: Sequence[Question], count: int) -> list[Question]:
    """`count` questions evenly over all of them, which may be sorted by subject; where that is more, over and over."""
    if count <= len(questions):
        return spread(questions, count)
    return list(itertools.islice(itertools.cycle(questions), count))
