"""What lies beside a trained drafter's weights: its model card, and the provenance file that the card is made from."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml

from fledge.checkpoints.reading import PROVENANCE_FILE, read_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target_files import weights_digest
from fledge.engine.tokenizer import load_tokenizer
from fledge.files import distinct_names, file_digest, read_json, write_json, write_text
from fledge.models.config import Architecture, DrafterConfig
from fledge.models.drafter.variants import name_of
from fledge.provenance import run_provenance, shown_path
from fledge.training.plots import plot_acceptance
from fledge.training.recipe import Recipe
from fledge.training.workspace import Manifest, StageContext, Workspace

MAX_ROWS = 24  # of a table by category; evaluation.json has all
TRAINING_PLOT, ACCEPTANCE_PLOT = "training.png", "acceptance.png"


def write_card(context: StageContext, drafter: Path, result: Mapping[str, Any]) -> None:
    """Complete the provenance file in a drafter's directory; write README.md and the plot of acceptance there."""
    provenance = {**(read_json(drafter / PROVENANCE_FILE) or {}), **drafter_provenance(context)}
    write_json(drafter / PROVENANCE_FILE, provenance)
    if result["evaluated"]:
        plot_acceptance(result, drafter / ACCEPTANCE_PLOT)
    plots = [name for name in (TRAINING_PLOT, ACCEPTANCE_PLOT) if (drafter / name).is_file()]
    write_text(
        drafter / "README.md",
        model_card(context.recipe, read_drafter(drafter).config, result, provenance, plots=plots),
    )


def drafter_provenance(context: StageContext) -> dict[str, Any]:
    """How `eval`'s input came about: enough to make it again, and to recognise the target it was made for."""
    recipe, manifests = context.recipe, _stage_manifests(context)
    prepared = manifests["prepare"].settings["data"]["sources"] if "prepare" in manifests else None
    return {
        **run_provenance(),
        "recipe": shown_recipe(recipe),
        "stages": {name: manifest.key for name, manifest in manifests.items()} | {"eval": context.directory.name},
        "data": {
            "sources": _digests(recipe.data.sources, [digest for _, digest in prepared or ()]),
            "evaluation": _digests(recipe.eval.sources),
        },
        "summaries": {name: dict(manifest.summary) for name, manifest in manifests.items()},
        "target": _target_facts(recipe),
    }


def _digests(sources: Sequence[str], known: Sequence[str] = ()) -> dict[str, str]:
    """Digests of files by name; those that are known already are not computed again."""
    digests = known if len(known) == len(sources) else [file_digest(source) for source in sources]
    return dict(zip(distinct_names(sources), digests, strict=True))


def _stage_manifests(context: StageContext) -> dict[str, Manifest]:
    """Return the manifests of all stages before this one, as far as their directories are still there."""
    fit = Manifest.read(context.inputs["fit"])
    if fit is None:  # started by hand, outside the pipeline
        return {}
    workspace = Workspace(context.inputs["fit"].parent.parent)
    found = {name: Manifest.read(workspace.stage_directory(name, key)) for name, key in fit.input_keys.items()}
    return {name: manifest for name, manifest in found.items() if manifest is not None} | {"fit": fit}


def _target_facts(recipe: Recipe) -> dict[str, Any]:
    """The target by name, and the digests by which another copy of it can be recognised."""
    directory = resolve(recipe.target.path)
    template = getattr(load_tokenizer(directory), "chat_template", None)
    text = template if isinstance(template, str) or template is None else json.dumps(template, sort_keys=True)
    file = directory / "tokenizer.json"
    return {
        "name": base_model(recipe),
        "weights_digest": weights_digest(directory),
        "tokenizer_sha256": hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None,
        "chat_template_sha256": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
    }


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


