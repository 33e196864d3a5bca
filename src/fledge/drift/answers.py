"""Perturbed prompts and the target's answers to them, cached because they do not depend on the drafter.

Greedy or with a seed, the target gives the same answer whichever drafter is used. So each answer is generated once,
for all drafters and for all perturbations that only change drafting. The cache is in memory and in files, for other
processes and for a run that is resumed:

    DIRECTORY/NAME-KEY.json     one perturbation; the key is a digest of everything that the answers depend on

A file is written atomically and contains a digest of its content; a damaged file is made again.
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
    """The target's answer to a prompt."""

    token_ids: tuple[int, ...]
    beyond: tuple[int, ...] = ()  # tokens that it would have generated next, if they are known


@dataclass(frozen=True, kw_only=True)
class AnsweredPrompts:
    """A workload under a perturbation: each prompt with token ids and segments, its answer, and prompts left out."""

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
class AnswerCache:
    """Answers by a digest of what they depend on. `directory` None: for this process only."""

    directory: Path | None = None
    _known: dict[str, AnsweredPrompts] = field(default_factory=dict)

    def get(self, name: str, depends_on: Sequence[Any], make: Callable[[], AnsweredPrompts]) -> AnsweredPrompts:
        """Return the cached answers, or make them. Waits while another process makes the same ones."""
        key = digest(depends_on)
        if key not in self._known:
            self._known[key] = make() if self.directory is None else self._from_disk(name, key, make)
        return self._known[key]

    def _from_disk(self, name: str, key: str, make: Callable[[], AnsweredPrompts]) -> AnsweredPrompts:
        assert self.directory is not None
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{re.sub(r'[^A-Za-z0-9._+-]+', '-', name)}-{key}.json"
        with _locked(path.with_suffix(".lock")):
            saved = read_json(path)
            if saved is None or (saved.get("key"), saved.get("digest")) != (key, digest(saved.get("answered"))):
                answered = make().to_dict()
                saved = {"key": key, "digest": digest(answered), "answered": answered}
                write_text(path, json_line(saved))
        return AnsweredPrompts.from_dict(saved["answered"])


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Hold a file lock; wait while another process holds it. The system releases it when its process ends."""
    with lock.open("a", encoding="utf-8") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield
