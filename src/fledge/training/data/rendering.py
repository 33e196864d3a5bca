"""Conversations through a chat template: the very ids that serving would see, and an exact mask of the answers.

An assistant turn i is split where serving splits it:

    prompt   template(messages[:i], add_generation_prompt=True)      what the target reads; never supervised
    answer   what template(messages[:i + 1]) adds to it, through the first end-of-sequence token

So whatever the generation prompt contains (a role header, the opening of a thinking block) is not supervised, the end
token is, and the line break that a template writes after it is not.

Turns share one sequence only where the ids of the later prompt begin with the ids of the earlier prompt and answer.
Where they do not, because the template rewrites history (it drops earlier thinking, or moves the system prompt) or
because the tokenizer merges across the boundary, the earlier turn becomes an example of its own: no mask is ever moved
onto tokens it was not made for.

Plain text has no prompt: all of it after the first token counts as answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from fledge.evaluation.conversations import ASKING_ROLES, Message

# Stands for a turn's content when a template is asked what it writes before and after it.
_STAND_IN = "\u2063stand-in\u2063"
_IDS_ONLY = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}


class TemplateRefusedError(ValueError):
    """A chat template does not take a conversation; the message says why."""


@dataclass(frozen=True, kw_only=True)
class TurnTokens:
    """One answer and what it answers, in ids."""

    prompt: Sequence[int]
    answer: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """One sequence and which of its tokens are answers."""

    tokens: list[int]
    answer: list[bool]

    def cut(self, length: int) -> "Rendered":
        return Rendered(tokens=self.tokens[:length], answer=self.answer[:length])


@dataclass(frozen=True, kw_only=True)
class TurnText:
    """The text of a turn, before it is tokenised."""

    prompt: str
    answer: str


def chain(turns: Iterable[TurnTokens]) -> list[Rendered]:
    """Join the turns of one conversation into as few sequences as their ids allow (see the module's text)."""
    done: list[Rendered] = []
    tokens: list[int] = []
    answer: list[bool] = []
    for turn in turns:
        prompt = list(turn.prompt)
        if tokens and prompt[: len(tokens)] != tokens:
            done.append(Rendered(tokens=tokens, answer=answer))
            answer = []
        answer = answer + [False] * (len(prompt) - len(answer)) + [True] * len(turn.answer)
        tokens = prompt + list(turn.answer)
    return [*done, Rendered(tokens=tokens, answer=answer)] if tokens else done


class Renderer:
    """A tokenizer with its own chat template and, by number, further ones. `stop_ids` end an answer."""

    def __init__(self, tokenizer: Any, stop_ids: Iterable[int], templates: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._special_ids = frozenset(int(token) for token in tokenizer.all_special_ids)
        self._templates = tuple(templates)

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    def prompt_text(self, messages: Sequence[Message], template: int | None = None) -> str:
        """Return the prompt as it is served. Raises TemplateRefusedError."""
        return self._render(messages, template, add_generation_prompt=True)

    def turn_texts(self, messages: Sequence[Message], template: int | None = None) -> list[TurnText]:
        """Return prompt and answer of every assistant turn that answers something. Raises TemplateRefusedError."""
        texts = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and any(m["role"] in ASKING_ROLES for m in messages[:i]):
                prompt = self.prompt_text(messages[:i], template)
                full = self._render(messages[: i + 1], template)
                if full.startswith(prompt):
                    answer = full[len(prompt) :]
                else:
                    answer = self._answer_apart(messages[: i + 1], template, prompt, full)
                texts.append(TurnText(prompt=prompt, answer=answer))
        return texts

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise rendered text, as `encode_chat` does."""
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False, **_IDS_ONLY)["input_ids"]
        return ids

    def conversations(self, several: Sequence[Sequence[TurnText]]) -> list[list[Rendered]]:
        """Tokenise the turns of several conversations together."""
        flat = [text for texts in several for text in texts]
        ids = self.encode([t for text in flat for t in (text.prompt, text.prompt + text.answer)])
        turns = iter(
            self._turn(text, prompt, joint) for text, prompt, joint in zip(flat, ids[::2], ids[1::2], strict=True)
        )
        return [chain([next(turns) for _ in texts]) for texts in several]

    def plain_texts(self, texts: Sequence[str]) -> list[Rendered]:
        """Tokenise plain text as the engine does a text prompt."""
        if not texts:
            return []
        several: list[list[int]] = self.tokenizer(list(texts), **_IDS_ONLY)["input_ids"]
        return [Rendered(tokens=ids, answer=[False, *[True] * (len(ids) - 1)][: len(ids)]) for ids in several]

    def _turn(self, text: TurnText, prompt: list[int], joint: list[int]) -> TurnTokens:
        answer = joint[len(prompt) :] if joint[: len(prompt)] == prompt else self._encode_apart(text.answer)
        return TurnTokens(prompt=prompt, answer=self._through_stop(answer))

    def _through_stop(self, answer: list[int]) -> list[int]:
        for count, token in enumerate(answer, start=1):
            if token in self._stop_ids:
                return answer[:count]
        # The template ends turns with something the target does not stop at: without the white space after it.
        specials = [i for i, token in enumerate(answer) if token in self._special_ids]
        if specials and not self.tokenizer.decode(answer[specials[-1] + 1 :]).strip():
            return answer[: specials[-1] + 1]
        return answer

    def _encode_apart(self, answer: str) -> list[int]:
        """Tokenise an answer by itself, where the tokenizer would merge its start into the prompt's end."""
        # After a special token, so that tokenizers that put a space before a text's first word do not do it here.
        end = self.tokenizer.eos_token
        (ids,) = self.encode([f"{end or ''}{answer}"])
        after_end = end is not None and ids[:1] == [self.tokenizer.eos_token_id]
        return ids[1:] if after_end else self.encode([answer])[0]

    def _answer_apart(self, messages: Sequence[Message], template: int | None, prompt: str, full: str) -> str:
        """Return the answer of the last turn, where what is rendered does not begin with the prompt as served."""
        stand_in = [*messages[:-1], {"role": "assistant", "content": _STAND_IN}]
        before, found, after = self._render(stand_in, template).partition(_STAND_IN)
        if not found:
            raise TemplateRefusedError("the template does not write the assistant's content")
        content = str(messages[-1]["content"]).lstrip()
        opener = prompt[_common(before, prompt) :].strip()  # what the prompt opens and a finished turn does not show
        if opener and content.startswith(opener):
            return content[len(opener) :].lstrip("\n") + after
        if not full.startswith(before):
            raise TemplateRefusedError("the template writes an assistant's turn in a way that cannot be split")
        return full[len(before) :]

    def _render(self, messages: Sequence[Message], template: int | None, *, add_generation_prompt: bool = False) -> str:
        chosen = None if template is None else self._templates[template]
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), chat_template=chosen, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateRefusedError(f"the chat template refuses it: {' '.join(str(error).split())}") from None
        return str(text)


def _common(a: str, b: str) -> int:
    """Length of the common start of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
