"""Dialogues in which the target writes the answers, turn by turn, many side by side.

The target's own answers are the history of its later turns: nobody else's would be a history that it meets in use.
This is the one loop for that. Training's `regenerate` and acceptance measurements have every turn answered; drift only
the turns before the last (`split_turns` with `keep_answers`), and the history is then `dialogue.history`.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fledge.decoding.params import SamplingParams
from fledge.engine.llm import LLM
from fledge.engine.outputs import RequestOutput
from fledge.errors import PromptError
from fledge.evaluation.conversations import Message
from fledge.records import Record

TOO_LONG, REFUSED = "too long", "refused by the template"


@dataclass(frozen=True, kw_only=True)
class AnsweredTurn(Record):
    """One prompt as the target read it, and its answer."""

    prompt_token_ids: tuple[int, ...]
    answer_token_ids: tuple[int, ...]  # with the stop token, where it stopped
    finish_reason: str | None
    seed: int


@dataclass(kw_only=True)
class Dialogue:
    """A conversation to be answered. `answer_dialogues` fills in what is below `temperature`."""

    number: int  # of the prompt; with `sample` and the turn, it decides the seed
    sample: int = 0  # several answerings of one prompt differ in it
    turns: Sequence[Sequence[Message]]  # what is said before each answer
    first_ids: Sequence[int] | None = None  # the first prompt, where it is known; else the chat template makes it
    temperature: float | None = None  # in place of the one that all are answered with
    history: list[Message] = field(default_factory=list)  # all that was said and answered
    answers: list[AnsweredTurn] = field(default_factory=list)
    dropped: str | None = None  # why later turns have no answer: TOO_LONG or REFUSED

    @property
    def is_open(self) -> bool:
        return self.dropped is None and len(self.answers) < len(self.turns)

    @property
    def next_messages(self) -> list[Message]:
        """The conversation up to the next answer."""
        return [*self.history, *self.turns[len(self.answers)]]


class Answerer(Protocol):
    """As much of an `LLM` as is needed where prompts are token ids."""

    max_model_len: int

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[SamplingParams],
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]: ...


def answer_dialogues(
    llm: LLM | Answerer,
    dialogues: Sequence[Dialogue],
    params: SamplingParams,
    *,
    encode: Callable[[Dialogue], Sequence[int]] | None = None,
    longest: int | None = None,
    least_room: int = 1,
    advance: Callable[[int], None] = lambda _turns: None,
) -> None:
    """Answer all turns of all dialogues, the next turns of all of them together.

    An answer has `params` with a seed of its own, which follows from `params.seed` and from what is asked
    (`answer_seed`), never from the batch. `encode` gives the ids of a dialogue's `next_messages`; if left out, the
    `encode_chat` of an `LLM` does. Where it raises PromptError, or where a prompt leaves fewer than `least_room` of the
    `longest` tokens, the dialogue is dropped with the reason. `advance` is told of turns that are answered or given up.
    """
    longest = min(longest or llm.max_model_len, llm.max_model_len)
    chat: Any = llm  # one that has a tokenizer, where `encode` is left out
    encode = encode or (lambda dialogue: chat.encode_chat(dialogue.next_messages))
    while waiting := [dialogue for dialogue in dialogues if dialogue.is_open]:
        asked: list[tuple[Dialogue, list[int], SamplingParams]] = []
        for dialogue in waiting:
            turn = len(dialogue.answers)
            known = dialogue.first_ids if turn == 0 else None
            try:
                ids = list(encode(dialogue) if known is None else known)
                dialogue.dropped = TOO_LONG if len(ids) + least_room > longest else None
            except PromptError:
                dialogue.dropped = REFUSED
            if dialogue.dropped is not None:
                advance(len(dialogue.turns) - turn)
                continue
            room = longest - len(ids)
            seed = answer_seed(params.seed or 0, dialogue.number, dialogue.sample, turn)
            warmth = params.temperature if dialogue.temperature is None else dialogue.temperature
            most = min(params.max_tokens or room, room)
            asked.append((dialogue, ids, replace(params, max_tokens=most, seed=seed, temperature=warmth)))
        if not asked:
            break
        outputs = llm.generate([ids for _, ids, _ in asked], [own for *_, own in asked], progress=steps(advance))
        for (dialogue, ids, own), output in zip(asked, outputs, strict=True):
            (answer,) = output.outputs
            dialogue.history = [*dialogue.next_messages, {"role": "assistant", "content": answer.text}]
            dialogue.answers.append(
                AnsweredTurn(
                    prompt_token_ids=tuple(ids),
                    answer_token_ids=tuple(answer.token_ids),
                    finish_reason=answer.finish_reason,
                    seed=own.seed or 0,
                )
            )


def steps(advance: Callable[[int], None]) -> Callable[[int, int], None]:
    """`advance`, which is told how many more are done, as a progress that is told how many are."""
    before = 0

    def progress(done: int, _total: int) -> None:
        nonlocal before
        advance(done - before)
        before = done

    return progress


def answer_seed(seed: int, prompt: int, sample: int, turn: int) -> int:
    """63 bits that follow from what is asked and not from what else is in the batch."""
    # The words are those of the first user of this function: regenerated data stays the same from version to version.
    text = f"fledge regenerate {seed} {prompt} {sample} {turn}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
