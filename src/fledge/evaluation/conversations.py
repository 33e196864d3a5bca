"""Reads conversations in the usual formats into one representation.

The format is recognised record by record:

    OpenAI      {"messages": [{"role": "user", "content": "..."}, ...]}       content: text, or a list of text parts
    ShareGPT    {"conversations": [{"from": "human", "value": "..."}, ...]}
    pairs       {"prompt": "...", "completion": "..."}  (or "response"; either may be a list of messages)
    Alpaca      {"instruction": "...", "input": "...", "output": "..."}
    plain text  {"text": "..."}

Results are grouped by `category`, or else `source`, or else the file's name.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fledge.errors import DataError
from fledge.files import read_json_lines

ROLES = ("system", "developer", "user", "assistant", "tool")
ASKING_ROLES = ("user", "tool")  # roles of messages that an assistant's turn may answer
_SHAREGPT_NAMES = {
    "user": ("human", "user", "prompter"),
    "assistant": ("gpt", "assistant", "chatgpt", "bot", "model", "function_call"),
    "system": ("system",),
    "developer": ("developer",),
    "tool": ("tool", "observation", "function_response"),
}
_SHAREGPT_ROLES = {name: role for role, names in _SHAREGPT_NAMES.items() for name in names}
_KEPT_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")

Message = Mapping[str, Any]


class BadRecordError(ValueError):
    """A record is not a conversation; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages; or, for plain text, a text and no messages."""

    messages: tuple[Message, ...] = ()
    text: str | None = None
    category: str

    @property
    def topic(self) -> str:
        """The first user turn, or a plain text itself: conversations with the same topic count as duplicates."""
        asked = (message["content"] for message in self.messages if message["role"] == "user")
        return " ".join((self.text if self.text is not None else next(asked, "")).split())

    @property
    def is_answered(self) -> bool:
        """Whether an assistant turn answers a user or tool message."""
        roles = [message["role"] for message in self.messages]
        return any(role == "assistant" and set(roles[:i]) & set(ASKING_ROLES) for i, role in enumerate(roles))

    def question(self) -> tuple[Message, ...]:
        """Return the messages up to the last one that asks for an answer; empty where none does."""
        asking = [i for i, message in enumerate(self.messages) if message["role"] in ASKING_ROLES]
        return self.messages[: asking[-1] + 1] if asking else ()


def parse(record: Any, default_category: str) -> Conversation:
    """Return the conversation that a record holds, or raise BadRecordError."""
    if not isinstance(record, Mapping):
        raise BadRecordError(f"found {type(record).__name__}, expected an object")
    category = next((record[k] for k in ("category", "source") if isinstance(record.get(k), str)), default_category)
    if "messages" in record:
        messages = _messages("messages", record["messages"])
    elif "conversations" in record:
        messages = _messages("conversations", record["conversations"])
    elif "prompt" in record:
        answer = record.get("completion", record.get("response"))
        messages = _side(record["prompt"], "user") + (() if answer is None else _side(answer, "assistant"))
    elif "instruction" in record:
        parts = [record["instruction"], record.get("input") or ""]
        if not all(isinstance(part, str) for part in parts):
            raise BadRecordError("'instruction' and 'input' must be text")
        answer = record.get("output")
        question = "\n\n".join(part for part in parts if part.strip())
        messages = _side(question, "user") + (_side(answer, "assistant") if answer else ())
    elif "text" in record:
        if not isinstance(record["text"], str) or not record["text"].strip():
            raise BadRecordError("'text' is empty or no text")
        return Conversation(text=record["text"], category=category)
    else:
        known = "messages, conversations, prompt, instruction or text"
        raise BadRecordError(f"has keys {sorted(map(str, record))[:8]}, expected one of {known}")
    return Conversation(messages=messages, category=category)


def _side(value: Any, role: str) -> tuple[Message, ...]:
    """The prompt or the completion of a pair: text, or messages."""
    if not isinstance(value, str):
        return _messages("messages", value)
    if not value.strip():
        raise BadRecordError(f"the {role}'s text is empty")
    return ({"role": role, "content": value},)


def _messages(what: str, values: Any) -> tuple[Message, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise BadRecordError(f"{what}: expected a list that is not empty")
    messages = []
    for number, value in enumerate(values):
        try:
            if not isinstance(value, Mapping):
                raise BadRecordError(f"found {type(value).__name__}, expected an object")
            if what == "conversations":
                speaker = value.get("from", value.get("role"))
                if (role := _SHAREGPT_ROLES.get(str(speaker).lower())) is None:
                    raise BadRecordError(f"from {speaker!r}, expected human, gpt, system or tool")
                value = {"role": role, "content": value.get("value", value.get("content"))}  # noqa: PLW2901
            messages.append(_message(value))
        except BadRecordError as error:
            raise BadRecordError(f"message {number}: {error}") from None
    return tuple(messages)


def _message(value: Mapping[str, Any]) -> Message:
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise BadRecordError(f"role {role!r}, expected one of {', '.join(ROLES)}")
    kept = {key: value[key] for key in _KEPT_KEYS if value.get(key) is not None}
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise BadRecordError("has a part that is not text")
        content = "".join(texts)
    if content is None and role == "assistant" and kept:
        content = ""  # a turn that only calls tools
    if not isinstance(content, str):
        raise BadRecordError(f"its content is {type(content).__name__}, expected text")
    return {"role": role, "content": content, **kept}


def split_turns(messages: Sequence[Message], *, keep_answers: bool = False) -> list[tuple[Message, ...]]:
    """Return the new messages before each answer that the target is to write.

    Answers of other models, and results of tools that they called, are left out. With `keep_answers` they stay, and
    the target only answers turns that have no answer. Messages after the last question are left out.
    """
    said = [message for message in messages if keep_answers or message["role"] not in ("assistant", "tool")]
    turns, start = [], 0
    for end, message in enumerate(said, start=1):
        following = said[end]["role"] if end < len(said) else "user"
        if message["role"] in ASKING_ROLES and following not in ("assistant", "tool"):
            turns.append(tuple(said[start:end]))
            start = end
    return turns


def refuse_surrogates(value: Any) -> None:
    """Raise BadRecordError for lone surrogates, which JSON can contain and tokenizers refuse."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRecordError("has characters that are no Unicode text") from None


