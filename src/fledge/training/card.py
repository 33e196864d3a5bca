"""The model card of a trained drafter: what it is, how to serve it, what it was made from, how well it does."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fledge.checkpoints.reading import read_drafter
from fledge.models.config import Architecture, DrafterConfig
from fledge.models.drafter.variants import name_of
from fledge.training.recipe import Recipe
from fledge.training.stages.base import StageContext

MAX_ROWS = 24  # of a table by category; evaluation.json has all
TRAINING_PLOT, ACCEPTANCE_PLOT = "training.png", "acceptance.png"


def write_card(context: StageContext, drafter: Path, result: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Write README.md and the plot of acceptance into a drafter's directory."""
    if result["evaluated"]:
        plot_acceptance(result, drafter / ACCEPTANCE_PLOT)
    text = model_card(
        context.recipe,
        read_drafter(drafter).config,
        result,
        provenance,
        plots=[name for name in (TRAINING_PLOT, ACCEPTANCE_PLOT) if (drafter / name).is_file()],
    )
    (drafter / "README.md").write_text(text, encoding="utf-8")


def model_card(
    recipe: Recipe,
    config: DrafterConfig,
    result: Mapping[str, Any],
    provenance: Mapping[str, Any],
    *,
    plots: Sequence[str] = (),
) -> str:
    base, variant = provenance["target"]["name"], name_of(config)
    name = recipe.name or f"{Path(base).name}-{recipe.drafter.variant}"
    parts = [
        _front_matter(base, config),
        f"# {name}",
        f"An {variant} drafter for speculative decoding with `{base}`. It proposes tokens that the target verifies: "
        "the text is the target's own, only faster. It is of no use with another target.",
        _serving(recipe, config, base, name),
        _results(result, plots),
        _data(provenance),
        _training(recipe, config, provenance, plots),
        "## Recipe\n\nComplete, with the defaults spelt out; run it with `fledge train`.\n\n```yaml\n"
        + yaml.safe_dump(dict(provenance["recipe"]), sort_keys=False, allow_unicode=True)
        + "```",
        _origin(provenance),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(base: str, config: DrafterConfig) -> str:
    eagle1 = config.architecture is Architecture.EAGLE1
    values = {
        "base_model": base,
        "library_name": "fledge",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "eagle" if eagle1 else "eagle3", name_of(config).lower()],
    }
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---"


def _serving(recipe: Recipe, config: DrafterConfig, base: str, name: str) -> str:
    depth = recipe.fit.depth
    eagle1 = config.architecture is Architecture.EAGLE1
    speculation = {"method": "eagle" if eagle1 else "eagle3", "model": name, "num_speculative_tokens": depth}
    flags = [flag for flag in ("fc_norm", "norm_output") if getattr(config, flag)]
    needs = f" It must be a version that knows {' and '.join(f'`{flag}`' for flag in flags)}." if flags else ""
    return f"""## How to serve it

`{name}` stands for this directory. {depth} is the depth it was trained to; fewer drafts are better on a busy server.

With vLLM:

```bash
vllm serve {base} --speculative-config '{json.dumps(speculation)}'
```

With SGLang, which reads the same files.{needs}

```bash
python -m sglang.launch_server --model-path {base} --speculative-algorithm {"EAGLE" if eagle1 else "EAGLE3"} \\
    --speculative-draft-model-path {name} --speculative-num-steps {depth} \\
    --speculative-eagle-topk 1 --speculative-num-draft-tokens {depth + 1}
```

With Fledge:

```bash
fledge generate --target {base} --drafter {name} --depth {depth} --chat "Hello"
```"""


