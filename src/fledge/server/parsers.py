"""Streaming parsers of model output: reasoning, content and tool calls, as OpenAI's `delta` objects.

A parser reads the text of one choice. Text that may be the beginning of a marker is held back. A call is emitted
(index, id, name) as soon as it is certain to be one, and its arguments follow as they are generated. Text that looks
like a call but is not one is content. An emitted call cannot be retracted: incomplete or invalid arguments are emitted
as they are, as OpenAI does.

The result does not depend on how the text is cut into pieces.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from fledge.errors import ConfigError, nearest_name_hint

# OpenAI's: {"content": ...}, {"reasoning_content": ...}, or {"tool_calls": [{"index": ..., ...}]} with a call's id and
# name first and then its arguments in any number of pieces.
Delta = dict[str, Any]
_P = TypeVar("_P", bound="StreamParser")


class StreamParser(ABC):
    """Parses the output of one choice. `_read` is a generator over `_buffer` that yields when it needs more text."""

    def __init__(self) -> None:
        self._buffer = ""  # not parsed yet
        self._is_final = False  # all text is in the buffer
        self._deltas: list[Delta] = []
        self._reading = self._read()

    def feed(self, text: str, *, final: bool = False) -> list[Delta]:
        """Add text; return the deltas that are certain now, or all the rest if this is the end (`final`)."""
        self._is_final = self._is_final or final
        self._buffer += text
        next(self._reading, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    @abstractmethod
    def _read(self) -> Generator[None]:
        """Parse the buffer into `_deltas`."""

    def _emit_until(self, markers: Sequence[str], emit: Callable[[str], None]) -> Generator[None, None, str | None]:
        """Pass text to `emit` up to the first of `markers`, which is consumed and returned; None: there was none."""
        while True:
            end, marker = self._find(markers)
            emit(self._buffer[:end])
            self._buffer = self._buffer[end + len(marker or "") :]
            if marker is not None or self._is_final:
                return marker
            yield

    def _skip(self, *markers: str) -> Generator[None, None, str | None]:
        """If one of `markers` follows, after white space, consume and return it. None: something else follows."""
        while True:
            following = self._buffer.lstrip()
            for marker in markers:
                if following.startswith(marker):
                    self._buffer = following[len(marker) :]
                    return marker
            if self._is_final or not any(marker.startswith(following) for marker in markers):
                return None
            yield

    def _find(self, markers: Sequence[str]) -> tuple[int, str | None]:
        """Return the position of the first marker, and the marker.

        Without one: the end of the text that cannot be the beginning of a marker, and None.
        """
        text = self._buffer
        found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
        if found or self._is_final:
            return min(found, default=(len(text), None))
        longest = min(len(text), max(map(len, markers), default=1) - 1)
        held = (length for length in range(longest, 0, -1) if any(m.startswith(text[-length:]) for m in markers))
        return len(text) - next(held, 0), None


class Trimmer:
    """Strips white space from the ends of a text that arrives in pieces."""

    def __init__(self, *, has_text: bool = False) -> None:
        self.has_text = has_text  # leading white space is over
        self.space = ""  # held back: the text so far ends with it

    def __call__(self, text: str) -> str:
        text = self.space + text
        text = text if self.has_text else text.lstrip()
        kept = text.rstrip()
        self.space = text[len(kept) :]
        self.has_text = self.has_text or bool(kept)
        return kept


class ReasoningParser(StreamParser):
    """Splits reasoning between two markers, `<think>` and `</think>`, from the content after it.

    If the chat template writes the first marker (`opened`), the prompt ends with it and the output only has the second.
    White space around the reasoning is dropped. Reasoning counts against `max_tokens`. Structured outputs and required
    tool calls apply to the output after it (`Grammar.reasoning_opened`).
    """

    START_MARKERS: ClassVar[tuple[str, ...]] = ("<think>",)  # in all spellings
    END_MARKERS: ClassVar[tuple[str, ...]] = ("</think>",)

    def __init__(self, *, opened: bool = False, calls: Sequence[str] = ()) -> None:
        """`calls`: start markers of tool calls. Reasoning that is never closed ends at the first of these."""
        self._opened = opened
        self._calls = calls
        super().__init__()

    @classmethod
    def opened_by(cls, prompt: str) -> bool:
        """Whether a prompt, as text with its special tokens, ends inside reasoning."""
        return prompt.rstrip().endswith(cls.START_MARKERS)

    @classmethod
    def reasoning_lark(cls, marker: Callable[[str], str], *, opened: bool, calls: bool) -> str:
        """Return a Lark grammar of free reasoning followed by `@answer`. `calls`: `@answer` is tool calls.

        `marker` writes a marker in Lark: as a special token of the tokenizer, or as text in quotes.
        """
        del calls
        begins, ends = ([marker(text) for text in texts] for texts in (cls.START_MARKERS, cls.END_MARKERS))
        if ends[0].startswith('"'):
            spelled = ("".join(f"\\x{{{ord(character):x}}}" for character in text) for text in cls.END_MARKERS)
            free = f"free[lazy]: /(.|\\n)*({'|'.join(spelled)})/"
        else:
            free = f"free: /(.|\\n)*/ ({' | '.join(ends)})"
        body = "free" if opened else f"(({' | '.join(begins)}) free)?"
        return f"start: {body} /[ \\t\\r\\n]{{0,16}}/ @answer\n{free}"

    def _read(self) -> Generator[None]:
        if self._opened or (yield from self._skip(*self.START_MARKERS)):
            yield from self._read_reasoning()
            while not self._buffer.lstrip() and not self._is_final:
                yield
            self._buffer = self._buffer.lstrip()
        yield from self._emit_until((), lambda text: self._emit("content", text))

    def _read_reasoning(self) -> Generator[None]:
        trimmed = Trimmer()

        def emit(text: str) -> None:
            self._emit("reasoning_content", trimmed(text))

        marker = yield from self._emit_until((*self.END_MARKERS, *self._calls), emit)
        if marker is None or marker in self.END_MARKERS:
            return
        self._buffer = marker + self._buffer  # reasoning about calls, or a missing end marker: wait for the end
        while (found := self._find(self.END_MARKERS))[1] is None and not self._is_final:
            yield
        at, end = found
        if end is not None:
            emit(self._buffer[:at])
            self._buffer = self._buffer[at + len(end) :]

    def _emit(self, kind: str, text: str) -> None:
        self._deltas += [{kind: text}] if text else []


class AnswerParser:
    """A chain of parsers (reasoning, tool calls): each reads the content that the one before it emits."""

    def __init__(self, *parsers: StreamParser | None, parallel: bool = True) -> None:
        """Without `parallel`, calls after the first are dropped."""
        self._parsers = [parser for parser in parsers if parser is not None]
        self._parallel = parallel

    def feed(self, text: str, *, final: bool = False) -> list[Delta]:
        """As `StreamParser.feed`."""
        deltas: list[Delta] = [{"content": text}] if text else []
        for parser in self._parsers:
            parts = [parser.feed(delta["content"]) if "content" in delta else [delta] for delta in deltas]
            deltas = [*itertools.chain(*parts), *(parser.feed("", final=True) if final else ())]
        return deltas if self._parallel else [delta for delta in deltas if not _is_of_later_call(delta)]


def _is_of_later_call(delta: Delta) -> bool:
    return any(call["index"] > 0 for call in delta.get("tool_calls", ()))


def merge_deltas(deltas: Sequence[Delta], role: str = "assistant") -> dict[str, Any]:
    """Merge deltas into OpenAI's message with `content` and, if there are any, reasoning and tool calls."""
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        function = part["function"]
        if "id" in part:
            calls.append({"id": part["id"], "type": "function", "function": dict(function)})
        else:
            calls[-1]["function"]["arguments"] += function["arguments"]
    message: dict[str, Any] = {"role": role, "content": content or (None if calls else ""), "refusal": None}
    both = {"reasoning": reasoning, "reasoning_content": reasoning}  # vLLM's name and its older one
    return message | (both if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def parser_by_name(kind: str, name: str, known: Mapping[str, type[_P]], found: type[_P] | None) -> type[_P] | None:
    """Return the parser of that name; "auto": the one `found` by the chat template. Raises ConfigError."""
    if name not in ("auto", "none") and name not in known:
        raise ConfigError(f"unknown {kind} parser '{name}'.{nearest_name_hint(name, known)}")
    return found if name == "auto" else known.get(name)
