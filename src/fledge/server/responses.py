"""Answers in OpenAI's shapes, whole or as server-sent events: of chats, and of plain completions."""

import functools
import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fledge.engine.outputs import TokenLogprobs
from fledge.server.async_engine import Generation, TextDelta
from fledge.server.parsers import AnswerParser, Delta, whole_message
from fledge.server.protocol import ChatRequest, CompletionRequest, SamplingRequest
from fledge.server.request_log import RequestLogEntry

DONE = b"data: [DONE]\n\n"
LOWEST = -9999.0  # stands in for minus infinity, which JSON does not have


def event(value: Any) -> bytes:
    """Return one server-sent event."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return b"data: " + text.encode() + b"\n\n"


TokenTexts = Callable[[int], tuple[str, list[int]]]  # the text and the bytes of single tokens


def token_texts(tokenizer: Any | None, *, as_ids: bool = False) -> TokenTexts:
    """`as_ids`: tokens are written "token_id:123", and their bytes are still those of their text."""

    def as_id(token: int) -> tuple[str, list[int]]:
        text = f"token_id:{token}"
        return text, list(text.encode()) if tokenizer is None else look_up(token)[1]

    @functools.cache
    def look_up(token: int) -> tuple[str, list[int]]:
        assert tokenizer is not None
        text = str(tokenizer.decode([token]))
        # Decoders of SentencePiece take the blank from where a text begins: the second of two has it.
        is_part = "\N{REPLACEMENT CHARACTER}" in text
        if not is_part and "▁" in str(tokenizer.convert_ids_to_tokens(token)):
            text = str(tokenizer.decode([token, token]))[len(text) :]
        if is_part:  # part of a character: its bytes are in the vocabulary's spelling
            spelled = str(tokenizer.convert_ids_to_tokens(token))
            if byte := re.fullmatch("<0x(..)>", spelled):  # SentencePiece's byte fallback
                return text, [int(byte[1], 16)]
            if set(spelled) <= (alphabet := _alphabet()).keys():
                return text, [alphabet[character] for character in spelled]
        return text, list(text.encode())

    return as_id if as_ids or tokenizer is None else look_up


@functools.cache
def _alphabet() -> dict[str, int]:
    """How byte-level vocabularies spell bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: PLC0415 - takes a second at the start

    return {spelled: byte for byte, spelled in bytes_to_unicode().items()}


