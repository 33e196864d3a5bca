"""What drafters are probed on: prompts that come with the package, or a JSON lines file of conversations.

Besides the built-in ones there are those of `evaluation.workloads`: mt_bench, humaneval, long_context/4k and so on.

A file's records may be

    {"id", "category", "messages": [...]}    user turns only (answered one after another), or a whole conversation
    {"prompt": "..."}                        one user turn
    {"text": "..."}                          plain text to go on from

and whatever else `fledge train` reads. `full_messages`, where there are some, are preferred to `messages`. A
conversation is cut after its last user turn, which is the one that is answered and probed.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from fledge.drift.segments import Conversation, Message
from fledge.drift.texts import builtin_prompts
from fledge.errors import ConfigError, DataError, nearest_name_hint
from fledge.evaluation.conversations import ASKING_ROLES, BadRecordError, parse
from fledge.evaluation.workloads import Prompt, canonical, workload_names
from fledge.evaluation.workloads import load_workload as load_packaged
from fledge.files import read_json_lines

DEFAULT = "mixed"
BUILT_IN = (DEFAULT, "chat", "code", "maths", "docs", "dialogue", "instructions", "multi-turn")  # all, or one category

Answerer = Callable[[list[tuple[Message, ...]]], Sequence[str]]  # conversations -> the target's own answers


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Conversations under a name."""

    name: str
    conversations: tuple[Conversation, ...]

    def with_messages(self, messages: Sequence[Sequence[Message] | None]) -> "Workload":
        """Return the workload with other messages for each conversation; None leaves one as it is."""
        changed = [
            one if several is None else replace(one, messages=tuple(several))
            for one, several in zip(self.conversations, messages, strict=True)
        ]
        return replace(self, conversations=tuple(changed))


def load_workload(source: str | Path, *, sample: int | None = None, seed: int = 0) -> Workload:
    """Return a built-in workload or that of a file; `sample` of its conversations, drawn with `seed`, in its order."""
    name = str(source)
    if name in BUILT_IN:
        conversations = _built_in(name)
    elif Path(source).is_file():
        name = Path(source).name.split(".jsonl")[0]
        conversations = _read(Path(source), name)
    elif canonical(name).partition("/")[0] in workload_names():
        packaged = load_packaged(name)
        name, conversations = packaged.name, [_packaged(prompt) for prompt in packaged.prompts]
    elif Path(source).suffix or "/" in name:
        raise ConfigError(f"workload {name}: no such file")
    else:
        known = {*BUILT_IN, *workload_names()}
        raise ConfigError(f"unknown workload '{name}', and no file has that name.{nearest_name_hint(name, known)}")
    if sample is not None:
        if sample < 1:
            raise ConfigError(f"sample: found {sample}, allowed is an integer of at least 1")
        chosen = sorted(random.Random(seed).sample(range(len(conversations)), min(sample, len(conversations))))
        conversations = [conversations[i] for i in chosen]
    return Workload(name=name, conversations=tuple(conversations))


def has_open_turns(conversation: Conversation) -> bool:
    """Whether an earlier user turn has no answer yet."""
    return _first_open(conversation.messages or ()) is not None


def with_answers(conversations: Sequence[Conversation], answer: Answerer) -> list[Conversation]:
    """Have the target answer the user turns before the last, so that every drafter meets the same history."""
    done = list(conversations)
    while open_ones := [i for i, conversation in enumerate(done) if has_open_turns(conversation)]:
        cuts = [_first_open(done[i].messages or ()) or 0 for i in open_ones]
        answers = answer([tuple(done[i].messages or ())[:cut] for i, cut in zip(open_ones, cuts, strict=True)])
        for i, cut, text in zip(open_ones, cuts, answers, strict=True):
            messages = tuple(done[i].messages or ())
            reply = {"role": "assistant", "content": text}
            done[i] = replace(done[i], messages=(*messages[:cut], reply, *messages[cut:]))
    return done


def _first_open(messages: Sequence[Message]) -> int | None:
    """Where the first missing answer belongs: before a user turn that follows another turn which asks."""
    for i, (earlier, later) in enumerate(pairwise(messages), start=1):
        if earlier["role"] in ASKING_ROLES and later["role"] == "user":
            return i
    return None


def _built_in(name: str) -> list[Conversation]:
    categories = builtin_prompts() if name == DEFAULT else {name: builtin_prompts()[name]}
    return [
        Conversation(id=f"{category}-{number}", category=category, messages=_turns(turns))
        for category, prompts in categories.items()
        for number, turns in enumerate(prompts, start=1)
    ]


def _packaged(prompt: Prompt) -> Conversation:
    return Conversation(id=prompt.id, category=prompt.category, messages=prompt.messages)


def _turns(turns: Sequence[str]) -> tuple[Message, ...]:
    """User and assistant turns in alternation, the user's first."""
    return tuple({"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns))


def _read(path: Path, name: str) -> list[Conversation]:
    lines: dict[str, int] = {}  # by id
    conversations = []
    for number, record in read_json_lines(path):
        try:
            conversation = _conversation(record, name, number)
        except BadRecordError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
        if conversation.id in lines:
            raise DataError(
                f"{path}, line {number}: id '{conversation.id}' is also that of line {lines[conversation.id]}"
            )
        lines[conversation.id] = number
        conversations.append(conversation)
    if not conversations:
        raise DataError(f"{path}: no conversations in it")
    return conversations


def _conversation(record: Any, name: str, number: int) -> Conversation:
    if isinstance(record, Mapping) and "full_messages" in record:
        record = {**record, "messages": record["full_messages"]}
    parsed = parse(record, name)
    given = record.get("id")
    if given is not None and not isinstance(given, str | int):
        raise BadRecordError(f"'id' is {type(given).__name__}, expected text")
    prompt_id = f"{name}-{number}" if given is None else str(given)
    if parsed.text is not None:
        return Conversation(id=prompt_id, category=parsed.category, text=parsed.text)
    messages = parsed.question()
    if not messages:
        raise BadRecordError("no user turn to answer")
    return Conversation(id=prompt_id, category=parsed.category, messages=messages)
