"""A closed loop through an engine: so many requests in flight at all times, each recorded."""

import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fledge.decoding.params import SamplingParams
from fledge.engine.engine import Engine
from fledge.engine.request import Request
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
    _asked: list[tuple[TokenPrompt, Request]] = field(default_factory=list)

    def run(self) -> None:
        """Answer everything. Whatever is left over from an interruption is aborted."""
        waiting = iter(enumerate(self.prompts))
        self.started = time.perf_counter()
        try:
            for number, prompt in itertools.islice(waiting, self.concurrency):
                self._ask(number, prompt)
            while self.engine.has_unfinished:
                for update in self.engine.step():
                    following = next(waiting, None) if update.finish_reason is not None else None
                    if following is not None:
                        self._ask(*following)
        finally:
            for _, request in self._asked:
                if request.finish_reason is None:
                    self.engine.abort(request.id)

    def _ask(self, number: int, prompt: TokenPrompt) -> None:
        request = self.engine.add_request(
            str(number), prompt.tokens, self.params, seed=self.seed + number, eos_ids=self.eos_ids
        )
        self._asked.append((prompt, request))

    @property
    def records(self) -> tuple[RequestRecord, ...]:
        return tuple(_record(prompt, request, self.started, self.failure) for prompt, request in self._asked)

    @property
    def seconds(self) -> float:
        ends = [request.finished_at for _, request in self._asked if request.finished_at is not None]
        return round(max(ends, default=self.started) - self.started, 6)


def _record(prompt: TokenPrompt, request: Request, started: float, failure: str | None) -> RequestRecord:
    error = request.failure
    if error is None and request.finish_reason not in ("stop", "length"):
        error = failure or f"ended with {request.finish_reason}"

    def after(moment: float | None) -> float | None:
        return None if moment is None else round(moment - started, 6)  # microseconds: a run has many thousand of them

    return RequestRecord(
        prompt=prompt.id,
        sent=round(request.arrived - started, 6),
        first_token=after(request.first_token_at),
        done=None if error is not None else after(request.finished_at),
        prompt_tokens=len(prompt.tokens),
        output_tokens=request.num_output,
        error=error,
        digest=token_digest(request.output),
        acceptance=tally_triples(request.acceptance),
    )


def token_digest(tokens: Sequence[int]) -> str:
    """Of the token ids: whether two contenders said the same."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


def cycled(prompts: Sequence[TokenPrompt], count: int) -> list[TokenPrompt]:
    """`count` prompts evenly over all of them, which may be sorted by subject; where that is more, over and over."""
    if count <= len(prompts):
        return spread(prompts, count)
    return list(itertools.islice(itertools.cycle(prompts), count))
