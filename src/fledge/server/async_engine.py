"""An asynchronous client of the engine's process: submits requests, and streams their text.

The engine never waits for clients; the event loop only detokenizes. A client that reads slowly gets the tokens of
several rounds in one delta. Closing a `Generation` aborts its requests within a round.
"""

import asyncio
import functools
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics, Overlap
from fledge.engine.constraint import CONSTRAINT_FAILURE
from fledge.engine.detokenizer import Detokenizer
from fledge.engine.llm import next_int64
from fledge.engine.outputs import RequestMetrics, RequestUpdate, TextPiece, TokenLogprobs
from fledge.engine.protocol import EngineInfo, EngineStats
from fledge.errors import FledgeError
from fledge.evaluation.baseline import Baseline
from fledge.server.drift_monitor import RequestTraits
from fledge.server.engine_process import EngineProcess, EngineWorker
from fledge.server.errors import RequestError, queue_full, refuse, shutting_down, timed_out
from fledge.server.metrics import Metrics
from fledge.server.prompts import NO_TEMPLATE, Template
from fledge.server.structured import COMPILE_SECONDS, COMPILE_THREADS, Grammar

STALL_SECONDS = 10.0  # without a message of the engine while it has requests


class TextDelta(NamedTuple):
    """What is new in a choice since its last delta. The last delta has a finish reason."""

    pieces: tuple[TextPiece, ...]
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that was found
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first delta
    offsets: Sequence[int] = ()  # position of each token in the text of the choice

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class AsyncEngine:
    """The client of one engine. Call `start` in the event loop, and `close` at the end."""

    def __init__(self, process: EngineProcess, *, max_queue: int, metrics: Metrics, seed: int = 0) -> None:
        """`max_queue`: the most requests that wait, beside those that the engine runs at once."""
        self.process = process
        self.info = process.info
        self.max_requests = self.info.max_num_seqs + max_queue
        self.death: str | None = None  # why the engine has stopped
        self.on_death: Callable[[], None] = lambda: None
        self._metrics = metrics
        self._seeds = random.Random(seed)  # for requests without a seed
        self._reserved = 0  # requests that are being prepared
        self._running: dict[str, Generation] = {}  # by id of requests that have not ended
        self._traits: dict[
            str, RequestTraits
        ] = {}  # of the same requests, and of aborted ones until the engine ends them
        self.compile_seconds = COMPILE_SECONDS  # timeout of one grammar
        self._compile_slots = asyncio.Semaphore(COMPILE_THREADS)
        self._calls: dict[int, asyncio.Future[FledgeError | None]] = {}  # by number; the worker has not replied yet
        self._next_baseline: Baseline | None = None  # of the drafter that is being loaded
        self._call_numbers = itertools.count()
        self._last_message_at = 0.0  # or the time of the first request after the engine was idle

    async def start(self) -> None:
        """Connect to the engine's process from the running event loop."""
        await self.process.connect(self._deliver)

    async def close(self) -> None:
        """Abort all requests and stop the engine."""
        self.on_death = lambda: None  # it is expected
        self.fail_all()
        for request_id in list(self._running):
            self.abort(request_id, "shutdown")
        await self.process.close()

    def fail_all(self, error: RequestError | None = None) -> None:
        """End all requests with an error."""
        error = error or shutting_down()
        for generation in set(self._running.values()):
            generation.put(error)

    @property
    def is_healthy(self) -> bool:
        return self.death is None and self.process.is_alive

    @property
    def is_stalled(self) -> bool:
        """Whether the engine has requests but has not sent a message, as after every step, for `STALL_SECONDS`."""
        return bool(self._running) and time.monotonic() - self._last_message_at > STALL_SECONDS

    @property
    def active(self) -> int:
        """Number of requests that are running, waiting or being prepared."""
        return len(self._running) + self._reserved

    @contextmanager
    def reserve(self, requests: int) -> Iterator[None]:
        """Reserve room for so many requests while they are prepared. Raises RequestError if there is none.

        Requests with a reservation are not checked again.
        """
        if requests > self.max_requests:
            raise RequestError(f"the request asks for {requests} answers, this server takes {self.max_requests}")
        self._check_health()
        if self.active + requests > self.max_requests:
            self._metrics.on_rejected("queue_full")
            raise queue_full(self.active)
        self._reserved += requests
        try:
            yield
        finally:
            self._reserved -= requests

    def _check_health(self) -> None:
        if not self.is_healthy:
            self._metrics.on_rejected("unhealthy")
            raise RequestError("the engine has stopped working; see the server's log", status=503, code="engine_dead")

    async def compile(self, grammar: Grammar) -> None:
        """Compile a grammar in the engine's process. Raises RequestError if it fails or takes too long."""
        seconds = self.compile_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._compile_slots.acquire()
        except TimeoutError:
            message = "too many grammars are being compiled; try again"
            raise RequestError(message, status=503, param=grammar.param, retry_after=1) from None
        done = self._call(EngineWorker.compile, grammar)
        done.add_done_callback(lambda _: self._compile_slots.release())  # its thread is busy until then
        try:
            error = await asyncio.wait_for(asyncio.shield(done), seconds)
        except TimeoutError:
            refuse(grammar.param, f"the grammar takes longer than {seconds:g} s to compile", code="invalid_grammar")
        _raise(error)

    async def load_drafter(self, model: str) -> None:
        """Load another drafter, while the engine continues. Raises FledgeError if it does not fit the target."""
        self._check_health()
        _raise(await self._call(EngineWorker.load_drafter, model))

    async def exchange_drafter(self, model: str, baseline: Baseline | None) -> None:
        """Use the loaded drafter from now on. Raises FledgeError if that fails; the present one stays."""
        self._next_baseline = baseline
        _raise(await self._call(EngineWorker.exchange_drafter, model))

    def _call(self, method: Callable[..., None], *arguments: Any) -> "asyncio.Future[FledgeError | None]":
        """Call a method of the worker. The result of the future is an error or None."""
        done: asyncio.Future[FledgeError | None] = asyncio.get_running_loop().create_future()
        number = next(self._call_numbers)
        self._calls[number] = done
        self.process.send(method, number, *arguments)
        return done

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        request_id: str,
        n: int = 1,
        draft_limit: int | None = None,
        cache_salt: bytes = b"",
        priority: int = 0,
        grammar: Grammar | None = None,
        template: Template = NO_TEMPLATE,
        script: str = "Latin",
        timeout: float | None = None,
    ) -> "Generation":
        """Submit requests for `n` choices of each prompt; their ids begin with `request_id`.

        Raises PromptError or ConfigError, before any of them is submitted, if one of them can never run.
        """
        for prompt in prompts:
            self.info.check_request(prompt, params)
        ids = [f"{request_id}-{number}" for number in range(len(prompts) * n)]
        generation = Generation(self, ids, prompts, params, n=n, timeout=timeout)
        seed = 0
        self._last_message_at = self._last_message_at if self._running else time.monotonic()
        for number, name in enumerate(ids):
            if number % n == 0:
                seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
            self._running[name] = generation
            self._traits[name] = RequestTraits(template, script, params.temperature)
            self.process.send(
                EngineWorker.add,
                name,
                parent=request_id,
                prompt=prompts[number // n],
                params=replace(params, n=1),
                seed=next_int64(seed, number % n),  # distinct for each choice of a prompt
                draft_limit=draft_limit,
                cache_salt=cache_salt,
                priority=priority,
                grammar=grammar,
            )
        return generation

    def abort(self, request_id: str, reason: str) -> None:
        """Abort a request unless it has ended."""
        if self._running.pop(request_id, None) is not None:
            self.process.send(EngineWorker.abort, request_id, reason)

    def _deliver(self, name: str, *output: Any) -> None:
        """Call the method that a message of the engine's process names."""
        self._last_message_at = time.monotonic()
        getattr(self, name)(*output)

    def on_step(self, updates: Sequence[RequestUpdate], stats: EngineStats) -> None:
        """Handle the updates of one step, and the engine's statistics after it."""
        for update in updates:
            generation = self._running.get(update.request_id)
            if update.finish_reason is not None:
                self._running.pop(update.request_id, None)  # the client may still be reading
                self._metrics.on_finished(update, self._traits.pop(update.request_id, RequestTraits()))
            if generation is not None:
                generation.put(update)
        self._metrics.on_stats(stats)

    def on_reply(self, number: int, error: FledgeError | None) -> None:
        self._calls.pop(number).set_result(error)

    def on_exchanged(self, number: int, info: EngineInfo, error: FledgeError | None) -> None:
        """Handle the result of a drafter swap. Without an error, later steps use the new one."""
        if error is None:
            self.info = self.process.info = info
            self._metrics.on_drafter(info.drafter, self._next_baseline)
            self._traits = {name: traits._replace(has_two_drafters=True) for name, traits in self._traits.items()}
        self.on_reply(number, error)

    def on_died(self, reason: str) -> None:
        """Handle the end of the engine."""
        if self.death is not None:
            return  # the engine reported it before its process ended
        self.death = reason
        lost = RequestError("the engine has stopped working", status=500, code="generation_failed")
        self.fail_all(lost)
        self._running.clear()
        self._traits.clear()
        for number in list(self._calls):
            self.on_reply(number, lost)
        self.on_death()


class Generation:
    """All choices of one HTTP request: `n` for each prompt, in this order. Used by one reader."""

    def __init__(
        self,
        engine: AsyncEngine,
        ids: Sequence[str],
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        n: int,
        timeout: float | None,
    ) -> None:
        """`timeout`: seconds from now, after which reading raises RequestError (408)."""
        self.n = n
        self.prompt_tokens = sum(len(prompt) for prompt in prompts)
        self.output_tokens = 0  # in the deltas so far
        self._engine = engine
        self._numbers = {request_id: number for number, request_id in enumerate(ids)}
        self.prompts = prompts
        make = functools.partial(Detokenizer, engine.process.tokenizer, params, engine.info.eos_ids)
        self._detokenizers = [make(prompt=prompt) for prompt in prompts for _ in range(n)]
        self._num_read = [0] * len(ids)  # tokens of each choice in the deltas so far
        self._inbox: asyncio.Queue[RequestUpdate | RequestError] = asyncio.Queue()
        self._timeout = timeout
        self._deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout

    @property
    def num_choices(self) -> int:
        return len(self._detokenizers)

    @property
    def finish_reasons(self) -> list[str]:
        return [text.finish_reason for text in self._detokenizers if text.finish_reason is not None]

    @property
    def metrics(self) -> RequestMetrics | None:
        """Pooled metrics of the choices that have ended; None if there are none."""
        parts = [text.metrics for text in self._detokenizers if text.metrics is not None]
        return RequestMetrics.pooled(parts) if parts else None

    def put(self, message: RequestUpdate | RequestError) -> None:
        """Add a message of the engine, or an error that ends the generation."""
        if isinstance(message, RequestUpdate) and message.finish_reason == "error":
            error = message.error or "the request failed"
            is_grammar = error.startswith(CONSTRAINT_FAILURE)  # the request's fault: its parser gave up
            status, code = (400, "invalid_grammar") if is_grammar else (500, "generation_failed")
            message = RequestError(error, status=status, code=code)
        self._inbox.put_nowait(message)

    def close(self, reason: str = "abort") -> None:
        """Abort the requests that have not ended."""
        for request_id in self._numbers:
            self._engine.abort(request_id, reason)

    async def deltas(self) -> AsyncIterator[tuple[int, TextDelta]]:
        """Yield (number of the choice, delta) until all have ended. Closes on errors, which are RequestErrors."""
        left = self.num_choices
        while left:
            updated: dict[int, None] = {}  # an ordered set
            for message in await self._messages():
                if isinstance(message, RequestError):
                    self.close("error")
                    raise message
                number = self._numbers[message.request_id]
                if self._detokenizers[number].add(message):  # a stop string was found; the last update follows
                    self._engine.process.send(EngineWorker.abort, message.request_id, "stop")
                updated[number] = None
            for number in updated:
                text, num_read = self._detokenizers[number], self._num_read[number]
                new, logprobs, prompt = text.token_ids[num_read:], text.logprobs[num_read:], text.prompt_logprobs
                text.prompt_logprobs = None  # in the first delta only
                self._num_read[number] += len(new)
                self.output_tokens += len(new)
                left -= text.is_finished
                if (pieces := text.release()) or new or text.is_finished:
                    stop_reason = text.stop_reason if text.is_finished else None
                    ending = (text.finish_reason, stop_reason)
                    yield number, TextDelta(pieces, new, logprobs, *ending, prompt, text.offsets(num_read))

    async def _messages(self) -> list[RequestUpdate | RequestError]:
        """Wait for a message, and return all that have arrived."""
        try:
            async with asyncio.timeout_at(self._deadline):
                messages = [await self._inbox.get()]
        except TimeoutError:
            self.close("timeout")
            assert self._timeout is not None
            raise timed_out(self._timeout) from None
        while not self._inbox.empty():
            messages.append(self._inbox.get_nowait())
        return messages

    def usage(self, *, speculation: dict[str, Any] | None = None, opening: bool = False) -> dict[str, Any]:
        """Return OpenAI's usage object so far. `speculation`: also acceptance, after these fields.

        `opening`: for the first event of a stream, which has no tokens.
        """
        cached = sum(text.metrics.cached_tokens for text in self._detokenizers[:: self.n] if text.metrics is not None)
        tokens = 0 if opening else self.output_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if speculation is not None:
            usage["speculation"] = {**speculation, **self._acceptance()}
        return usage

    def _acceptance(self) -> dict[str, Any]:
        """Return the acceptance of choices that have ended: of all rounds, without repetition, and of novel text."""
        whole, fresh, novel, counts = [], [], [], {"repeated_tokens": 0, "copied_tokens": 0}
        for number, text in enumerate(self._detokenizers):
            if (metrics := text.metrics) is not None:
                overlap = Overlap.of(self.prompts[number // self.n], text.token_ids)
                whole.append(metrics.acceptance)
                fresh.append(overlap.fresh(metrics.rounds))
                novel.append(overlap.novel(metrics.rounds))
                counts["repeated_tokens"] += sum(overlap.repeated)
                counts["copied_tokens"] += sum(overlap.copied)
        parts = {"outside_repetition": fresh, "novel": novel}
        merged = {name: AcceptanceStatistics.merge(part) for name, part in parts.items()}
        return {
            **AcceptanceStatistics.merge(whole).to_dict(),
            **{name: part.to_dict() if part.rounds else None for name, part in merged.items()},
            **counts,
        }


def _raise(error: FledgeError | None) -> None:
    if error is not None:
        raise error