@dataclass
class Skipped:
    """Counts records that could not be used, by reason, and remembers where the first one is."""

    counts: Counter[str] = field(default_factory=Counter)  # by reason
    first: str | None = None

    def add(self, where: str, kind: str, detail: str = "") -> None:
        self.counts[kind] += 1
        self.first = self.first or f"{where}: {detail or kind}"

    @property
    def total(self) -> int:
        return self.counts.total()


def read_conversations(sources: Iterable[str | Path], skipped: Skipped) -> Iterator[tuple[str, Conversation]]:
    """Yield (where, conversation) from files in order. Records that are not conversations go to `skipped`."""
    for source in sources:
        path = Path(source)
        default = path.name.split(".jsonl")[0]
        for line, record in read_json_lines(path):
            where = f"{path.name}, line {line}"
            try:
                conversation = parse(record, default)
                refuse_surrogates(conversation.messages or conversation.text)
            except BadRecordError as error:
                skipped.add(where, "not a conversation", str(error))
            else:
                yield where, conversation


def refuse_if_empty(used: int, skipped: Skipped, sources: Iterable[str | Path]) -> None:
    """Raise DataError where no record could be used."""
    if used == 0:
        names = ", ".join(Path(source).name for source in sources)
        reason = f"; the first of {skipped.total} skipped is {skipped.first}" if skipped.total else " (no records)"
        raise DataError(f"{names}: nothing to train on{reason}")
