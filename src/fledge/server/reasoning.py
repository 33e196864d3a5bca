"""Reasoning: what a model writes between `<think>` and `</think>` before its answer, split from the answer.

The model opens it, or the chat template has: then the prompt ends with `<think>` and only the close appears. Which of
the two is known from the prompt, never guessed from the answer. White space around the reasoning is dropped. Reasoning
counts against `max_tokens` like everything else. Structured output and forced tool calls apply to what comes after it
(`Grammar.reasoning`).
"""

from fledge.errors import ConfigError, nearest_name_hint
from fledge.server.grammar import ReasoningMarkers
from fledge.server.tools.base import Delta, ToolParser, held_back

# vLLM's names for --reasoning-parser; all of them write the same markers.
PARSERS = ("think", "deepseek_r1", "qwen3", "kimi_k2")
BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """Reads one answer: its text becomes reasoning and content. `opened`: the prompt ends inside reasoning."""

    def __init__(self, *, opened: bool = False) -> None:
        self._buffer = ""
        self._undecided = not opened  # nothing but white space and perhaps a piece of the marker so far
        self._inside = opened
        self._trim = opened  # white space that comes now is dropped
        self._space = ""  # white space that the reasoning so far ends with

    @staticmethod
    def opened_by(prompt: str) -> bool:
        """Whether a prompt, as text with its special tokens, ends inside reasoning."""
        return prompt.rstrip().endswith(BEGIN)

    @staticmethod
    def markers(*, opened: bool) -> ReasoningMarkers:
        """For a grammar that is to begin after the reasoning."""
        return ReasoningMarkers(begin=BEGIN, end=END, opened=opened)

    def feed(self, text: str) -> list[Delta]:
        """Take in more text; return what has become certain."""
        self._buffer += text
        return self._read(final=False)

    def finish(self) -> list[Delta]:
        """Return what is left when the answer has ended."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> list[Delta]:
        found: list[Delta] = []
        if self._undecided:
            following = self._buffer.lstrip()
            if BEGIN.startswith(following) and following != BEGIN and not final:
                return found
            self._undecided = False
            if following.startswith(BEGIN):
                self._buffer = following[len(BEGIN) :]
                self._inside = self._trim = True
        if self._inside:
            at = self._buffer.find(END)
            end = at if at >= 0 else len(self._buffer) - (0 if final else held_back(self._buffer, (END,)))
            text = self._trimmed(self._space + self._buffer[:end])
            kept = text.rstrip()
            self._space = text[len(kept) :]
            if kept:
                found.append({"reasoning_content": kept})
            self._buffer = self._buffer[end:]
            if at < 0:
                return found
            self._buffer = self._buffer[len(END) :]
            self._inside, self._trim = False, True
        content = self._trimmed(self._buffer)
        self._buffer = ""
        if content:
            found.append({"content": content})
        return found

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text


class AnswerParser:
    """Reasoning, then content and tool calls: one answer through both parsers, where there are any."""

    def __init__(self, *, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None) -> None:
        self._reasoning, self._tools = reasoning, tools

    def feed(self, text: str) -> list[Delta]:
        """Take in more text; return what has become certain."""
        parts: list[Delta] = [{"content": text}] if text else []
        return self._through_tools(parts if self._reasoning is None else self._reasoning.feed(text))

    def finish(self) -> list[Delta]:
        """Return what is left when the answer has ended."""
        found = self._through_tools([] if self._reasoning is None else self._reasoning.finish())
        return found if self._tools is None else [*found, *self._tools.finish()]

    def _through_tools(self, parts: list[Delta]) -> list[Delta]:
        if self._tools is None:
            return parts
        found: list[Delta] = []
        for part in parts:
            found += self._tools.feed(part["content"]) if "content" in part else [part]
        return found


def get_reasoning_parser(name: str) -> type[ReasoningParser]:
    """Return the parser of that name. Raises ConfigError."""
    if name not in PARSERS:
        raise ConfigError(f"unknown reasoning parser '{name}'.{nearest_name_hint(name, PARSERS)}")
    return ReasoningParser


def detect_reasoning_parser(chat_template: str | None) -> type[ReasoningParser] | None:
    """Return a parser if the chat template knows about reasoning."""
    return ReasoningParser if END in (chat_template or "") else None
