"""A tiny target, examples and recipe for tests of the training loop."""

import functools
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from fledge.checkpoints.target import save_target
from fledge.models.config import TargetConfig
from fledge.progress import Progress
from fledge.training.data.examples import PackedBatch, TokenStore
from fledge.training.pipeline import StageContext
from fledge.training.recipe import (
    CaptureSection,
    DataSection,
    DrafterSection,
    FitSection,
    Recipe,
    TargetSection,
)
from fledge.training.stages import fit
from tests.shared_directory import shared_directory
from tests.tiny_models import TINY_TARGET, make_target

TARGET = TINY_TARGET
FIT = FitSection(
    depth=3, length=32, rows=4, max_steps=8, lr=5e-3, log_every=3, drift_every=4, save_every=3, candidates=2, seed=1
)


def write_store(directory: Path, vocab_size: int = TARGET.vocab_size, examples: int = 40) -> TokenStore:
    """Examples of 6 to 40 tokens, of which the last two thirds are answers."""
    random = np.random.default_rng(0)
    with TokenStore.writer(directory, vocab_size) as writer:
        for _ in range(examples):
            size = int(random.integers(6, 40))
            answer = np.arange(size) >= size // 3
            writer.add(random.integers(0, vocab_size, size), answer)
    return TokenStore(directory)


def make_inputs(directory: Path, *, target: TargetConfig = TARGET, draft_vocab: int | None = 24) -> Recipe:
    """Write target, examples and vocabulary below `directory`, and return the recipe to train on them."""
    save_target(make_target(target), directory / "target")
    store = write_store(directory / "regenerate" / "examples")
    (directory / "prepare").mkdir()
    (directory / "vocab").mkdir()
    ids = None if draft_vocab is None else sorted(range(0, target.vocab_size))[-draft_vocab:]
    values = {"target_ids": ids, "vocab_size": target.vocab_size, "data_digest": store.digest}
    (directory / "vocab" / "vocab.json").write_text(json.dumps(values))
    return _recipe(directory)


def _recipe(directory: Path) -> Recipe:
    return Recipe(
        output=str(directory),
        target=TargetSection(path=str(directory / "target")),
        data=DataSection(sources=("none",)),
        drafter=DrafterSection(),
        fit=FIT,
        device="cpu",
    )


def context(recipe: Recipe, stage: str, name: str | None = None) -> StageContext:
    root = Path(recipe.output)
    directory = root / (name or stage)
    directory.mkdir(exist_ok=True)
    inputs = {each: root / each for each in ("prepare", "regenerate", "vocab", "capture")}
    return StageContext(recipe=recipe, directory=directory, inputs=inputs, progress=Progress(quiet=True))


def run_fit(recipe: Recipe, name: str = "fit", *, plot: bool = False) -> dict[str, Any]:
    """Run the stage, by default without its picture, which takes longer than all the rest."""
    with nullcontext() if plot else patch.object(fit, "plot_training"):
        return fit.STAGE.run(context(recipe, "fit", name))


@functools.cache
def _undisturbed() -> Path:
    root = shared_directory("fit")
    run_fit(make_inputs(root))
    return root / "fit"


def copy_undisturbed_run(recipe: Recipe, name: str) -> None:
    """Put what `run_fit` makes of the recipe of `make_inputs` there: trained once, as many tests compare with it."""
    assert recipe == _recipe(Path(recipe.output)), "another recipe"
    shutil.copytree(_undisturbed(), Path(recipe.output) / name)


def run_capture(recipe: Recipe) -> dict[str, Any]:
    return fit.CAPTURE.run(context(recipe, "capture"))


def offline(recipe: Recipe) -> Recipe:
    return replace(recipe, capture=CaptureSection(mode="offline", batch_tokens=100, shard_tokens=300))


def final_weights(directory: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(directory / "resume.pt", weights_only=True)["model"]
    return state


def log_without_times(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in lines]


def packed(lengths: list[list[int]], length: int, seed: int = 0) -> PackedBatch:
    """Rows of documents of these lengths, random tokens, padded to `length`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), length)
    document, positions = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    for row, sizes in enumerate(lengths):
        at = 0
        for number, size in enumerate(sizes):
            document[row, at : at + size] = number
            positions[row, at : at + size] = torch.arange(size)
            at += size
    tokens = torch.randint(0, TARGET.vocab_size, shape, generator=generator).where(document >= 0, 0)
    return PackedBatch(tokens=tokens, answer=document >= 0, document=document, positions=positions)
