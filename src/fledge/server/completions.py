"""Plain completions in OpenAI's shape, whole or streamed."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fledge.engine.outputs import TokenLogprobs
from fledge.server.answer_stream import StreamChunk
from fledge.server.generation import Generation
from fledge.server.logprobs import TokenTexts, completion_logprobs
from fledge.server.protocol import CompletionRequest
from fledge.server.streaming import DONE, event


@dataclass(kw_only=True)
class _Choice:
    text: str
    offset: int = 0  # of the text whose log-probabilities have been told
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    pieces: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class CompletionAnswer:
    """The response to one request, from the chunks of its generation."""

    def __init__(
        self,
        request: CompletionRequest,
        generation: Generation,
        *,
        request_id: str,
        model: str,
        texts: TokenTexts,
        echoes: Sequence[str],
    ) -> None:
        """`echoes` begin the answers to each prompt: the prompts' texts, or nothing."""
        self._request = request
        self._generation = generation
        self._id = request_id
        self._model = model
        self._texts = texts
        self._created = int(time.time())
        self._choices = [_Choice(text=echo) for echo in echoes for _ in range(generation.asked.n)]

    async def whole(self) -> dict[str, Any]:
        """Wait for all answers and return the response."""
        async for number, chunk in self._generation.chunks():
            choice = self._choices[number]
            choice.text += chunk.text
            choice.logprobs += chunk.logprobs
            choice.token_ids += chunk.token_ids
            choice.pieces += [{"text": piece.text, "drafted": piece.drafted} for piece in chunk.pieces]
            choice.finish_reason, choice.stop_reason = chunk.finish_reason, chunk.stop_reason
        return {
            **self._head(),
            "choices": [self._spell(number, choice, choice.text) for number, choice in enumerate(self._choices)],
            "usage": self._generation.usage(report=self._request.wants_report),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events."""
        request = self._request
        async for number, chunk in self._generation.chunks():
            body = self._stream_body(number, chunk)
            if body is not None:
                yield event(body)
        tail = b""
        if request.wants_stream_usage:
            usage = self._generation.usage(report=request.wants_report)
            tail = event({**self._head(), "choices": [], "usage": usage})
        yield tail + DONE

    def _stream_body(self, number: int, chunk: StreamChunk) -> dict[str, Any] | None:
        choice = self._choices[number]
        text, choice.text = choice.text + chunk.text, ""  # what is echoed comes with the first chunk
        choice.logprobs += chunk.logprobs
        choice.token_ids += chunk.token_ids
        choice.pieces = [{"text": piece.text, "drafted": piece.drafted} for piece in chunk.pieces]
        choice.finish_reason, choice.stop_reason = chunk.finish_reason, chunk.stop_reason
        wanted = self._request.logprobs is not None or self._request.return_token_ids
        if not text and chunk.finish_reason is None and not wanted:
            return None
        body = {**self._head(), "choices": [self._spell(number, choice, text)]}
        choice.logprobs, choice.token_ids = [], []
        if self._request.wants_continuous_usage:
            body["usage"] = self._generation.usage()
        elif self._request.wants_stream_usage:
            body["usage"] = None
        return body

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}

    def _spell(self, number: int, choice: _Choice, text: str) -> dict[str, Any]:
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = completion_logprobs(choice.logprobs, self._texts, choice.offset)
            choice.offset += sum(len(token) for token in logprobs["tokens"])
        made = {
            "index": number,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._request.return_token_ids:
            made["token_ids"] = choice.token_ids
        if self._request.wants_report:
            made["fledge"] = {"pieces": choice.pieces}
        return made
