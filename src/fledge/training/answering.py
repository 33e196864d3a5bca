"""The target's answers to chunks of prompts, for the stage `regenerate`."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fledge.checkpoints.source import resolve
from fledge.decoding.params import SamplingParams
from fledge.devices import choose_device
from fledge.engine.llm import LLM
from fledge.errors import CheckpointError, ConfigError, PromptError
from fledge.evaluation.conversations import Message, split_turns
from fledge.evaluation.dialogue import Dialogue, Generator, answer_dialogues
from fledge.training.data.rendering import Renderer, TemplateRefusedError
from fledge.training.recipe import Recipe
from fledge.training.stages.prepare import open_renderer

GPU_MEMORY = 0.88  # of the device, for all processes that answer together
_BESIDE_KEYS = 3 << 30  # what such a process needs besides its keys and values: weights of a small target, graphs, CUDA


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

    def close(self) -> None:
        """Give the model's memory back before the next stage needs it."""
        self._llm = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

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
