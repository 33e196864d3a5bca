"""regenerate: the target answers the prompts itself, so that the drafter learns to predict this target and no other.

Answers are written chunk by chunk (`parts/answers-000000000-000000512.jsonl`); a start after an interruption repeats at
most one chunk. An answer's seed follows from the recipe, the prompt's number, the sample and the turn, so neither the
batch it was made in nor an interruption changes it. In the end the parts become `examples/`, a TokenStore: the ids the
target read and the ids it wrote, its end token included, with the mask on what it wrote.
"""

import gc
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from fledge.checkpoints.source import resolve
from fledge.decoding.params import SamplingParams
from fledge.engine.llm import LLM
from fledge.engine.outputs import RequestOutput
from fledge.errors import CheckpointError
from fledge.training.data.conversations import Message
from fledge.training.data.files import DataError, read_json_lines, write_json_lines
from fledge.training.data.rendering import Renderer, TemplateRefusedError, Turn, chain
from fledge.training.data.store import TokenStore
from fledge.training.data.target_files import config_stop_ids, tokenizer_digests, vocab_size, weights_digest
from fledge.training.recipe import Recipe
from fledge.training.stages.base import Stage, StageContext
from fledge.training.stages.prepare import EXAMPLES, PROMPTS, add_example, open_renderer

_PARTS = "parts"


class Answerer(Protocol):
    """What this stage needs of `LLM`."""

    max_model_len: int

    def generate(
        self,
        prompts: list[list[int]],
        sampling_params: list[SamplingParams],
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]: ...


def examples_directory(inputs: Mapping[str, Path]) -> Path:
    """Return the TokenStore to train on: the regenerated one, or where there is none the one of `prepare`."""
    regenerated = inputs["regenerate"] / EXAMPLES
    return regenerated if regenerated.is_dir() else inputs["prepare"] / EXAMPLES


def open_llm(recipe: Recipe) -> Answerer:
    """Load the target to answer with, without a drafter."""
    try:
        return LLM(
            recipe.target.path,
            dtype=recipe.target.dtype,
            device=recipe.device,
            max_num_seqs=recipe.regenerate.max_num_seqs,
            seed=recipe.regenerate.seed,
        )
    except CheckpointError as error:
        raise CheckpointError(f"{error} (set regenerate.enabled=false to train on the data's own answers)") from None


def settings(recipe: Recipe) -> dict[str, Any]:
    if not recipe.regenerate.enabled:
        return {"enabled": False}
    target = resolve(recipe.target.path)
    section = asdict(recipe.regenerate)
    del section["max_num_seqs"], section["chunk"]  # how it is done, not what comes out
    return {
        "regenerate": section,
        "max_length": recipe.data.max_length,
        "min_answer_tokens": recipe.data.min_answer_tokens,
        "dtype": recipe.target.dtype,
        "weights": weights_digest(target),
        "stop_ids": list(config_stop_ids(target)),
        **tokenizer_digests(target),
    }


def run(context: StageContext) -> dict[str, Any]:
    recipe, directory = context.recipe, context.directory
    if not recipe.regenerate.enabled:
        return {"enabled": False}
    prompts = context.inputs["prepare"] / PROMPTS
    total = sum(1 for _ in read_json_lines(prompts))
    parts = directory / _PARTS
    parts.mkdir(exist_ok=True)
    worker = _Worker(recipe)
    with context.progress.task("regenerate", total=total * recipe.regenerate.samples) as advance:
        for first, records in _chunks(prompts, recipe.regenerate.chunk):
            part = _part(parts, first, len(records))
            if part.is_file():
                advance(len(records) * recipe.regenerate.samples)
                continue
            lines = worker.answer(first, records, lambda count: advance(count, note=worker.speed()))
            write_json_lines(part, lines)
    worker.close()
    summary = _assemble(context, prompts, parts)
    return {"enabled": True, **summary, "tokens_per_second": worker.tokens_per_second}


