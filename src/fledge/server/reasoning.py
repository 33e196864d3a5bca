"""Reasoning: what a model writes between `<think>` and `</think>` before its answer, split from the answer.

The model opens it, or the chat template has: then the prompt ends with `<think>` and only the close appears. Which of
the two is known from the prompt, never guessed from the answer. White space around the reasoning is dropped. Reasoning
counts against `max_tokens` like everything else. Structured output and forced tool calls apply to what comes after it
(`ReasoningParser.markers`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fledge.errors import ConfigError, nearest_name_hint
from fledge.server.structured import ReasoningMarkers
from fledge.server.tools.base import ContentDelta, Delta, ToolCall, ToolStream, assemble, held_back

# vLLM's names for --reasoning-parser; all of them write the same markers.
PARSERS = ("think", "deepseek_r1", "qwen3", "kimi_k2")


@dataclass(frozen=True, kw_only=True)
class ReasoningDelta:
    """A piece of reasoning."""

    text: str


@dataclass(frozen=True, kw_only=True)
class AnswerParts:
    """A whole answer, taken apart."""

    reasoning: str | None
    content: str | None
    tool_calls: list[ToolCall]


class ReasoningParser:
    """Splits reasoning off. Markers other than the usual ones may be given."""

    def __init__(self, begin: str = "<think>", end: str = "</think>") -> None:
        self.begin, self.end = begin, end

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt, as text with its special tokens, ends inside reasoning."""
        return prompt.rstrip().endswith(self.begin)

    def markers(self, *, opened: bool) -> ReasoningMarkers:
        """For `GrammarCompiler.compile`: the grammar is to begin after the reasoning."""
        return ReasoningMarkers(begin=self.begin, end=self.end, opened=opened)

    def parse(self, text: str, *, opened: bool = False) -> tuple[str | None, str | None]:
        """Return the reasoning and the content of a whole answer, None where there is none."""
        stream = self.stream(opened=opened)
        deltas = [*stream.feed(text), *stream.finish()]
        reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
        content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        return reasoning or None, content or None

    def stream(self, *, opened: bool = False) -> "ReasoningStream":
        return ReasoningStream(self.begin, self.end, opened=opened)


class ReasoningStream:
    """The text of one answer on its way to reasoning and content."""

    def __init__(self, begin: str, end: str, *, opened: bool) -> None:
        self._begin, self._end = begin, end
        self._buffer = ""
        self._undecided = not opened  # nothing but white space and perhaps a piece of the marker so far
        self._inside = opened
        self._trim = opened  # white space that comes now is dropped
        self._space = ""  # white space that the reasoning so far ends with

    def feed(self, text: str) -> list[ReasoningDelta | ContentDelta]:
        """Take in more text; return what has become certain."""
        self._buffer += text
        return self._read(final=False)

    def finish(self) -> list[ReasoningDelta | ContentDelta]:
        """Return what is left when the answer has ended."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> list[ReasoningDelta | ContentDelta]:
        found: list[ReasoningDelta | ContentDelta] = []
        if self._undecided:
            following = self._buffer.lstrip()
            if self._begin.startswith(following) and following != self._begin and not final:
                return found
            self._undecided = False
            if following.startswith(self._begin):
                self._buffer = following[len(self._begin) :]
                self._inside = self._trim = True
        if self._inside:
            at = self._buffer.find(self._end)
            end = at if at >= 0 else len(self._buffer) - (0 if final else held_back(self._buffer, (self._end,)))
            text = self._trimmed(self._space + self._buffer[:end])
            kept = text.rstrip()
            self._space = text[len(kept) :]
            if kept:
                found.append(ReasoningDelta(text=kept))
            self._buffer = self._buffer[end:]
            if at < 0:
                return found
            self._buffer = self._buffer[len(self._end) :]
            self._inside, self._trim = False, True
        content = self._trimmed(self._buffer)
        self._buffer = ""
        if content:
            found.append(ContentDelta(text=content))
        return found

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text


class AnswerSplitter:
    """Reasoning, then content and tool calls: one answer through both parsers, where there are any."""

    def __init__(self, *, reasoning: ReasoningStream | None = None, tools: ToolStream | None = None) -> None:
        self._reasoning, self._tools = reasoning, tools

    def feed(self, text: str) -> list[ReasoningDelta | Delta]:
        """Take in more text; return what has become certain."""
        parts = [ContentDelta(text=text)] if self._reasoning is None else self._reasoning.feed(text)
        return self._through_tools(parts)

    def finish(self) -> list[ReasoningDelta | Delta]:
        """Return what is left when the answer has ended."""
        found = self._through_tools([] if self._reasoning is None else self._reasoning.finish())
        return found if self._tools is None else [*found, *self._tools.finish()]

    def parse(self, text: str) -> AnswerParts:
        """Take a whole answer apart. For a stream that has been fed nothing."""
        deltas = [*self.feed(text), *self.finish()]
        reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
        content, calls = assemble([delta for delta in deltas if not isinstance(delta, ReasoningDelta)])
        return AnswerParts(reasoning=reasoning or None, content=content, tool_calls=calls)

    def _through_tools(self, parts: Sequence[ReasoningDelta | ContentDelta]) -> list[ReasoningDelta | Delta]:
        found: list[ReasoningDelta | Delta] = []
        for part in parts:
            if isinstance(part, ContentDelta) and self._tools is not None:
                found += self._tools.feed(part.text)
            elif part.text:
                found.append(part)
        return found


def get_reasoning_parser(name: str) -> ReasoningParser:
    """Return the parser of that name. Raises ConfigError."""
    if name not in PARSERS:
        raise ConfigError(f"unknown reasoning parser '{name}'.{nearest_name_hint(name, PARSERS)}")
    return ReasoningParser()


def detect_reasoning_parser(chat_template: str | None) -> ReasoningParser | None:
    """Return a parser if the chat template knows about reasoning."""
    return ReasoningParser() if "</think>" in (chat_template or "") else None
