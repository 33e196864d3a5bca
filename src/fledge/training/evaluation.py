"""Acceptance length through the engine, and whether the text stays the target's own.

The target first answers every user turn by itself, and its answers are the history of the turns after them. Each turn
is then a prompt of its own, the same one for every drafter and depth, and the target's answer to it is what a drafter
must not change.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.llm import LLM
from fledge.engine.outputs import RequestOutput
from fledge.evaluation.conversations import ASKING_ROLES, Message, Skipped, read_conversations
from fledge.files import read_json_lines
from fledge.training.recipe import Recipe

# In float32 two ways to compute the same logits differ by about 1e-5; a choice closer than this may fall either way.
TIE = 1e-3
MAX_TEXT_PROMPT = 64  # tokens of a plain text that are given; the target goes on from there

Advance = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Question:
    """User turns to answer one after another, or where there are none a text or ids to go on from."""

    source: str
    category: str
    messages: tuple[Message, ...] = ()  # without answers, which the target writes itself
    text: str | None = None
    prompt: tuple[int, ...] = ()

    @property
    def turns(self) -> int:
        """How many answers it takes."""
        asking = sum(message["role"] in ASKING_ROLES for message in self.messages)
        return asking or int(bool(self.text or self.prompt))


def read_questions(path: Path, source: str, skipped: Skipped) -> list[Question]:
    """Return what a file of conversations asks, in order."""
    read = (conversation for _, conversation in read_conversations([path], skipped))
    questions = [
        Question(source=source, category=one.category, messages=_without_answers(one.messages), text=one.text)
        for one in read
    ]
    return [question for question in questions if question.turns]


def read_held_out(path: Path, source: str) -> list[Question]:
    """Return the prompts that `prepare` kept from training."""
    return [
        Question(
            source=source,
            category=record["category"],
            messages=_without_answers(record["messages"]),
            prompt=tuple(record["prompt_token_ids"]),
        )
        for _, record in read_json_lines(path)
    ]


def _without_answers(messages: Iterable[Message]) -> tuple[Message, ...]:
    return tuple(message for message in messages if message["role"] != "assistant")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One prompt, and the answer the target gives by itself."""

    source: str
    category: str
    question: int  # its number
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    seed: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Turn":
        return cls(**{**values, "prompt": tuple(values["prompt"]), "answer": tuple(values["answer"])})


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How one drafter did at one depth."""

    depth: int
    groups: Mapping[tuple[str, str], AcceptanceStatistics]  # by (source, category)
    tokens: int
    different: Mapping[int, int]  # turns whose tokens are not the target's own -> the first token that differs

    @property
    def total(self) -> AcceptanceStatistics:
        return AcceptanceStatistics.merge(self.groups.values())

    def by_source(self) -> dict[str, AcceptanceStatistics]:
        return _merged((source, statistics) for (source, _), statistics in self.groups.items())

    def by_category(self) -> dict[str, AcceptanceStatistics]:
        """Of several sources, each has categories of its own."""
        several = len({source for source, _ in self.groups}) > 1
        return _merged((f"{s}/{c}" if several else c, statistics) for (s, c), statistics in self.groups.items())

    def to_dict(self) -> dict[str, Any]:
        groups = [
            [source, category, [[*cell, rounds] for cell, rounds in sorted(statistics.tally.items())]]
            for (source, category), statistics in self.groups.items()
        ]
        return {"depth": self.depth, "groups": groups, "tokens": self.tokens, "different": [*self.different.items()]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Measurement":
        groups = {
            (source, category): AcceptanceStatistics(tally=Counter({(d, a): rounds for d, a, rounds in tally}))
            for source, category, tally in values["groups"]
        }
        return cls(depth=values["depth"], groups=groups, tokens=values["tokens"], different=dict(values["different"]))


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Return `count` items evenly over the whole list: files are often sorted by subject."""
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def open_llm(recipe: Recipe, drafter: Path | None = None, depth: int = 0) -> LLM:
    """Load the target, with a drafter or without."""
    speculation = None if drafter is None else {"model": str(drafter), "num_speculative_tokens": depth}
    return LLM(
        recipe.target.path,
        speculative_config=speculation,
        dtype=recipe.target.dtype,
        device=recipe.device,
        max_num_seqs=recipe.eval.max_num_seqs,
    )


