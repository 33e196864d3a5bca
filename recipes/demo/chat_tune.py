"""Tunes the pretrained model on conversations: packed rows, document masks, loss on what the assistant says."""

import math
import random
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from recipes.demo import conversations, jsonlines
from recipes.demo.data import Encoder, copy_tokenizer
from recipes.demo.model import Llama, describe, from_huggingface, huggingface_config, save_huggingface, write_json
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


class DocumentMask:
    """Causal masks inside the documents of packed rows: blocks for flex attention, or dense for any device.

    The document numbers live in one tensor that is refilled: compiled code sees the same mask function at each step.
    """

    def __init__(self, rows: int, length: int, device: torch.device, dense: bool) -> None:
        documents = torch.zeros((rows, length), dtype=torch.int32, device=device)
        self.causal = torch.ones((length, length), dtype=torch.bool, device=device).tril() if dense else None

        def allowed(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (documents[row, query] == documents[row, key]) & (query >= key)

        self.documents, self.allowed = documents, allowed

    def __call__(self, documents: Tensor) -> Tensor | BlockMask:
        self.documents.copy_(documents)
        rows, length = documents.shape
        if self.causal is not None:
            same = self.documents[:, None, :, None] == self.documents[:, None, None, :]
            return same & self.causal
        return create_block_mask(self.allowed, rows, None, length, length, device=self.documents.device)


def generation_config(encoder: Encoder) -> dict[str, Any]:
    return {
        "bos_token_id": encoder.begin,
        "eos_token_id": [encoder.turn_end, encoder.end],
        "pad_token_id": encoder.end,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
    }


def write_model(model: Llama, encoder: Encoder, tokenizer: Path, folder: Path) -> None:
    """Write a complete Hugging Face directory: weights, configurations, tokenizer."""
    config = huggingface_config(model.shape, encoder.begin, [encoder.turn_end, encoder.end], encoder.end)
    save_huggingface(model, folder, config)
    write_json(folder / "generation_config.json", generation_config(encoder))
    copy_tokenizer(tokenizer, folder)


def main(
    base: Annotated[Path, typer.Option(help="Model directory that recipes.demo.pretrain wrote.")],
    data: Annotated[Path, typer.Option(help="Folder of conversations, *.jsonl.xz.")],
    tokenizer: Annotated[Path, typer.Option(help="Directory that recipes.demo.tokenizer wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoint.pt, log.jsonl and, at the end, model/.")],
    export: Annotated[Path | None, typer.Option(help="Also write shards, index, config and log here, flat.")] = None,
    epochs: int = 3,
    minutes: Annotated[float | None, typer.Option(help="Time limit for training, over all sessions.")] = None,
    steps: Annotated[int | None, typer.Option(help="Fewer steps than the epochs give.")] = None,
    session_minutes: Annotated[
        float | None, typer.Option(help="End this process, with a checkpoint, after this.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from OUT/checkpoint.pt.")] = False,
    length: int = 4096,
    rows: Annotated[int, typer.Option(help="Packed rows per step.")] = 16,
    lr: Annotated[float, typer.Option(help="Peak rate for the matrices (Muon).")] = 6e-4,
    adam_lr: Annotated[float, typer.Option(help="Peak rate for embeddings and norms (AdamW).")] = 6e-4,
    weight_decay: float = 0.05,
    warm_up: float = 0.03,
    dense_mask: Annotated[
        bool, typer.Option(help="Dense masks instead of flex attention; always so on a CPU.")
    ] = False,
    checkpoint_minutes: float = 2.0,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile")] = True,
    device: str = "auto",
    workers: Annotated[int, typer.Option(help="Processes that encode text.")] = default_workers(),
    seed: int = 1,
) -> None:
    """Fine-tune all weights and write a complete Hugging Face directory under OUT/model."""
    console = Console()
    files = sorted(data.glob("*.jsonl*"))
    if not files:
        jsonlines.fail(f"{data} holds no *.jsonl.xz files")
    if not resume and (out / "checkpoint.pt").exists():
        jsonlines.fail(f"{out}/checkpoint.pt exists: give --resume or another --out")
    encoder = Encoder(tokenizer)
    if Encoder(base).key != encoder.key:
        jsonlines.fail(f"{base} was pretrained with another tokenizer than {tokenizer}: use its own")
    started = time.monotonic()
    training, held_out = conversations.load(files)
    packed = []
    for number in range(epochs):
        rng = random.Random(f"{seed} {number}")
        chosen_records = conversations.epoch(training, rng)
        packed.append(conversations.rows_of(chosen_records, tokenizer, length, encoder.end, workers, rng))
    validation = conversations.rows_of(held_out, tokenizer, length, encoder.end, workers, random.Random(seed))
    tokens, targets, documents = (
        np.concatenate([getattr(p, name) for p in packed]) for name in ("tokens", "targets", "documents")
    )
    possible = len(tokens) // rows
    if possible == 0:
        jsonlines.fail(f"{len(tokens)} packed rows are fewer than one batch of {rows}")
    log = Log(out / "log.jsonl", console)
    log.write(
        "corpus",
        seconds=time.monotonic() - started,
        conversations=len(training),
        held_out=len(held_out),
        packed_rows=len(tokens),
        million_tokens=round(float((documents >= 0).sum()) / 1e6, 2),
        trained_share=round(float((targets >= 0).sum() / (documents >= 0).sum()), 3),
        filled=round(float((documents >= 0).mean()), 3),
        steps=possible,
    )

    chosen = prepare_device(device, "auto")
    torch.manual_seed(seed)
    model = from_huggingface(base, torch.bfloat16 if chosen.type == "cuda" else torch.float32, compiled).to(chosen)
    if length > model.shape.positions:
        jsonlines.fail(f"--length {length} is more than the model's {model.shape.positions} positions")
    optimizers = Optimizers(model, lr, adam_lr, weight_decay, compiled)
    make_mask = DocumentMask(rows, length, chosen, dense_mask or chosen.type == "cpu")
    budget = Budget(minutes, min(steps or possible, possible), session_minutes)
    if resume:
        load_checkpoint(out / "checkpoint.pt", model, optimizers, budget)
    log.write("model", **describe(model.shape), device=str(chosen), step=budget.step, elapsed=budget.elapsed)

    def losses(inputs: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any]) -> Tensor:
        x, y = (torch.from_numpy(a.astype(np.int64)).to(chosen) for a in (inputs, wanted))
        return model.losses(x, y, make_mask(torch.from_numpy(numbers.astype(np.int32)).to(chosen)))

    def validate() -> None:
        sums, counts = np.zeros(len(validation.names)), np.zeros(len(validation.names))
        for start in range(0, len(validation), rows):
            pick = np.arange(start, start + rows) % len(validation)
            wanted = validation.targets[pick].copy()
            wanted[len(validation) - start :] = -100  # rows that only fill the batch
            scored = losses(validation.tokens[pick], wanted, validation.documents[pick]).detach().cpu().numpy()
            for i in range(len(validation.names)):
                here = (validation.sources[pick] == i) & (wanted >= 0)
                sums[i] += scored[here].sum()
                counts[i] += here.sum()
        scores = {n: round(float(s / c), 4) for n, s, c in zip(validation.names, sums, counts, strict=True) if c}
        log.write("validation", step=budget.step, all=float(sums.sum() / max(1, counts.sum())), **scores)

    if len(validation):
        validate()
    saved, shown, shown_step, evaluated = (
        time.monotonic(),
        time.monotonic(),
        budget.step,
        math.floor(budget.progress * 3),
    )
    finished = True
    while (progress := budget.progress) < 1.0:
        if budget.session_over:
            finished = False
            break
        part = slice(budget.step * rows, (budget.step + 1) * rows)
        wanted = targets[part]
        loss = losses(tokens[part], wanted, documents[part]).sum() / max(1, int((wanted >= 0).sum()))
        loss.backward()
        factor = rate_factor(progress, warm_up, 1.0 - warm_up)
        norm = optimizers.step(factor)
        budget.step += 1
        if budget.step <= 3 or budget.step % 20 == 0:
            value, now = float(loss.detach()), time.monotonic()
            rate = (budget.step - shown_step) * rows * length / (now - shown)
            log.write(
                "train",
                show=budget.step <= 3 or budget.step % 100 == 0,
                step=budget.step,
                progress=progress,
                elapsed=budget.elapsed,
                loss=value,
                norm=float(norm),
                factor=factor,
                tokens_per_second=round(rate),
            )
            shown, shown_step = now, budget.step
            if not math.isfinite(value):
                jsonlines.fail(f"the loss is {value} at step {budget.step}: lower --lr")
        if len(validation) and math.floor(budget.progress * 3) > evaluated and budget.progress < 1.0:
            evaluated = math.floor(budget.progress * 3)
            validate()
        if time.monotonic() - saved > 60 * checkpoint_minutes:
            save_checkpoint(out / "checkpoint.pt", model, optimizers, budget)
            saved = time.monotonic()
    save_checkpoint(out / "checkpoint.pt", model, optimizers, budget)
    if not finished:
        console.print("session over; run the same command with --resume")
        return
    if len(validation):
        validate()
    log.write("stopped", step=budget.step, elapsed=budget.elapsed)
    write_model(model, encoder, tokenizer, out / "model")
    if export is not None:
        config = huggingface_config(model.shape, encoder.begin, [encoder.turn_end, encoder.end], encoder.end)
        save_huggingface(model, export, config)
        (export / "log.jsonl").write_bytes(log.path.read_bytes())


if __name__ == "__main__":
    typer.run(main)
