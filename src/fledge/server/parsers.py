"""What models write, read back into OpenAI's shape as it comes: reasoning, content and tool calls.

A parser reads the text of one answer and gives OpenAI's `delta` objects. Text that may still turn out to be a marker is
held back; a call is announced (index, id, name) as soon as it is certain to be one, and its arguments follow as they
come. What looks like a call but is none is content. Once a call has been announced it cannot be taken back: arguments
that then break off or are no JSON are passed on as they are, as OpenAI does.

Everything is decided character by character, so how the text is cut into pieces changes nothing.
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
    """Reads one answer. `_read` is a generator over `_buffer` that yields when it needs more text."""

    def __init__(self) -> None:
        self._buffer = ""  # not understood yet
        self._is_final = False  # no more will come: nothing is waited for
        self._deltas: list[Delta] = []
        self._reading = self._read()

    def feed(self, text: str, *, final: bool = False) -> list[Delta]:
        """Take in more text; return what has become certain, and all that is left when the answer has ended."""
        self._is_final = self._is_final or final
        self._buffer += text
        next(self._reading, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    @abstractmethod
    def _read(self) -> Generator[None]:
        """Understand the buffer."""

    def _pass_until(self, markers: Sequence[str], hand_on: Callable[[str], None]) -> Generator[None, None, str | None]:
        """Hand on text up to the first of `markers` and consume that; None: the answer ended without one."""
        while True:
            end, marker = self._find(markers)
            hand_on(self._buffer[:end])
            self._buffer = self._buffer[end + len(marker or "") :]
            if marker is not None or self._is_final:
                return marker
            yield

    def _skip(self, *markers: str) -> Generator[None, None, str | None]:
        """Consume one of `markers` and the white space before it, and return it; None: something else comes."""
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
        """Return where the first marker is, and which; without any, where the text ends that cannot become one."""
        text = self._buffer
        found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
        if found or self._is_final:
            return min(found, default=(len(text), None))
        longest = min(len(text), max(map(len, markers), default=1) - 1)
        held = (length for length in range(longest, 0, -1) if any(m.startswith(text[-length:]) for m in markers))
        return len(text) - next(held, 0), None


class Trimmer:
    """Text without the white space around it, as it comes."""

    def __init__(self, *, has_text: bool = False) -> None:
        self.has_text = has_text  # then white space before it counts
        self.space = ""  # that the text so far ends with

    def __call__(self, text: str) -> str:
        text = self.space + text
        text = text if self.has_text else text.lstrip()
        kept = text.rstrip()
        self.space = text[len(kept) :]
        self.has_text = self.has_text or bool(kept)
        return kept


class ReasoningParser(StreamParser):
    """What a model writes between two markers, `<think>` and `</think>`, before its answer, split from the answer.

    The model opens it, or the chat template has (`opened`): then the prompt ends with the first and only the second
    appears. Which of the two is known from the prompt, never guessed from the answer. White space around the reasoning
    is dropped. Reasoning counts against `max_tokens` like everything else. Structured output and forced tool calls
    apply to what comes after it (`Grammar.reasoning_opened`).
    """

    BEGINS: ClassVar[tuple[str, ...]] = ("<think>",)  # in all spellings
    ENDS: ClassVar[tuple[str, ...]] = ("</think>",)

    def __init__(self, *, opened: bool = False, calls: Sequence[str] = ()) -> None:
        """`calls`: what tool calls begin with. From such a marker on, reasoning that is never closed is the answer."""
        self._opened = opened
        self._calls = calls
        super().__init__()

    @classmethod
    def opened_by(cls, prompt: str) -> bool:
        """Whether a prompt, as text with its special tokens, ends inside reasoning."""
        return prompt.rstrip().endswith(cls.BEGINS)

    @classmethod
    def before_answer(cls, marker: Callable[[str], str], *, opened: bool, calls: bool) -> str:
        """Return Lark for free reasoning and then `@answer`, which is `calls` or content.

        `marker` writes one in Lark: as a special token of the tokenizer, or as text in quotes.
        """
        del calls
        begins, ends = ([marker(text) for text in texts] for texts in (cls.BEGINS, cls.ENDS))
        if ends[0].startswith('"'):
            spelled = ("".join(f"\\x{{{ord(character):x}}}" for character in text) for text in cls.ENDS)
            free = f"free[lazy]: /(.|\\n)*({'|'.join(spelled)})/"
        else:
            free = f"free: /(.|\\n)*/ ({' | '.join(ends)})"
        body = "free" if opened else f"(({' | '.join(begins)}) free)?"
        return f"start: {body} /[ \\t\\r\\n]{{0,16}}/ @answer\n{free}"

    def _read(self) -> Generator[None]:
        if self._opened or (yield from self._skip(*self.BEGINS)):
            yield from self._read_reasoning()
            while not self._buffer.lstrip() and not self._is_final:
                yield
            self._buffer = self._buffer.lstrip()
        yield from self._pass_until((), lambda text: self._tell("content", text))

    def _read_reasoning(self) -> Generator[None]:
        trimmed = Trimmer()

        def tell(text: str) -> None:
            self._tell("reasoning_content", trimmed(text))

        marker = yield from self._pass_until((*self.ENDS, *self._calls), tell)
        if marker is None or marker in self.ENDS:
            return
        self._buffer = marker + self._buffer  # a thought about calls, or a model that forgot to close: the end tells
        while (found := self._find(self.ENDS))[1] is None and not self._is_final:
            yield
        at, end = found
        if end is not None:
            tell(self._buffer[:at])
            self._buffer = self._buffer[at + len(end) :]

    def _tell(self, kind: str, text: str) -> None:
        self._deltas += [{kind: text}] if text else []


class AnswerParser:
    """Reasoning, then content and tool calls: each parser reads the content that the one before it gives."""

    def __init__(self, *parsers: StreamParser | None, parallel: bool = True) -> None:
        """Without `parallel`, calls after the first are dropped."""
        self._parsers = [parser for parser in parsers if parser is not None]
        self._parallel = parallel

    def feed(self, text: str, *, final: bool = False) -> list[Delta]:
        """As a parser does."""
        deltas: list[Delta] = [{"content": text}] if text else []
        for parser in self._parsers:
            parts = [parser.feed(delta["content"]) if "content" in delta else [delta] for delta in deltas]
            deltas = [*itertools.chain(*parts), *(parser.feed("", final=True) if final else ())]
        return deltas if self._parallel else [delta for delta in deltas if not _is_of_later_call(delta)]


def _is_of_later_call(delta: Delta) -> bool:
    return any(call["index"] > 0 for call in delta.get("tool_calls", ()))


def whole_message(deltas: Sequence[Delta], role: str = "assistant") -> dict[str, Any]:
    """Put deltas together: OpenAI's message with `content` and, where there are any, reasoning and calls."""
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
    thought = (
        {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}
    )  # vLLM's name, its older one
    return message | thought | ({"tool_calls": calls} if calls else {})


def named_parser(kind: str, name: str, known: Mapping[str, type[_P]], found: type[_P] | None) -> type[_P] | None:
    """Return the parser of that name; "auto": the one found by the chat template; "none": none. Raises ConfigError."""
    if name not in ("auto", "none") and name not in known:
        raise ConfigError(f"unknown {kind} parser '{name}'.{nearest_name_hint(name, known)}")
    return found if name == "auto" else known.get(name)
