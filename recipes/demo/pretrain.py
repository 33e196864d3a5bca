"""Pretrains the bundled target on one GPU: about 28M parameters, ten minutes or so, resumable.

The schedule follows the larger of steps done and minutes spent: a run given minutes finishes its decay in them.
"""

import math
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from torch import Tensor

from recipes.demo import jsonlines
from recipes.demo.data import WEIGHTS, Corpus, Encoder, Mixture, copy_tokenizer, load_corpus
from recipes.demo.model import (
    SHAPES,
    Llama,
    block,
    describe,
    from_huggingface,
    huggingface_config,
    save_huggingface,
    widen_heads,
)
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

SAMPLE_PROMPTS = (
    "The `Array.prototype.map()` method",
    "def fibonacci(n):\n",
    "It was a dark evening in November, and",
    "Question: Tom has 3 boxes with 12 pencils each. How many pencils does he have?\nAnswer:",
    "# Install a package with kubectl\n",
)


class Validation:
    """Held-out windows of all groups, scored in batches of the training shape so that nothing is compiled for them."""

    def __init__(self, corpus: Corpus, device: torch.device) -> None:
        self.tokens, self.bytes, self.device = corpus.validation, corpus.validation_bytes, device

    def windows(self, length: int) -> tuple[list[str], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        groups, inputs, targets = [], [], []
        for group, stream in self.tokens.items():
            for start in range(0, len(stream) - 1, length):
                piece = stream[start : start + length + 1].astype(np.int64)
                row, target = np.zeros(length, dtype=np.int64), np.full(length, -100, dtype=np.int64)
                row[: len(piece) - 1], target[: len(piece) - 1] = piece[:-1], piece[1:]
                groups.append(group)
                inputs.append(row)
                targets.append(target)
        return groups, np.stack(inputs), np.stack(targets)

    def score(self, model: Llama, rows: int, length: int) -> dict[str, dict[str, float]]:
        """Loss per token and bits per byte, by group and over all."""
        groups, inputs, targets = self.windows(length)
        sums: list[float] = []
        for start in range(0, len(groups), rows):
            x = np.zeros((rows, length), dtype=np.int64)
            y = np.full((rows, length), -100, dtype=np.int64)
            part = slice(start, min(start + rows, len(groups)))
            x[: part.stop - start], y[: part.stop - start] = inputs[part], targets[part]
            # Gradients stay enabled though unused: without them torch.compile would build another set of graphs.
            losses = model.losses(torch.from_numpy(x).to(self.device), torch.from_numpy(y).to(self.device))
            sums += losses.detach().sum(1).tolist()[: part.stop - start]
        result: dict[str, dict[str, float]] = {}
        names = np.array(groups)
        counts = (targets != -100).sum(1)
        for group in [*self.tokens, "all"]:
            chosen = names == group if group != "all" else np.ones(len(names), dtype=bool)
            nats, tokens = float(np.array(sums)[chosen].sum()), int(counts[chosen].sum())
            size = self.bytes.get(group, 0) if group != "all" else sum(self.bytes.values())
            result[group] = {
                "loss": round(nats / max(1, tokens), 4),
                "bits_per_byte": round(nats / math.log(2) / max(1, size), 4),
            }
        return result


@torch.no_grad()
def sample_text(model: Llama, encoder: Encoder, prompt: str, count: int, temperature: float = 0.0) -> str:
    """Continue a prompt with the uncompiled model, without a cache: short texts only."""
    compiled, model.block = model.block, block
    ids = torch.tensor([[encoder.begin, *encoder.text(prompt)]], device=model.embedding.device)
    for _ in range(min(count, model.shape.positions - ids.size(1))):
        logits = model.logits(ids)[:, -1].float()
        if temperature > 0:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            chosen = logits.argmax(-1, keepdim=True)
        if int(chosen) == encoder.end:
            break
        ids = torch.cat((ids, chosen), dim=1)
    model.block = compiled
    text: str = encoder.tokenizer.decode(ids[0, 1:].tolist())
    return text


def corpus_files(data: Path, chat: Path | None) -> tuple[list[Path], Path | None]:
    files = [p for p in sorted(data.glob("*.jsonl*")) if not p.name.startswith("validation")]
    if not files:
        jsonlines.fail(f"{data} holds no *.jsonl.xz files")
    validation = next(iter(sorted(data.glob("validation*"))), None)
    if chat is not None:
        found = sorted(chat.glob("*.jsonl*"))
        if not found:
            jsonlines.fail(f"{chat} holds no *.jsonl.xz files")
        files += found
    return files, validation


def main(
    data: Annotated[Path, typer.Option(help="Folder of GROUP-NN.jsonl.xz and validation.jsonl.xz.")],
    tokenizer: Annotated[Path, typer.Option(help="Directory that recipes.demo.tokenizer wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoint.pt, log.jsonl and, at the end, model/.")],
    chat: Annotated[Path | None, typer.Option(help="Folder of conversations to mix in (must be named chat).")] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for the encoded text; default: tokens/ beside --data.")
    ] = None,
    export: Annotated[Path | None, typer.Option(help="Also write shards, index, config and log here, flat.")] = None,
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "tower",
    minutes: Annotated[float | None, typer.Option(help="Time for training, over all sessions.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps for training, over all sessions.")] = None,
    session_minutes: Annotated[
        float | None, typer.Option(help="End this process, with a checkpoint, after this.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from OUT/checkpoint.pt.")] = False,
    warm_start: Annotated[
        Path | None, typer.Option(help="Begin with the weights of this model directory; it may have fewer heads.")
    ] = None,
    batch_tokens: int = 131_072,
    length: int = 1024,
    long_length: int = 4096,
    long_share: Annotated[float, typer.Option(help="Last part of the run at the long length.")] = 0.15,
    lr: Annotated[float, typer.Option(help="Peak rate for the matrices (Muon, scaled to match AdamW).")] = 3e-3,
    adam_lr: Annotated[float, typer.Option(help="Peak rate for embeddings and norms (AdamW).")] = 3e-3,
    weight_decay: float = 0.1,
    warm_up: float = 0.01,
    decay: Annotated[float, typer.Option(help="Last part of the run over which the rate falls to 0.")] = 0.45,
    evaluations: Annotated[int, typer.Option(help="Validations over the run, besides the last.")] = 6,
    checkpoint_minutes: float = 2.0,
    attention: Annotated[str, typer.Option(help="Attention kernel: auto, flash or cudnn.")] = "auto",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile")] = True,
    device: str = "auto",
    workers: Annotated[int, typer.Option(help="Processes that encode text.")] = default_workers(),
    seed: int = 1,
) -> None:
    """Pretrain and write a Hugging Face Llama directory under OUT/model."""
    console = Console()
    if shape not in SHAPES:
        jsonlines.fail(f"--shape must be one of {', '.join(SHAPES)}")
    sizes = SHAPES[shape]
    if batch_tokens % long_length or batch_tokens % length or max(length, long_length) > sizes.positions:
        jsonlines.fail(
            "--batch-tokens must be a multiple of both lengths, and those no longer than the model's positions"
        )
    budget = Budget(minutes, steps, session_minutes)  # checked before minutes are spent on encoding
    if not resume and (out / "checkpoint.pt").exists():
        jsonlines.fail(f"{out}/checkpoint.pt exists: give --resume or another --out")
    files, validation_file = corpus_files(data, chat)
    encoder = Encoder(tokenizer)
    if warm_start is not None and Encoder(warm_start).key != encoder.key:
        jsonlines.fail(f"{warm_start} was trained with another tokenizer than {tokenizer}: use its own")
    started = time.monotonic()
    corpus = load_corpus(files, validation_file, tokenizer, cache or data.parent / "tokens", workers, console)
    log = Log(out / "log.jsonl", console)
    mixture = Mixture({g: len(s) for g, s in corpus.streams.items()}, WEIGHTS, seed)
    log.write(
        "corpus",
        seconds=time.monotonic() - started,
        million_tokens={g: round(len(s) / 1e6, 2) for g, s in corpus.streams.items()},
        shares={g: round(float(s), 3) for g, s in zip(mixture.groups, mixture.shares, strict=True)},
    )
    if encoder.tokenizer.get_vocab_size() != sizes.vocabulary:
        jsonlines.fail(
            f"the tokenizer has {encoder.tokenizer.get_vocab_size()} tokens, {shape} wants {sizes.vocabulary}"
        )

    chosen = prepare_device(device, attention)
    torch.manual_seed(seed)
    model = Llama(sizes, torch.bfloat16 if chosen.type == "cuda" else torch.float32, compiled)
    if warm_start is not None:
        widen_heads(from_huggingface(warm_start), model)
    model = model.to(chosen)
    optimizers = Optimizers(model, lr, adam_lr, weight_decay, compiled)
    stream = torch.from_numpy(np.concatenate([corpus.streams[g] for g in mixture.groups]).astype(np.int32)).to(chosen)
    validation = Validation(corpus, chosen) if corpus.validation else None
    budget = Budget(minutes, steps, session_minutes)
    if resume:
        mixture.restore(load_checkpoint(out / "checkpoint.pt", model, optimizers, budget)["mixture"])
    log.write("model", shape=shape, **describe(sizes), device=str(chosen), step=budget.step, elapsed=budget.elapsed)

    def batch(rows: int, window: int) -> tuple[Tensor, Tensor]:
        starts = torch.from_numpy(mixture.windows(rows, window)).to(chosen, non_blocking=True)
        tokens = stream[starts[:, None] + torch.arange(window + 1, device=chosen)].long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def validate(window: int) -> None:
        if validation is not None:
            scores = validation.score(model, batch_tokens // window, window)
            log.write("validation", step=budget.step, progress=budget.progress, **scores)

    evaluated = math.floor(budget.progress * evaluations)
    saved, shown, shown_step = time.monotonic(), time.monotonic(), budget.step
    finished = True
    while (progress := budget.progress) < 1.0:
        if budget.session_over:
            finished = False
            break
        window = long_length if progress >= 1 - long_share else length
        tokens, targets = batch(batch_tokens // window, window)
        loss = model.losses(tokens, targets).mean()
        loss.backward()
        norm = optimizers.step(rate_factor(progress, warm_up, decay))
        budget.step += 1
        if budget.step <= 3 or budget.step % 50 == 0:
            value = float(loss.detach())
            now = time.monotonic()
            log.write(
                "train",
                show=budget.step <= 3 or budget.step % 200 == 0,
                step=budget.step,
                progress=progress,
                elapsed=budget.elapsed,
                loss=value,
                norm=float(norm),
                factor=rate_factor(progress, warm_up, decay),
                length=window,
                tokens_per_second=round((budget.step - shown_step) * batch_tokens / (now - shown)),
            )
            shown, shown_step = now, budget.step
            if not math.isfinite(value):
                jsonlines.fail(f"the loss is {value} at step {budget.step}: lower --lr")
        if math.floor(budget.progress * evaluations) > evaluated and budget.progress < 1.0:
            evaluated = math.floor(budget.progress * evaluations)
            validate(window)
            shown, shown_step = time.monotonic(), budget.step
        if time.monotonic() - saved > 60 * checkpoint_minutes:
            save_checkpoint(out / "checkpoint.pt", model, optimizers, budget, mixture=mixture.state())
            saved = shown = time.monotonic()
            shown_step = budget.step
    save_checkpoint(out / "checkpoint.pt", model, optimizers, budget, mixture=mixture.state())
    passes = mixture.passes_done()
    log.write("stopped", step=budget.step, elapsed=budget.elapsed, tokens=budget.step * batch_tokens, passes=passes)
    if not finished:
        console.print("session over; run the same command with --resume")
        return
    config = huggingface_config(sizes, encoder.begin, [encoder.turn_end, encoder.end], encoder.end)
    save_huggingface(model, out / "model", config)
    copy_tokenizer(tokenizer, out / "model")
    validate(length)
    for prompt in SAMPLE_PROMPTS:
        for temperature in (0.0, 0.7):
            text = sample_text(model, encoder, prompt, 80, temperature)
            log.write("sample", show=False, temperature=temperature, text=text)
            console.print(f"--- temperature {temperature}\n{text}", markup=False, highlight=False)
    if export is not None:
        save_huggingface(model, export, config)
        shutil.copyfile(tokenizer / "tokenizer.json", export / "tokenizer.json")
        (export / "log.jsonl").write_bytes(log.path.read_bytes())


if __name__ == "__main__":
    typer.run(main)
