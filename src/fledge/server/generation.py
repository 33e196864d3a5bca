"""All answers to one HTTP request: several prompts, several answers to each, as one stream of chunks."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.llm import next_int64
from fledge.engine.outputs import RequestMetrics
from fledge.errors import ConfigError, ContextLengthError, PromptError
from fledge.server.answer_stream import AnswerStream, StreamChunk
from fledge.server.async_engine import AsyncEngine, RequestOptions
from fledge.server.errors import RequestError
from fledge.server.request_log import RequestRecord


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be generated: `n` answers to each of `prompts`, numbered prompt by prompt."""

    request_id: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    n: int = 1
    options: RequestOptions = field(default_factory=RequestOptions)

    @property
    def answers(self) -> int:
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


class Generation:
    """Answers in the making. Made only if all of them can be: nothing is half accepted."""

    def __init__(self, engine: AsyncEngine, asked: Asked) -> None:
        """Submit. Raises RequestError if something is wrong with the request, or there is no room for it."""
        self.asked = asked
        self.output_tokens = 0
        self.finish_reasons: list[str] = []
        self._metrics: dict[int, RequestMetrics] = {}
        self._streams: list[AnswerStream] = []
        if asked.answers > engine.max_requests:
            raise RequestError(f"the request asks for {asked.answers} answers, this server takes {engine.max_requests}")
        engine.check_room(asked.answers)
        try:
            for number, prompt in enumerate(asked.prompts):
                seed = engine.draw_seed() if asked.params.seed is None else asked.params.seed
                for i in range(asked.n):
                    stream = engine.generate(
                        prompt,
                        asked.params,
                        request_id=f"{asked.request_id}-{number * asked.n + i}",
                        seed=next_int64(seed, i),  # answers to one prompt differ, and still follow from the seed
                        options=asked.options,
                    )
                    self._streams.append(stream)
        except (ConfigError, PromptError) as error:
            self.close()
            raise _refusal(error) from None
        except BaseException:
            self.close()
            raise

    def close(self, reason: str = "abort") -> None:
        """End what has not ended."""
        for stream in self._streams:
            stream.close(reason)

    async def chunks(self) -> AsyncIterator[tuple[int, StreamChunk]]:
        """Yield (number of the answer, chunk) until all have ended."""
        if len(self._streams) == 1:
            async for chunk in self._streams[0]:
                self._count(0, chunk)
                yield 0, chunk
            return
        async with _merged(self._streams) as merged:
            async for number, chunk in merged:
                self._count(number, chunk)
                yield number, chunk

    @property
    def metrics(self) -> RequestMetrics | None:
        """Of the answers that have ended, pooled."""
        return RequestMetrics.pooled(list(self._metrics.values())) if self._metrics else None

    def note(self, record: RequestRecord) -> None:
        """Write down how it went."""
        record.output_tokens = self.output_tokens
        if (metrics := self.metrics) is not None:
            record.take(metrics, self.output_tokens, self.finish_reasons)

    def usage(self, *, report: bool = False) -> dict[str, Any]:
        """Return OpenAI's usage object so far; with `report`, how speculation went."""
        prompt_tokens, n = self.asked.prompt_tokens, self.asked.n
        cached = sum(metrics.cached_tokens for number, metrics in self._metrics.items() if number % n == 0)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if report:
            acceptance = AcceptanceStatistics.merge(metrics.acceptance for metrics in self._metrics.values())
            depth = self.asked.options.speculation_depth
            usage["speculation"] = {"enabled": depth != 0, "depth": depth, **acceptance.to_dict()}
        return usage

    def _count(self, number: int, chunk: StreamChunk) -> None:
        self.output_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self.finish_reasons.append(chunk.finish_reason)
        if chunk.metrics is not None:
            self._metrics[number] = chunk.metrics


@asynccontextmanager
async def _merged(streams: Sequence[AnswerStream]) -> AsyncIterator[AsyncIterator[tuple[int, StreamChunk]]]:
    """Several streams as one. Each is at most one chunk ahead, so that later ones gather more tokens."""
    waiting: asyncio.Queue[tuple[int, StreamChunk | BaseException | None]] = asyncio.Queue(len(streams))

    async def pump(number: int, stream: AnswerStream) -> None:
        try:
            async for chunk in stream:
                await waiting.put((number, chunk))
            await waiting.put((number, None))
        except Exception as error:
            await waiting.put((number, error))

    async def drawn() -> AsyncIterator[tuple[int, StreamChunk]]:
        left = len(streams)
        while left:
            number, item = await waiting.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield number, item

    tasks = [asyncio.ensure_future(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        yield drawn()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _refusal(error: ConfigError | PromptError) -> RequestError:
    too_long = isinstance(error, ContextLengthError)
    return RequestError(str(error), code="context_length_exceeded" if too_long else None)
