"""Llama 3: {"name": ..., "parameters": {...}}, as the whole answer or after `<|python_tag|>`; `;` between several."""

from collections.abc import Callable, Sequence

from fledge.server.tools.base import NewId, Tool, ToolParser, ToolStream, new_call_id
from fledge.server.tools.call_object import CallObjectStream, call_rule

TAG = "<|python_tag|>"


class Llama3Stream(CallObjectStream):
    """Without the tag only what the answer begins with can be a call: elsewhere it is JSON that the text quotes."""

    _may_begin = True  # nothing but white space and calls so far

    def _step(self, *, final: bool) -> bool:
        if self._call is not None:
            call = self._call
            ended = self._read_call(call)
            self._may_begin = ended and call.is_done and call.is_call
            return ended
        if self._may_begin:
            return self._begin(final=final)
        if self._text_until((TAG,)) is None:
            return False
        self._open_call(TAG)
        return True

    def _begin(self, *, final: bool) -> bool:
        """Decide whether the answer begins, or goes on after a call, with a call."""
        skipped = " \t\r\n;" if self.calls else " \t\r\n"
        following = self._buffer.lstrip(skipped)
        if final and not following and self.calls:
            self._buffer = ""
        if not following or (TAG.startswith(following) and following != TAG and not final):
            return False
        if following.startswith(TAG):
            self._buffer = following[len(TAG) :]
            self._open_call(TAG)
        elif following.startswith("{"):
            # White space before it is content if the object is no call.
            self._open_call(self._buffer[: len(self._buffer) - len(following)])
            self._buffer = following
        self._may_begin = False
        return True


class Llama3Parser(ToolParser):
    name = "llama3_json"
    special_markers = True

    def stream(self, *, parallel: bool = True, new_id: NewId = new_call_id) -> ToolStream:
        return Llama3Stream(parallel=parallel, new_id=new_id)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Callable[[str], str]) -> str:
        del marker  # the tag is for code; calls are plain JSON
        calls = " | ".join(f"call_{number}" for number in range(len(tools)))
        return "\n".join(
            [
                'start: call ("; " call)*' if parallel else "start: call",
                f"call: {calls}",
                *(call_rule(number, tool.name, "parameters") for number, tool in enumerate(tools)),
            ]
        )
