"""Where a trained drafter comes from: enough to make it again, and to recognise the target it was made for."""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from fledge.checkpoints.reading import PROVENANCE_FILE
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target_files import weights_digest
from fledge.engine.tokenizer import load_tokenizer
from fledge.files import distinct_names, file_digest, read_json, write_json
from fledge.provenance import device_name, git_commit, shown_command, shown_path
from fledge.training.recipe import Recipe
from fledge.training.stages.base import StageContext
from fledge.training.workspace import Manifest, Workspace
from fledge.version import __version__


def write_provenance(context: StageContext, drafter: Path) -> dict[str, Any]:
    """Complete the provenance file beside a drafter's weights, and return all of it."""
    values = {**(read_json(drafter / PROVENANCE_FILE) or {}), **collect(context)}
    write_json(drafter / PROVENANCE_FILE, values)
    return values


def collect(context: StageContext) -> dict[str, Any]:
    """Everything that is known of how `eval`'s input came about."""
    recipe = context.recipe
    manifests = stage_manifests(context)
    prepared = manifests["prepare"].settings["data"]["sources"] if "prepare" in manifests else None
    return {
        "fledge_version": __version__,
        "git_commit": git_commit(),
        "command": shown_command(sys.argv),
        "recipe": shown_recipe(recipe),
        "stages": {name: manifest.key for name, manifest in manifests.items()} | {"eval": context.directory.name},
        "data": {
            "sources": _digests(recipe.data.sources, [digest for _, digest in prepared or ()]),
            "evaluation": _digests(recipe.eval.sources),
        },
        "summaries": {name: dict(manifest.summary) for name, manifest in manifests.items()},
        "target": target_facts(recipe),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "device": device_name(),
    }


def _digests(sources: Sequence[str], known: Sequence[str] = ()) -> dict[str, str]:
    """Digests of files by name; those that are known already are not computed again."""
    digests = known if len(known) == len(sources) else [file_digest(source) for source in sources]
    return dict(zip(distinct_names(sources), digests, strict=True))


def stage_manifests(context: StageContext) -> dict[str, Manifest]:
    """Return the manifests of all stages before this one, as far as their directories are still there."""
    fit = Manifest.read(context.inputs["fit"])
    if fit is None:  # started by hand, outside the pipeline
        return {}
    workspace = Workspace(context.inputs["fit"].parent.parent)
    found = {name: Manifest.read(workspace.stage_directory(name, key)) for name, key in fit.input_keys.items()}
    return {name: manifest for name, manifest in found.items() if manifest is not None} | {"fit": fit}


def target_facts(recipe: Recipe) -> dict[str, Any]:
    """The target by name, and the digests by which another copy of it can be recognised."""
    directory = resolve(recipe.target.path)
    tokenizer = load_tokenizer(directory)
    template = getattr(tokenizer, "chat_template", None)
    facts: dict[str, Any] = {"name": base_model(recipe), "weights_digest": weights_digest(directory)}
    file = directory / "tokenizer.json"
    facts["tokenizer_sha256"] = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
    text = template if isinstance(template, str) or template is None else json.dumps(template, sort_keys=True)
    facts["chat_template_sha256"] = None if text is None else hashlib.sha256(text.encode()).hexdigest()
    return facts


def base_model(recipe: Recipe) -> str:
    """Return the target's name: its hub name, the name its config remembers, or its directory's."""
    path = Path(recipe.target.path)
    if not path.is_dir():
        return recipe.target.path
    remembered = (read_json(path / "config.json") or {}).get("_name_or_path")
    return remembered if isinstance(remembered, str) and remembered.count("/") == 1 else path.name


def shown_recipe(recipe: Recipe) -> dict[str, Any]:
    """The recipe in full, its paths relative to where the run's directory lies: a card is read on other machines."""
    base = Path(recipe.output).parent

    def shown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shown(item) for key, item in value.items()}
        if isinstance(value, list):
            return [shown(item) for item in value]
        return shown_path(value, base) if isinstance(value, str) and os.path.isabs(value) else value

    values: dict[str, Any] = shown(recipe.to_dict())
    return values
