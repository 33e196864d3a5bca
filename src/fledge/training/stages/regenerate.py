"""regenerate: the target answers the prompts itself, so that the drafter learns to predict this target and no other.

Answers are written chunk by chunk (`parts/answers-000000000-000000512.jsonl`); a start after an interruption repeats at
most one chunk. An answer's seed follows from the recipe, the prompt's number, the sample and the turn, so neither the
batch it was made in nor an interruption changes it. In the end the parts become `examples/`, a TokenStore: the ids the
target read and the ids it wrote, its end token included, with the mask on what it wrote.
"""

import math
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import vocab_size, weights_digest
from fledge.decoding.params import SamplingParams
from fledge.devices import choose_device
from fledge.engine.llm import LLM
from fledge.errors import CheckpointError, ConfigError, DataError, FledgeError
from fledge.evaluation.conversations import split_turns
from fledge.evaluation.dialogue import Answerer, Dialogue, answer_dialogues, answer_seed
from fledge.files import read_json_lines, write_json_lines
from fledge.records import encode
from fledge.training.data.examples import TokenStore
from fledge.training.data.rendering import chain
from fledge.training.pipeline import Stage, StageContext
from fledge.training.recipe import Recipe
from fledge.training.stages.prepare import EXAMPLES, PROMPTS, add_examples, open_renderer, text_identity
from fledge.training.stages.vllm import answers_of, check_target, check_vllm, open_hosts

_PARTS = "parts"
_BESIDE_KEYS = 3 << 30  # what such a process needs besides its keys and values: weights of a small target, graphs, CUDA


def examples_directory(inputs: Mapping[str, Path]) -> Path:
    """Return the TokenStore to train on: the regenerated one, or where there is none the one of `prepare`."""
    regenerated = inputs["regenerate"] / EXAMPLES
    return regenerated if regenerated.is_dir() else inputs["prepare"] / EXAMPLES


def _settings(recipe: Recipe) -> dict[str, Any]:
    if not recipe.regenerate.enabled:
        return {"enabled": False}
    target = resolve(recipe.target.path)
    if recipe.capture.engine == "vllm":
        check_target(recipe)  # before hours of answering
    section = asdict(recipe.regenerate)
    for name in ("max_num_seqs", "chunk", "processes", "gpu_memory_utilization"):
        del section[name]  # how it is done, not what comes out
    for name, before in (("engine", "fledge"), ("temperatures", ()), ("keep_cut", True), ("max_minutes", None)):
        if section[name] == before:
            del section[name]  # as before there was a choice
    marks = {} if recipe.data.loss_on == "answers" else {"loss_on": recipe.data.loss_on}
    return {
        "regenerate": section,
        **marks,
        "max_length": recipe.data.max_length,
        "min_answer_tokens": recipe.data.min_answer_tokens,
        "dtype": recipe.target.dtype,
        "weights": weights_digest(target),
        **text_identity(target),
    }


def _run(context: StageContext) -> dict[str, Any]:
    recipe = context.recipe
    if recipe.uses_vllm:
        check_vllm(recipe)  # whichever stage needs it: before hours of work
    if not recipe.regenerate.enabled:
        return {"enabled": False}
    prompts = read_json_lines(context.inputs["prepare"] / PROMPTS)
    total = sum(len(dialogue.turns) for _, record in prompts for dialogue in _dialogues(0, record, recipe))
    (context.directory / _PARTS).mkdir(exist_ok=True)
    with context.progress.task("regenerate", total=total) as advance:
        alone = recipe.regenerate.processes == 1
        tokens, seconds = _answer_chunks(context, 0, advance) if alone else _answer_in_processes(context, advance)
    return {"enabled": True, **_assemble(context), "tokens_per_second": tokens / seconds if seconds > 0 else None}


