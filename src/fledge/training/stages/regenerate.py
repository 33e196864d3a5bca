"""regenerate: the target answers the prompts itself, so that the drafter learns to predict this target and no other.

Answers are written chunk by chunk (`parts/answers-000000000-000000512.jsonl`); a start after an interruption repeats at
most one chunk. An answer's seed follows from the recipe, the prompt's number, the sample and the turn, so neither the
batch it was made in nor an interruption changes it. In the end the parts become `examples/`, a TokenStore: the ids the
target read and the ids it wrote, its end token included, with the mask on what it wrote.
"""

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target_files import config_stop_ids, tokenizer_digests, vocab_size, weights_digest
from fledge.decoding.params import SamplingParams
from fledge.devices import choose_device
from fledge.engine.llm import LLM
from fledge.errors import CheckpointError, ConfigError, DataError, FledgeError, PromptError
from fledge.evaluation.conversations import Message, split_turns
from fledge.evaluation.dialogue import Dialogue, Generator, answer_dialogues
from fledge.files import read_json_lines, write_json_lines
from fledge.training.data.rendering import Renderer, TemplateRefusedError, TurnTokens, chain
from fledge.training.data.store import TokenStore
from fledge.training.recipe import Recipe
from fledge.training.stages.prepare import EXAMPLES, PROMPTS, add_example, open_renderer
from fledge.training.workspace import Stage, StageContext

_PARTS = "parts"
GPU_MEMORY = 0.88  # of the device, for all processes that answer together
_BESIDE_KEYS = 3 << 30  # what such a process needs besides its keys and values: weights of a small target, graphs, CUDA


def examples_directory(inputs: Mapping[str, Path]) -> Path:
    """Return the TokenStore to train on: the regenerated one, or where there is none the one of `prepare`."""
    regenerated = inputs["regenerate"] / EXAMPLES
    return regenerated if regenerated.is_dir() else inputs["prepare"] / EXAMPLES


def settings(recipe: Recipe) -> dict[str, Any]:
    if not recipe.regenerate.enabled:
        return {"enabled": False}
    target = resolve(recipe.target.path)
    section = asdict(recipe.regenerate)
    del section["max_num_seqs"], section["chunk"], section["processes"]  # how it is done, not what comes out
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
    total = sum(len(dialogue_turns(record, recipe)) for _, record in read_json_lines(prompts))
    parts = directory / _PARTS
    parts.mkdir(exist_ok=True)
    with context.progress.task("regenerate", total=total * recipe.regenerate.samples) as advance:
        if recipe.regenerate.processes == 1:
            tokens, seconds = _answer_chunks(recipe, prompts, parts, 0, advance)
        else:
            tokens, seconds = _answer_in_processes(recipe, prompts, parts, advance)
    summary = _assemble(context, prompts, parts)
    return {"enabled": True, **summary, "tokens_per_second": tokens / seconds if seconds > 0 else None}


STAGE = Stage(name="regenerate", version=1, depends_on=("prepare",), settings=settings, run=run)


def open_llm(recipe: Recipe) -> Generator:
    """Load the target to answer with, without a drafter; beside others of its kind where the recipe says so."""
    try:
        return LLM(
            recipe.target.path,
            dtype=recipe.target.dtype,
            device=recipe.device,
            max_num_seqs=recipe.regenerate.max_num_seqs,
            gpu_memory_utilization=GPU_MEMORY,
            kv_cache_bytes=_share_of_memory(recipe),
            seed=recipe.regenerate.seed,
        )
    except CheckpointError as error:
        raise CheckpointError(f"{error} (set regenerate.enabled=false to train on the data's own answers)") from None


def _share_of_memory(recipe: Recipe) -> int | None:
    """Bytes of keys and values for one of several processes: free memory tells none what the others will take."""
    if recipe.regenerate.processes == 1 or choose_device(recipe.device).type != "cuda":
        return None
    _, total = torch.cuda.mem_get_info()
    share = int(GPU_MEMORY * total) // recipe.regenerate.processes - _BESIDE_KEYS
    if share <= 0:
        raise ConfigError(f"regenerate.processes: found {recipe.regenerate.processes}, too many for the GPU's memory")
    return share


def dialogue_turns(record: Mapping[str, Any], recipe: Recipe) -> list[tuple[Message, ...]]:
    """What is said before each answer to a prompt of `prepare`: one turn, or all of the user's."""
    messages = record["messages"]
    return split_turns(messages) if recipe.regenerate.turns == "all" and messages else [tuple(messages)]


