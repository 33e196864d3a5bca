"""What lies beside a trained drafter's weights: model card, provenance, and pictures of how it trained and drafts."""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from fledge.checkpoints.reading import PROVENANCE_FILE, read_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import weights_digest
from fledge.engine.tokenizer import load_tokenizer
from fledge.files import atomic_path, distinct_names, file_digest, read_json, write_json, write_text
from fledge.models.config import Architecture, DrafterConfig
from fledge.models.drafter.variants import name_of
from fledge.provenance import run_provenance, shown_path
from fledge.report.charts import MUTED, SERIES, frame, short_title
from fledge.training.pipeline import Manifest, StageContext, shown_numbers
from fledge.training.recipe import Recipe

MAX_ROWS = 24  # of a table by category; evaluation.json has all
TRAINING_PLOT, ACCEPTANCE_PLOT = "training.png", "acceptance.png"
_SHADES = ("#12467b", "#5b8db8", "#a9c7df", "#d6e4ef")  # of depths, from the first
_PANELS = (  # in two rows: name in the log, title, unit
    ("loss", "Loss", "weighted sum over depths"),
    ("accuracy_by_depth", "Accuracy", "drafts equal to the target's choice"),
    ("simulated_acceptance_length", "Simulated acceptance length", "tokens per round"),
    ("hidden_rms_by_depth", "Size of the state fed forward", "root mean square"),
    ("own_attention_by_depth", "Attention on own drafts", "share of attention"),
    ("sink_attention_by_depth", "Attention on the first token", "share of attention"),
)


def write_card(context: StageContext, drafter: Path, result: Mapping[str, Any]) -> None:
    """Complete the provenance file in a drafter's directory; write README.md and the plot of acceptance there."""
    provenance = {**(read_json(drafter / PROVENANCE_FILE) or {}), **drafter_provenance(context)}
    write_json(drafter / PROVENANCE_FILE, provenance)
    if result["evaluated"]:
        plot_acceptance(result, drafter / ACCEPTANCE_PLOT)
    plots = [name for name in (TRAINING_PLOT, ACCEPTANCE_PLOT) if (drafter / name).is_file()]
    card = model_card(context.recipe, read_drafter(drafter).config, result, provenance, plots=plots)
    write_text(drafter / "README.md", card)