def open_llm(recipe: Recipe) -> LLM:
    """Load the target to answer with, without a drafter; beside others of its kind where the recipe says so."""
    processes, share = recipe.regenerate.processes, None
    if processes > 1 and choose_device(recipe.device).type == "cuda":
        # Bytes of keys and values for each: free memory tells none what the others will take.
        memory = recipe.regenerate.gpu_memory_utilization * torch.cuda.mem_get_info()[1]
        share = int(memory) // processes - _BESIDE_KEYS
        if share <= 0:
            most = f"lower it or raise regenerate.gpu_memory_utilization ({recipe.regenerate.gpu_memory_utilization:g})"
            raise ConfigError(f"regenerate.processes: found {processes}, too many for the GPU's memory; {most}")
    try:
        return LLM(
            recipe.target.path,
            dtype=recipe.target.dtype,
            device=recipe.device,
            max_num_seqs=recipe.regenerate.max_num_seqs,
            gpu_memory_utilization=recipe.regenerate.gpu_memory_utilization,
            kv_cache_bytes=share,
            seed=recipe.regenerate.seed,
        )
    except (CheckpointError, ConfigError) as error:
        ways = "regenerate.engine=vllm, or regenerate.enabled=false to train on the data's own answers"
        raise CheckpointError(f"{error} (in a recipe: {ways})") from None


@contextmanager
def _answerer(context: StageContext) -> Iterator[Answerer]:
    """What answers: our engine, or vLLM, which then leaves the states of its answers for `capture` too."""
    recipe = context.recipe
    if recipe.regenerate.engine == "fledge":
        yield open_llm(recipe)
        return
    with open_hosts(recipe, context.progress) as hosts:
        one_pass = recipe.capture.engine == "vllm" and recipe.regenerate.turns == "last"
        yield answers_of(recipe, hosts, leave_states=one_pass)


def _dialogues(number: int, record: Mapping[str, Any], recipe: Recipe) -> list[Dialogue]:
    """What is said before each answer to a prompt of `prepare` (one turn, or all of the user's), for each sample."""
    messages, first_ids = record["messages"], record["prompt_token_ids"]
    turns = [tuple(messages)]
    if recipe.regenerate.turns == "all" and messages:
        turns, first_ids = split_turns(messages), None
    dialogues = []
    for sample in range(recipe.regenerate.samples):
        one = Dialogue(number=number, sample=sample, turns=turns, first_ids=first_ids)
        if temperatures := recipe.regenerate.temperatures:
            seed = answer_seed(recipe.regenerate.seed, number, sample, 0)
            one.temperature = temperatures[seed % len(temperatures)]
        dialogues.append(one)
    return dialogues


def _chunks(context: StageContext) -> Iterator[tuple[int, list[dict[str, Any]], Path]]:
    """(number of the first prompt, prompts, file of their answers), never more than a chunk in memory."""
    records = (record for _, record in read_json_lines(context.inputs["prepare"] / PROMPTS))
    first = 0
    while chunk := list(islice(records, context.recipe.regenerate.chunk)):
        last = first + len(chunk)
        yield first, chunk, context.directory / _PARTS / f"answers-{first:09d}-{last:09d}.jsonl"
        first = last


def _answer_chunks(context: StageContext, process: int, advance: Callable[..., None]) -> tuple[int, float]:
    """Write the missing parts that fall to one of the processes. Return tokens written and seconds spent on them."""
    recipe, renderer, parent, tokens, seconds = context.recipe, open_renderer(context.recipe), os.getppid(), 0, 0.0
    names = ("temperature", "top_p", "top_k", "max_tokens", "seed")
    params = SamplingParams(**{name: getattr(recipe.regenerate, name) for name in names})
    longest, least = recipe.data.max_length, recipe.data.min_answer_tokens
    prompts: dict[int, dict[str, Any]] = {}  # of this chunk, by number
    llm: Answerer | None = None  # when the first answer is needed
    minutes = recipe.regenerate.max_minutes
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def token_ids(dialogue: Dialogue) -> list[int]:
        text = renderer.prompt_text(dialogue.next_messages, prompts[dialogue.number]["template"])
        return renderer.encode([text])[0]

    with ExitStack() as stack:
        for first, records, part in islice(_chunks(context), process, None, recipe.regenerate.processes):
            prompts.clear()
            prompts.update(enumerate(records, start=first))
            dialogues = [d for number, record in prompts.items() for d in _dialogues(number, record, recipe)]
            if part.is_file():
                advance(sum(len(dialogue.turns) for dialogue in dialogues))
                continue
            if tokens and time.monotonic() > deadline:
                break
            llm = llm or stack.enter_context(_answerer(context))
            started = time.perf_counter()
            tell = partial(advance, note=f"{tokens / seconds:,.0f} tokens/s" if seconds else "")
            answer_dialogues(llm, dialogues, params, encode=token_ids, longest=longest, least_room=least, advance=tell)
            seconds += time.perf_counter() - started
            tokens += sum(len(turn.answer_token_ids) for dialogue in dialogues for turn in dialogue.answers)
            if os.getppid() != parent:
                break  # the run was killed; its next start must not find us at work
            lines = []
            for one in dialogues:
                line = {"turns": encode(one.answers), "dropped": one.dropped}
                lines.append({"category": prompts[one.number]["category"], **line})
            write_json_lines(part, lines)
    return tokens, seconds


