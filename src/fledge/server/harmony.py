"""gpt-oss's harmony format: the output is a series of messages, each on a channel, some of them to a recipient.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

The prompt ends with `<|start|>assistant`. Only the header of a message (up to `<|message|>`) tells reasoning, content
and calls apart, so one parser reads all three.
"""

import re
from collections.abc import Callable, Generator
from typing import ClassVar

from fledge.server.parsers import ReasoningParser
from fledge.server.tool_calls import MAX_HEADER, ToolParser, new_call_id

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_BUILT_IN = re.compile(r"(browser|python|container)(\.|$)")  # OpenAI's built-in tools, which are not run here


class HarmonyParser(ReasoningParser):
    """Analysis is reasoning, messages to a function are calls, the final channel and preambles to calls are content.

    Messages of one kind are joined with a line break. Incomplete headers are dropped.
    """

    START_MARKERS: ClassVar = (f"{CHANNEL}analysis{MESSAGE}",)
    END_MARKERS: ClassVar = (END, CALL, RETURN, START, CHANNEL)

    @classmethod
    def reasoning_lark(cls, marker: Callable[[str], str], *, opened: bool, calls: bool) -> str:
        del opened  # a prompt never ends inside of reasoning
        start, channel, message, end = map(marker, (START, CHANNEL, MESSAGE, END))
        analysis = f'({channel} "analysis" {message} free {end} {start} "assistant")?'
        final = "" if calls else f'{channel} "final" {message} '
        return f"start: {analysis} {final}@answer\nfree: /(.|\\n)*/"

    def _read(self) -> Generator[None]:
        self._calls_begun = 0
        self._emitted: set[str] = set()
        while self._buffer or not self._is_final:
            marker = yield from self._skip(START, CHANNEL, "to=")
            header = None if marker is None else (yield from self._read_header(marker))
            ended = yield from self._emit_until(self.END_MARKERS, self._message_emitter(header or ""))
            if ended in (START, CHANNEL):  # of the next message
                self._buffer = ended + self._buffer

    def _read_header(self, marker: str) -> Generator[None, None, str | None]:
        """Consume a header and return it. None: it is not a header, and only `marker` is dropped."""
        while True:
            end = self._buffer.find(MESSAGE)
            if end >= 0 or self._is_final or len(self._buffer) >= MAX_HEADER + len(MESSAGE):
                break
            yield
        if not 0 <= end <= MAX_HEADER:
            if len(self._buffer) < MAX_HEADER:
                self._buffer = ""
            return None
        header, self._buffer = marker + self._buffer[:end], self._buffer[end + len(MESSAGE) :]
        return header

    def _message_emitter(self, header: str) -> Callable[[str], None]:
        """Return a function that emits the text of the message with this header."""
        recipient = next(iter(_RECIPIENT.findall(header)), None)
        channel = next(reversed(_CHANNEL.findall(header)), "final")
        if recipient is not None and not _BUILT_IN.match(recipient):
            self._calls_begun += 1
            name = {"name": recipient.removeprefix("functions."), "arguments": ""}
            self._call({"id": new_call_id(), "type": "function", "function": name})
            return lambda text: self._call({"function": {"arguments": text}}) if text else None
        if channel == "analysis":
            return self._emitter("reasoning_content")
        return self._emitter("content") if recipient is None else lambda _text: None

    def _emitter(self, kind: str) -> Callable[[str], None]:
        between = "\n" if kind in self._emitted else ""

        def emit(text: str) -> None:
            nonlocal between
            if text:
                self._emit(kind, between + text)
                self._emitted.add(kind)
                between = ""

        return emit

    def _call(self, part: dict[str, object]) -> None:
        self._deltas.append({"tool_calls": [{"index": self._calls_begun - 1, **part}]})


class HarmonyTools(ToolParser):
    """The grammar of required calls. `HarmonyParser` parses calls."""

    uses_special_tokens = True
    markers: ClassVar = {"channel": CHANNEL, "constrain": CONSTRAIN, "message": MESSAGE}

    PARALLEL_RULE = "call"  # a call ends the output
    CALL_RULE = "TOOLS"
    TOOL_RULE = 'channel "commentary to=functions.TOOL " constrain "json" message'

    def _read_calls(self) -> Generator[None]:
        yield from self._emit_until((), self._emit_content)
