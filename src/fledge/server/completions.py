"""Responses of chat and text completions, complete or as server-sent events."""

import functools
import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fledge.engine.outputs import TokenLogprobs
from fledge.server.async_engine import Generation, TextDelta
from fledge.server.parsers import AnswerParser, Delta, merge_deltas
from fledge.server.protocol import ChatRequest, CompletionRequest, SamplingRequest
from fledge.server.request_log import RequestLogEntry

DONE = b"data: [DONE]\n\n"
MIN_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have; as in vLLM


def event(value: Any) -> bytes:
    """Return one server-sent event."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return b"data: " + text.encode() + b"\n\n"


TokenTexts = Callable[[int], tuple[str, list[int]]]  # token id -> its text and its bytes


def token_texts(tokenizer: Any | None, *, as_ids: bool = False) -> TokenTexts:
    """Return the text and bytes of single tokens. `as_ids`: the text is "token_id:123", the bytes stay."""

    def as_id(token: int) -> tuple[str, list[int]]:
        text = f"token_id:{token}"
        return text, list(text.encode()) if tokenizer is None else look_up(token)[1]

    @functools.cache
    def look_up(token: int) -> tuple[str, list[int]]:
        assert tokenizer is not None
        text = str(tokenizer.decode([token]))
        # SentencePiece decoders drop a blank at the beginning of a text, so the token is decoded as the second of two.
        is_part = "\N{REPLACEMENT CHARACTER}" in text
        if not is_part and "▁" in str(tokenizer.convert_ids_to_tokens(token)):
            text = str(tokenizer.decode([token, token]))[len(text) :]
        if is_part:  # part of a character: the vocabulary spells its bytes
            spelled = str(tokenizer.convert_ids_to_tokens(token))
            if byte := re.fullmatch("<0x(..)>", spelled):  # SentencePiece's byte fallback
                return text, [int(byte[1], 16)]
            if set(spelled) <= (alphabet := _alphabet()).keys():
                return text, [alphabet[character] for character in spelled]
        return text, list(text.encode())

    return as_id if as_ids or tokenizer is None else look_up


@functools.cache
def _alphabet() -> dict[str, int]:
    """Return the characters that stand for bytes in byte-level vocabularies."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: PLC0415 - takes a second at the start

    return {spelled: byte for byte, spelled in bytes_to_unicode().items()}


