"""One streamed request to an OpenAI-compatible server, timed. Whatever a server does wrong becomes one line.

What servers tell of speculation, in a request's usage (Fledge) or in `/metrics` (vLLM too), becomes a tally of rounds.
"""

import asyncio
import codecs
import contextlib
import hashlib
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fledge.bench.load.http import HttpClient, HttpError
from fledge.evaluation.results import RequestRecord, Tally

MAX_MESSAGE = 200  # characters of what a server says about an error
USAGE_SLACK = 2  # pieces of text that may come without a token of their own: text held back, reasoning split off
MAX_EVENT_BYTES = 16 * 2**20
_TWO_LINE_ENDS = re.compile(rb"(?>\r\n|\r|\n){2}")  # after an event
BROKEN_ENDINGS = ("abort", "error", "timeout")  # finish reasons of answers that were given up

_SAMPLE = re.compile(
    r"^(?:vllm:|fledge_)spec_decode_num_(?P<what>drafts|draft_tokens_per_pos|accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)",
    re.MULTILINE,
)
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')

# Totals since the server started, all its engines together, by what they count and the draft's position (from 0).
# vLLM does not tell draft_tokens_per_pos.
SpeculationCounters = Counter[tuple[str, int]]

Failure = Literal["connection", "stall", "other"]


class StreamError(Exception):
    """The server did not answer as it should; the message says how, on one line."""


@dataclass(kw_only=True)
class StreamedAnswer:
    """How one request went. Times are those of `time.perf_counter`. `read` changes it in place."""

    sent: float
    first_token: float | None = None  # the first piece of text
    done: float | None = None  # the piece that says why the answer ended
    text: list[str] = field(default_factory=list)
    pieces: int = 0  # events with text in them
    usage: Mapping[str, Any] | None = None
    finish_reason: str | None = None
    error: str | None = None
    failure: Failure | None = None

    @property
    def counted(self) -> bool:
        """The server told no usage, so pieces were counted: too few, where a piece has several tokens."""
        return self._told("completion_tokens") is None

    @property
    def output_tokens(self) -> int:
        told = self._told("completion_tokens")
        return self.pieces if told is None else told

    def _told(self, name: str) -> int | None:
        value = (self.usage or {}).get(name)
        return value if type(value) is int else None

    def record(self, prompt: str, begun: float) -> RequestRecord:
        """What results keep of it, with times after `begun`."""
        # Halves of a character that JSON spells as a surrogate pair may come in two pieces, or alone.
        digest = hashlib.sha256("".join(self.text).encode("utf-16", "surrogatepass")).hexdigest()[:16]
        sent, first, done = (
            None if moment is None else round(moment - begun, 6) for moment in (self.sent, self.first_token, self.done)
        )
        report = (self.usage or {}).get("speculation")
        told = report if isinstance(report, Mapping) else {}
        repeated, copied = told.get("repeated_tokens"), told.get("copied_tokens")
        return RequestRecord(
            prompt=prompt,
            sent=sent or 0.0,
            first_token=first,
            done=None if self.error else done,
            prompt_tokens=self._told("prompt_tokens"),
            output_tokens=self.output_tokens,
            error=self.error,
            digest=None if self.error else digest,
            acceptance=tally_of_report(report),
            fresh_acceptance=tally_of_report(told.get("outside_repetition")),
            novel_acceptance=tally_of_report(told.get("novel")),
            repeated_tokens=repeated if type(repeated) is int else None,
            copied_tokens=copied if type(copied) is int else None,
        )

    def read(self, event: str, now: float) -> None:
        """Take one event that came at `now`."""
        if event == "[DONE]":
            return
        try:
            value = json.loads(event)
        except (ValueError, RecursionError):
            raise StreamError(f"malformed JSON in the stream: {_short(event)}") from None
        if not isinstance(value, dict):
            raise StreamError(f"no JSON object in the stream: {_short(event)}")
        if value.get("error"):
            raise StreamError(f"error in the stream: {_message(value)}")
        if isinstance(value.get("usage"), dict):
            self.usage = value["usage"]
        choices = value.get("choices")
        if not choices:
            return
        if not isinstance(choices, list) or not isinstance(choices[0], dict):
            raise StreamError(f"no list of choices in the stream: {_short(event)}")
        text = _text(choices[0])
        if text:
            self.first_token = self.first_token or now
            self.pieces += 1
            self.text.append(text)
            self.done = now
        if choices[0].get("finish_reason") is not None:
            self.finish_reason = str(choices[0]["finish_reason"])
            self.done = now

    def check(self, content_type: str) -> None:
        """Refuse what must not enter a mean."""
        if self.finish_reason is None:
            if self.done is None and "text/event-stream" not in content_type:
                raise StreamError(f"answered without a stream of events (Content-Type: {content_type or 'none'})")
            raise StreamError(f"the stream ended without a finish reason, after {self.pieces} pieces of text")
        if self.finish_reason in BROKEN_ENDINGS:
            raise StreamError(f"the server gave up: finish reason '{self.finish_reason}'")
        if self.output_tokens < 1:
            raise StreamError("answered without a single token")
        if self.pieces > self.output_tokens + USAGE_SLACK:
            raise StreamError(f"usage tells {self.output_tokens} tokens, but {self.pieces} pieces of text came")
        if self.first_token is None:
            self.first_token = self.done  # one token that has no text: the end of the answer


def _text(choice: Mapping[str, Any]) -> str:
    """All text in a piece: answer, reasoning, arguments of tool calls."""
    delta = choice["delta"] if isinstance(choice.get("delta"), Mapping) else {"content": choice.get("text")}
    found = [delta.get(name) for name in ("reasoning_content", "reasoning", "content")]
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            found += [function.get("name"), function.get("arguments")]
    return "".join(part for part in found if isinstance(part, str))


