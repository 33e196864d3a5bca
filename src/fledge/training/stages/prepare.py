"""prepare: files of conversations become tokens with exact answer masks, or prompts for the target to answer.

Writes into its directory:
    held_out.jsonl   {"messages", "category", "prompt_token_ids"}: prompts for `eval`, which never reach training
    examples/        TokenStore of whole conversations, where the data's own answers are used
    prompts.jsonl    {"prompt_token_ids", "messages", "category", "template"}, where the target is to answer itself
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import stop_ids, tokenizer_digests, vocab_size
from fledge.engine.tokenizer import load_tokenizer
from fledge.errors import DataError, PromptError
from fledge.evaluation.conversations import Conversation, Skipped, read_conversations, refuse_if_empty
from fledge.files import file_digest, write_json_lines
from fledge.progress import Advance
from fledge.training.data.examples import TokenStore, TokenWriter
from fledge.training.data.rendering import Rendered, Renderer
from fledge.training.pipeline import Stage, StageContext
from fledge.training.recipe import DataSection, Recipe

HELD_OUT, PROMPTS, EXAMPLES = "held_out.jsonl", "prompts.jsonl", "examples"
_BATCH = 512  # conversations tokenised together
_NOTHING = {  # to be asked or learnt from, by whether the target is to answer
    True: ("nothing to answer", "no user turn to answer"),
    False: ("no answer", "no assistant turn to learn from; regenerate.enabled would make some"),
}
_COUNTS = ("conversations", "examples", "tokens", "answer_tokens", "held_out_duplicates", "cut", "too_long")


def _settings(recipe: Recipe) -> dict[str, Any]:
    target, data = resolve(recipe.target.path), asdict(recipe.data)
    data["sources"] = [[Path(source).name, file_digest(source)] for source in recipe.data.sources]
    data["templates"] = list(map(file_digest, recipe.data.templates))
    if data["loss_on"] == "answers":
        del data["loss_on"]  # as before there was a choice
    own = {"data": data, "answers_follow": recipe.regenerate.enabled, "vocab_size": vocab_size(target)}
    return {**own, **text_identity(target)}


def text_identity(target: Path) -> dict[str, Any]:
    """JSON values that change with what texts become, and with where answers end."""
    return {"stop_ids": list(stop_ids(target)), **tokenizer_digests(target)}


def open_renderer(recipe: Recipe) -> Renderer:
    """Return the target's tokenizer with the templates of the recipe, tried on a simple question."""
    target = resolve(recipe.target.path)
    tokenizer = load_tokenizer(target)
    if tokenizer is None:
        raise DataError(f"{target}: has no tokenizer, which preparing data needs")
    renderer = Renderer(tokenizer, stop_ids(target, tokenizer))
    for number, path in enumerate(recipe.data.templates):
        try:
            renderer.templates.append(Path(path).read_text(encoding="utf-8"))
            renderer.prompt_text([{"role": "user", "content": "Hello"}], number)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from None
        except PromptError as error:
            raise DataError(f"{path}: cannot render a simple question: {error}") from None
    return renderer


@dataclass(frozen=True, kw_only=True)
class Varied:
    """A conversation as it will be rendered: with the target's own template, or another one by its number."""

    conversation: Conversation
    template: int | None = None
    system: str = "kept"  # or "dropped" or "replaced"


