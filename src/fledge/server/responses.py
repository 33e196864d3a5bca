"""Answers in OpenAI's shapes, whole or as server-sent events: of chats, and of plain completions."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fledge.engine.outputs import TokenLogprobs
from fledge.server.async_engine import Generation, TextDelta
from fledge.server.logprobs import TokenTexts, chat_logprobs, completion_logprobs
from fledge.server.protocol import ChatRequest, CompletionRequest, SamplingRequest
from fledge.server.reasoning import AnswerParser
from fledge.server.tools import Delta, whole_message

DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def event(value: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


@dataclass(kw_only=True)
class Choice:
    """One answer so far: what has not been told yet, or all of it if nothing is told before the end."""

    text: str = ""
    deltas: list[Delta] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    pieces: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, delta: TextDelta) -> None:
        self.logprobs += delta.logprobs
        self.token_ids += delta.token_ids
        self.pieces += [piece._asdict() for piece in delta.pieces]
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class OpenAIResponse(ABC):
    """The response to one request, from the deltas of its generation."""

    whole_object: str
    chunk_object: str

    def __init__(
        self, request: SamplingRequest, generation: Generation, *, request_id: str, model: str, texts: TokenTexts
    ) -> None:
        self.generation = generation
        self._request = request
        self._texts = texts
        self._head = {"id": request_id, "object": self.chunk_object, "created": int(time.time()), "model": model}

    async def whole(self) -> dict[str, Any]:
        """Wait for all answers and return the response."""
        async for number, delta in self.generation.deltas():
            self._take(number, delta)
        choices = [self._choice(number) for number in range(self.generation.answers)]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events."""
        async for number, delta in self.generation.deltas():
            self._take(number, delta)
            chunks = self._chunks(number)
            if chunks:
                yield b"".join(event(self._chunk(choice)) for choice in chunks)
        tail = event({**self._head, "choices": [], "usage": self._usage()}) if self._request.wants_stream_usage else b""
        yield tail + DONE

    @abstractmethod
    def _take(self, number: int, delta: TextDelta) -> None:
        """Add to an answer."""

    @abstractmethod
    def _choice(self, number: int) -> dict[str, Any]:
        """Return a whole answer: an entry of `choices`."""

    @abstractmethod
    def _chunks(self, number: int) -> list[dict[str, Any]]:
        """Return what can be told of an answer now: entries of `choices`, each for a chunk of its own."""

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        body = {**self._head, "choices": [choice]}
        if self._request.wants_continuous_usage:
            body["usage"] = self.generation.usage()
        elif self._request.wants_stream_usage:
            body["usage"] = None
        return body

    def _usage(self) -> dict[str, Any]:
        depth = self._request.speculation_depth
        wanted = {"enabled": depth != 0, "depth": depth} if self._request.wants_report else None
        return self.generation.usage(speculation=wanted)

    def _figures(self, choice: Choice) -> dict[str, Any]:
        """Return what was asked for beside the text, of the tokens that have not been told; now they have."""
        figures: dict[str, Any] = {}
        if self._request.return_token_ids:
            figures["token_ids"], choice.token_ids = choice.token_ids, []
        if self._request.wants_report:
            figures["fledge"], choice.pieces = {"pieces": choice.pieces}, []
        return figures


class ChatResponse(OpenAIResponse):
    """`/v1/chat/completions`. Each answer goes through a parser of its own."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"
    _request: ChatRequest

    def __init__(
        self,
        request: ChatRequest,
        generation: Generation,
        *,
        request_id: str,
        model: str,
        texts: TokenTexts,
        new_parser: Callable[[], AnswerParser],
    ) -> None:
        super().__init__(request, generation, request_id=request_id, model=model, texts=texts)
        self._parsers = [new_parser() for _ in range(self.generation.answers)]
        self._choices = [Choice() for _ in self._parsers]
        self._has_begun = [False] * len(self._parsers)
        self._has_calls = [False] * len(self._parsers)

    def _take(self, number: int, delta: TextDelta) -> None:
        choice, parser = self._choices[number], self._parsers[number]
        choice.take(delta)
        found = parser.feed(delta.text)
        if delta.finish_reason is not None:
            found += parser.finish()
        self._has_calls[number] |= any("tool_calls" in one for one in found)
        if self._has_calls[number] and delta.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
        shows_reasoning = self._request.include_reasoning is not False
        choice.deltas += [one for one in found if shows_reasoning or "reasoning_content" not in one]

    def _choice(self, number: int) -> dict[str, Any]:
        choice = self._choices[number]
        return {
            "index": number,
            "message": whole_message(choice.deltas),
            "logprobs": chat_logprobs(choice.logprobs, self._texts) if self._request.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._figures(choice),
        }

    def _chunks(self, number: int) -> list[dict[str, Any]]:
        choice = self._choices[number]
        deltas, choice.deltas = choice.deltas, []
        chunks: list[dict[str, Any]] = []

        def add(delta: Delta) -> None:
            chunks.append({"index": number, "delta": delta, "logprobs": None, "finish_reason": None})

        if not self._has_begun[number]:
            self._has_begun[number] = True
            add({"role": "assistant", "content": ""})
        if not deltas and self._request.wants_report and choice.pieces:
            deltas = [{}]  # what was drafted is told even where a parser holds the text back
        for delta in deltas:
            add(delta)
        told = chunks[-1] if deltas else None  # with this, what there is to say of the tokens
        if choice.finish_reason is not None:
            add({})
            chunks[-1] |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            told = told or chunks[-1]
        if told is not None:
            told |= self._figures(choice)
            if self._request.logprobs and choice.logprobs:
                told["logprobs"], choice.logprobs = chat_logprobs(choice.logprobs, self._texts), []
        return chunks


class CompletionResponse(OpenAIResponse):
    """`/v1/completions`."""

    whole_object = chunk_object = "text_completion"
    _request: CompletionRequest

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
        super().__init__(request, generation, request_id=request_id, model=model, texts=texts)
        self._choices = [Choice(text=echo) for echo in echoes for _ in range(self.generation.n)]
        self._offsets = [0] * len(self._choices)  # of the text whose log-probabilities have been told

    def _take(self, number: int, delta: TextDelta) -> None:
        self._choices[number].take(delta)
        self._choices[number].text += delta.text

    def _choice(self, number: int) -> dict[str, Any]:
        choice = self._choices[number]
        text, choice.text = choice.text, ""
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = completion_logprobs(choice.logprobs, self._texts, self._offsets[number])
            self._offsets[number] += sum(len(token) for token in logprobs["tokens"])
            choice.logprobs = []
        return {
            "index": number,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._figures(choice),
        }

    def _chunks(self, number: int) -> list[dict[str, Any]]:
        choice = self._choices[number]
        wanted = self._request.logprobs is not None or self._request.return_token_ids
        return [self._choice(number)] if choice.text or choice.finish_reason is not None or wanted else []