def model_card(
    recipe: Recipe,
    config: DrafterConfig,
    result: Mapping[str, Any],
    provenance: Mapping[str, Any],
    *,
    plots: Sequence[str] = (),
) -> str:
    """The card as Markdown: what the drafter is, how to serve it, what it was made from, how well it does."""
    base, variant, depth = provenance["target"]["name"], name_of(config), recipe.fit.depth
    name = recipe.name or f"{Path(base).name}-{recipe.drafter.variant}"
    eagle1 = config.architecture is Architecture.EAGLE1
    method = "eagle" if eagle1 else "eagle3"
    front_matter = {
        "base_model": base,
        "library_name": "fledge",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", method, variant.lower()],
    }
    target, commit = provenance["target"], provenance["git_commit"]
    origin = [
        ["Fledge", provenance["fledge_version"] + (f", commit {commit}" if commit else "")],
        ["command", f"`{provenance['command']}`"],
        ["target weights", target["weights_digest"]],
        ["tokenizer sha256", target["tokenizer_sha256"]],
        ["chat template sha256", target["chat_template_sha256"]],
        ["versions", ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())],
        ["device", provenance["device"]],
    ]
    uses = {"sources": "training", "evaluation": "evaluation"}
    files = [[n, digest, use] for kind, use in uses.items() for n, digest in provenance["data"][kind].items()]
    # No zeros: where the target answers, `prepare` has no answer tokens, and that says nothing.
    counts = [
        [stage, key, value]
        for stage in ("prepare", "regenerate", "vocab")
        for key, value, count in _numbers(provenance["summaries"].get(stage, {}))
        if count
    ]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fledge.training", "."),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("card.md.jinja").render(
        name=name,
        base=base,
        variant=variant,
        depth=depth,
        eagle1=eagle1,
        front_matter=yaml.safe_dump(front_matter, sort_keys=False),
        speculative_config=json.dumps({"method": method, "model": name, "num_speculative_tokens": depth}),
        flags=" and ".join(f"`{flag}`" for flag in ("fc_norm", "norm_output") if getattr(config, flag)),
        result=result,
        **(_acceptance_tables(result) if result["evaluated"] else {}),
        provenance=provenance,
        data_table=_table(["file", "digest", "used for"], files),
        count_table=_table(["stage", "", ""], counts) if counts else "",
        facts=_training_facts(recipe, config, provenance),
        recipe_yaml=yaml.safe_dump(dict(provenance["recipe"]), sort_keys=False, allow_unicode=True),
        origin_table=_table(["", ""], origin),
        plots=plots,
        training_plot=TRAINING_PLOT,
        acceptance_plot=ACCEPTANCE_PLOT,
    )


def _acceptance_tables(result: Mapping[str, Any]) -> dict[str, Any]:
    depths: Mapping[str, Any] = result["depths"]
    sources = {name for cell in depths.values() for name in cell["by_source"]}
    categories = {name for cell in depths.values() for name in cell["by_category"]}
    groupings = ["source", "category"] if len(categories) > 1 and categories != sources else ["source"]
    deepest = max(len(cell["total"]["rate_by_depth"]) for cell in depths.values())
    rates = {depth: [f"{rate:.0%}" for rate in cell["total"]["rate_by_depth"]] for depth, cell in depths.items()}
    return {
        "length_tables": [_length_table(grouping, depths) for grouping in groupings],
        "rate_table": _table(
            ["drafted", *map(str, range(1, deepest + 1))],
            [[depth, *row, *[""] * (deepest - len(row))] for depth, row in rates.items()],
        ),
        "different": sum(cell["different_answers"] for cell in depths.values()),
        "answers": result["turns"] * len(depths),
    }


def _length_table(grouping: str, depths: Mapping[str, Any]) -> str:
    def length(figures: Mapping[str, Any] | None) -> str:
        found = None if figures is None else figures["acceptance_length"]
        return "" if found is None else f"{found:.2f}"

    groups = [cell[f"by_{grouping}"] for cell in depths.values()]
    names = list(dict.fromkeys(name for group in groups for name in group))
    rows = [[name, *(length(group.get(name)) for group in groups)] for name in names[:MAX_ROWS]]
    if len(names) > MAX_ROWS:
        rows.append([f"and {len(names) - MAX_ROWS} more in evaluation.json", *("" for _ in depths)])
    rows.append(["**all**", *(f"**{length(cell['total'])}**" for cell in depths.values())])
    return _table([grouping, *(f"depth {depth}" for depth in depths)], rows)


def _training_facts(recipe: Recipe, config: DrafterConfig, provenance: Mapping[str, Any]) -> list[str]:
    layers = "1 layer" if config.num_layers == 1 else f"{config.num_layers} layers"
    facts = [
        f"{name_of(config)}, {layers}, hidden size {config.hidden_size}, stored in {config.dtype}",
        f"draft vocabulary {config.draft_vocab_size:,} of {config.vocab_size:,}",
        f"positions {config.max_positions:,}, rope theta {config.layer.rope.theta:g}",
    ]
    if config.aux_layer_ids is not None:
        facts.append(f"reads the inputs of the target's blocks {', '.join(map(str, config.aux_layer_ids))}")
    facts.append(f"{recipe.fit.depth} draft steps unrolled (training-time test), loss {recipe.fit.loss}")
    return [*facts, *(f"{key}: {value}" for key, value, _ in _numbers(provenance["summaries"].get("fit", {})))]


def _numbers(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """The plain numbers of a stage's summary: name and value for people, and the number."""
    for key, value in summary.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield key.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:,.4g}", value


def _table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