def release() -> None:
    """Give back the memory of an `LLM` that was deleted."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def answer_questions(
    llm: LLM,
    questions: Sequence[Question],
    recipe: Recipe,
    advance: Advance = lambda *_, **__: None,
    *,
    first_seed: int = 0,
) -> tuple[list[Turn], int]:
    """Let the target answer every turn, all conversations side by side. Return the turns, and how many did not fit.

    Turns have the seeds `first_seed` and on.
    """
    waiting = {number: _Dialogue(question, llm) for number, question in enumerate(questions)}
    turns: list[Turn] = []
    too_long = 0
    while waiting:
        prompts = {number: dialogue.next_prompt() for number, dialogue in waiting.items()}
        fitting = {n: ids for n, ids in prompts.items() if ids is not None and len(ids) + 1 < llm.max_model_len}
        too_long += sum(ids is not None and n not in fitting for n, ids in prompts.items())
        waiting = {number: waiting[number] for number in fitting}
        seeds = range(first_seed + len(turns), first_seed + len(turns) + len(fitting))
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in fitting.values()],
            [sampling(recipe, seed) for seed in seeds],
            progress=_one_by_one(advance),
        )
        for (number, ids), seed, output in zip(fitting.items(), seeds, outputs, strict=True):
            (completion,) = output.outputs
            waiting[number].take(completion.text)
            question = questions[number]
            turns.append(
                Turn(
                    source=question.source,
                    category=question.category,
                    question=number,
                    prompt=tuple(ids),
                    answer=completion.token_ids,
                    seed=seed,
                )
            )
    return sorted(turns, key=lambda turn: turn.question), too_long


class _Dialogue:
    """A question while it is being answered."""

    def __init__(self, question: Question, llm: LLM) -> None:
        self.llm = llm
        self.rest = list(question.messages)
        self.history: list[Message] = []
        self.opening = () if question.messages else question.prompt or self._opening(question.text or "")

    def next_prompt(self) -> list[int] | None:
        """Return the ids of the next prompt; None when all is answered."""
        if self.opening:
            ids, self.opening = list(self.opening), ()
            return ids
        while self.rest:
            self.history.append(self.rest.pop(0))
            if self.history[-1]["role"] in ASKING_ROLES:
                return self.llm.encode_chat(self.history)
        return None

    def _opening(self, text: str) -> tuple[int, ...]:
        assert self.llm.tokenizer is not None
        ids: list[int] = self.llm.tokenizer.encode(text)
        return tuple(ids[: max(1, min(MAX_TEXT_PROMPT, len(ids) // 2))])

    def take(self, answer: str) -> None:
        self.history.append({"role": "assistant", "content": answer})


def answer_turns(
    llm: LLM, turns: Sequence[Turn], recipe: Recipe, advance: Advance = lambda *_, **__: None
) -> list[RequestOutput]:
    """Answer every turn with `llm`'s drafter, each as if it were alone."""
    prompts = [{"prompt_token_ids": list(turn.prompt)} for turn in turns]
    return llm.generate(prompts, [sampling(recipe, turn.seed) for turn in turns], progress=_one_by_one(advance))


def _one_by_one(advance: Advance) -> Callable[[int, int], None]:
    """A progress that is told how many are finished, as one that is told how many more."""
    done = 0

    def report(finished: int, _all: int) -> None:
        nonlocal done
        advance(finished - done)
        done = finished

    return report


def measure(
    llm: LLM, turns: Sequence[Turn], recipe: Recipe, depth: int, advance: Advance = lambda *_, **__: None
) -> Measurement:
    """Answer every turn with `llm`'s drafter, and count."""
    outputs = answer_turns(llm, turns, recipe, advance)
    answers = [output.outputs[0].token_ids for output in outputs]
    groups: dict[tuple[str, str], list[AcceptanceStatistics]] = {}
    for turn, output in zip(turns, outputs, strict=True):
        groups.setdefault((turn.source, turn.category), []).append(output.metrics.acceptance)
    return Measurement(
        depth=depth,
        groups={group: AcceptanceStatistics.merge(parts) for group, parts in groups.items()},
        tokens=sum(map(len, answers)),
        different={
            number: first_difference(answer, turn.answer)
            for number, (turn, answer) in enumerate(zip(turns, answers, strict=True))
            if tuple(answer) != turn.answer
        },
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the first place at which two sequences differ, which may be the end of the shorter one."""
    places = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(places, min(len(one), len(other)))


def clear_differences(
    llm: LLM, turns: Sequence[Turn], different: Mapping[int, int], recipe: Recipe, *, tie: float | None = None
) -> list[int]:
    """Return the turns of `different` at whose first differing token the target's choice was clear.

    `llm` is the target alone. Where that token was a tie (log-probabilities within `tie`, or `TIE`), arithmetic
    decides, and neither answer is wrong.
    """
    prompts = [
        {"prompt_token_ids": [*turns[number].prompt, *turns[number].answer[:place]]}
        for number, place in different.items()
    ]
    parameters = [replace(sampling(recipe, turns[number].seed), logprobs=2, max_tokens=1) for number in different]
    clear = []
    for number, output in zip(different, llm.generate(prompts, parameters), strict=True):
        (scores,) = output.outputs[0].logprobs or ()
        (_, best), (_, second) = scores.top[:2]
        if best - second > (TIE if tie is None else tie):
            clear.append(number)
    return clear


def sampling(recipe: Recipe, seed: int) -> SamplingParams:
    return SamplingParams(temperature=recipe.eval.temperature, max_tokens=recipe.eval.max_tokens, seed=seed)


def _merged(parts: Iterable[tuple[str, AcceptanceStatistics]]) -> dict[str, AcceptanceStatistics]:
    merged: dict[str, list[AcceptanceStatistics]] = {}
    for name, statistics in parts:
        merged.setdefault(name, []).append(statistics)
    return {name: AcceptanceStatistics.merge(group) for name, group in merged.items()}
