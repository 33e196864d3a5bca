"""A closed loop through an engine: so many requests in flight at all times, each recorded."""

import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fledge.decoding.params import SamplingParams
from fledge.engine.outputs import RequestUpdate
from fledge.engine.protocol import Engine
from fledge.evaluation.results import RequestRecord, tally_triples
from fledge.evaluation.workloads import spread


@dataclass(frozen=True, kw_only=True)
class TokenPrompt:
    """A prompt as the engine takes it."""

    id: str
    tokens: tuple[int, ...]


@dataclass(kw_only=True)
class ClosedLoop:
    """Keeps `concurrency` requests in flight until all prompts are answered."""

    engine: Engine
    prompts: Sequence[TokenPrompt]
    concurrency: int
    params: SamplingParams
    eos_ids: tuple[int, ...]
    seed: int = 0
    failure: str | None = None  # why it did not get to the end
    started: float = 0.0
    _asked: dict[str, TokenPrompt] = field(default_factory=dict)  # by request
    _tokens: dict[str, list[int]] = field(default_factory=dict)
    _last: dict[str, RequestUpdate] = field(default_factory=dict)

    def run(self) -> None:
        """Answer everything. Whatever is left over from an interruption is aborted."""
        waiting = iter(enumerate(self.prompts))
        self.started = time.perf_counter()
        try:
            for number, prompt in itertools.islice(waiting, self.concurrency):
                self._ask(number, prompt)
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

    def _ask(self, number: int, prompt: TokenPrompt) -> None:
        request_id = str(number)
        self.engine.add_request(request_id, prompt.tokens, self.params, seed=self.seed + number, eos_ids=self.eos_ids)
        self._asked[request_id], self._tokens[request_id] = prompt, []

    @property
    def records(self) -> tuple[RequestRecord, ...]:
        return tuple(
            _record(prompt, self._tokens[request_id], self._last[request_id], self.started, self.failure)
            for request_id, prompt in self._asked.items()
        )

    @property
    def seconds(self) -> float:
        ends = [one.metrics.arrived + one.metrics.seconds for one in self._last.values() if one.metrics is not None]
        return round(max(ends, default=self.started) - self.started, 6)


def _record(
    prompt: TokenPrompt, tokens: list[int], last: RequestUpdate, started: float, failure: str | None
) -> RequestRecord:
    metrics, error = last.metrics, last.error
    assert metrics is not None
    if error is None and last.finish_reason not in ("stop", "length"):
        error = failure or f"ended with {last.finish_reason}"

    def after(seconds: float | None) -> float | None:
        """From the start, in microseconds: a run has many thousand of them."""
        return None if seconds is None else round(metrics.arrived - started + seconds, 6)

    return RequestRecord(
        prompt=prompt.id,
        sent=round(metrics.arrived - started, 6),
        first_token=after(metrics.time_to_first_token),
        done=None if error is not None else after(metrics.seconds),
        prompt_tokens=len(prompt.tokens),
        output_tokens=len(tokens),
        error=error,
        digest=token_digest(tokens),
        acceptance=tally_triples(metrics.acceptance),
    )


def token_digest(tokens: Sequence[int]) -> str:
    """Of the token ids: whether two contenders said the same."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


def cycled(prompts: Sequence[TokenPrompt], count: int) -> list[TokenPrompt]:
    """`count` prompts evenly over all of them, which may be sorted by subject; where that is more, over and over."""
    if count <= len(prompts):
        return spread(prompts, count)
    return list(itertools.islice(itertools.cycle(prompts), count))