def chat_logprobs(logprobs: Sequence[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat answer."""
    return {
        "content": [
            _entry(one.token, one.logprob, texts) | {"top_logprobs": [_entry(*other, texts) for other in one.top]}
            for one in logprobs
        ],
        "refusal": None,
    }


def completion_logprobs(logprobs: Sequence[TokenLogprobs], texts: TokenTexts, offsets: Sequence[int]) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion; `offsets`: where the text of each token begins."""
    return {
        "text_offset": list(offsets),
        "token_logprobs": [_finite(one.logprob) for one in logprobs],
        "tokens": [texts(one.token)[0] for one in logprobs],
        "top_logprobs": [  # the chosen token is among them, as at OpenAI; before a prompt's first there is nothing
            None
            if one.logprob is None
            else {texts(token)[0]: _finite(value) for token, value in ((one.token, one.logprob), *one.top)}
            for one in logprobs
        ],
    }


def prompt_logprobs(logprobs: Sequence[TokenLogprobs], texts: TokenTexts) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each token, by id, the likeliest ones and the token itself."""
    found: list[dict[str, Any] | None] = []
    for one in logprobs:
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(one.top, start=1)}
        entries = {
            str(token): {"logprob": _finite(value), "rank": rank, "decoded_token": texts(token)[0]}
            for token, (value, rank) in {one.token: (one.logprob, one.rank), **ranked}.items()
        }
        found.append(None if one.logprob is None else entries)
    return found


def _entry(token: int, logprob: float | None, texts: TokenTexts) -> dict[str, Any]:
    text, spelled = texts(token)
    return {"token": text, "logprob": _finite(logprob), "bytes": spelled}


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else LOWEST


class _Choice:
    """One answer: what has not been told yet, or all of it if nothing is told before the end.

    `whole` is an entry of `choices`, `chunks` are entries for chunks of their own: what can be told now.
    """

    def __init__(self, number: int, request: SamplingRequest, texts: TokenTexts) -> None:
        self._number = number
        self._request = request
        self._texts = texts
        self._untold: list[TextDelta] = []
        self._prompt: list[TokenLogprobs] = []  # if asked for
        self._ending: dict[str, Any] = {"finish_reason": None}

    def take(self, delta: TextDelta) -> None:
        """Add what is new."""
        self._untold.append(delta)
        self._prompt = delta.prompt_logprobs or self._prompt
        self._ending = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}

    def prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        """Return vLLM's field of that name; None if it was not asked for."""
        top = self._request.prompt_logprobs
        prompt = [one._replace(top=one.top[:top]) for one in self._prompt]
        return None if top is None else prompt_logprobs(prompt, self._texts)

    def _logprobs(self, logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]) -> dict[str, Any] | None:
        raise NotImplementedError

    def _tell(self) -> dict[str, Any]:
        """Return what was asked for beside the text, of the tokens that have not been told; now they have."""
        untold, self._untold = self._untold, []
        logprobs = [one for delta in untold for one in delta.logprobs]
        told: dict[str, Any] = {"logprobs": self._logprobs(logprobs, [at for delta in untold for at in delta.offsets])}
        wants_ids = self._request.return_token_ids
        told["token_ids"] = [token for delta in untold for token in delta.token_ids] if wants_ids else None
        if self._request.wants_report:
            told["fledge"] = {"pieces": [piece._asdict() for delta in untold for piece in delta.pieces]}
        return told

    def _entry(self, name: str, content: Any) -> dict[str, Any]:
        return {"index": self._number, name: content, "logprobs": None, **self._ending} | self._tell()


class ChatChoice(_Choice):
    """An answer of `/v1/chat/completions`. It goes through a parser of its own."""

    def __init__(
        self, number: int, request: ChatRequest, texts: TokenTexts, parser: AnswerParser, role: str = "assistant"
    ) -> None:
        super().__init__(number, request, texts)
        self._shows_reasoning = request.include_reasoning is not False
        self._shows_logprobs = bool(request.logprobs)
        self._names_a_tool = isinstance(request.tool_choice, dict)
        self._parser = parser
        self._deltas: list[Delta] = []
        self._role = role
        self._opening: list[Delta] = [{"role": role, "content": ""}]
        self._has_calls = False

    def take(self, delta: TextDelta) -> None:
        super().take(delta)
        found = self._parser.feed(delta.text, final=delta.finish_reason is not None)
        self._has_calls |= any("tool_calls" in one for one in found)
        if self._has_calls and delta.finish_reason == "stop" and not self._names_a_tool:  # as at OpenAI
            self._ending["finish_reason"] = "tool_calls"
        for one in found:
            if "reasoning_content" not in one:
                self._deltas.append(one)
            elif self._shows_reasoning:  # under vLLM's name and the older one
                self._deltas.append({"reasoning": one["reasoning_content"], **one})

    def whole(self) -> dict[str, Any]:
        message = whole_message(self._deltas, self._role)
        return self._entry("message", {**message, "reasoning": message.get("reasoning")})

    def chunks(self) -> list[dict[str, Any]]:
        deltas, self._deltas = self._deltas, []
        opening, self._opening = self._opening, []
        if not deltas and self._request.wants_report and any(delta.pieces for delta in self._untold):
            deltas = [{}]  # what was drafted is told even where a parser holds the text back
        is_finished = self._ending["finish_reason"] is not None
        chunks: list[dict[str, Any]] = [
            {"index": self._number, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}
            for delta in (*opening, *deltas, *([{}] if is_finished else []))
        ]
        if is_finished:
            chunks[-1] |= self._ending
        if deltas or is_finished:  # with one of these, what there is to say of the tokens
            chunks[len(opening) + len(deltas) - 1 if deltas else -1] |= self._tell()
        return chunks

    def _logprobs(self, logprobs: Sequence[TokenLogprobs], _offsets: Sequence[int]) -> dict[str, Any] | None:
        return chat_logprobs(logprobs, self._texts) if self._shows_logprobs and logprobs else None


class CompletionChoice(_Choice):
    """An answer of `/v1/completions`. It begins with `echo`: the prompt's text, or nothing."""

    def __init__(
        self,
        number: int,
        request: CompletionRequest,
        texts: TokenTexts,
        prompt: Sequence[int],
        echo: str = "",
        offsets: Sequence[int] = (),
    ) -> None:
        """`offsets`: where the prompt's tokens begin in `echo`."""
        super().__init__(number, request, texts)
        self._text = echo
        self._echo_length = len(echo)
        self._echoes = bool(request.echo)
        self._offsets = offsets
        self._prompt_ids = list(prompt) if request.return_token_ids else None

    def take(self, delta: TextDelta) -> None:
        delta = delta._replace(offsets=[self._echo_length + at for at in delta.offsets])
        if self._echoes and delta.prompt_logprobs is not None:
            top = self._request.logprobs_wanted or 0
            prompt = [one._replace(top=one.top[:top]) for one in delta.prompt_logprobs]
            delta = delta._replace(logprobs=[*prompt, *delta.logprobs], offsets=[*self._offsets, *delta.offsets])
        super().take(delta)
        self._text += delta.text

    def whole(self) -> dict[str, Any]:
        return self._text_entry() | {"prompt_logprobs": self.prompt_logprobs()}

    def chunks(self) -> list[dict[str, Any]]:
        wanted = self._request.logprobs_wanted is not None or self._request.return_token_ids
        return [self._text_entry()] if self._text or self._ending["finish_reason"] is not None or wanted else []

    def _text_entry(self) -> dict[str, Any]:
        text, self._text = self._text, ""
        prompt_ids, self._prompt_ids = self._prompt_ids, None  # once
        return self._entry("text", text) | {"prompt_token_ids": prompt_ids}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]) -> dict[str, Any] | None:
        if self._request.logprobs_wanted is None:
            return None
        return completion_logprobs(logprobs, self._texts, offsets)


