"""One answer as an asynchronous iterator: tokens from the engine become text, stop strings end it.

Lives in the event loop. The engine's thread hands over messages that nobody changes afterwards.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fledge.decoding.params import SamplingParams
from fledge.engine.detokenizer import Detokenizer
from fledge.engine.outputs import RequestMetrics, TextPiece, TokenLogprobs
from fledge.server.engine_worker import Ended, Tokens
from fledge.server.errors import FailedGenerationError, RequestError


@dataclass(frozen=True, kw_only=True)
class StreamChunk:
    """What has become known of an answer since its last chunk. The last one has a finish reason and metrics."""

    pieces: tuple[TextPiece, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop id or stop string that ended it
    metrics: RequestMetrics | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


Message = Tokens | Ended | RequestError  # an error: from outside the engine


class StreamOwner(Protocol):
    """Who runs the request of a stream."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def stop(self, number: int) -> None:
        """End a request whose stop string has been found; its stream is told of the end like of any other."""
        ...

    def end(self, number: int, reason: str) -> None:
        """End a request that nobody waits for any more."""
        ...


class AnswerStream(AsyncIterator[StreamChunk]):
    """One answer in the making. Belongs to the event loop; ends its request when it is closed."""

    def __init__(self, owner: StreamOwner, number: int, params: SamplingParams, tokenizer: Any | None) -> None:
        self.number = number
        self.num_tokens = 0
        self._owner = owner
        self._text = Detokenizer(tokenizer, params, owner.eos_ids)
        self._shows_stop = params.include_stop_str_in_output
        self._last_token: int | None = None
        self._ends = False  # that token is a stop id
        self._inbox: deque[Message] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False
        self._stopped_by_string = False

    def put(self, message: Message) -> None:
        """Take a message from the engine."""
        self._inbox.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self, reason: str = "abort") -> None:
        """End the request, unless it has ended by itself."""
        if not self._is_over:
            self._is_over = True
            self._owner.end(self.number, reason)

    async def aclose(self) -> None:
        self.close()

    async def __anext__(self) -> StreamChunk:
        if self._is_over:
            raise StopAsyncIteration
        try:
            while True:
                while not self._inbox:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
                chunk = self._digest()
                if chunk is not None:
                    return chunk
        except Exception:
            self.close("error")
            raise

    def _digest(self) -> StreamChunk | None:
        """Make one chunk of all that has come in; None if that says nothing new."""
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        ended: Ended | None = None
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, RequestError):
                raise message
            if isinstance(message, Ended):
                ended = message
            elif not self._stopped_by_string:
                taken = self._push(message)
                tokens += taken
                logprobs += (message.logprobs or ())[: len(taken)]
        self.num_tokens += len(tokens)
        if tokens:
            self._last_token = tokens[-1]
        if ended is not None:
            self._text.finish_reason = ended.finish_reason
        pieces = self._text.release()
        chunk = StreamChunk(
            pieces=pieces,
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
        )
        if ended is not None:
            return self._last(chunk, ended)
        return chunk if tokens or pieces else None

    def _push(self, new: Tokens) -> list[int]:
        """Take new tokens, up to the one that completes a stop string."""
        taken = new.tokens
        hidden = new.ends and not self._shows_stop  # the token that ends the answer is no part of its text
        for count, token in enumerate(taken, start=1):
            silent = hidden and count == len(taken)
            if self._text.push(token, drafted=count <= new.accepted, silent=silent):
                self._stopped_by_string = True
                taken = taken[:count]
                self._owner.stop(self.number)  # its end is told like any other, with the figures
                break
        self._ends = new.ends
        return taken

    def _last(self, chunk: StreamChunk, ended: Ended) -> StreamChunk:
        self._is_over = True
        if ended.finish_reason == "error":
            raise FailedGenerationError(ended.failure or "the request failed")
        reason = "stop" if self._stopped_by_string else ended.finish_reason
        stop_reason: int | str | None = None
        if self._stopped_by_string:
            stop_reason = self._text.stop_string
        elif self._ends and self._last_token not in self._owner.eos_ids:
            stop_reason = self._last_token  # as in vLLM, the model's own end of text is no reason
        return replace(chunk, finish_reason=reason, stop_reason=stop_reason, metrics=ended.metrics)
