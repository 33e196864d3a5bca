"""Multi-turn dialogues in which the target writes the answers, many side by side.

The target's own answers are the history of its later turns, as when it is used; answers of other models would not be.
Training's `regenerate` and acceptance measurements have every turn answered, drift only the turns before the last
(`split_turns` with `keep_answers`).
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
    """One prompt as token ids, and the target's answer."""

    prompt_token_ids: tuple[int, ...]
    answer_token_ids: tuple[int, ...]  # with the stop token, if there was one
    finish_reason: str | None
    seed: int


@dataclass(kw_only=True)
class Dialogue:
    """A conversation to be answered. `answer_dialogues` fills in the fields below `temperature`."""

    number: int  # of the prompt; with `sample` and the turn, it decides the seed
    sample: int = 0  # distinguishes several samples of one prompt
    turns: Sequence[Sequence[Message]]  # the new messages before each answer
    first_ids: Sequence[int] | None = None  # the first prompt, if it is known; else the chat template makes it
    temperature: float | None = None  # overrides the sampling parameters
    history: list[Message] = field(default_factory=list)  # all messages so far, with the answers
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
    """The part of an `LLM` that is needed if prompts are token ids."""

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
    """Answer all turns of all dialogues, in batches of the next turn of each.

    Every answer is sampled with `params` and its own seed, which depends on `params.seed` and on the question
    (`answer_seed`), never on the batch. `encode` returns the ids of a dialogue's `next_messages`; the default is the
    `encode_chat` of an `LLM`. If it raises PromptError, or if a prompt leaves room for fewer than `least_room` of the
    `longest` tokens, the dialogue is dropped with the reason. `advance` is called with the number of turns that were
    answered or dropped.
    """
    longest = min(longest or llm.max_model_len, llm.max_model_len)
    chat: Any = llm  # without `encode` it must be an `LLM`, which has a tokenizer
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
            temperature = params.temperature if dialogue.temperature is None else dialogue.temperature
            most = min(params.max_tokens or room, room)
            asked.append((dialogue, ids, replace(params, max_tokens=most, seed=seed, temperature=temperature)))
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
    """Make a progress callback (done so far, total) of `advance` (newly done)."""
    before = 0

    def progress(done: int, _total: int) -> None:
        nonlocal before
        advance(done - before)
        before = done

    return progress


def answer_seed(seed: int, prompt: int, sample: int, turn: int) -> int:
    """Return a 63-bit seed that depends on the question and not on the batch."""
    # The text must not change, so that regenerated data stays the same from version to version.
    text = f"fledge regenerate {seed} {prompt} {sample} {turn}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