def drafter_provenance(context: StageContext) -> dict[str, Any]:
    """How `eval`'s input came about: enough to make it again, and to recognise the target it was made for."""
    recipe, fit = context.recipe, Manifest.read(context.inputs["fit"])
    # Of all stages before this one, as far as their directories are still there; none outside the pipeline.
    keys = {} if fit is None else {**fit.input_keys, "fit": fit.key}
    output = context.inputs["fit"].parent.parent
    manifests = {name: found for name, key in keys.items() if (found := Manifest.read(output / name / key))}
    if "prepare" in manifests:  # as they were then
        digests = [digest for _, digest in manifests["prepare"].settings["data"]["sources"]]
    else:
        digests = list(map(file_digest, recipe.data.sources))
    directory = resolve(recipe.target.path)
    template = getattr(load_tokenizer(directory), "chat_template", None)
    text = template if isinstance(template, str) or template is None else json.dumps(template, sort_keys=True)
    file = directory / "tokenizer.json"
    return {
        **run_provenance(),
        "recipe": shown_recipe(recipe),
        "stages": {name: manifest.key for name, manifest in manifests.items()} | {"eval": context.directory.name},
        "data": {
            "sources": dict(zip(distinct_names(recipe.data.sources), digests, strict=True)),
            "evaluation": dict(
                zip(distinct_names(recipe.eval.sources), map(file_digest, recipe.eval.sources), strict=True)
            ),
        },
        "summaries": {name: dict(manifest.summary) for name, manifest in manifests.items()},
        "target": {  # by name, and by the digests that another copy of it has too
            "name": base_model(recipe),
            "weights_digest": weights_digest(directory),
            "tokenizer_sha256": hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None,
            "chat_template_sha256": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
        },
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

    return {key: shown(item) for key, item in recipe.to_dict().items()}


def model_card(
    recipe: Recipe,
    config: DrafterConfig,
    result: Mapping[str, Any],
    provenance: Mapping[str, Any],
    *,
    plots: Sequence[str] = (),
) -> str:
    """The card as Markdown: what the drafter is, how to serve it, what it was made from, how well it does."""
    base = provenance["target"]["name"]
    name = recipe.name or f"{Path(base).name}-{recipe.drafter.variant}"
    method = "eagle" if config.architecture is Architecture.EAGLE1 else "eagle3"
    front_matter = {
        "base_model": base,
        "library_name": "fledge",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", method, name_of(config).lower()],
    }
    speculation = {"method": method, "model": name, "num_speculative_tokens": recipe.fit.depth}
    return fill_template(
        "card.md.jinja",
        name=name,
        base=base,
        variant=name_of(config),
        method=method,
        recipe=recipe,
        config=config,
        result=result,
        provenance=provenance,
        plots=plots,
        front_matter=yaml.safe_dump(front_matter, sort_keys=False),
        speculative_config=json.dumps(speculation),
        recipe_yaml=yaml.safe_dump(dict(provenance["recipe"]), sort_keys=False, allow_unicode=True),
        numbers=shown_numbers,
        max_rows=MAX_ROWS,
    )


def fill_template(template: str, **values: Any) -> str:
    """Fill one of this package's templates."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fledge.training", "."),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(values)


def plot_training(records: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Write a PNG of the records of a log. Where drift was not recorded, those panels say so."""
    depth = max((len(record["accuracy_by_depth"]) for record in records), default=1)
    last = max((record["step"] for record in records), default=1)
    figure = Figure(figsize=(14, 7.6), layout="constrained")  # without pyplot, which wants a display or a global choice
    figure.suptitle(title, fontsize=14, fontweight="bold")
    for panel, (name, heading, unit) in zip(figure.subplots(2, 3).flat, _PANELS, strict=True):
        frame(panel, None, percent=name.startswith("accuracy") or "attention" in name)
        panel.set_title(heading, fontsize=11, loc="left", fontweight="bold")
        _draw_lines(panel, records, name)
        panel.set(xlabel="optimizer step", ylabel=unit, xlim=(0, last * 1.02))
        panel.set_ylim(bottom=0, top=1 if name == "accuracy_by_depth" else None)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10]))
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if name == "simulated_acceptance_length":
            panel.axhline(depth + 1, color=MUTED, linewidth=1, linestyle=":")
            panel.text(0.02 * last, depth + 0.95, f"every draft right: {depth + 1}", va="top", fontsize=9, color=MUTED)
            panel.set_ylim(1, depth + 1.15)
        elif name == "accuracy_by_depth":
            handles, labels = panel.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside right center", title="draft step", frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def _draw_lines(panel: Axes, records: Sequence[Mapping[str, Any]], name: str) -> None:
    """One line of a number; of a list one for each draft step, from dark (the first) to light."""
    found = [(r["step"], r[name] if isinstance(r[name], list) else [r[name]]) for r in records if name in r]
    depth, marker = max((len(values) for _, values in found), default=0), "o" if len(found) < 20 else None
    for k in range(depth):
        points = [(step, values[k]) for step, values in found if values[k] is not None and math.isfinite(values[k])]
        colour = matplotlib.colormaps["viridis"](0.9 * k / (depth - 1)) if depth > 1 else SERIES[1]
        if points:
            panel.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=3.5, label=str(k + 1))
    if not panel.get_lines():
        panel.text(0.5, 0.5, "not recorded", transform=panel.transAxes, ha="center", va="center", color=MUTED)
        panel.set_yticks([])


def plot_acceptance(result: Mapping[str, Any], path: Path) -> None:
    """Draw the share of accepted drafts by position, and acceptance length by source and depth."""
    depths: Mapping[str, Any] = result["depths"]
    deepest = depths[max(depths, key=int)]
    grouping = "by_source" if len(deepest["by_source"]) > 1 else "by_category"
    names = list(deepest[grouping])[:10] if len(deepest[grouping]) > 1 else []
    figure = Figure(figsize=(10, max(3.8, 1.5 + 0.2 * (len(names) + 1) * len(depths))), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in names:
        rates = deepest[grouping][name]["rate_by_depth"]
        left.plot(range(1, len(rates) + 1), rates, color=_SHADES[2], linewidth=1)
    rates = deepest["total"]["rate_by_depth"]
    places = range(1, len(rates) + 1)
    left.plot(places, rates, color=_SHADES[0], linewidth=2.4, marker="o", label="all")
    if names:
        left.plot([], [], color=_SHADES[2], linewidth=1, label=f"each {grouping.removeprefix('by_')}")
    if result["trained_depth"] < len(rates):
        left.axvline(result["trained_depth"] + 0.5, color=MUTED, linestyle=":", label="trained depth")
    frame(left, places or (1,), percent=True)
    left.set(xlabel="draft position", ylabel="rounds in which it was accepted", ylim=(0, 1))
    left.legend(frameon=False)

    rows, height = ["all", *names], 0.8 / len(depths)
    for number, (depth, cell) in enumerate(depths.items()):
        figures = [cell["total"], *(cell[grouping][name] for name in names)]
        y = [row + (number - (len(depths) - 1) / 2) * height for row in range(len(rows))]
        lengths = [each["acceptance_length"] or 0.0 for each in figures]
        bars = right.barh(y, lengths, height=height * 0.92, color=_SHADES[number % 4], label=f"depth {depth}")
        right.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    right.set_yticks(range(len(rows)), map(short_title, rows))
    right.invert_yaxis()
    right.margins(x=0.14)
    right.set(xlabel="acceptance length (tokens per round)")
    right.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(depths))
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png", metadata={"Software": None})