Choice = ChatChoice | CompletionChoice


class OpenAIResponse:
    """The response to one request, from the deltas of its generation."""

    def __init__(
        self, request: SamplingRequest, generation: Generation, entry: RequestLogEntry, choices: Sequence[Choice]
    ) -> None:
        self.generation = generation
        self._request = request
        self.choices = choices
        self._is_chat = isinstance(request, ChatRequest)
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        self.head = {"id": entry.id, "object": kind, "created": int(time.time()), "model": entry.model}

    async def whole(self) -> dict[str, Any]:
        """Wait for all answers and return the response."""
        async for number, delta in self.generation.deltas():
            self.choices[number].take(delta)
        choices = [choice.whole() for choice in self.choices]
        body = {**self.head, "choices": choices, "usage": self._usage()}
        if self._is_chat:
            told = {"prompt_logprobs": self.choices[0].prompt_logprobs(), "prompt_token_ids": self._prompt_ids()}
            body |= {"object": "chat.completion", **told}
        return body

    def _prompt_ids(self) -> list[int] | None:
        return list(self.generation.prompts[0]) if self._request.return_token_ids else None

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events."""
        asked, head = self._request, self.head
        if self._is_chat:
            head = {**head, "prompt_token_ids": self._prompt_ids()}  # in the first chunk
        async for number, delta in self.generation.deltas():
            self.choices[number].take(delta)
            parts = []
            for choice in self.choices[number].chunks():
                told: dict[str, Any] = {"usage": None} if asked.wants_stream_usage else {}
                if asked.wants_continuous_usage:
                    told["usage"] = self.generation.usage(opening="role" in choice.get("delta", ()))
                parts.append(event({**head, "choices": [choice], **told}))
                head = self.head
            if parts:
                yield b"".join(parts)
        tail = event({**self.head, "choices": [], "usage": self._usage()}) if self._request.wants_stream_usage else b""
        yield tail + DONE

    def _usage(self) -> dict[str, Any]:
        depth = self._request.speculation_depth
        wanted = {"enabled": depth != 0, "depth": depth} if self._request.wants_report else None
        return self.generation.usage(speculation=wanted)
