"""Raises the miniature models, once: a target with its tokenizer, and two drafters for it, as ordinary directories."""

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from examples.miniature import corpus, training
from examples.miniature.training import Budget, train_drafter, train_target
from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from fledge.checkpoints.tensors import new_directory, write_json
from fledge.errors import CheckpointError
from fledge.layers.config import LayerConfig, RopeConfig
from fledge.models.config import TargetConfig
from fledge.models.drafter.variants import EAGLE_3, EAGLE_3_1

VARIANTS = {"eagle3": EAGLE_3, "eagle3.1": EAGLE_3_1}  # by the directory their drafter is written to
TARGET = "target"
RECIPE_FILE = "recipe.json"

LAYER = LayerConfig(
    hidden_size=128,
    intermediate_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    norm_eps=1e-5,
    rope=RopeConfig(),
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the models are raised on, and how long. Both drafters get the same."""

    characters: int
    vocab_size: int
    num_layers: int
    target: Budget
    drafter: Budget
    unroll: int  # draft steps in a row, in training

    @property
    def key(self) -> str:
        """Changes with anything that the models depend on."""
        sources = [Path(module).read_bytes() for module in (__file__, corpus.__file__, training.__file__)]
        text = "\n".join(corpus.documentation(self.characters)).encode()
        return hashlib.sha256(b"\0".join([repr(self).encode(), text, *sources])).hexdigest()


RECIPE = Recipe(
    characters=12_000,
    vocab_size=768,
    num_layers=16,  # deep and narrow: a drafter of one layer is then cheap beside the target
    target=Budget(steps=150, batch=8, window=96, rate=3e-3),
    drafter=Budget(steps=150, batch=8, window=96, rate=6e-3),
    unroll=4,
)


def raise_models(directory: Path, recipe: Recipe, console: Console) -> None:
    """Fill `directory` with `target`, `eagle3` and `eagle3.1`, unless they are there already.

    The directory appears when all of it is complete. One that holds anything but older models of ours is refused.
    """
    if directory.exists():
        if _key_in(directory) == recipe.key:
            console.print(f"Using the models in {directory} (remove it to raise them again).")
            return
        shutil.rmtree(directory)
    console.print(f"Raising a miniature target and two drafters into {directory}; this happens once.")
    with new_directory(directory) as temporary:
        _train(temporary, recipe, console)
        write_json(temporary / RECIPE_FILE, {"key": recipe.key, **asdict(recipe)})


def _key_in(directory: Path) -> str:
    try:
        return str(json.loads((directory / RECIPE_FILE).read_text(encoding="utf-8"))["key"])
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{directory}: exists, but holds no miniature models; choose another --build-dir"
        ) from None


def _train(directory: Path, recipe: Recipe, console: Console) -> None:
    paragraphs = corpus.documentation(recipe.characters)
    tokenizer = corpus.train_tokenizer(paragraphs, recipe.vocab_size)
    text, starts = _token_ids(tokenizer, paragraphs)
    config = TargetConfig(
        family="llama",
        layer=LAYER,
        num_layers=recipe.num_layers,
        vocab_size=len(tokenizer),
        max_positions=512,
        tied_head=False,
        eos_ids=(tokenizer.eos_token_id,),
    )
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        names = ["target", *(variant.name for variant in VARIANTS.values())]
        budgets = [recipe.target, *[recipe.drafter] * len(VARIANTS)]
        tasks = {
            name: progress.add_task(name, total=budget.steps, loss="", start=False)
            for name, budget in zip(names, budgets, strict=True)
        }

        def shown(name: str) -> training.Progress:
            progress.start_task(tasks[name])
            return lambda loss: progress.update(tasks[name], advance=1, loss=f"loss {loss:.2f}")

        target = train_target(config, text, recipe.target, shown("target"), starts=starts)
        save_target(target, directory / TARGET)
        tokenizer.save_pretrained(directory / TARGET)
        for name, variant in VARIANTS.items():
            drafter = train_drafter(
                variant.config_for(config),
                target,
                text,
                recipe.drafter,
                shown(variant.name),
                unroll=recipe.unroll,
                starts=starts,
                head_from_target=True,
            )
            provenance = {
                "trained_by": "examples.miniature",
                "steps": recipe.drafter.steps,
                "seed": recipe.drafter.seed,
            }
            save_drafter(drafter, directory / name, provenance=provenance)


def _token_ids(tokenizer: PreTrainedTokenizerFast, paragraphs: list[str], *, rounds: int = 50) -> tuple[Tensor, Tensor]:
    """All paragraphs again and again, each time in another order, and where each of them begins.

    In one fixed order, the target would learn to recognise a paragraph by the one before it, which prompts do not have.
    """
    random = torch.Generator().manual_seed(0)
    encoded = [
        torch.tensor([*ids, tokenizer.eos_token_id])
        for ids in tokenizer([f"{paragraph}\n" for paragraph in paragraphs])["input_ids"]
    ]
    order = [int(i) for _ in range(rounds) for i in torch.randperm(len(encoded), generator=random)]
    lengths = torch.tensor([len(encoded[i]) for i in order])
    return torch.cat([encoded[i] for i in order]), lengths.cumsum(0) - lengths
