"""Answers prompts with the target itself, turn by turn, many dialogues at once. Used by the stage `regenerate`."""

import gc
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fledge.checkpoints.source import resolve
from fledge.decoding.params import SamplingParams
from fledge.devices import choose_device
from fledge.engine.llm import LLM
from fledge.engine.outputs import RequestOutput
from fledge.errors import CheckpointError, ConfigError
from fledge.evaluation.conversations import Message
from fledge.training.data.rendering import Renderer, TemplateRefusedError
from fledge.training.recipe import Recipe
from fledge.training.stages.prepare import open_renderer

GPU_MEMORY = 0.88  # of the device, for all processes that answer together
_BESIDE_KEYS = 3 << 30  # what such a process needs besides its keys and values: weights of a small target, graphs, CUDA


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


def open_llm(recipe: Recipe) -> Answerer:
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


def answer_seed(seed: int, prompt: int, sample: int, turn: int) -> int:
    """63 bits that follow from what is asked and not from what else is in the batch."""
    text = f"fledge regenerate {seed} {prompt} {sample} {turn}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


@dataclass
class Dialogue:
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


class AnswerWorker:
    """Answers chunks of prompts. The model is loaded when the first answer is needed."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._llm: Answerer | None = None
        self._renderer: Renderer | None = None
        self.tokens = 0
        self.seconds = 0.0

    def speed(self) -> str:
        return f"{self.tokens / self.seconds:,.0f} tokens/s" if self.seconds > 0 else ""

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

    def _dialogue(self, number: int, sample: int, record: Mapping[str, Any]) -> Dialogue:
        ids, messages = record["prompt_token_ids"], record["messages"]
        waiting, first_ids = [list(messages)], ids
        if self._recipe.regenerate.turns == "all" and messages:
            waiting, first_ids = user_turns(messages), None
        return Dialogue(
            number=number,
            sample=sample,
            category=record["category"],
            template=record["template"],
            waiting=waiting,
            first_ids=first_ids,
        )

    def _round(self, dialogues: Sequence[Dialogue], advance: Callable[[int], None]) -> None:
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
        self.seconds += time.perf_counter() - started
        for dialogue, ids, output in zip(asked, prompts, outputs, strict=True):
            (answer,) = output.outputs
            self.tokens += len(answer.token_ids)
            dialogue.history += [*dialogue.waiting.pop(0), {"role": "assistant", "content": answer.text}]
            dialogue.turns.append(
                {"prompt_token_ids": ids, "answer_token_ids": list(answer.token_ids), "finish": answer.finish_reason}
            )
        if not ending:
            advance(sum(not dialogue.waiting for dialogue in asked))

    def _prompts(self, dialogues: Sequence[Dialogue]) -> list[list[int] | None]:
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