def _results(result: Mapping[str, Any], plots: Sequence[str]) -> str:
    if not result["evaluated"]:
        return f"## Acceptance\n\nNot evaluated: {result['reason']}."
    depths: Mapping[str, Any] = result["depths"]
    how = "greedy" if result["temperature"] == 0 else f"temperature {result['temperature']:g}"
    parts = [
        "## Acceptance",
        "Acceptance length is the mean number of tokens a verification round emits, `1 + accepted / rounds`, pooled "
        f"over rounds. Measured through Fledge's engine: {result['turns']} turns of {result['prompts']} prompts, "
        f"{how}, {result['dtype']}, on {result['device']}; trained to depth {result['trained_depth']}.",
        _length_table("source", depths, "by_source"),
    ]
    categories = {category for cell in depths.values() for category in cell["by_category"]}
    sources = {source for cell in depths.values() for source in cell["by_source"]}
    if len(categories) > 1 and categories != sources:
        parts.append(_length_table("category", depths, "by_category"))
    parts.append("Share of rounds whose draft at each position was accepted:")
    deepest = max(len(cell["total"]["rate_by_depth"]) for cell in depths.values())
    rows = [[depth, *(f"{rate:.0%}" for rate in cell["total"]["rate_by_depth"])] for depth, cell in depths.items()]
    parts.append(_table(["drafted", *map(str, range(1, deepest + 1))], rows))
    different = sum(cell["different_answers"] for cell in depths.values())
    answers = result["turns"] * len(depths)
    parts.append(
        f"Lossless: all {answers} answers are the target's own, token for token."
        if not different
        else f"{different} of {answers} answers differ from those without a drafter: in {result['dtype']}, rounding "
        "decides between tokens that are nearly as likely, and several tokens at once round in another way than one."
    )
    if result["candidates"]:
        tried = ", ".join(f"{name} {length:.2f}" for name, length in result["candidates"].items())
        parts.append(f"Chosen among checkpoints by acceptance length on some of the prompts: {tried}.")
    if ACCEPTANCE_PLOT in plots:
        parts.append(f"![Acceptance by position and by source]({ACCEPTANCE_PLOT})")
    return "\n\n".join(parts)


def _length_table(heading: str, depths: Mapping[str, Any], grouping: str) -> str:
    names = list(dict.fromkeys(name for cell in depths.values() for name in cell[grouping]))
    rows = [[name, *(_length(cell[grouping].get(name)) for cell in depths.values())] for name in names[:MAX_ROWS]]
    if len(names) > MAX_ROWS:
        rows.append([f"and {len(names) - MAX_ROWS} more in evaluation.json", *("" for _ in depths)])
    rows.append(["**all**", *(f"**{_length(cell['total'])}**" for cell in depths.values())])
    return _table([heading, *(f"depth {depth}" for depth in depths)], rows)


def _length(figures: Mapping[str, Any] | None) -> str:
    length = None if figures is None else figures["acceptance_length"]
    return "" if length is None else f"{length:.2f}"


