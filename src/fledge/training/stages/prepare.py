"""prepare: files of conversations become tokens with exact answer masks, or prompts for the target to answer.

Writes into its directory:
    held_out.jsonl   {"messages", "category", "prompt_token_ids"}: prompts for `eval`, which never reach training
    examples/        TokenStore of whole conversations, where the data's own answers are used
    prompts.jsonl    {"prompt_token_ids", "messages", "category", "template"}, where the target is to answer itself
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target_files import config_stop_ids, stop_ids, tokenizer_digests, vocab_size
from fledge.engine.tokenizer import load_tokenizer
from fledge.errors import DataError
from fledge.evaluation.conversations import Conversation, Skipped, read_conversations, refuse_if_empty
from fledge.files import atomic_file, file_digest, json_line, write_json_lines
from fledge.progress import Advance
from fledge.training.data.rendering import Rendered, Renderer, TemplateRefusedError
from fledge.training.data.selection import Varied, choose_held_out, choose_sample, hashed, vary
from fledge.training.data.store import TokenStore
from fledge.training.recipe import Recipe
from fledge.training.workspace import Stage, StageContext

HELD_OUT, PROMPTS, EXAMPLES = "held_out.jsonl", "prompts.jsonl", "examples"
_BATCH = 512  # conversations tokenised together
_T = TypeVar("_T")
_Batch = Sequence[tuple[str, Varied]]  # where it was read, and what


def settings(recipe: Recipe) -> dict[str, Any]:
    target = resolve(recipe.target.path)
    data = asdict(recipe.data)
    data["sources"] = [[Path(source).name, _digest_of(source)] for source in recipe.data.sources]
    data["templates"] = [_digest_of(template) for template in recipe.data.templates]
    return {
        "data": data,
        "answers_follow": recipe.regenerate.enabled,
        "vocab_size": vocab_size(target),
        "stop_ids": list(config_stop_ids(target)),
        **tokenizer_digests(target),
    }


def _digest_of(path: str) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; see data.sources and data.templates") from None


def run(context: StageContext) -> dict[str, Any]:
    return _Preparation(context).run()


STAGE = Stage(name="prepare", version=1, depends_on=(), settings=settings, run=run)


def open_renderer(recipe: Recipe, target: Path) -> Renderer:
    """Return the target's tokenizer with the templates of the recipe, tried on a simple question."""
    tokenizer = load_tokenizer(target)
    if tokenizer is None:
        raise DataError(f"{target}: has no tokenizer, which preparing data needs")
    texts = []
    for path in recipe.data.templates:
        try:
            texts.append(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from None
    renderer = Renderer(tokenizer, stop_ids(target, tokenizer), texts)
    for number, path in enumerate(recipe.data.templates):
        try:
            renderer.prompt_text([{"role": "user", "content": "Hello"}], number)
        except TemplateRefusedError as error:
            raise DataError(f"{path}: cannot render a simple question: {error}") from None
    return renderer


@dataclass(frozen=True, kw_only=True)
class _Census:
    """What a first pass over the data learns: little enough to keep for millions of conversations."""

    topics: np.ndarray[Any, np.dtype[np.uint64]]
    categories: np.ndarray[Any, np.dtype[np.int32]]
    may_be_held_out: np.ndarray[Any, np.dtype[np.bool_]]


class _Preparation:
    """Reads the data twice: to choose what is held out and what is taken, then to write it."""

    def __init__(self, context: StageContext) -> None:
        self.recipe, self.data = context.recipe, context.recipe.data
        self.directory, self.progress = context.directory, context.progress
        self.target = resolve(self.recipe.target.path)
        self.renderer = open_renderer(self.recipe, self.target)
        self.skipped = Skipped()
        self.counts, self.categories = Counter[str](), Counter[str]()
        self.held_out: dict[str, dict[str, Any] | None] = {}  # by topic; None where its prompt cannot be used

    def run(self) -> dict[str, Any]:
        census = self._census()
        shutil.rmtree(self.directory / EXAMPLES, ignore_errors=True)
        (self.directory / PROMPTS).unlink(missing_ok=True)
        with self.progress.task("prepare", total=len(census.topics)) as advance:
            batches = self._batches(census, advance)
            if self.recipe.regenerate.enabled:
                with atomic_file(self.directory / PROMPTS) as file:
                    for batch in batches:
                        self._write_prompts(file, batch)
            else:
                with TokenStore.Writer(self.directory / EXAMPLES, vocab_size(self.target)) as writer:
                    for batch in batches:
                        self._write_examples(writer, batch)
                    refuse_if_empty(len(writer), self.skipped, self.data.sources)
        refuse_if_empty(self.counts["examples"], self.skipped, self.data.sources)
        held_out = [record for record in self.held_out.values() if record is not None]
        write_json_lines(self.directory / HELD_OUT, held_out)
        if self.skipped.total:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.counts.items()))
            self.progress.say(f"prepare: {self.skipped.total} records left out ({reasons}); first {self.skipped.first}")
        if len(held_out) < self.data.held_out:
            self.progress.say(f"prepare: {len(held_out)} prompts held out, not {self.data.held_out}: data is too small")
        return {**self._summary(), "held_out": len(held_out), **tokenizer_digests(self.target)}

    def _summary(self) -> dict[str, Any]:
        names = ("conversations", "examples", "tokens", "answer_tokens", "held_out_duplicates", "cut", "too_long")
        return {
            **{name: self.counts[name] for name in names},
            **{name: count for name, count in sorted(self.counts.items()) if name not in names and count},
            "categories": dict(sorted(self.categories.items())),
            "skipped": dict(sorted(self.skipped.counts.items())),
            "first_skipped": self.skipped.first,
        }

    def _usable(self, skipped: Skipped) -> Iterator[tuple[str, Conversation]]:
        """Conversations that have what the recipe needs, the same ones in every pass."""
        answers_follow = self.recipe.regenerate.enabled
        for where, conversation in read_conversations(self.data.sources, skipped):
            if conversation.text is None:
                if not self.renderer.has_chat_template:
                    raise DataError(f"{where}: is a conversation, but the target's tokenizer has no chat template")
                if answers_follow and not conversation.question():
                    skipped.add(where, "nothing to answer", "no user turn to answer")
                    continue
                if not answers_follow and not conversation.is_answered:
                    reason = "no assistant turn to learn from; regenerate.enabled would make some"
                    skipped.add(where, "no answer", reason)
                    continue
            yield where, conversation

    def _census(self) -> _Census:
        names = dict[str, int]()
        topics, categories, chats, texts = [], [], [], []
        for _, conversation in self._usable(self.skipped):
            topics.append(hashed(conversation.topic))
            categories.append(names.setdefault(conversation.category, len(names)))
            chats.append(any(m["role"] == "user" for m in conversation.messages))
            texts.append(conversation.text is not None)
        refuse_if_empty(len(topics), self.skipped, self.data.sources)
        # Numbered by name, so that the order of files does not matter.
        order = {names[name]: rank for rank, name in enumerate(sorted(names))}
        return _Census(
            topics=np.array(topics, dtype=np.uint64),
            categories=np.array([order[category] for category in categories], dtype=np.int32),
            may_be_held_out=np.array(chats if any(chats) else texts, dtype=np.bool_),
        )

    def _batches(self, census: _Census, advance: Advance) -> Iterator[list[tuple[str, Varied]]]:
        """Yield what is taken, some hundred at a time; put aside what is held out."""
        mask = census.may_be_held_out
        held_out = choose_held_out(census.topics[mask], census.categories[mask], self.data.held_out, self.data.seed)
        eligible = np.array([topic not in held_out for topic in census.topics.tolist()], dtype=np.bool_)
        taken = choose_sample(eligible, self.data.max_examples, self.data.seed)
        batch: list[tuple[str, Varied]] = []
        # Bad records were counted by the first pass.
        for number, (where, conversation) in enumerate(self._usable(Skipped())):
            if not eligible[number]:
                self._hold_out(where, conversation)
            elif taken[number]:
                batch.append((where, vary(conversation, number, self.data)))
            if len(batch) == _BATCH:
                yield batch
                batch = []
            advance()
        yield batch

    def _hold_out(self, where: str, conversation: Conversation) -> None:
        """Keep the first conversation of each held-out topic as a prompt for `eval`; drop the others of that topic."""
        if conversation.topic in self.held_out:
            self.counts["held_out_duplicates"] += 1
            return
        record: dict[str, Any] | None = None
        try:
            ids = prompt_ids(self.renderer, conversation, self.data.max_length)
            if len(ids) < self.data.max_length:
                messages = [dict(message) for message in conversation.question()]
                record = {"messages": messages, "category": conversation.category, "prompt_token_ids": ids}
            else:
                self.counts["too_long"] += 1
        except TemplateRefusedError as error:
            self.skipped.add(where, "refused by the template", str(error))
        self.held_out[conversation.topic] = record

    def _render_chats(self, batch: _Batch, render: Callable[[Conversation, int | None], _T]) -> list[tuple[Varied, _T]]:
        """Render the conversations of a batch: those that another template refuses, with the target's own."""
        done = []
        for where, varied in batch:
            if varied.conversation.text is not None:
                continue
            try:
                try:
                    done.append((varied, render(varied.conversation, varied.template)))
                except TemplateRefusedError:
                    if varied.template is None:
                        raise
                    self.counts["refused_by_other_template"] += 1
                    own = replace(varied, template=None)
                    done.append((own, render(own.conversation, None)))
            except TemplateRefusedError as error:
                self.skipped.add(where, "refused by the template", str(error))
        return done

    def _render_plain(self, batch: _Batch) -> list[tuple[Varied, Rendered]]:
        plain = [varied for _, varied in batch if varied.conversation.text is not None]
        texts = self.renderer.plain_texts([varied.conversation.text or "" for varied in plain])
        return list(zip(plain, texts, strict=True))

    def _write_prompts(self, file: IO[str], batch: _Batch) -> None:
        longest, renderer = self.data.max_length, self.renderer
        chats = self._render_chats(batch, lambda chat, template: renderer.prompt_text(chat.question(), template))
        encoded = renderer.encode([text for _, text in chats])
        prompts = [(varied, ids) for (varied, _), ids in zip(chats, encoded, strict=True)]
        prompts += [(varied, _opening(text, longest)) for varied, text in self._render_plain(batch)]
        for varied, ids in prompts:
            if not ids or len(ids) + self.data.min_answer_tokens > longest:
                self.counts["too_long" if ids else "empty"] += 1
                continue
            record = {
                "prompt_token_ids": ids,
                "messages": [dict(message) for message in varied.conversation.question()],
                "category": varied.conversation.category,
                "template": varied.template,
            }
            file.write(json_line(record))
            self._count(varied, examples=1, tokens=len(ids), answers=0)

    def _write_examples(self, writer: TokenStore.Writer, batch: _Batch) -> None:
        renderer = self.renderer
        chats = self._render_chats(batch, lambda chat, template: renderer.turn_texts(chat.messages, template))
        encoded = renderer.conversations([texts for _, texts in chats])
        several = [(varied, sequences) for (varied, _), sequences in zip(chats, encoded, strict=True)]
        several += [(varied, [text]) for varied, text in self._render_plain(batch)]
        for varied, sequences in several:
            self.counts["turns_apart"] += len(sequences) - 1
            before = len(writer), writer.total_tokens, writer.answer_tokens
            for sequence in sequences:
                add_example(writer, sequence, varied.conversation.category, self.recipe, self.counts)
            after = len(writer), writer.total_tokens, writer.answer_tokens
            examples, tokens, answers = (b - a for a, b in zip(before, after, strict=True))
            if examples:
                self._count(varied, examples=examples, tokens=tokens, answers=answers)

    def _count(self, varied: Varied, *, examples: int, tokens: int, answers: int) -> None:
        self.counts.update(conversations=1, examples=examples, tokens=tokens, answer_tokens=answers)
        self.counts["other_template"] += varied.template is not None
        self.counts[f"system_{varied.system}"] += varied.system != "kept"
        self.categories[varied.conversation.category] += 1


def prompt_ids(renderer: Renderer, conversation: Conversation, max_length: int) -> list[int]:
    """What the target is asked: the conversation up to its answer, or the first half of a plain text."""
    if conversation.text is None:
        return renderer.encode([renderer.prompt_text(conversation.question())])[0]
    return _opening(renderer.plain_texts([conversation.text])[0], max_length)


def _opening(text: Rendered, max_length: int) -> list[int]:
    return text.tokens[: max(1, min(len(text.tokens), max_length) // 2)]


def add_example(
    writer: TokenStore.Writer, sequence: Rendered, category: str, recipe: Recipe, counts: Counter[str]
) -> bool:
    """Cut a sequence to `data.max_length` and store it, unless too little of an answer is left."""
    cut = sequence.cut(recipe.data.max_length)
    counts["cut"] += len(cut.tokens) < len(sequence.tokens)
    if sum(cut.answer) < recipe.data.min_answer_tokens:
        counts["too_long" if sum(sequence.answer) >= recipe.data.min_answer_tokens else "too_short"] += 1
        return False
    writer.add(cut.tokens, cut.answer, category)
    return True