def chat_logprobs(logprobs: Sequence[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat completion."""
    return {
        "content": [
            _logprob_entry(one.token, one.logprob, texts)
            | {"top_logprobs": [_logprob_entry(*other, texts) for other in one.top]}
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
        "top_logprobs": [  # the sampled token is among them, as at OpenAI; the first token of a prompt has none
            None
            if one.logprob is None
            else {texts(token)[0]: _finite(value) for token, value in ((one.token, one.logprob), *one.top)}
            for one in logprobs
        ],
    }


def prompt_logprobs(logprobs: Sequence[TokenLogprobs], texts: TokenTexts) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each token, by id, the most likely tokens and the token itself."""
    found: list[dict[str, Any] | None] = []
    for one in logprobs:
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(one.top, start=1)}
        entries = {
            str(token): {"logprob": _finite(value), "rank": rank, "decoded_token": texts(token)[0]}
            for token, (value, rank) in {one.token: (one.logprob, one.rank), **ranked}.items()
        }
        found.append(None if one.logprob is None else entries)
    return found


def _logprob_entry(token: int, logprob: float | None, texts: TokenTexts) -> dict[str, Any]:
    text, spelled = texts(token)
    return {"token": text, "logprob": _finite(logprob), "bytes": spelled}


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else MIN_LOGPROB


class _Choice:
    """One entry of `choices`, for one sequence.

    `add` takes what is new. A complete response calls `collect` at the end; a stream calls `chunks` after each delta,
    which returns the entries, one for each chunk, of all that was not sent before.
    """

    def __init__(self, number: int, request: SamplingRequest, texts: TokenTexts) -> None:
        self._number = number
        self._request = request
        self._texts = texts
        self._unsent: list[TextDelta] = []
        self._prompt: list[TokenLogprobs] = []  # its log-probabilities, if requested
        self._ending: dict[str, Any] = {"finish_reason": None}

    def add(self, delta: TextDelta) -> None:
        self._unsent.append(delta)
        self._prompt = delta.prompt_logprobs or self._prompt
        self._ending = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}

    def prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        """Return vLLM's field of that name; None if it was not requested."""
        top = self._request.prompt_logprobs
        prompt = [one._replace(top=one.top[:top]) for one in self._prompt]
        return None if top is None else prompt_logprobs(prompt, self._texts)

    def _logprobs(self, logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]) -> dict[str, Any] | None:
        raise NotImplementedError

    def _take_token_fields(self) -> dict[str, Any]:
        """Return the requested fields beside the text, for the tokens since the last call."""
        unsent, self._unsent = self._unsent, []
        logprobs = [one for delta in unsent for one in delta.logprobs]
        fields: dict[str, Any] = {
            "logprobs": self._logprobs(logprobs, [at for delta in unsent for at in delta.offsets])
        }
        wants_ids = self._request.return_token_ids
        fields["token_ids"] = [token for delta in unsent for token in delta.token_ids] if wants_ids else None
        if self._request.wants_report:
            fields["fledge"] = {"pieces": [piece._asdict() for delta in unsent for piece in delta.pieces]}
        return fields

    def _full_entry(self, name: str, content: Any) -> dict[str, Any]:
        return {"index": self._number, name: content, "logprobs": None, **self._ending} | self._take_token_fields()


class ChatChoice(_Choice):
    """An entry of a chat completion. The text goes through `parser`."""

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

    def add(self, delta: TextDelta) -> None:
        super().add(delta)
        found = self._parser.feed(delta.text, final=delta.finish_reason is not None)
        self._has_calls |= any("tool_calls" in one for one in found)
        if self._has_calls and delta.finish_reason == "stop" and not self._names_a_tool:  # as at OpenAI
            self._ending["finish_reason"] = "tool_calls"
        for one in found:
            if "reasoning_content" not in one:
                self._deltas.append(one)
            elif self._shows_reasoning:  # under vLLM's name and the older one
                self._deltas.append({"reasoning": one["reasoning_content"], **one})

    def collect(self) -> dict[str, Any]:
        message = merge_deltas(self._deltas, self._role)
        return self._full_entry("message", {**message, "reasoning": message.get("reasoning")})

    def chunks(self) -> list[dict[str, Any]]:
        deltas, self._deltas = self._deltas, []
        opening, self._opening = self._opening, []
        if not deltas and self._request.wants_report and any(delta.pieces for delta in self._unsent):
            deltas = [{}]  # drafted text is reported even if a parser holds it back
        is_finished = self._ending["finish_reason"] is not None
        chunks: list[dict[str, Any]] = [
            {"index": self._number, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}
            for delta in (*opening, *deltas, *([{}] if is_finished else []))
        ]
        if is_finished:
            chunks[-1] |= self._ending
        if deltas or is_finished:  # the last one of these has the fields of the tokens
            chunks[len(opening) + len(deltas) - 1 if deltas else -1] |= self._take_token_fields()
        return chunks

    def _logprobs(self, logprobs: Sequence[TokenLogprobs], _offsets: Sequence[int]) -> dict[str, Any] | None:
        return chat_logprobs(logprobs, self._texts) if self._shows_logprobs and logprobs else None