STAGE = Stage(name="regenerate", version=1, depends_on=("prepare",), settings=settings, run=run)


def _part(parts: Path, first: int, count: int) -> Path:
    return parts / f"answers-{first:09d}-{first + count:09d}.jsonl"


def _chunks(prompts: Path, size: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(number of the first prompt, prompts), never more than a chunk in memory."""
    records = (record for _, record in read_json_lines(prompts))
    first = 0
    while chunk := list(islice(records, size)):
        yield first, chunk
        first += len(chunk)


def answer_seed(seed: int, prompt: int, sample: int, turn: int) -> int:
    """63 bits that follow from what is asked and not from what else is in the batch."""
    text = f"fledge regenerate {seed} {prompt} {sample} {turn}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


@dataclass
class _Dialogue:
    """One answering of one prompt record, turn by turn."""

    number: int  # of the prompt
    sample: int
    category: str
    template: int | None
    waiting: list[list[Message]]  # for each turn to be answered, what is said before the answer
    first_ids: list[int] | None  # the first turn's prompt, where `prepare` has rendered it
    history: list[Message] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    dropped: str | None = None  # why it ended early

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.number,
            "sample": self.sample,
            "category": self.category,
            "turns": self.turns,
            "dropped": self.dropped,
        }


class _Worker:
    """Answers chunks of prompts. The model is loaded when the first answer is needed."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._llm: Answerer | None = None
        self._renderer: Renderer | None = None
        self._tokens = 0
        self._seconds = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        return self._tokens / self._seconds if self._seconds > 0 else None

    def speed(self) -> str:
        rate = self.tokens_per_second
        return "" if rate is None else f"{rate:,.0f} tokens/s"

    def answer(
        self, first: int, records: Sequence[Mapping[str, Any]], advance: Callable[[int], None]
    ) -> list[dict[str, Any]]:
        """Return the lines of a part: one for each prompt and sample."""
        dialogues = [
            self._dialogue(first + i, sample, record)
            for i, record in enumerate(records)
            for sample in range(self._recipe.regenerate.samples)
        ]
        while active := [d for d in dialogues if d.waiting and d.dropped is None]:
            self._round(active, advance)
        advance(sum(d.dropped is not None for d in dialogues))
        return [dialogue.to_json() for dialogue in dialogues]

    def close(self) -> None:
        """Give the model's memory back before the next stage needs it."""
        self._llm = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _dialogue(self, number: int, sample: int, record: Mapping[str, Any]) -> _Dialogue:
        ids, messages = record["prompt_token_ids"], record["messages"]
        waiting, first_ids = [list(messages)], ids
        if self._recipe.regenerate.turns == "all" and messages:
            waiting, first_ids = user_turns(messages), None
        return _Dialogue(
            number=number,
            sample=sample,
            category=record["category"],
            template=record["template"],
            waiting=waiting,
            first_ids=first_ids,
        )

    def _round(self, dialogues: Sequence[_Dialogue], advance: Callable[[int], None]) -> None:
        """Answer the next turn of each dialogue, all of them together."""
        self._llm = self._llm or open_llm(self._recipe)
        section = self._recipe.regenerate
        longest = min(self._llm.max_model_len, self._recipe.data.max_length)
        asked, prompts, params = [], [], []
        for dialogue, ids in zip(dialogues, self._prompts(dialogues), strict=True):
            if ids is None or len(ids) + self._recipe.data.min_answer_tokens > longest:
                dialogue.dropped = "refused by the template" if ids is None else "too long"
                continue
            asked.append(dialogue)
            prompts.append(ids)
            seed = answer_seed(section.seed, dialogue.number, dialogue.sample, len(dialogue.turns))
            params.append(
                SamplingParams(
                    temperature=section.temperature,
                    top_p=section.top_p,
                    top_k=section.top_k,
                    max_tokens=min(section.max_tokens, longest - len(ids)),
                    seed=seed,
                )
            )
        if not asked:
            return
        # Counted when the whole dialogue is done, so that a bar of dialogues never runs ahead.
        ending = all(len(dialogue.waiting) == 1 for dialogue in asked)
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, params, progress=(lambda _done, _all: advance(1)) if ending else None)
        self._seconds += time.perf_counter() - started
        for dialogue, ids, output in zip(asked, prompts, outputs, strict=True):
            (answer,) = output.outputs
            self._tokens += len(answer.token_ids)
            dialogue.history += [*dialogue.waiting.pop(0), {"role": "assistant", "content": answer.text}]
            dialogue.turns.append(
                {"prompt_token_ids": ids, "answer_token_ids": list(answer.token_ids), "finish": answer.finish_reason}
            )
        if not ending:
            advance(sum(not dialogue.waiting for dialogue in asked))

    def _prompts(self, dialogues: Sequence[_Dialogue]) -> list[list[int] | None]:
        """Ids of each dialogue's next prompt; None where the template refuses it."""
        prompts: list[list[int] | None] = [None] * len(dialogues)
        texts: dict[int, str] = {}
        for place, dialogue in enumerate(dialogues):
            if not dialogue.turns and dialogue.first_ids is not None:
                prompts[place] = dialogue.first_ids
                continue
            self._renderer = self._renderer or open_renderer(self._recipe, resolve(self._recipe.target.path))
            try:
                messages = [*dialogue.history, *dialogue.waiting[0]]
                texts[place] = self._renderer.prompt_text(messages, dialogue.template)
            except TemplateRefusedError:
                continue
        if self._renderer is not None:
            for place, ids in zip(texts, self._renderer.encode(list(texts.values())), strict=True):
                prompts[place] = ids
        return prompts