def _data(provenance: Mapping[str, Any]) -> str:
    rows = [[name, digest, "training"] for name, digest in provenance["data"]["sources"].items()]
    rows += [[name, digest, "evaluation"] for name, digest in provenance["data"]["evaluation"].items()]
    regenerated = provenance["recipe"]["regenerate"]["enabled"]
    whose = "Answers were generated by the target itself." if regenerated else "Answers are those of the data."
    shown = []
    for stage in ("prepare", "regenerate", "vocab"):
        for key, value in provenance["summaries"].get(stage, {}).items():
            # No zeros: where the target answers, `prepare` has no answer tokens, and that says nothing.
            if isinstance(value, int | float) and not isinstance(value, bool) and value:
                shown.append([stage, key.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:.4g}"])
    parts = ["## Data", whose, _table(["file", "digest", "used for"], rows)]
    return "\n\n".join([*parts, _table(["stage", "", ""], shown)] if shown else parts)


def _training(recipe: Recipe, config: DrafterConfig, provenance: Mapping[str, Any], plots: Sequence[str]) -> str:
    layers = "1 layer" if config.num_layers == 1 else f"{config.num_layers} layers"
    facts = [
        f"{name_of(config)}, {layers}, hidden size {config.hidden_size}, stored in {config.dtype}",
        f"draft vocabulary {config.draft_vocab_size:,} of {config.vocab_size:,}",
        f"positions {config.max_positions:,}, rope theta {config.layer.rope.theta:g}",
    ]
    if config.aux_layer_ids is not None:
        facts.append(f"reads the inputs of the target's blocks {', '.join(map(str, config.aux_layer_ids))}")
    facts.append(f"{recipe.fit.depth} draft steps unrolled (training-time test), loss {recipe.fit.loss}")
    for key, value in provenance["summaries"].get("fit", {}).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            facts.append(
                f"{key.replace('_', ' ')}: {value:,.4g}"
                if isinstance(value, float)
                else f"{key.replace('_', ' ')}: {value:,}"
            )
    text = "## Training\n\n" + "\n".join(f"- {fact}" for fact in facts)
    return text + (
        f"\n\n![Training: loss, accuracy and drift signals by depth]({TRAINING_PLOT})" if TRAINING_PLOT in plots else ""
    )


def _origin(provenance: Mapping[str, Any]) -> str:
    target, versions = provenance["target"], provenance["versions"]
    rows = [
        ["Fledge", f"{provenance['fledge_version']}" + (f", commit {c}" if (c := provenance["git_commit"]) else "")],
        ["command", f"`{provenance['command']}`"],
        ["target weights", target["weights_digest"]],
        ["tokenizer sha256", target["tokenizer_sha256"]],
        ["chat template sha256", target["chat_template_sha256"]],
        ["versions", ", ".join(f"{name} {version}" for name, version in versions.items())],
        ["device", provenance["device"]],
    ]
    return "## Provenance\n\n`fledge_provenance.json` has this and the keys of every stage.\n\n" + _table(
        ["", ""], rows
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    width = len(headings)
    lines = [headings, ["---"] * width, *([*row, *[""] * (width - len(row))] for row in rows)]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def plot_acceptance(result: Mapping[str, Any], path: Path) -> None:
    """Draw the share of accepted drafts by position, and acceptance length by source and depth."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import PercentFormatter  # noqa: PLC0415

    depths: Mapping[str, Any] = result["depths"]
    deepest = depths[max(depths, key=int)]
    grouping = "by_source" if len(deepest["by_source"]) > 1 else "by_category"
    names = list(deepest[grouping])[:10] if len(deepest[grouping]) > 1 else []

    figure = Figure(figsize=(10, max(3.8, 1.5 + 0.2 * (len(names) + 1) * len(depths))), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name in names:
        rates = deepest[grouping][name]["rate_by_depth"]
        left.plot(range(1, len(rates) + 1), rates, color="#9fb3c8", linewidth=1)
    rates = deepest["total"]["rate_by_depth"]
    left.plot(range(1, len(rates) + 1), rates, color="#12467b", linewidth=2.4, marker="o", label="all")
    if names:
        left.plot([], [], color="#9fb3c8", linewidth=1, label=f"each {grouping.removeprefix('by_')}")
    if result["trained_depth"] < len(rates):
        left.axvline(result["trained_depth"] + 0.5, color="#888888", linestyle=":", label="trained depth")
    left.set(xlabel="draft position", ylabel="rounds in which it was accepted", ylim=(0, 1))
    left.set_xticks(range(1, len(rates) + 1))
    left.yaxis.set_major_formatter(PercentFormatter(1.0))
    left.legend(frameon=False)

    shades = ("#12467b", "#5b8db8", "#a9c7df", "#d6e4ef")
    rows = ["all", *names]
    height = 0.8 / len(depths)
    for number, (depth, cell) in enumerate(depths.items()):
        figures = [cell["total"], *(cell[grouping].get(name) for name in names)]
        lengths = [(f["acceptance_length"] or 0.0) if f else 0.0 for f in figures]
        places = [row + (number - (len(depths) - 1) / 2) * height for row in range(len(rows))]
        bars = right.barh(places, lengths, height=height * 0.92, color=shades[number % 4], label=f"depth {depth}")
        right.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    right.set_yticks(range(len(rows)), [name if len(name) < 28 else f"{name[:26]}…" for name in rows])
    right.invert_yaxis()
    right.margins(x=0.14)
    right.set(xlabel="acceptance length (tokens per round)")
    right.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(depths))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, metadata={"Software": None})
