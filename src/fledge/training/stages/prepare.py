"""prepare: files of conversations become tokens with exact answer masks, or prompts for the target to answer.

Writes into its directory:
    held_out.jsonl   {"messages", "category", "prompt_token_ids"}: prompts for `eval`, which never reach training
    examples/        TokenStore of whole conversations, where the data's own answers are used
    prompts.jsonl    {"prompt_token_ids", "messages", "category", "template"}, where the target is to answer itself
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from fledge.training.stages.base import Stage, StageContext

HELD_OUT, PROMPTS, EXAMPLES = "held_out.jsonl", "prompts.jsonl", "examples"
_BATCH = 512  # conversations tokenised together


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
    recipe, directory = context.recipe, context.directory
    target = resolve(recipe.target.path)
    renderer = open_renderer(recipe, target)
    census = _Census.take(recipe, renderer)
    held_out = census.held_out_topics(recipe)
    eligible = np.array([topic not in held_out for topic in census.topics.tolist()], dtype=np.bool_)
    taken = choose_sample(eligible, recipe.data.max_examples, recipe.data.seed)
    tally = _Tally(skipped=census.skipped)
    kept = _HeldOut(recipe, renderer, tally)
    shutil.rmtree(directory / EXAMPLES, ignore_errors=True)
    (directory / PROMPTS).unlink(missing_ok=True)

    def batches(advance: Advance) -> Iterator[list[tuple[str, Varied]]]:
        batch: list[tuple[str, Varied]] = []
        # Bad records were counted by the first pass.
        for number, (where, conversation) in enumerate(_usable(recipe, renderer, Skipped())):
            if int(census.topics[number]) in held_out:
                kept.add(where, conversation)
            elif taken[number]:
                batch.append((where, vary(conversation, number, recipe.data)))
            if len(batch) == _BATCH:
                yield batch
                batch = []
            advance()
        yield batch

    with context.progress.task("prepare", total=len(census.topics)) as advance:
        if recipe.regenerate.enabled:
            with atomic_file(directory / PROMPTS) as file:
                for batch in batches(advance):
                    _write_prompts(file, renderer, batch, recipe, tally)
        else:
            with TokenStore.Writer(directory / EXAMPLES, vocab_size(target)) as writer:
                for batch in batches(advance):
                    _write_examples(writer, renderer, batch, recipe, tally)
                refuse_if_empty(len(writer), tally.skipped, recipe.data.sources)
    refuse_if_empty(tally.counts["examples"], tally.skipped, recipe.data.sources)
    write_json_lines(directory / HELD_OUT, kept.records())
    if tally.skipped.total:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(tally.skipped.counts.items()))
        context.progress.say(
            f"prepare: {tally.skipped.total} records left out ({reasons}); first {tally.skipped.first}"
        )
    if kept.count < recipe.data.held_out:
        context.progress.say(f"prepare: {kept.count} prompts held out, not {recipe.data.held_out}: data is too small")
    return {**tally.summary(), "held_out": kept.count, **tokenizer_digests(target)}


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


def _usable(recipe: Recipe, renderer: Renderer, skipped: Skipped) -> Iterator[tuple[str, Conversation]]:
    """Conversations that have what the recipe needs, the same ones in every pass."""
    for where, conversation in read_conversations(recipe.data.sources, skipped):
        if conversation.text is None:
            if not renderer.has_chat_template:
                raise DataError(f"{where}: is a conversation, but the target's tokenizer has no chat template")
            if recipe.regenerate.enabled and not conversation.question():
                skipped.add(where, "nothing to answer", "no user turn to answer")
                continue
            if not recipe.regenerate.enabled and not conversation.is_answered:
                skipped.add(where, "no answer", "no assistant turn to learn from; regenerate.enabled would make some")
                continue
        yield where, conversation


@dataclass(frozen=True, kw_only=True)
class _Census:
    """What a first pass over the data learns: little enough to keep for millions of conversations."""

    topics: np.ndarray[Any, np.dtype[np.uint64]]
    categories: np.ndarray[Any, np.dtype[np.int32]]
    may_be_held_out: np.ndarray[Any, np.dtype[np.bool_]]
    skipped: Skipped

    @classmethod
    def take(cls, recipe: Recipe, renderer: Renderer) -> "_Census":
        skipped, names = Skipped(), dict[str, int]()
        topics, categories, chats, texts = [], [], [], []
        for _, conversation in _usable(recipe, renderer, skipped):
            topics.append(hashed(conversation.topic))
            categories.append(names.setdefault(conversation.category, len(names)))
            chats.append(any(m["role"] == "user" for m in conversation.messages))
            texts.append(conversation.text is not None)
        refuse_if_empty(len(topics), skipped, recipe.data.sources)
        # Numbered by name, so that the order of files does not matter.
        order = {names[name]: rank for rank, name in enumerate(sorted(names))}
        return cls(
            topics=np.array(topics, dtype=np.uint64),
            categories=np.array([order[category] for category in categories], dtype=np.int32),
            may_be_held_out=np.array(chats if any(chats) else texts, dtype=np.bool_),
            skipped=skipped,
        )

    def held_out_topics(self, recipe: Recipe) -> set[int]:
        mask = self.may_be_held_out
        return choose_held_out(self.topics[mask], self.categories[mask], recipe.data.held_out, recipe.data.seed)


@dataclass
class _Tally:
    """Numbers for the summary."""

    skipped: Skipped
    counts: Counter[str] = field(default_factory=Counter)
    categories: Counter[str] = field(default_factory=Counter)

    def add(self, varied: Varied, *, examples: int, tokens: int, answers: int) -> None:
        self.counts.update(conversations=1, examples=examples, tokens=tokens, answer_tokens=answers)
        self.counts["other_template"] += varied.template is not None
        self.counts[f"system_{varied.system}"] += varied.system != "kept"
        self.categories[varied.conversation.category] += 1

    def summary(self) -> dict[str, Any]:
        names = ("conversations", "examples", "tokens", "answer_tokens", "held_out_duplicates", "cut", "too_long")
        return {
            **{name: self.counts[name] for name in names},
            **{name: count for name, count in sorted(self.counts.items()) if name not in names and count},
            "categories": dict(sorted(self.categories.items())),
            "skipped": dict(sorted(self.skipped.counts.items())),
            "first_skipped": self.skipped.first,
        }


class _HeldOut:
    """Prompts for `eval`: the first conversation of each held-out topic. The others with that topic are dropped."""

    def __init__(self, recipe: Recipe, renderer: Renderer, tally: _Tally) -> None:
        self._recipe = recipe
        self._renderer = renderer
        self._tally = tally
        self._seen: dict[str, dict[str, Any] | None] = {}

    def add(self, where: str, conversation: Conversation) -> None:
        if conversation.topic in self._seen:
            self._tally.counts["held_out_duplicates"] += 1
            return
        record: dict[str, Any] | None = None
        try:
            ids = _prompt_ids(self._renderer, conversation, self._recipe.data.max_length)
            if len(ids) < self._recipe.data.max_length:
                messages = [dict(message) for message in conversation.question()]
                record = {"messages": messages, "category": conversation.category, "prompt_token_ids": ids}
            else:
                self._tally.counts["too_long"] += 1
        except TemplateRefusedError as error:
            self._tally.skipped.add(where, "refused by the template", str(error))
        self._seen[conversation.topic] = record

    @property
    def count(self) -> int:
        return len(self.records())

    def records(self) -> list[dict[str, Any]]:
        return [record for record in self._seen.values() if record is not None]


def _prompt_ids(renderer: Renderer, conversation: Conversation, max_length: int) -> list[int]:
    if conversation.text is None:
        return renderer.encode([renderer.prompt_text(conversation.question())])[0]
    return _opening(renderer.plain_texts([conversation.text])[0], max_length)


def _opening(text: Rendered, max_length: int) -> list[int]:
    """The part of a plain text that the target is asked to go on from: its first half."""
    return text.tokens[: max(1, min(len(text.tokens), max_length) // 2)]


_T = TypeVar("_T")


def _render_chats(
    batch: Sequence[tuple[str, Varied]], tally: _Tally, render: Callable[[Conversation, int | None], _T]
) -> list[tuple[Varied, _T]]:
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
                tally.counts["refused_by_other_template"] += 1
                own = replace(varied, template=None)
                done.append((own, render(own.conversation, None)))
        except TemplateRefusedError as error:
            tally.skipped.add(where, "refused by the template", str(error))
    return done


def _render_plain(batch: Sequence[tuple[str, Varied]], renderer: Renderer) -> list[tuple[Varied, Rendered]]:
    plain = [varied for _, varied in batch if varied.conversation.text is not None]
    texts = renderer.plain_texts([varied.conversation.text or "" for varied in plain])
    return list(zip(plain, texts, strict=True))


def _write_prompts(
    file: IO[str], renderer: Renderer, batch: Sequence[tuple[str, Varied]], recipe: Recipe, tally: _Tally
) -> None:
    longest = recipe.data.max_length
    chats = _render_chats(batch, tally, lambda chat, template: renderer.prompt_text(chat.question(), template))
    encoded = renderer.encode([text for _, text in chats])
    prompts = [(varied, ids) for (varied, _), ids in zip(chats, encoded, strict=True)]
    prompts += [(varied, _opening(text, longest)) for varied, text in _render_plain(batch, renderer)]
    for varied, ids in prompts:
        if not ids or len(ids) + recipe.data.min_answer_tokens > longest:
            tally.counts["too_long" if ids else "empty"] += 1
            continue
        record = {
            "prompt_token_ids": ids,
            "messages": [dict(message) for message in varied.conversation.question()],
            "category": varied.conversation.category,
            "template": varied.template,
        }
        file.write(json_line(record))
        tally.add(varied, examples=1, tokens=len(ids), answers=0)


def _write_examples(
    writer: TokenStore.Writer, renderer: Renderer, batch: Sequence[tuple[str, Varied]], recipe: Recipe, tally: _Tally
) -> None:
    chats = _render_chats(batch, tally, lambda chat, template: renderer.turn_texts(chat.messages, template))
    encoded = renderer.conversations([texts for _, texts in chats])
    several = [(varied, sequences) for (varied, _), sequences in zip(chats, encoded, strict=True)]
    several += [(varied, [text]) for varied, text in _render_plain(batch, renderer)]
    for varied, sequences in several:
        tally.counts["turns_apart"] += len(sequences) - 1
        before = len(writer), writer.total_tokens, writer.answer_tokens
        for sequence in sequences:
            add_example(writer, sequence, varied.conversation.category, recipe, tally.counts)
        examples = len(writer) - before[0]
        if examples:
            tally.add(
                varied,
                examples=examples,
                tokens=writer.total_tokens - before[1],
                answers=writer.answer_tokens - before[2],
            )


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
