"""Chat answers in OpenAI's shape, whole or streamed."""

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from fledge.engine.outputs import TokenLogprobs
from fledge.server.answer_stream import StreamChunk
from fledge.server.generation import Generation
from fledge.server.logprobs import TokenTexts, chat_logprobs
from fledge.server.protocol import ChatRequest
from fledge.server.reasoning import AnswerSplitter, ReasoningDelta
from fledge.server.streaming import DONE, event
from fledge.server.tools import ContentDelta, Delta, ToolCallDelta
from fledge.server.tools.base import assemble

Deltas = list[ReasoningDelta | Delta]


@dataclass(kw_only=True)
class _Choice:
    """One answer's way through the parsers."""

    splitter: AnswerSplitter
    deltas: Deltas = field(default_factory=list)  # of the whole answer, unless it is streamed
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    has_begun: bool = False
    has_calls: bool = False

    def take(self, chunk: StreamChunk) -> Deltas:
        deltas = self.splitter.feed(chunk.text)
        if chunk.finish_reason is not None:
            deltas += self.splitter.finish()
        self.has_calls |= any(isinstance(delta, ToolCallDelta) for delta in deltas)
        self.logprobs += chunk.logprobs
        self.token_ids += chunk.token_ids
        if chunk.finish_reason is not None:
            ended_by_itself = chunk.finish_reason == "stop"
            self.finish_reason = "tool_calls" if self.has_calls and ended_by_itself else chunk.finish_reason
            self.stop_reason = chunk.stop_reason
        return deltas


class ChatAnswer:
    """The response to one chat request, from the chunks of its generation."""

    def __init__(
        self,
        request: ChatRequest,
        generation: Generation,
        *,
        request_id: str,
        model: str,
        texts: TokenTexts,
        new_splitter: Callable[[], AnswerSplitter],
    ) -> None:
        self._request = request
        self._generation = generation
        self._id = request_id
        self._model = model
        self._texts = texts
        self._created = int(time.time())
        self._choices = [_Choice(splitter=new_splitter()) for _ in range(generation.asked.answers)]
        self._shows_reasoning = request.include_reasoning is not False

    async def whole(self) -> dict[str, Any]:
        """Wait for all answers and return the response."""
        pieces: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        async for number, chunk in self._generation.chunks():
            self._choices[number].deltas += self._choices[number].take(chunk)
            if self._request.wants_report:
                pieces[number] += _pieces(chunk)
        choices = [self._whole_choice(number, choice) for number, choice in enumerate(self._choices)]
        if self._request.wants_report:
            for choice, own in zip(choices, pieces, strict=True):
                choice["fledge"] = {"pieces": own}
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": self._generation.usage(report=self._request.wants_report),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events."""
        request = self._request
        async for number, chunk in self._generation.chunks():
            found = b"".join(event(body) for body in self._stream_bodies(number, chunk))
            if found:
                yield found
        tail = b""
        if request.wants_stream_usage:
            usage = self._generation.usage(report=request.wants_report)
            tail = event({**self._head(), "choices": [], "usage": usage})
        yield tail + DONE

    def _stream_bodies(self, number: int, chunk: StreamChunk) -> list[dict[str, Any]]:
        choice = self._choices[number]
        bodies: list[dict[str, Any]] = []
        deltas = [made for delta in choice.take(chunk) if (made := self._spell(delta)) is not None]
        if not choice.has_begun and (deltas or chunk.token_ids or chunk.finish_reason is not None):
            choice.has_begun = True
            bodies.append(self._stream_body(number, {"role": "assistant", "content": ""}))
        if not deltas and self._request.wants_report and chunk.pieces:
            deltas = [{}]  # what was drafted is told even where a parser holds the text back
        bodies += [self._stream_body(number, delta) for delta in deltas]
        last = None
        if chunk.finish_reason is not None:
            last = self._stream_body(number, {})
            last["choices"][0] |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        told = bodies[-1] if deltas else last
        if told is not None:
            self._add_figures(told["choices"][0], choice, chunk)
        return bodies if last is None else [*bodies, last]

    def _add_figures(self, body: dict[str, Any], choice: _Choice, chunk: StreamChunk) -> None:
        """Tell what has become known of the tokens since the last text was told."""
        if self._request.wants_report:
            body["fledge"] = {"pieces": _pieces(chunk)}
        if self._request.logprobs and choice.logprobs:
            body["logprobs"], choice.logprobs = chat_logprobs(choice.logprobs, self._texts), []
        if self._request.return_token_ids:
            body["token_ids"], choice.token_ids = choice.token_ids, []

    def _stream_body(self, number: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
        body = {**self._head(), "choices": [choice]}
        if self._request.wants_continuous_usage:
            body["usage"] = self._generation.usage()
        elif self._request.wants_stream_usage:
            body["usage"] = None
        return body

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
        }

    def _spell(self, delta: ReasoningDelta | Delta) -> dict[str, Any] | None:
        if isinstance(delta, ReasoningDelta):
            return {"reasoning_content": delta.text} if self._shows_reasoning else None
        if isinstance(delta, ContentDelta):
            return {"content": delta.text}
        function: dict[str, Any] = {"arguments": delta.arguments}
        call: dict[str, Any] = {"index": delta.index, "function": function}
        if delta.name is not None:
            function["name"] = delta.name
            call |= {"id": delta.id, "type": "function"}
        return {"tool_calls": [call]}

    def _whole_choice(self, number: int, choice: _Choice) -> dict[str, Any]:
        reasoning = "".join(delta.text for delta in choice.deltas if isinstance(delta, ReasoningDelta))
        content, calls = assemble([delta for delta in choice.deltas if not isinstance(delta, ReasoningDelta)])
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if reasoning and self._shows_reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        made = {
            "index": number,
            "message": message,
            "logprobs": chat_logprobs(choice.logprobs, self._texts) if self._request.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._request.return_token_ids:
            made["token_ids"] = choice.token_ids
        return made


def _pieces(chunk: StreamChunk) -> list[dict[str, Any]]:
    return [{"text": piece.text, "drafted": piece.drafted} for piece in chunk.pieces]
