"""Trains repetition away: the model answers prompts greedily, and what repeats in its own answers is made unlikely.

Small models fall into loops when they decode greedily, since a text that repeats itself is the likeliest continuation
of a text that has begun to. Each round lets the model answer, marks the tokens that go on with a loop, and tunes with

    cross entropy on conversations  +  weight * mean of -log(1 - p(token)) over the marked tokens

(sequence-level unlikelihood training, arXiv 1908.04319). Nothing changes in how the model is decoded.
"""

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from torch import Tensor

from fledge import LLM, SamplingParams
from fledge.checkpoints.target import load_target
from recipes.demo import conversations, jsonlines
from recipes.demo.chat_tune import DocumentMask, write_model
from recipes.demo.data import Encoder
from recipes.demo.model import from_huggingface
from recipes.demo.training import Log, Optimizers, default_workers, prepare_device

SIZE = 8  # tokens of a sequence whose return is a repetition
ONSET = 4  # repeated tokens in a row before a loop is one: lists and code come back to a phrase without looping

Answer = tuple[list[int], list[int]]  # prompt and answer ids


def repeated(ids: Sequence[int], size: int = SIZE) -> list[bool]:
    """For each token, whether it ends a sequence of `size` tokens that occurred before in the same text."""
    seen: set[tuple[int, ...]] = set()
    found = [False] * len(ids)
    for end in range(size, len(ids) + 1):
        window = tuple(ids[end - size : end])
        found[end - 1] = window in seen
        seen.add(window)
    return found


def in_repetition(ids: Sequence[int], size: int = SIZE) -> float:
    """Share of the tokens that lie inside a sequence of `size` tokens seen before."""
    inside = np.zeros(len(ids), dtype=bool)
    for end, again in enumerate(repeated(ids, size)):
        if again:
            inside[end - size + 1 : end + 1] = True
    return float(inside.mean()) if len(ids) else 0.0


def loop_tokens(ids: Sequence[int], size: int = SIZE, onset: int = ONSET) -> list[int]:
    """Places of tokens to make unlikely: from the token at which a text begins to repeat a stretch it has written."""
    again = repeated(ids, size)
    places: list[int] = []
    start = None
    for place, value in enumerate([*again, False]):
        if value and start is None:
            start = place
        elif not value and start is not None:
            if place - start >= onset:
                places += range(max(0, start - size // 2), place)  # the choice to repeat fell before it could be seen
            start = None
    return sorted(set(places))


class Answers:
    """The model as it is, answering greedily through Fledge's engine."""

    def __init__(self, folder: Path, max_tokens: int) -> None:
        self.llm = LLM(folder, max_num_seqs=512, enable_prefix_caching=False, gpu_memory_utilization=0.3)
        self.params = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    def update(self, folder: Path) -> None:
        """Take over other weights, in place: what was captured reads the same memory."""
        fresh = load_target(folder, dtype=next(self.llm.target.parameters()).dtype, device="cpu")
        with torch.no_grad():
            for old, new in zip(self.llm.target.parameters(), fresh.parameters(), strict=True):
                old.copy_(new)

    def __call__(self, prompts: list[list[int]]) -> list[Answer]:
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], self.params)
        return [(ids, list(o.outputs[0].token_ids)) for ids, o in zip(prompts, outputs, strict=True)]


def marked_rows(answers: list[Answer], length: int, pad: int) -> conversations.Rows | None:
    """Pack the answers that loop; targets are the marked tokens only. None where there are none."""
    items = []
    for prompt, answer in answers:
        places = loop_tokens(answer)
        if places and len(prompt) + len(answer) <= length:
            ids = np.array([*prompt, *answer], dtype=np.uint16)
            marked = np.zeros(len(ids), dtype=bool)
            marked[[len(prompt) + place for place in places]] = True
            items.append((ids, marked, "own"))
    return conversations.pack(items, length, pad) if items else None


def unlikelihood(losses: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log(1 - p) over targets, from their cross entropies -log p [rows, length]."""
    chosen = losses[targets >= 0].float()
    return -torch.log1p(-torch.exp(-chosen).clamp(max=1 - 1e-4)).mean()


def prompt_ids(encoder: Encoder, messages: list[dict[str, str]]) -> list[int]:
    """Ids of a conversation up to where the assistant answers its last user turn."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    ids, _ = encoder.conversation(messages)
    return [*ids, encoder.turn_start, *encoder.text("assistant\n")]


def evaluate(answers: Answers, sets: dict[str, list[list[int]]]) -> dict[str, float]:
    """Share of greedy tokens inside repeated sequences, by set; and of answers to `humaneval` that hold code."""
    scores: dict[str, float] = {}
    for name, prompts in sets.items():
        found = [answer for _, answer in answers(prompts)]
        tokens = sum(map(len, found))
        scores[name] = round(sum(in_repetition(ids) * len(ids) for ids in found) / max(1, tokens), 4)
        scores[f"{name}_tokens"] = round(tokens / len(found), 1)
        if name == "humaneval":
            texts = [answers.llm.tokenizer.decode(ids) for ids in found]
            scores["humaneval_code"] = sum("def " in text for text in texts)
    return scores


def main(
    base: Annotated[Path, typer.Option(help="Model directory that recipes.demo.chat_tune wrote.")],
    data: Annotated[Path, typer.Option(help="Folder of conversations, *.jsonl.xz, to stay close to.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines of conversations to answer, .jsonl.xz.")],
    out: Annotated[Path, typer.Option(help="Folder for log.jsonl and model/.")],
    evaluation: Annotated[Path | None, typer.Option(help="Folder of sets to measure repetition on.")] = None,
    rounds: int = 8,
    answered: Annotated[int, typer.Option(help="Prompts answered in a round.")] = 3072,
    steps: Annotated[int, typer.Option(help="Steps in a round.")] = 40,
    max_tokens: int = 256,
    weight: Annotated[float, typer.Option(help="Of the marked tokens beside the conversations.")] = 1.0,
    length: int = 2048,
    rows: Annotated[int, typer.Option(help="Packed rows of each kind in a step.")] = 16,
    lr: float = 1e-4,
    minutes: Annotated[float | None, typer.Option(help="Begin no round after this.")] = None,
    device: str = "auto",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile")] = True,
    workers: int = default_workers(),
    seed: int = 1,
) -> None:
    """Tune, round by round, and write a complete Hugging Face directory under OUT/model."""
    console, began = Console(), time.monotonic()
    files = sorted(data.glob("*.jsonl*"))
    if not files:
        jsonlines.fail(f"{data} holds no *.jsonl.xz files")
    encoder, rng = Encoder(base), random.Random(seed)
    asked = [prompt_ids(encoder, record["messages"]) for record in jsonlines.read(prompts)]
    asked = [ids for ids in asked if len(ids) + max_tokens <= length]
    sets: dict[str, list[list[int]]] = {}
    for path in sorted(evaluation.glob("*.jsonl")) if evaluation else ():
        first = [prompt_ids(encoder, record["messages"][:1]) for record in jsonlines.read(path)]
        sets[path.stem] = [ids for ids in first if len(ids) + max_tokens <= length][:164]
    sets = {name: found for name, found in sets.items() if found}
    chat = conversations.epoch(conversations.load(files)[0], rng)
    wanted = rounds * steps * rows
    packed = conversations.rows_of(chat[: 24 * wanted], base, length, encoder.end, workers, rng)

    log = Log(out / "log.jsonl", console)
    chosen = prepare_device(device, "auto")
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if chosen.type == "cuda" else torch.float32
    model = from_huggingface(base, dtype, compiled).to(chosen)
    optimizers = Optimizers(model, lr, lr, 0.0, compiled)
    make_mask = DocumentMask(rows, length, chosen, chosen.type == "cpu")
    answers = Answers(base, max_tokens)
    log.write("start", prompts=len(asked), chat_rows=len(packed), seconds=time.monotonic() - began)
    if sets:
        log.write("evaluation", round=0, **evaluate(answers, sets))

    def losses(part: conversations.Rows, pick: Any) -> tuple[Tensor, Tensor]:
        ids, targets = (torch.from_numpy(a[pick].astype(np.int64)).to(chosen) for a in (part.tokens, part.targets))
        mask = make_mask(torch.from_numpy(part.documents[pick].astype(np.int32)).to(chosen))
        return model.losses(ids, targets, mask), targets

    for number in range(1, rounds + 1):
        if minutes is not None and time.monotonic() - began > 60 * minutes:
            break
        own = answers(rng.sample(asked, min(answered, len(asked))))
        share = sum(in_repetition(a) * len(a) for _, a in own) / max(1, sum(len(a) for _, a in own))
        marked = marked_rows(own, length, encoder.end)
        sums = np.zeros(2)
        for step in range(steps):
            start = ((number - 1) * steps + step) * rows
            loss, targets = losses(packed, np.arange(start, start + rows) % len(packed))
            likely = loss.sum() / max(1, int((targets >= 0).sum()))
            likely.backward()
            unlikely = torch.zeros(())
            if marked is not None:
                loss, targets = losses(marked, np.array([rng.randrange(len(marked)) for _ in range(rows)]))
                unlikely = unlikelihood(loss, targets)
                (weight * unlikely).backward()
            done = ((number - 1) * steps + step) / (rounds * steps)
            optimizers.step(min(1.0, 10 * done + 0.1, 2 * (1 - done)))
            sums += [float(likely.detach()), float(unlikely.detach())]
        folder = out / "model"
        write_model(model, encoder, base, folder)
        answers.update(folder)
        shown = {"likely": sums[0] / steps, "unlikely": sums[1] / steps, "own_repetition": share}
        measured = evaluate(answers, sets) if sets and (number % 2 == 0 or number == rounds) else {}
        log.write("round", round=number, seconds=time.monotonic() - began, **shown, **measured)
    console.print(json.dumps({"seconds": round(time.monotonic() - began, 1), "out": str(out / "model")}))


if __name__ == "__main__":
    typer.run(main)
