"""Renders conversations with a chat template: the token ids that serving would see, and a mask of the answers.

An assistant turn i is split where serving splits it:

    prompt   template(messages[:i], add_generation_prompt=True)      what the target reads; never supervised
    answer   what template(messages[:i + 1]) adds to it, through the first end-of-sequence token

So the generation prompt (a role header, the opening of a thinking block) is not supervised, the end token is, and the
line break that a template writes after it is not.

Turns share one sequence only if the ids of the later prompt begin with the ids of the earlier prompt and answer. If not
(the template rewrites history, or the tokenizer merges across the boundary), the earlier turn becomes an example of its
own. Plain text has no prompt: all of it after the first token counts as answer.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from fledge.errors import PromptError
from fledge.evaluation.conversations import ASKING_ROLES, Message

# Placeholder for a turn's content, to find out what a template writes before and after it.
_STAND_IN = "\u2063stand-in\u2063"
_IDS_ONLY = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The tokens of a sequence, and a mask of those that are answers."""

    tokens: list[int]
    answer: list[bool]

    def cut(self, length: int) -> "Rendered":
        return Rendered(tokens=self.tokens[:length], answer=self.answer[:length])


def chain(turns: Iterable[tuple[list[int], list[int]]]) -> list[Rendered]:
    """Join turns (ids of a prompt and its answer) into as few sequences as their ids allow (see above)."""
    done: list[Rendered] = []
    for prompt, said in turns:
        last = done[-1] if done and prompt[: len(done[-1].tokens)] == done[-1].tokens else None
        before = [] if last is None else done.pop().answer
        answer = before + [False] * (len(prompt) - len(before)) + [True] * len(said)
        done.append(Rendered(tokens=prompt + said, answer=answer))
    return done


class Renderer:
    """A tokenizer with its own chat template, and further `templates` by index. `stop_ids` end an answer."""

    def __init__(self, tokenizer: Any, stop_ids: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._special_ids = frozenset(int(token) for token in tokenizer.all_special_ids)
        self.templates: list[str] = []

    def prompt_text(
        self, messages: Sequence[Message], template: int | None = None, *, add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt as it is served. Raises PromptError."""
        chosen = None if template is None else self.templates[template]
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), chat_template=chosen, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise PromptError(f"the chat template refuses it: {' '.join(str(error).split())}") from None
        return str(text)

    def turn_texts(self, messages: Sequence[Message], template: int | None = None) -> list[tuple[str, str]]:
        """Return prompt and answer of every assistant turn that follows a question. Raises PromptError."""
        texts = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and any(m["role"] in ASKING_ROLES for m in messages[:i]):
                prompt = self.prompt_text(messages[:i], template)
                full = self.prompt_text(messages[: i + 1], template, add_generation_prompt=False)
                apart = not full.startswith(prompt)
                answer = self._answer_apart(messages[: i + 1], template, prompt, full) if apart else full[len(prompt) :]
                texts.append((prompt, answer))
        return texts

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """Tokenise rendered text, as `encode_chat` does."""
        if not texts:
            return []
        made = self.tokenizer(list(texts), add_special_tokens=add_special_tokens, **_IDS_ONLY)
        ids: list[list[int]] = made["input_ids"]
        return ids

    def conversations(self, several: Sequence[Sequence[tuple[str, str]]]) -> list[list[Rendered]]:
        """Tokenise the turns (prompt and answer) of several conversations together."""
        texts = [text for turns in several for p, a in turns for text in ((p, p + a) if a else (p,))]
        ids = iter(self.encode(texts))
        return [chain([self._turn(a, next(ids), next(ids) if a else []) for _, a in turns]) for turns in several]

    def plain_texts(self, texts: Sequence[str]) -> list[Rendered]:
        """Tokenise plain text as the engine does a text prompt."""
        several = self.encode(texts, add_special_tokens=True)
        return [Rendered(tokens=ids, answer=[i > 0 for i in range(len(ids))]) for ids in several]

    def _turn(self, answer: str, prompt: list[int], joint: list[int]) -> tuple[list[int], list[int]]:
        """Return the ids of a prompt, and those of its answer up to and including the first end token."""
        ids = joint[len(prompt) :] if joint[: len(prompt)] == prompt else self._encode_apart(answer) if answer else []
        return prompt, self._through_stop(ids)

    def _through_stop(self, answer: list[int]) -> list[int]:
        for count, token in enumerate(answer, start=1):
            if token in self._stop_ids:
                return answer[:count]
        # The template ends turns with a special token that is no stop token: cut white space after it.
        specials = [i for i, token in enumerate(answer) if token in self._special_ids]
        if specials and not self.tokenizer.decode(answer[specials[-1] + 1 :]).strip():
            return answer[: specials[-1] + 1]
        return answer

    def _encode_apart(self, answer: str) -> list[int]:
        """Tokenise an answer separately, if the tokenizer would merge its start with the end of the prompt."""
        # After a special token, because some tokenizers put a space before the first word of a text.
        end = self.tokenizer.eos_token
        (ids,) = self.encode([f"{end or ''}{answer}"])
        after_end = end is not None and ids[:1] == [self.tokenizer.eos_token_id]
        return ids[1:] if after_end else self.encode([answer])[0]

    def _answer_apart(self, messages: Sequence[Message], template: int | None, prompt: str, full: str) -> str:
        """Return the answer of the last turn, if the rendered conversation does not begin with the served prompt."""
        stand_in = [*messages[:-1], {"role": "assistant", "content": _STAND_IN}]
        whole = self.prompt_text(stand_in, template, add_generation_prompt=False)
        before, found, after = whole.partition(_STAND_IN)
        if not found:
            raise PromptError("the template does not write the assistant's content")
        content = str(messages[-1]["content"]).lstrip()
        # Text that the prompt ends with and that a finished turn does not have, such as an opened thinking block.
        opener = prompt[len(os.path.commonprefix([before, prompt])) :].strip()  # noqa: RUF071 - of texts, not paths
        if opener and content.startswith(opener):
            return content[len(opener) :].lstrip("\n") + after
        if not full.startswith(before):
            raise PromptError("the template writes an assistant's turn in a way that cannot be split")
        return full[len(before) :]
