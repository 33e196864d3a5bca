"""What a probe needs that no drafter has a part in: prompts as they are after a perturbation, and the target's answers.

Greedy or with a seed, an answer is the target's whichever drafter helps it. So it is made once, for all drafters and
for perturbations of drafting too, and kept: in memory, and in files for other processes and for a run that goes on.

    DIRECTORY/NAME-KEY.json     of one perturbation; the key is what it depends on

A file is written in full or not at all and has a digest of what it says; one that is damaged is made anew.
"""

import fcntl
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fledge.drift.prompts import ProbePrompt, Segment
from fledge.files import digest, json_line, read_json, write_text


class Answer(NamedTuple):
    """What the target says to a prompt."""

    token_ids: tuple[int, ...]
    beyond: tuple[int, ...] = ()  # what it would have said next, had it not been stopped, where that is known


@dataclass(frozen=True, kw_only=True)
class AnsweredPrompts:
    """A workload under a perturbation: token ids and segments of each prompt, its answer, and what was left out."""

    prompts: tuple[ProbePrompt, ...]
    answers: tuple[Answer, ...]
    left_out: dict[str, str] = field(default_factory=dict)  # prompt id -> reason
    skip: str | None = None  # why there is nothing to run

    def to_dict(self) -> dict[str, Any]:
        prompts = [[one.id, one.category, one.token_ids, [int(kind) for kind in one.segments]] for one in self.prompts]
        return {"prompts": prompts, "answers": self.answers, "left_out": self.left_out, "skip": self.skip}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "AnsweredPrompts":
        prompts = (
            ProbePrompt(id=name, category=category, token_ids=tuple(ids), segments=tuple(map(Segment, kinds)))
            for name, category, ids, kinds in values["prompts"]
        )
        answers = tuple(Answer(*map(tuple, several)) for several in values["answers"])
        return cls(prompts=tuple(prompts), answers=answers, left_out=values["left_out"], skip=values["skip"])


@dataclass
class KeptAnswers:
    """Answers by what they depend on. `directory` None: for this process alone."""

    directory: Path | None = None
    _known: dict[str, AnsweredPrompts] = field(default_factory=dict)

    def get(self, name: str, depends_on: Sequence[Any], make: Callable[[], AnsweredPrompts]) -> AnsweredPrompts:
        """Return what is kept, or make it; what another process is making is waited for."""
        key = digest(depends_on)
        if key not in self._known:
            self._known[key] = make() if self.directory is None else self._from_disk(name, key, make)
        return self._known[key]

    def _from_disk(self, name: str, key: str, make: Callable[[], AnsweredPrompts]) -> AnsweredPrompts:
        assert self.directory is not None
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{re.sub(r'[^A-Za-z0-9._+-]+', '-', name)}-{key}.json"
        with _alone(path.with_suffix(".lock")):
            saved = read_json(path)
            if saved is None or (saved.get("key"), saved.get("digest")) != (key, digest(saved.get("answered"))):
                answered = make().to_dict()
                saved = {"key": key, "digest": digest(answered), "answered": answered}
                write_text(path, json_line(saved))
        return AnsweredPrompts.from_dict(saved["answered"])


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait for other processes that are in here. The lock goes with its process, however that ends."""
    with lock.open("a", encoding="utf-8") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield
