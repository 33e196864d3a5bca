"""Tunes the model on its own answers: sharper where they are good, away from where they loop.

Small models fall into loops when they decode greedily, and have few clear favourites where they do not. In each round
the model answers training prompts as it is, mostly greedily; the answers are judged (judging.py), and it is tuned with

    cross entropy on conversations
    + good_weight * cross entropy on its good answers               rejection-sampling self-training
    + loop_weight * mean of -log(1 - p(token)) where it loops       unlikelihood training, arXiv 1908.04319

The first term holds it to the data, the second makes its favourites clearer, the third takes the loops out. The third
alone works too, and leaves a model of near-ties that nobody can draft for. Nothing changes in how the model is decoded.
"""

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from torch import Tensor

from fledge.decoding.statistics import repeated_tokens
from recipes.demo import conversations, humaneval, jsonlines
from recipes.demo.answers import Answer, Engines
from recipes.demo.chat_tune import DocumentMask, write_model
from recipes.demo.data import Encoder, encode_all
from recipes.demo.judging import Request, Verdict, judge, loop_tokens, repeated_share
from recipes.demo.model import from_huggingface
from recipes.demo.training import (
    Budget,
    Log,
    Optimizers,
    default_workers,
    load_checkpoint,
    prepare_device,
    rate_factor,
    save_checkpoint,
)

# Of its own tokens that are to be unlearnt; with fewer, the penalty falls in proportion, so that rounds do not swing.
FULL_PENALTY = 0.02
QUICK = 48  # prompts of each set that are answered after every round; all of them before the first and after the last
HELD_OUT_ROWS = 64


def split_record(record: jsonlines.Record) -> tuple[jsonlines.Record, str | None]:
    """A conversation up to its last question, and the answer that follows in the data, if any."""
    messages, reference = record["messages"], None
    while messages and messages[-1]["role"] == "assistant":
        reference, messages = messages[-1]["content"], messages[:-1]
    return {"messages": messages, "source": record.get("source", "")}, reference


