"""Stage `eval`: the best checkpoint by acceptance length through the engine, and the directory that is published.

Output: `drafter/`, the best candidate with its model card, plots, provenance and baseline, and `evaluation.json`. What
was measured before an interruption is kept in `parts/`.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.figure import Figure

from fledge.checkpoints.reading import PROVENANCE_FILE, read_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import describe_quantization, identify_target, read_target_config
from fledge.decoding.drafter_statistics import Reliability, StateGrowth
from fledge.decoding.statistics import COPYING, LOOPING
from fledge.engine.tokenizer import load_tokenizer
from fledge.errors import CheckpointError, FledgeError
from fledge.evaluation.acceptance import AcceptanceMeter, AcceptanceSettings, Measurement, TargetAnswers, TargetTurn
from fledge.evaluation.baseline import Baseline, BaselineCell
from fledge.evaluation.conversations import Skipped, read_conversations
from fledge.evaluation.results import token_share
from fledge.evaluation.workloads import Prompt, Workload, spread
from fledge.files import atomic_directory, distinct_names, file_digest, read_json, read_json_lines, write_json
from fledge.models.config import DrafterConfig
from fledge.models.drafter.variants import name_of
from fledge.provenance import run_provenance
from fledge.report.charts import MUTED, frame, short_title
from fledge.report.page import page_template
from fledge.training.pipeline import Manifest, Stage, StageContext, shown_numbers, shown_recipe
from fledge.training.recipe import Recipe

MAX_ROWS = 24  # of a table by category; evaluation.json has all
_SHADES = ("#12467b", "#5b8db8", "#a9c7df", "#d6e4ef")  # of depths, from the first


def settings(recipe: Recipe) -> dict[str, Any]:
    section = recipe.to_dict()["eval"]
    del section["sources"], section["max_num_seqs"]
    return {
        "eval": section,
        "sources": [[Path(source).name, file_digest(source)] for source in recipe.eval.sources],
        "depths": list(recipe.eval_depths),
        "trained_depth": recipe.fit.depth,
        "name": recipe.name,
    }


def run(context: StageContext) -> dict[str, Any]:
    candidates = sorted((context.inputs["fit"] / "candidates").iterdir())
    reason = None if context.recipe.eval.enabled else "the recipe says eval.enabled: false"
    try:
        read_target_config(resolve(context.recipe.target.path))
    except CheckpointError as error:
        reason = reason or f"Fledge's engine does not serve this target ({error}); measure acceptance with vLLM"
    if reason is None:
        result = _evaluate(context, candidates)
    else:
        context.progress.say(f"eval: skipped: {reason}")
        result = {"evaluated": False, "reason": reason, "best": candidates[-1].name}
    write_json(context.directory / "evaluation.json", result)
    # A start that was killed leaves nothing half-written.
    with atomic_directory(context.directory / "drafter", replace=True) as directory:
        shutil.copytree(context.inputs["fit"] / "candidates" / result["best"], directory, dirs_exist_ok=True)
        write_json(directory / "evaluation.json", result)
        provenance = {**(read_json(directory / PROVENANCE_FILE) or {}), **_provenance(context)}
        write_json(directory / PROVENANCE_FILE, provenance)
        if (context.inputs["fit"] / "training.png").is_file():
            shutil.copy(context.inputs["fit"] / "training.png", directory)
        if result["evaluated"]:
            if cells := _baseline_cells(result):
                named = distinct_names(context.recipe.eval.sources) or ["held-out"]
                Baseline.of(cells, named, provenance).write(directory)
            plot_acceptance(result, directory / "acceptance.png")
        plots = [name for name in ("training.png", "acceptance.png") if (directory / name).is_file()]
        card = model_card(context.recipe, read_drafter(directory).config, result, provenance, plots=plots)
        (directory / "README.md").write_text(card, encoding="utf-8")
    if not result["evaluated"]:
        return result
    depths = result["depths"]
    first = next(iter(depths.values()))
    return {
        **{name: result[name] for name in ("evaluated", "best", "acceptance_length")},
        "by_depth": {depth: cell["total"]["acceptance_length"] for depth, cell in depths.items()},
        "without_repetition": {depth: cell["fresh"]["acceptance_length"] for depth, cell in depths.items()},
        "novel": {depth: cell["novel"]["acceptance_length"] for depth, cell in depths.items()},
        "repeated": first["repeated"],
        "copied": first["copied"],
        **{
            by: {group: {d: cell[by][group]["acceptance_length"] for d, cell in depths.items()} for group in first[by]}
            for by in ("by_source", "by_category")
        },
        "different_answers": sum(cell["different_answers"] for cell in depths.values()),
    }


STAGE = Stage(name="eval", version=2, depends_on=("prepare", "fit"), settings=settings, run=run)


def _evaluate(context: StageContext, candidates: Sequence[Path]) -> dict[str, Any]:
    """Measure the candidates, then the best one. Every part is written down as soon as it is known."""
    recipe, section, temperature = context.recipe, context.recipe.eval, context.recipe.eval.temperature
    workloads, unusable = _workloads(recipe, context.inputs["prepare"] / "held_out.jsonl")
    measured_as = AcceptanceSettings(
        target=recipe.target.path,
        max_tokens=section.max_tokens,
        max_num_seqs=section.max_num_seqs,
        dtype=recipe.target.dtype,
        device=recipe.device,
    )
    meter = AcceptanceMeter(measured_as)
    parts = context.directory / "parts"
    parts.mkdir(exist_ok=True)

    def part(name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path = parts / f"{name.replace(' ', '-')}.json"
        if read_json(path) is None:
            write_json(path, work())
        return read_json(path) or {}  # through JSON either way: a resumed run cannot differ

    def answer() -> dict[str, Any]:
        total = sum(prompt.num_turns for workload in workloads for prompt in workload.prompts)
        with context.progress.task("eval: target", total) as advance:
            answers = meter.answer(workloads, temperature, advance)
        return {**answers.to_dict(), "dtype": meter.dtype, "device": meter.device}

    def measure(what: str, drafter: Path, depth: int, turns: Sequence[TargetTurn]) -> Measurement:
        def work() -> dict[str, Any]:
            meter.set_drafter(drafter, depth)
            with context.progress.task(f"eval: {what}", len(turns)) as advance:
                return meter.measure(turns, temperature, advance).to_dict()

        return Measurement.from_dict(part(f"{what} of {drafter.name}", work))

    with closing(meter):
        baseline = part("baseline", answer)
        answers = TargetAnswers.from_dict(baseline)
        turns = answers.turns
        if not turns:
            raise FledgeError("eval: no prompt fits the target's positions; use shorter ones, or eval.enabled=false")
        few = spread(turns, section.candidate_prompts)
        tried = candidates if len(candidates) > 1 else ()
        tests = {one.name: measure(f"candidate {one.name}", one, recipe.fit.depth, few) for one in tried}
        lengths = {name: measured.total.acceptance_length or 0.0 for name, measured in tests.items()}
        # Among equals the one that was trained longest.
        best = max(candidates, key=lambda c: (lengths.get(c.name, 0.0), c.name))
        measured = {depth: measure(f"depth {depth}", best, depth, turns) for depth in recipe.eval_depths}
        for depth, each in measured.items() if baseline["dtype"] == "float32" else ():
            # A drafter may change the text only where the target's best two tokens tie.
            if each.different and (clear := meter.clear_differences(turns, each.different, temperature)):
                what = f"{len(clear)} of {len(turns)} answers are not the target's own although its choices are clear"
                raise FledgeError(f"eval: at depth {depth}, {what}; speculation must not do this: please report it")
    return {
        "evaluated": True,
        "best": best.name,
        "acceptance_length": measured[recipe.eval_depths[0]].total.acceptance_length,
        "candidates": lengths,
        "trained_depth": recipe.fit.depth,
        "temperature": temperature,
        **{name: baseline[name] for name in ("dtype", "device")},
        "prompts": sum(len(workload.prompts) for workload in workloads),
        "turns": len(turns),
        "too_long": len(answers.too_long) + len(answers.cut_short),
        "unusable": unusable,
        "depths": {str(depth): _figures(each, turns) for depth, each in measured.items()},
    }


def _baseline_cells(result: Mapping[str, Any]) -> list[BaselineCell]:
    """What live traffic will be compared with."""
    return [
        BaselineCell(
            temperature=result["temperature"],
            depth=int(depth),
            rounds=cell["total"]["rounds"],
            acceptance_length=cell["total"]["acceptance_length"],
            rate_by_depth=tuple(cell["total"]["rate_by_depth"]),
            fresh_acceptance_length=cell["fresh"]["acceptance_length"],
            novel_acceptance_length=cell["novel"]["acceptance_length"],
            repeated=cell["repeated"],
            copied=cell["copied"],
            growth_by_depth=StateGrowth.of(cell["state_growth"]).by_depth,
            reliability=Reliability.of(cell["reliability"]).triples,
        )
        for depth, cell in result["depths"].items()
        if cell["total"]["rounds"]
    ]


def _workloads(recipe: Recipe, held_out: Path) -> tuple[list[Workload], int]:
    """The prompts to measure on, and how many records of their files were none."""
    named, workloads, skipped = recipe.eval.sources, [], Skipped()
    for name, path in zip(distinct_names(named) or ["held-out"], named or [str(held_out)], strict=True):
        prompts = read_source(Path(path), skipped) if named else read_held_out(held_out)
        if not prompts:
            hint = "" if named else "; raise data.held_out, or name eval.sources, or set eval.enabled=false"
            raise FledgeError(f"eval: {path}: no prompts in it{hint}")
        chosen, short = tuple(spread(prompts, recipe.eval.max_prompts)), name.replace(".jsonl", "")
        workloads.append(Workload(name=short, prompts=chosen, source=path, licence="that of its source"))
    return workloads, skipped.total


def _figures(measured: Measurement, turns: Sequence[TargetTurn]) -> dict[str, Any]:
    sources = [turn.workload for turn in turns]
    several = len(set(sources)) > 1  # each has categories of its own
    categories = [f"{turn.workload}/{turn.category}" if several else turn.category for turn in turns]
    grouped = {"by_source": measured.grouped(sources), "by_category": measured.grouped(categories)}
    return {
        "total": measured.total.to_dict(),
        "fresh": measured.statistics("fresh").to_dict(),
        "novel": measured.statistics("novel").to_dict(),
        "repeated": token_share(measured.requests, "repeated_tokens"),
        "copied": token_share(measured.requests, "copied_tokens"),
        **{key: {name: each.to_dict() for name, each in groups.items()} for key, groups in grouped.items()},
        "tokens": measured.tokens,
        "different_answers": len(measured.different),
        "state_growth": measured.state_growth,
        "reliability": measured.reliability,
    }


def read_source(path: Path, skipped: Skipped) -> list[Prompt]:
    """What a file of conversations asks, in order. What is no conversation goes to `skipped`."""
    read = read_conversations([path], skipped)
    prompts = [Prompt(id=where, category=one.category, messages=one.messages, text=one.text) for where, one in read]
    return [prompt for prompt in prompts if prompt.num_turns]


def read_held_out(path: Path) -> list[Prompt]:
    """The prompts that `prepare` kept from training: conversations, or where there are no messages ids."""
    return [
        Prompt(
            id=str(line),
            category=record["category"],
            messages=tuple(record["messages"]),
            token_ids=() if record["messages"] else tuple(record["prompt_token_ids"]),
        )
        for line, record in read_json_lines(path)
    ]


def _provenance(context: StageContext) -> dict[str, Any]:
    """How `eval`'s input came about: enough to make it again, and to recognise the target it was made for."""
    recipe, fit = context.recipe, Manifest.read(context.inputs["fit"])
    # Of all stages before this one, as far as their directories are still there; none outside the pipeline.
    keys = {} if fit is None else {**fit.input_keys, "fit": fit.key}
    output = context.inputs["fit"].parent.parent
    manifests = {name: found for name, key in keys.items() if (found := Manifest.read(output / name / key))}
    trained_on: Iterable[str] = map(file_digest, recipe.data.sources)
    if "prepare" in manifests:  # as they were then
        trained_on = [digest for _, digest in manifests["prepare"].settings["data"]["sources"]]
    measured_on = map(file_digest, recipe.eval.sources)
    directory = resolve(recipe.target.path)
    template = getattr(load_tokenizer(directory), "chat_template", None)
    text = template if isinstance(template, str) or template is None else json.dumps(template, sort_keys=True)
    return {
        **run_provenance(),
        "recipe": shown_recipe(recipe),
        "stages": {name: manifest.key for name, manifest in manifests.items()} | {"eval": context.directory.name},
        "data": {
            "sources": dict(zip(distinct_names(recipe.data.sources), trained_on, strict=True)),
            "evaluation": dict(zip(distinct_names(recipe.eval.sources), measured_on, strict=True)),
        },
        "summaries": {name: dict(manifest.summary) for name, manifest in manifests.items()},
        "target": {  # by name, and by the digests that another copy of it has too
            "name": base_model(recipe),
            **identify_target(directory),
            "quantization": describe_quantization(directory),
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


def model_card(
    recipe: Recipe,
    config: DrafterConfig,
    result: Mapping[str, Any],
    provenance: Mapping[str, Any],
    *,
    plots: Sequence[str] = (),
) -> str:
    """The card as Markdown: what the drafter is, how to serve it, what it was made from, how well it does."""
    about = {"recipe": recipe, "config": config, "result": result, "provenance": provenance, "plots": plots}
    writers = {"yaml": partial(yaml.safe_dump, sort_keys=False, allow_unicode=True), "json": json.dumps}
    known = {
        "variant": name_of(config),
        "numbers": shown_numbers,
        "max_rows": MAX_ROWS,
        "looping": LOOPING,
        "copying": COPYING,
        **writers,
    }
    return page_template("fledge.training", "card.md.jinja").render(**about, **known) + "\n"


def plot_acceptance(result: Mapping[str, Any], path: Path) -> None:
    """Draw the share of accepted drafts by position, and acceptance length by source and depth."""
    depths: Mapping[str, Any] = result["depths"]
    deepest = depths[max(depths, key=int)]
    grouping = "by_source" if len(deepest["by_source"]) > 1 else "by_category"
    names = list(deepest[grouping])[:10] if len(deepest[grouping]) > 1 else []
    rates, rows, height = deepest["total"]["rate_by_depth"], ["all", *names], 0.8 / len(depths)
    figure = Figure(figsize=(10, max(3.8, 1.5 + 0.2 * len(rows) * len(depths))), layout="constrained")
    left, right = figure.subplots(1, 2)
    places = range(1, len(rates) + 1)
    for number, name in enumerate(names):
        label, its = f"each {grouping.removeprefix('by_')}" if number == 0 else None, deepest[grouping][name]
        left.plot(places[: len(its["rate_by_depth"])], its["rate_by_depth"], color=_SHADES[2], linewidth=1, label=label)
    left.plot(places, rates, color=_SHADES[0], linewidth=2.4, marker="o", label="all")
    if result["trained_depth"] < len(rates):
        left.axvline(result["trained_depth"] + 0.5, color=MUTED, linestyle=":", label="trained depth")
    frame(left, places or (1,), percent=True)
    left.set(xlabel="draft position", ylabel="rounds in which it was accepted", ylim=(0, 1))
    left.legend(frameon=False)
    for number, (depth, cell) in enumerate(depths.items()):
        y = np.arange(len(rows)) + (number - (len(depths) - 1) / 2) * height
        lengths = [each["acceptance_length"] or 0.0 for each in (cell["total"], *map(cell[grouping].get, names))]
        bars = right.barh(y, lengths, height=height * 0.92, color=_SHADES[number % 4], label=f"depth {depth}")
        right.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    right.set_yticks(range(len(rows)), map(short_title, rows))
    right.invert_yaxis()
    right.margins(x=0.14)
    right.set(xlabel="acceptance length (tokens per round)")
    right.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(depths))
    figure.savefig(path, dpi=130, format="png", metadata={"Software": None})
