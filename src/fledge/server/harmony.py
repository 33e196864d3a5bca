"""gpt-oss's format (harmony): an answer is a series of messages, each on a channel and perhaps to a recipient.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

The prompt ends with `<|start|>assistant`. Reasoning, content and calls are told apart by nothing but a message's head,
so one parser reads all three.
"""

import re
from collections.abc import Callable, Generator
from typing import ClassVar

from fledge.server.parsers import ReasoningParser
from fledge.server.tool_calls import LONGEST_HEAD, ToolParser, new_call_id

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_BUILT_IN = re.compile(r"(browser|python|container)(\.|$)")  # tools of OpenAI's own, which nobody runs here


class HarmonyParser(ReasoningParser):
    """Analysis is reasoning; what is for a function is a call; the final channel and preambles to calls are content.

    Messages of one kind are put together with a line break. A head that breaks off is nobody's content.
    """

    BEGINS: ClassVar = (f"{CHANNEL}analysis{MESSAGE}",)
    ENDS: ClassVar = (END, CALL, RETURN, START, CHANNEL)

    @classmethod
    def before_answer(cls, marker: Callable[[str], str], *, opened: bool, calls: bool) -> str:
        del opened  # a prompt never ends within the analysis
        start, channel, message, end = map(marker, (START, CHANNEL, MESSAGE, END))
        analysis = f'({channel} "analysis" {message} free {end} {start} "assistant")?'
        final = "" if calls else f'{channel} "final" {message} '
        return f"start: {analysis} {final}@answer\nfree: /(.|\\n)*/"

    def _read(self) -> Generator[None]:
        self._calls_begun = 0
        self._told: set[str] = set()
        while self._buffer or not self._is_final:
            marker = yield from self._skip(START, CHANNEL, "to=")
            head = None if marker is None else (yield from self._read_head(marker))
            ended = yield from self._pass_until(self.ENDS, self._message(head or ""))
            if ended in (START, CHANNEL):  # of the next message
                self._buffer = ended + self._buffer

    def _read_head(self, marker: str) -> Generator[None, None, str | None]:
        """Consume a head and return it; None: it is none, and only what it began with is dropped."""
        while True:
            end = self._buffer.find(MESSAGE)
            if end >= 0 or self._is_final or len(self._buffer) >= LONGEST_HEAD + len(MESSAGE):
                break
            yield
        if not 0 <= end <= LONGEST_HEAD:
            if len(self._buffer) < LONGEST_HEAD:
                self._buffer = ""
            return None
        head, self._buffer = marker + self._buffer[:end], self._buffer[end + len(MESSAGE) :]
        return head

    def _message(self, head: str) -> Callable[[str], None]:
        """Return what takes the text of the message with this head."""
        recipient = next(iter(_RECIPIENT.findall(head)), None)
        channel = next(reversed(_CHANNEL.findall(head)), "final")
        if recipient is not None and not _BUILT_IN.match(recipient):
            self._calls_begun += 1
            name = {"name": recipient.removeprefix("functions."), "arguments": ""}
            self._call({"id": new_call_id(), "type": "function", "function": name})
            return lambda text: self._call({"function": {"arguments": text}}) if text else None
        if channel == "analysis":
            return self._teller("reasoning_content")
        return self._teller("content") if recipient is None else lambda _text: None

    def _teller(self, kind: str) -> Callable[[str], None]:
        between = "\n" if kind in self._told else ""

        def tell(text: str) -> None:
            nonlocal between
            if text:
                self._tell(kind, between + text)
                self._told.add(kind)
                between = ""

        return tell

    def _call(self, part: dict[str, object]) -> None:
        self._deltas.append({"tool_calls": [{"index": self._calls_begun - 1, **part}]})


class HarmonyTools(ToolParser):
    """How calls that must come are written. Those that come are found by `HarmonyParser`."""

    special_markers = True
    markers: ClassVar = {"channel": CHANNEL, "constrain": CONSTRAIN, "message": MESSAGE}

    SEVERAL = "call"  # a call ends the answer
    CALL = "TOOLS"
    TOOL = 'channel "commentary to=functions.TOOL " constrain "json" message'

    def _read_calls(self) -> Generator[None]:
        yield from self._pass_until((), self._content)