def first_question(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """A conversation up to the first thing the user says."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    return messages[: first + 1]


def requests_of(records: Sequence[jsonlines.Record], encoder: Encoder, tokenizer: Path, workers: int) -> list[Request]:
    """Encode questions in parallel; before CUDA is touched, as `encode_all` wants it."""
    split = [split_record(record) for record in records]
    split = [(asked, reference) for asked, reference in split if asked["messages"]]
    encoded = encode_all([asked for asked, _ in split], tokenizer, workers, conversations=True)
    return [
        Request([*ids.tolist(), *encoder.answer_start], asked["messages"][-1]["content"], reference)
        for (asked, reference), (ids, _) in zip(split, encoded, strict=True)
    ]


def packed(answers: Sequence[Answer], places: Sequence[Sequence[int]], length: int, pad: int) -> conversations.Rows:
    """Pack answers; targets are the tokens at `places` of each. Answers without any are left out."""
    items = []
    for answer, chosen in zip(answers, places, strict=True):
        if len(chosen) and len(answer.prompt) + len(answer.ids) <= length:
            ids = np.array([*answer.prompt, *answer.ids], dtype=np.uint16)
            targets = np.zeros(len(ids), dtype=bool)
            targets[len(answer.prompt) + np.array(chosen)] = True
            items.append((ids, targets, "own"))
    return conversations.pack(items, length, pad)


def lessons(
    answers: Sequence[Answer], verdicts: Sequence[Verdict], length: int, pad: int
) -> tuple[conversations.Rows, conversations.Rows, float]:
    """Good answers whole, the looping tokens of the others, and the share of all tokens that these are."""
    judged = list(zip(answers, verdicts, strict=True))
    good = [range(len(answer.ids)) if verdict is Verdict.GOOD else range(0) for answer, verdict in judged]
    loops = [loop_tokens(answer.ids) if verdict is Verdict.LOOPING else [] for answer, verdict in judged]
    share = sum(map(len, loops)) / max(1, sum(len(answer.ids) for answer in answers))
    return packed(answers, good, length, pad), packed(answers, loops, length, pad), share


def unlikelihood(losses: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log(1 - p) over targets, from their cross entropies -log p [rows, length]."""
    chosen = losses[targets >= 0].float()
    return -torch.log1p(-torch.exp(-chosen).clamp(max=1 - 1e-4)).mean()


class Tuner:
    """The model in training and its losses on packed rows, always `rows` of them at a time."""

    def __init__(self, base: Path, lr: float, rows: int, length: int, device: torch.device, compiled: bool) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = from_huggingface(base, dtype, compiled).to(device)
        self.optimizers = Optimizers(self.model, lr, lr, 0.0, compiled)
        self.mask, self.rows, self.device = DocumentMask(rows, length, device, device.type == "cpu"), rows, device

    def losses(self, part: conversations.Rows, pick: Any) -> tuple[Tensor, Tensor]:
        """Cross entropies and targets [rows, length] of the picked rows."""
        ids, targets = (torch.from_numpy(a[pick].astype(np.int64)).to(self.device) for a in (part.tokens, part.targets))
        documents = torch.from_numpy(part.documents[pick].astype(np.int32)).to(self.device)
        return self.model.losses(ids, targets, self.mask(documents)), targets

    def all_losses(self, part: conversations.Rows) -> Tensor:
        """Cross entropy of every target of all rows, without training."""
        found = []
        for start in range(0, len(part), self.rows):
            losses, targets = self.losses(part, np.arange(start, start + self.rows) % len(part))
            keep = targets >= 0
            keep[len(part) - start :] = False  # rows that only fill the batch
            found.append(losses.detach()[keep].float())
        return torch.cat(found) if found else torch.zeros(0)

    def step(self, parts: Sequence[tuple[str, float, conversations.Rows]], picks: Sequence[Any], rate: float) -> Any:
        """One update on weighted parts ("unlikely" is the penalty); return the losses before weighting."""
        seen = []
        for (name, weight, rows), pick in zip(parts, picks, strict=True):
            losses, targets = self.losses(rows, pick)
            likely = losses.sum() / (targets >= 0).sum().clamp(min=1)
            loss = unlikelihood(losses, targets) if name == "unlikely" else likely
            (weight * loss).backward()
            seen.append(loss.detach())
        self.optimizers.step(rate)
        return torch.stack(seen)


class Evaluation:
    """Sets that training never sees: repetition and length by set, how sure the model is, HumanEval's counts."""

    def __init__(self, folder: Path | None, tests: Path | None, encoder: Encoder, room: int) -> None:
        questions: dict[str, list[list[dict[str, str]]]] = {}
        for path in sorted(folder.glob("*.jsonl*")) if folder else ():
            name = path.name.partition(".")[0]
            questions[name] = [first_question(record["messages"]) for record in jsonlines.read(path)]
        self.tasks = humaneval.load(tests) if tests else []
        if self.tasks:
            questions["humaneval"] = [humaneval.question(task) for task in self.tasks]
        self.sets: dict[str, list[list[int]]] = {}
        for name, asked in questions.items():
            short = [messages for messages in asked if sum(len(m["content"]) for m in messages) < 8 * room]
            prompts = [encoder.prompt(messages) for messages in short]
            if kept := [ids for ids in prompts if name == "humaneval" or len(ids) <= room][:200]:
                self.sets[name] = kept

    def measure(
        self, engines: Engines, tuner: Tuner, length: int, pad: int, workers: int, limit: int | None
    ) -> dict[str, Any]:
        """The first `limit` prompts of each set, together; HumanEval's tests only where there is no limit."""
        sets = {name: prompts[:limit] for name, prompts in self.sets.items()}
        answers = engines.answer([ids for prompts in sets.values() for ids in prompts])
        scores: dict[str, Any] = {}
        rest = answers
        for name, prompts in sets.items():
            own, rest = rest[: len(prompts)], rest[len(prompts) :]
            scores[name] = round(repeated_share(own), 4)
            scores[f"{name}_tokens"] = round(sum(len(a.ids) for a in own) / len(own), 1)
            if name == "humaneval" and self.tasks and limit is None:
                scores["humaneval_counts"] = humaneval.score(self.tasks, [a.text for a in own], workers)
        fresh = [[i for i, again in enumerate(repeated_tokens(a.ids)) if not again] for a in answers]
        sure = torch.exp(-tuner.all_losses(packed(answers, fresh, length, pad)))
        if len(sure):  # greedy tokens are the likeliest ones: how likely, is how clear a favourite there is
            scores["confidence"], scores["below_half"] = float(sure.mean()), float((sure < 0.5).float().mean())
        return scores


def main(
    base: Annotated[Path, typer.Option(help="Model directory that recipes.demo.chat_tune wrote.")],
    data: Annotated[Path, typer.Option(help="Folder of conversations, *.jsonl.xz, to stay close to and to answer.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoint.pt, log.jsonl and model/.")],
    prompts: Annotated[list[Path] | None, typer.Option(help="More conversations to answer, .jsonl.xz.")] = None,
    evaluation: Annotated[Path | None, typer.Option(help="Folder of sets to measure on, *.jsonl.xz.")] = None,
    tests: Annotated[Path | None, typer.Option(help="HumanEval.jsonl of openai/human-eval, to count passes.")] = None,
    rounds: int = 12,
    answered: Annotated[int, typer.Option(help="Prompts answered in a round.")] = 6144,
    sampled: Annotated[float, typer.Option(help="Share of them answered at --temperature, the rest greedily.")] = 0.33,
    temperature: float = 0.7,
    max_tokens: int = 320,
    steps: Annotated[int, typer.Option(help="Steps in a round.")] = 40,
    good_weight: Annotated[float, typer.Option(help="Of its good answers beside the conversations.")] = 1.0,
    loop_weight: Annotated[float, typer.Option(help="Of what loops.")] = 0.5,
    length: int = 2048,
    rows: Annotated[int, typer.Option(help="Packed rows of each kind in a step.")] = 16,
    lr: float = 5e-5,
    warm_up: float = 0.03,
    decay: Annotated[float, typer.Option(help="Last part of the run over which the rate falls to 0.")] = 0.34,
    minutes: Annotated[float | None, typer.Option(help="For all of it, measuring included, over all sessions.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from OUT/checkpoint.pt.")] = False,
    processes: Annotated[int, typer.Option(help="That answer side by side on one GPU (MPS).")] = 1,
    device: str = "auto",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile")] = True,
    workers: int = default_workers(),
    seed: int = 1,
) -> None:
    """Tune, round by round, and write a complete Hugging Face directory under OUT/model after each."""
    budget = Budget(minutes, rounds * steps)  # first: loading and measuring count too
    console, encoder, rng = Console(), Encoder(base), random.Random(seed)
    files = sorted(data.glob("*.jsonl*"))
    if not files:
        jsonlines.fail(f"{data} holds no *.jsonl.xz files")
    if not resume and (out / "checkpoint.pt").exists():
        jsonlines.fail(f"{out}/checkpoint.pt exists: give --resume or another --out")
    engines = Engines(base, max_tokens, processes, device) if processes > 1 else None  # they load while we encode
    training, held_out = conversations.load(files)
    chat = conversations.epoch(training, rng)
    more = [record for path in prompts or () for record in jsonlines.read(path)]
    asked = requests_of(
        rng.sample([*chat, *more], min(len(chat) + len(more), rounds * answered)), encoder, base, workers
    )
    asked = [request for request in asked if len(request.ids) + max_tokens <= length]
    if not asked:
        jsonlines.fail(f"no prompt leaves room for {max_tokens} tokens in --length {length}")
    likely = conversations.rows_of(chat[: 24 * rounds * steps * rows], base, length, encoder.end, workers, rng)
    validation = conversations.rows_of(held_out[: 8 * HELD_OUT_ROWS], base, length, encoder.end, workers, rng)
    sets = Evaluation(evaluation, tests, encoder, length - max_tokens)

    log = Log(out / "log.jsonl", console)
    chosen = prepare_device(device, "auto")
    torch.manual_seed(seed)
    tuner = Tuner(base, lr, rows, length, chosen, compiled)
    engines = engines or Engines(base, max_tokens, 1, device)
    folder = out / "model"

    def hand_over() -> None:
        write_model(tuner.model, encoder, base, folder)
        engines.update(folder)

    def measure(limit: int | None = None) -> dict[str, Any]:
        held = tuner.all_losses(validation)
        found = sets.measure(engines, tuner, length, encoder.end, workers, limit)
        return {"held_out": float(held.mean()) if len(held) else None, **found}

    if resume:
        load_checkpoint(out / "checkpoint.pt", tuner.model, tuner.optimizers, budget)
        hand_over()
    # Once each, for nothing: what comes now is timed, and must not contain loading and compiling.
    engines.answer([request.ids for request in asked[:64]])
    tuner.all_losses(validation)
    log.write("start", requests=len(asked), chat_rows=len(likely), step=budget.step, elapsed=budget.elapsed)
    before = budget.elapsed
    if budget.step == 0:
        log.write("evaluation", round=0, **measure())
    last_measure, longest = budget.elapsed - before, 0.0
    for number in range(budget.step // steps, rounds):
        began = budget.elapsed
        if minutes is not None and number and began + longest + last_measure > 60 * minutes:
            break
        drawn = [asked[i % len(asked)] for i in range(number * answered, (number + 1) * answered)]
        greedy = round(len(drawn) * (1 - sampled))
        temperatures = [0.0] * greedy + [temperature] * (len(drawn) - greedy)
        own = engines.answer([request.ids for request in drawn], temperatures, seed=seed + number * answered)
        answering = budget.elapsed - began
        verdicts = judge(drawn, own, workers)
        judging = budget.elapsed - began - answering
        good, unlikely, looping = lessons(own, verdicts, length, encoder.end)
        penalty = loop_weight * min(1.0, looping / FULL_PENALTY)
        weighted = (("likely", 1.0, likely), ("good", good_weight, good), ("unlikely", penalty, unlikely))
        parts = [part for part in weighted if part[1] > 0 and len(part[2])]
        sums, draw = torch.zeros(len(parts), device=chosen), random.Random(f"{seed} {number}")
        for _ in range(steps):
            start = budget.step * rows
            picks = [np.arange(start, start + rows) % len(likely)]
            picks += [np.array([draw.randrange(len(part)) for _ in range(rows)]) for _, _, part in parts[1:]]
            sums += tuner.step(parts, picks, rate_factor(budget.progress, warm_up, decay))
            budget.step += 1
        tuning = budget.elapsed - began - answering - judging
        hand_over()
        save_checkpoint(out / "checkpoint.pt", tuner.model, tuner.optimizers, budget)
        counts = Counter(verdicts)
        log.write(
            "round",
            round=number + 1,
            elapsed=budget.elapsed,
            answering=answering,
            judging=judging,
            tuning=tuning,
            rate=rate_factor(budget.progress, warm_up, decay),
            **{name: float(total) / steps for (name, *_), total in zip(parts, sums, strict=True)},
            own_repetition=repeated_share(own[:greedy]),
            own_tokens=sum(len(a.ids) for a in own) / len(own),
            good_share=counts[Verdict.GOOD] / len(own),
            looping_share=counts[Verdict.LOOPING] / len(own),
            **measure(QUICK),
        )
        longest = max(longest, budget.elapsed - began) if number else 0.0  # the first compiles
    log.write("final", step=budget.step, **measure(), elapsed=budget.elapsed)
    console.print(json.dumps({"seconds": round(budget.elapsed, 1), "out": str(folder)}))


if __name__ == "__main__":
    typer.run(main)