async def ask(
    client: HttpClient, path: str, body: Mapping[str, Any], *, stall_seconds: float, max_pieces: int
) -> StreamedAnswer:
    """Send one request and read its stream to the end. Gives up after `stall_seconds` without an event."""
    content = json.dumps(body).encode()
    loop = asyncio.get_running_loop()
    answer = StreamedAnswer(sent=time.perf_counter())
    try:
        async with asyncio.timeout(stall_seconds) as limit, client.request("POST", path, content) as response:
            if response.status != 200:
                said, wait = _message(await response.whole()), response.headers.get("retry-after")
                status = f"HTTP {response.status}" + (f", Retry-After {wait}" if wait else "")
                raise StreamError(f"{status}: {said}" if said else status)
            rest = b""
            async for data in response.parts():
                now = time.perf_counter()
                events, rest = split_events(rest + data)
                if events:
                    limit.reschedule(loop.time() + stall_seconds)
                for event in events:
                    answer.read(event, now)
                if answer.pieces > max_pieces:
                    raise StreamError(f"the answer does not end: {answer.pieces} pieces of text came")
            for event in split_events(rest + b"\n\n")[0]:  # the last may come without the empty line after it
                answer.read(event, time.perf_counter())
            answer.check(response.headers.get("content-type", ""))
    except StreamError as error:
        answer.error, answer.failure = str(error), "other"
    except TimeoutError:
        answer.error = f"stalled: nothing for {stall_seconds:g} s, after {answer.pieces} pieces of text"
        answer.failure = "stall"
    except HttpError as error:
        lost = "no connection" if error.connecting else f"connection lost after {answer.pieces} pieces of text"
        answer.error, answer.failure = _short(f"{lost}: {error}"), "connection"
    return answer


def _message(value: Any) -> str:
    """The words in an error object or a body, whichever of the usual shapes it has."""
    if isinstance(value, bytes):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = value.decode("utf-8", errors="replace")
    while isinstance(value, dict) and (inner := [value[k] for k in ("error", "message", "detail") if value.get(k)]):
        value = inner[0]
    return _short(value if isinstance(value, str) else json.dumps(value))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 3] + "..."


def split_events(stream: bytes) -> tuple[list[str], bytes]:
    """Return the `data` of each event that is complete, and the beginning of the next; StreamError for an endless one.

    Knows the three line ends, comments, fields other than data, several data lines in an event, a byte order mark.
    """
    *events, rest = _TWO_LINE_ENDS.split(stream)
    if len(rest) > MAX_EVENT_BYTES:
        raise StreamError(f"unreadable stream: an event of more than {MAX_EVENT_BYTES >> 20} MiB")
    found = []
    for event in events:
        fields = [line.partition(b":") for line in event.removeprefix(codecs.BOM_UTF8).splitlines()]
        if lines := [value.removeprefix(b" ") for name, _, value in fields if name == b"data"]:
            found.append(b"\n".join(lines).decode("utf-8", errors="replace"))
    return found, rest


def read_metrics(text: str) -> SpeculationCounters | None:
    """Read Prometheus' text format; None if the server counts no speculation."""
    counts: SpeculationCounters = Counter()
    for sample in _SAMPLE.finditer(text):
        position = _POSITION.search(sample["labels"] or "")
        with contextlib.suppress(ValueError, OverflowError):
            counts[sample["what"], int(position[1]) if position else 0] += int(float(sample["value"]))
    return counts if ("drafts", 0) in counts else None


def tally_between(before: SpeculationCounters | None, after: SpeculationCounters | None) -> Tally:
    """The rounds between two readings. Raises ValueError if the counters cannot be of one server's life."""
    if before is None or after is None:
        raise ValueError("/metrics did not answer")
    counts = Counter({key: value - before[key] for key, value in after.items()})

    def by_depth(what: str) -> list[int]:
        return [counts[what, i] for i in range(1 + max((i for name, i in counts if name == what), default=-1))]

    return tally_of(counts["drafts", 0], by_depth("accepted_tokens_per_pos"), by_depth("draft_tokens_per_pos") or None)


def tally_of(rounds: int, accepted: Sequence[int], drafted: Sequence[int] | None = None) -> Tally:
    """Rounds by (drafted, accepted), from how many rounds drafted and accepted at least 1, 2, ... tokens.

    Where `drafted` is not told, every round counts as drafted to the last position, as in vLLM's own per-position
    rates. Where depths vary, the totals do not say which of the rounds that drafted deep also accepted much; they
    are matched in order. Acceptance length and rates by depth do not depend on that.
    """
    drafted = [rounds] * len(accepted) if drafted is None else drafted
    for counts in ([rounds, *accepted, 0], [rounds, *drafted, 0]):
        if counts != sorted(counts, reverse=True):
            raise ValueError(f"counts of speculation that contradict each other: {rounds} rounds, then {counts[1:-1]}")
    # In ascending order of either, round `rounds - n` is the first of the n that have a token more.
    triples: list[tuple[int, int, int]] = []
    for first, end in itertools.pairwise(sorted({0, rounds, *(rounds - n for n in (*accepted, *drafted))})):
        depth, length = (sum(rounds - n <= first for n in counts) for counts in (drafted, accepted))
        if length > depth:
            raise ValueError(f"counts of speculation that contradict each other: {length} of {depth} drafts accepted")
        if depth:
            triples.append((depth, length, end - first))
    return tuple(triples)


def tally_of_report(report: Any) -> Tally:
    """Read `usage.speculation` of a Fledge server; nothing where it says nothing sensible."""
    try:
        return tally_of(int(report["rounds"]), report["accepted_by_depth"], report["drafted_by_depth"])
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return ()