class AnswerWorker:
    """Answers chunks of prompts. The model is loaded when the first answer is needed."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._llm: Generator | None = None
        self._renderer: Renderer | None = None
        self.tokens = 0
        self.seconds = 0.0

    def speed(self) -> str:
        return f"{self.tokens / self.seconds:,.0f} tokens/s" if self.seconds > 0 else ""

    def answer(
        self, first: int, records: Sequence[Mapping[str, Any]], advance: Callable[[int], None]
    ) -> list[dict[str, Any]]:
        """Return the lines of a part: one for each prompt and sample. `advance` is told of every turn."""
        self._llm = self._llm or open_llm(self._recipe)
        section, data = self._recipe.regenerate, self._recipe.data
        dialogues = []
        for number, record in enumerate(records, start=first):
            turns = dialogue_turns(record, self._recipe)
            first_ids = None if section.turns == "all" and record["messages"] else record["prompt_token_ids"]
            dialogues += [
                Dialogue(number=number, sample=sample, turns=turns, first_ids=first_ids)
                for sample in range(section.samples)
            ]
        started = time.perf_counter()
        answer_dialogues(
            self._llm,
            dialogues,
            SamplingParams(
                temperature=section.temperature,
                top_p=section.top_p,
                top_k=section.top_k,
                max_tokens=section.max_tokens,
                seed=section.seed,
            ),
            encode=lambda dialogue: self._encode(dialogue, records[dialogue.number - first]["template"]),
            longest=data.max_length,
            least_room=data.min_answer_tokens,
            advance=advance,
        )
        self.seconds += time.perf_counter() - started
        self.tokens += sum(len(turn.answer_token_ids) for dialogue in dialogues for turn in dialogue.answers)
        return [_line(dialogue, records[dialogue.number - first]["category"]) for dialogue in dialogues]

    def _encode(self, dialogue: Dialogue, template: int | None) -> list[int]:
        self._renderer = self._renderer or open_renderer(self._recipe, resolve(self._recipe.target.path))
        try:
            (ids,) = self._renderer.encode([self._renderer.prompt_text(dialogue.next_messages, template)])
        except TemplateRefusedError as error:
            raise PromptError(str(error)) from None
        return ids


def _line(dialogue: Dialogue, category: str) -> dict[str, Any]:
    turns = [
        {
            "prompt_token_ids": turn.prompt_token_ids,
            "answer_token_ids": turn.answer_token_ids,
            "finish": turn.finish_reason,
        }
        for turn in dialogue.answers
    ]
    return {
        "prompt": dialogue.number,
        "sample": dialogue.sample,
        "category": category,
        "turns": turns,
        "dropped": dialogue.dropped,
    }


def _answer_chunks(
    recipe: Recipe, prompts: Path, parts: Path, process: int, advance: Callable[..., None]
) -> tuple[int, float]:
    """Write the missing parts that fall to one of the processes. Return tokens written and seconds spent on them."""
    worker = AnswerWorker(recipe)
    parent = os.getppid()
    for number, (first, records) in enumerate(_chunks(prompts, recipe.regenerate.chunk)):
        if number % recipe.regenerate.processes != process:
            continue
        part = _part(parts, first, len(records))
        if part.is_file():
            advance(sum(len(dialogue_turns(record, recipe)) for record in records) * recipe.regenerate.samples)
            continue
        lines = worker.answer(first, records, lambda count: advance(count, note=worker.speed()))
        if os.getppid() != parent:
            break  # the run was killed; its next start must not find us at work
        write_json_lines(part, lines)
    return worker.tokens, worker.seconds


def _answer_in_processes(recipe: Recipe, prompts: Path, parts: Path, advance: Callable[..., None]) -> tuple[int, float]:
    """Several processes share one device: for small targets, which leave a GPU waiting for the host."""
    spawned = multiprocessing.get_context("spawn")
    news = spawned.Queue()
    count = recipe.regenerate.processes
    workers = [
        spawned.Process(target=_process, args=(recipe, prompts, parts, number, news), daemon=True)
        for number in range(count)
    ]
    for worker in workers:
        worker.start()
    tokens, seconds, finished = 0, 0.0, 0
    try:
        while finished < count:
            try:
                kind, value = news.get(timeout=1.0)
            except Empty:
                if any(worker.exitcode not in (None, 0) for worker in workers):
                    raise FledgeError(
                        "regenerate: one of its processes ended; lower regenerate.processes if memory was short"
                    ) from None
                continue
            if kind == "advance":
                advance(value)
            elif kind == "error":
                raise FledgeError(value)
            else:
                tokens, seconds, finished = tokens + value[0], max(seconds, value[1]), finished + 1
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    return tokens, seconds


def _process(recipe: Recipe, prompts: Path, parts: Path, number: int, news: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    try:
        done = _answer_chunks(recipe, prompts, parts, number, lambda count, note="": news.put(("advance", count)))  # noqa: ARG005
    except FledgeError as error:
        news.put(("error", str(error)))
    else:
        news.put(("done", done))


def _part(parts: Path, first: int, count: int) -> Path:
    return parts / f"answers-{first:09d}-{first + count:09d}.jsonl"


def _chunks(prompts: Path, size: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(number of the first prompt, prompts), never more than a chunk in memory."""
    records = (record for _, record in read_json_lines(prompts))
    first = 0
    while chunk := list(islice(records, size)):
        yield first, chunk
        first += len(chunk)


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
                    TurnTokens(prompt=turn["prompt_token_ids"], answer=turn["answer_token_ids"]) for turn in turns
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