def _answer_in_processes(context: StageContext, advance: Callable[..., None]) -> tuple[int, float]:
    """Several processes share one device: for small targets, which leave a GPU waiting for the host."""
    spawned = multiprocessing.get_context("spawn")
    news: list[Any] = []
    workers, done = [], list[tuple[int, float]]()
    for number in range(context.recipe.regenerate.processes):
        receiver, sender = spawned.Pipe(duplex=False)
        task = (context.recipe, context.directory, context.inputs, number, sender)
        workers.append(spawned.Process(target=_process, args=task, daemon=True))
        workers[-1].start()
        sender.close()  # the worker's end is now the only one: when it is gone, reading ends
        news.append(receiver)
    try:
        while news:
            for receiver in list[Any](wait(news)):
                try:
                    said = receiver.recv()
                except EOFError:
                    advice = "lower regenerate.processes if memory was short"
                    raise FledgeError(f"regenerate: one of its processes ended; {advice}") from None
                if isinstance(said, FledgeError):
                    raise said
                if isinstance(said, int):
                    advance(said)
                else:
                    done.append(said)
                    news.remove(receiver)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    return sum(tokens for tokens, _ in done), max(seconds for _, seconds in done)


def _process(recipe: Recipe, directory: Path, inputs: Mapping[str, Path], number: int, news: Any) -> None:
    """Send the count of each advance, then tokens and seconds, or the error that ended it."""
    context = StageContext(recipe=recipe, directory=directory, inputs=inputs)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    try:
        news.send(_answer_chunks(context, number, lambda count, **_: news.send(count)))
    except FledgeError as error:
        news.send(error)


def _assemble(context: StageContext) -> dict[str, Any]:
    """Turn all parts into a TokenStore."""
    recipe, counts, categories = context.recipe, Counter[str](), Counter[str]()
    with TokenStore.writer(context.directory / EXAMPLES, vocab_size(resolve(recipe.target.path))) as writer:
        for _, records, part in _chunks(context):
            if recipe.regenerate.max_minutes is not None and not part.is_file():
                counts["prompts_left_out_by_max_minutes"] += len(records)
                continue
            for _, line in read_json_lines(part):
                turns, category = line["turns"], line["category"]
                counts["answers"] += len(turns)
                ended = [turn for turn in turns if turn["finish_reason"] != "length"]
                counts["cut_by_max_tokens"] += len(turns) - len(ended)
                turns = turns if recipe.regenerate.keep_cut else ended
                if line["dropped"] is not None:
                    counts[f"dropped_{line['dropped'].replace(' ', '_')}"] += 1
                sequences = chain((turn["prompt_token_ids"], turn["answer_token_ids"]) for turn in turns)
                counts["turns_apart"] += max(0, len(sequences) - 1)
                categories[category] += len(add_examples(writer, sequences, recipe.data, counts))
        if len(writer) == 0:
            prompts = context.inputs["prepare"] / PROMPTS
            raise DataError(f"{prompts}: no prompt could be answered ({dict(counts)})")
    if counts["cut_by_max_tokens"]:
        share = counts["cut_by_max_tokens"] / counts["answers"]
        fate = "have no end token" if recipe.regenerate.keep_cut else "are left out"
        context.progress.say(f"regenerate: {share:.0%} of the answers were cut by max_tokens and {fate}")
    return {
        "examples": len(writer),
        "tokens": writer.offsets[-1],
        "answer_tokens": writer.answer_tokens,
        **{name: n for name, n in sorted(counts.items()) if n},
        "categories": dict(sorted(categories.items())),
    }


STAGE = Stage(name="regenerate", version=3, depends_on=("prepare",), settings=_settings, run=_run)