def user_turns(messages: Sequence[Message]) -> list[list[Message]]:
    """Split a conversation into what is said before each answer. Another model's answers and tools are left out."""
    turns: list[list[Message]] = []
    said: list[Message] = []
    for message in messages:
        if message["role"] not in ("assistant", "tool"):
            said.append(message)
        if message["role"] == "user":
            turns.append(said)
            said = []
    return turns


def _assemble(context: StageContext, prompts: Path, parts: Path) -> dict[str, Any]:
    """Turn all parts into a TokenStore."""
    recipe, counts, categories = context.recipe, Counter[str](), Counter[str]()
    with TokenStore.Writer(context.directory / EXAMPLES, vocab_size(resolve(recipe.target.path))) as writer:
        for first, records in _chunks(prompts, recipe.regenerate.chunk):
            for _, line in read_json_lines(_part(parts, first, len(records))):
                turns = line["turns"]
                counts["answers"] += len(turns)
                counts["cut_by_max_tokens"] += sum(turn["finish"] == "length" for turn in turns)
                if line["dropped"] is not None:
                    counts[f"dropped_{line['dropped'].replace(' ', '_')}"] += 1
                sequences = chain(
                    Turn(prompt=turn["prompt_token_ids"], answer=turn["answer_token_ids"]) for turn in turns
                )
                counts["turns_apart"] += max(0, len(sequences) - 1)
                for sequence in sequences:
                    categories[line["category"]] += add_example(writer, sequence, line["category"], recipe, counts)
        if len(writer) == 0:
            raise DataError(f"{prompts}: no prompt could be answered ({dict(counts)})")
        sizes = {"examples": len(writer), "tokens": writer.total_tokens, "answer_tokens": writer.answer_tokens}
    if counts["cut_by_max_tokens"]:
        share = counts["cut_by_max_tokens"] / counts["answers"]
        context.progress.say(f"regenerate: {share:.0%} of the answers were cut by max_tokens and have no end token")
    return {
        **sizes,
        **{name: n for name, n in sorted(counts.items()) if n},
        "categories": dict(sorted(categories.items())),
    }
