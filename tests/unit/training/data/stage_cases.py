"""A tiny target on disk, data for it, and stages run by hand."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fledge.checkpoints.target import save_target
from fledge.progress import Progress
from fledge.training.pipeline import Stage, StageContext
from fledge.training.recipe import DataSection, Recipe, RegenerateSection, TargetSection
from tests.tiny_models import TINY_TARGET, make_target
from tests.unit.training.data.templates import CHATML, make_tokenizer


def save_tiny_target(directory: Path, template: str | None = CHATML, *, seed: int = 0) -> Path:
    tokenizer = make_tokenizer(template)
    config = replace(
        TINY_TARGET,
        num_layers=2,
        vocab_size=len(tokenizer),
        eos_ids=(tokenizer.eos_token_id,),
        max_positions=256,
    )
    save_target(make_target(config, seed), directory)
    tokenizer.save_pretrained(directory)
    return directory


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_recipe(target: Path, *sources: Path, regenerate: bool = False, **data: Any) -> Recipe:
    return Recipe(
        output=str(target.parent / "out"),
        target=TargetSection(path=str(target)),
        data=DataSection(**{"sources": tuple(map(str, sources)), "held_out": 0, **data}),
        regenerate=RegenerateSection(enabled=regenerate, max_tokens=12, chunk=4, max_num_seqs=8),
        device="cpu",
    )


def run_stage(stage: Stage, recipe: Recipe, directory: Path, **inputs: Path) -> dict[str, Any]:
    directory.mkdir(exist_ok=True, parents=True)
    context = StageContext(recipe=recipe, directory=directory, inputs=inputs, progress=Progress(quiet=True))
    summary = stage.run(context)
    json.dumps(summary)
    return summary