class CompletionChoice(_Choice):
    """An entry of a text completion. Its text begins with `echo`, the text of the prompt, if requested."""

    def __init__(
        self,
        number: int,
        request: CompletionRequest,
        texts: TokenTexts,
        prompt: Sequence[int],
        echo: str = "",
        offsets: Sequence[int] = (),
    ) -> None:
        """`offsets`: positions of the prompt's tokens in `echo`."""
        super().__init__(number, request, texts)
        self._text = echo
        self._echo_length = len(echo)
        self._echoes = bool(request.echo)
        self._offsets = offsets
        self._prompt_ids = list(prompt) if request.return_token_ids else None

    def add(self, delta: TextDelta) -> None:
        delta = delta._replace(offsets=[self._echo_length + at for at in delta.offsets])
        if self._echoes and delta.prompt_logprobs is not None:
            top = self._request.num_logprobs or 0
            prompt = [one._replace(top=one.top[:top]) for one in delta.prompt_logprobs]
            delta = delta._replace(logprobs=[*prompt, *delta.logprobs], offsets=[*self._offsets, *delta.offsets])
        super().add(delta)
        self._text += delta.text

    def collect(self) -> dict[str, Any]:
        return self._text_entry() | {"prompt_logprobs": self.prompt_logprobs()}

    def chunks(self) -> list[dict[str, Any]]:
        has_token_fields = self._request.num_logprobs is not None or self._request.return_token_ids
        return (
            [self._text_entry()] if self._text or self._ending["finish_reason"] is not None or has_token_fields else []
        )

    def _text_entry(self) -> dict[str, Any]:
        text, self._text = self._text, ""
        prompt_ids, self._prompt_ids = self._prompt_ids, None  # in the first entry only
        return self._full_entry("text", text) | {"prompt_token_ids": prompt_ids}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]) -> dict[str, Any] | None:
        if self._request.num_logprobs is None:
            return None
        return completion_logprobs(logprobs, self._texts, offsets)


Choice = ChatChoice | CompletionChoice


class OpenAIResponse:
    """The response to a chat or completion request."""

    def __init__(
        self, request: SamplingRequest, generation: Generation, entry: RequestLogEntry, choices: Sequence[Choice]
    ) -> None:
        self.generation = generation
        self._request = request
        self.choices = choices
        self._is_chat = isinstance(request, ChatRequest)
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        self.head = {"id": entry.id, "object": kind, "created": int(time.time()), "model": entry.model}

    async def collect(self) -> dict[str, Any]:
        """Wait for all choices and return the response."""
        async for number, delta in self.generation.deltas():
            self.choices[number].add(delta)
        choices = [choice.collect() for choice in self.choices]
        body = {**self.head, "choices": choices, "usage": self._usage()}
        if self._is_chat:
            prompt_fields = {
                "prompt_logprobs": self.choices[0].prompt_logprobs(),
                "prompt_token_ids": self._prompt_ids(),
            }
            body |= {"object": "chat.completion", **prompt_fields}
        return body

    def _prompt_ids(self) -> list[int] | None:
        return list(self.generation.prompts[0]) if self._request.return_token_ids else None

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events."""
        request, head = self._request, self.head
        if self._is_chat:
            head = {**head, "prompt_token_ids": self._prompt_ids()}  # in the first chunk
        async for number, delta in self.generation.deltas():
            self.choices[number].add(delta)
            parts = []
            for choice in self.choices[number].chunks():
                usage: dict[str, Any] = {"usage": None} if request.wants_stream_usage else {}
                if request.wants_continuous_usage:
                    usage["usage"] = self.generation.usage(opening="role" in choice.get("delta", ()))
                parts.append(event({**head, "choices": [choice], **usage}))
                head = self.head
            if parts:
                yield b"".join(parts)
        tail = event({**self.head, "choices": [], "usage": self._usage()}) if request.wants_stream_usage else b""
        yield tail + DONE

    def _usage(self) -> dict[str, Any]:
        depth = self._request.speculation_depth
        speculation = {"enabled": depth != 0, "depth": depth} if self._request.wants_report else None
        return self.generation.usage(speculation=speculation)