class Preparation:
    """Reads the data twice: to choose what is held out and what is taken, then to write it."""

    def __init__(self, context: StageContext) -> None:
        self.recipe, self.data = context.recipe, context.recipe.data
        self.directory, self.progress = context.directory, context.progress
        self.target, self.renderer = resolve(self.recipe.target.path), open_renderer(self.recipe)
        self.skipped, self.counts, self.categories = Skipped(), Counter[str](), Counter[str]()
        self.held_out: dict[str, dict[str, Any] | None] = {}  # by topic; None where its prompt cannot be used

    def run(self) -> dict[str, Any]:
        eligible, taken = self._choose()
        with self.progress.task("prepare", total=len(eligible)) as advance:
            chosen = self._taken(eligible, taken, advance)
            batches = iter(lambda: list(islice(chosen, _BATCH)), [])
            rendered = (each for batch in batches for each in self.sequences(batch))
            if self.recipe.regenerate.enabled:
                write_json_lines(self.directory / PROMPTS, self._prompts(rendered))
            else:
                with TokenStore.writer(self.directory / EXAMPLES, vocab_size(self.target)) as writer:
                    for varied, sequences in rendered:
                        self.counts["turns_apart"] += len(sequences) - 1
                        self._count(varied, add_examples(writer, sequences, self.data, self.counts))
        refuse_if_empty(self.counts["examples"], self.skipped, self.data.sources)
        held_out = [record for record in self.held_out.values() if record is not None]
        write_json_lines(self.directory / HELD_OUT, held_out)
        if self.skipped.total:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.counts.items()))
            self.progress.say(f"prepare: {self.skipped.total} records left out ({reasons}); first {self.skipped.first}")
        if len(held_out) < self.data.held_out:
            self.progress.say(f"prepare: {len(held_out)} prompts held out, not {self.data.held_out}: data is too small")
        return {
            **{name: self.counts[name] for name in _COUNTS},
            **{name: count for name, count in sorted(self.counts.items()) if name not in _COUNTS and count},
            "categories": dict(sorted(self.categories.items())),
            "skipped": dict(sorted(self.skipped.counts.items())),
            "first_skipped": self.skipped.first,
            "held_out": len(held_out),
            **tokenizer_digests(self.target),
        }

    def usable(self, skipped: Skipped) -> Iterator[tuple[str, Conversation]]:
        """Conversations that have what the recipe needs, the same ones in every pass."""
        answers_follow = self.recipe.regenerate.enabled
        for where, conversation in read_conversations(self.data.sources, skipped):
            if conversation.text is None:
                if self.renderer.tokenizer.chat_template is None:
                    raise DataError(f"{where}: is a conversation, but the target's tokenizer has no chat template")
                if not (conversation.question() if answers_follow else conversation.is_answered):
                    skipped.add(where, *_NOTHING[answers_follow])
                    continue
            yield where, conversation

    def _choose(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Say of each usable conversation (maybe of millions) whether it is not held out, and whether it is taken."""
        topics, chats, texts = array("Q"), dict[int, str](), dict[int, str]()  # topics with their first category
        for _, conversation in self.usable(self.skipped):
            topics.append(hashed(conversation.topic))
            if conversation.text is not None:
                texts.setdefault(topics[-1], conversation.category)
            elif any(message["role"] == "user" for message in conversation.messages):
                chats.setdefault(topics[-1], conversation.category)
        refuse_if_empty(len(topics), self.skipped, self.data.sources)
        held_out = choose_held_out(chats or texts, self.data.held_out, self.data.seed)
        eligible = np.array([topic not in held_out for topic in topics], dtype=np.bool_)
        # At random, so that every file has its part.
        shuffled = np.random.default_rng(self.data.seed).permutation(np.flatnonzero(eligible))
        taken = np.zeros_like(eligible)
        taken[shuffled[: self.data.max_examples]] = True
        return eligible, taken

    def _taken(
        self, eligible: NDArray[np.bool_], taken: NDArray[np.bool_], advance: Advance
    ) -> Iterator[tuple[str, Varied]]:
        """Yield what is taken and where it was read; put aside what is held out."""
        # Bad records were counted by the first pass.
        for number, (where, conversation) in enumerate(self.usable(Skipped())):
            if not eligible[number]:
                self._hold_out(where, conversation)
            elif taken[number]:
                yield where, vary(conversation, number, self.data)
            advance()

    def _hold_out(self, where: str, conversation: Conversation) -> None:
        """Keep the first conversation of each held-out topic as a prompt for `eval`; drop the others of that topic."""
        if conversation.topic in self.held_out:
            self.counts["held_out_duplicates"] += 1
            return
        self.held_out[conversation.topic] = None
        for varied, (prompt,) in self.sequences([(where, Varied(conversation=conversation))], prompts=True):
            if len(prompt.tokens) < self.data.max_length:
                self.held_out[conversation.topic] = _prompt_record(varied, prompt)
            else:
                self.counts["too_long"] += 1

    def sequences(
        self, batch: Sequence[tuple[str, Varied]], *, prompts: bool | None = None
    ) -> Iterator[tuple[Varied, list[Rendered]]]:
        """What each conversation of a batch becomes: its examples, or with `prompts` what the target is asked.

        That is the default where the target is to answer: all up to the answer, or the first half of a plain text. A
        conversation that another template refuses is rendered with the target's own.
        """
        renderer, prompts = self.renderer, self.recipe.regenerate.enabled if prompts is None else prompts
        chats = []
        for where, varied in batch:
            chat = varied.conversation
            for template in () if chat.text is not None else dict.fromkeys((varied.template, None)):
                try:
                    asked = [(renderer.prompt_text(chat.question(), template), "")] if prompts else None
                    turns = asked or renderer.turn_texts(chat.messages, template)
                    chats.append((replace(varied, template=template), turns))
                    break
                except PromptError as error:
                    if template is None:
                        self.skipped.add(where, "refused by the template", str(error))
                    else:
                        self.counts["refused_by_other_template"] += 1
        encoded = renderer.conversations([turns for _, turns in chats])
        yield from zip((varied for varied, _ in chats), encoded, strict=True)
        plain = [(varied, varied.conversation.text) for _, varied in batch if varied.conversation.text is not None]
        texts = renderer.plain_texts([text for _, text in plain])
        for (varied, _), text in zip(plain, texts, strict=True):
            half = max(1, min(len(text.tokens), self.data.max_length) // 2)
            yield varied, [Rendered(tokens=text.tokens[:half], answer=[]) if prompts else text]

    def _prompts(self, rendered: Iterable[tuple[Varied, list[Rendered]]]) -> Iterator[dict[str, Any]]:
        for varied, (prompt,) in rendered:
            size = len(prompt.tokens)
            if not size or size + self.data.min_answer_tokens > self.data.max_length:
                self.counts["too_long" if size else "empty"] += 1
            else:
                self._count(varied, [prompt])
                yield {**_prompt_record(varied, prompt), "template": varied.template}

    def _count(self, varied: Varied, kept: Sequence[Rendered]) -> None:
        if not kept:
            return
        self.counts.update(
            conversations=1,
            examples=len(kept),
            tokens=sum(len(sequence.tokens) for sequence in kept),
            answer_tokens=sum(sum(sequence.answer) for sequence in kept),
            other_template=varied.template is not None,
        )
        self.counts[f"system_{varied.system}"] += varied.system != "kept"
        self.categories[varied.conversation.category] += 1


STAGE = Stage(name="prepare", version=3, depends_on=(), settings=_settings, run=lambda c: Preparation(c).run())


def _prompt_record(varied: Varied, prompt: Rendered) -> dict[str, Any]:
    messages, category = list(varied.conversation.question()), varied.conversation.category
    return {"prompt_token_ids": prompt.tokens, "messages": messages, "category": category}


def add_examples(
    writer: TokenWriter, sequences: Sequence[Rendered], data: DataSection, counts: Counter[str]
) -> list[Rendered]:
    """Store sequences cut to `data.max_length`, unless too little of an answer is left; return those stored.

    With `loss_on: all` every token but the first is marked: the target's distribution is known before any of them.
    """
    kept = []
    for sequence in sequences:
        cut = sequence.cut(data.max_length)
        counts["cut"] += len(cut.tokens) < len(sequence.tokens)
        if sum(cut.answer) < data.min_answer_tokens:
            counts["too_long" if sum(sequence.answer) >= data.min_answer_tokens else "too_short"] += 1
        else:
            if data.loss_on == "all":
                cut = Rendered(tokens=cut.tokens, answer=[i > 0 for i in range(len(cut.tokens))])
            writer.add(cut.tokens, cut.answer)
            kept.append(cut)
    return kept


def hashed(*parts: object) -> int:
    """64 bits that follow from the parts."""
    text = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def choose_held_out(topics: Mapping[int, str], count: int, seed: int) -> set[int]:
    """Return the topics (hashes) to hold out, at most half of them, in proportion to their categories.

    Each category has one first, where `count` allows it; what is left over goes to the largest remainders. The choice
    depends on which topics there are, not on their order.
    """
    members: dict[str, list[int]] = {category: [] for category in sorted(set(topics.values()))}
    for topic in sorted(topics, key=lambda topic: hashed(seed, topic)):
        members[topics[topic]].append(topic)
    count = min(count, len(topics) // 2)
    base = 1 if count >= len(members) else 0
    rest, total = count - base * len(members), len(topics) - base * len(members)
    exact = [(len(group) - base) * rest / max(1, total) for group in members.values()]
    quotas = [int(share) for share in exact]
    for i in sorted(range(len(exact)), key=lambda i: (quotas[i] - exact[i], i))[: rest - sum(quotas)]:
        quotas[i] += 1
    return {topic for group, n in zip(members.values(), quotas, strict=True) for topic in group[: n + base]}


def vary(conversation: Conversation, number: int, section: DataSection) -> Varied:
    """Choose template and system prompt of conversation `number`. Plain text stays as it is."""
    if conversation.text is not None:
        return Varied(conversation=conversation)

    def chance(purpose: str) -> float:
        """A number in [0, 1) that follows from the seed."""
        return (hashed(section.seed, purpose, number) >> 11) / 2**53

    other = chance("template") < section.template_share
    template = int(chance("which template") * len(section.templates)) if other else None
    system, (first, *rest) = "kept", conversation.messages
    if first["role"] in ("system", "developer"):
        if chance("drop system") < section.drop_system_share and rest:
            conversation, system = replace(conversation, messages=tuple(rest)), "dropped"
        elif chance("vary system") < section.vary_system_share:
            prompt = section.system_prompts[int(chance("which system") * len(section.system_prompts))]
            conversation, system = replace(conversation, messages=({**first, "content": prompt}, *rest)), "replaced"
    return Varied(conversation=conversation, template=template, system=system)
