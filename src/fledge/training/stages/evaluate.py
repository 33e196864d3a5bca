"""Stage `eval`: the best checkpoint by acceptance length through the engine, and the directory that is published.

Output: `drafter/`, the best candidate with its model card, plots and provenance, and `evaluation.json`. What was
measured before an interruption is kept in `parts/`.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import read_target_config
from fledge.errors import CheckpointError, FledgeError
from fledge.evaluation.acceptance import AcceptanceMeter, AcceptanceSettings, Measurement, TargetAnswers, TargetTurn
from fledge.evaluation.conversations import Skipped, read_conversations
from fledge.evaluation.workloads import Prompt, Workload, spread
from fledge.files import atomic_directory, distinct_names, file_digest, read_json, read_json_lines, write_json
from fledge.training.card import TRAINING_PLOT, write_card
from fledge.training.pipeline import Stage, StageContext
from fledge.training.recipe import Recipe


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
    if reason is not None:
        context.progress.say(f"eval: skipped: {reason}")
        result: dict[str, Any] = {"evaluated": False, "reason": reason, "best": candidates[-1].name}
    else:
        evaluation = _Evaluation(context, candidates)
        try:
            result = evaluation.run()
        finally:
            evaluation.meter.close()
    write_json(context.directory / "evaluation.json", result)
    # A start that was killed leaves nothing half-written.
    with atomic_directory(context.directory / "drafter", replace=True) as directory:
        shutil.copytree(context.inputs["fit"] / "candidates" / result["best"], directory, dirs_exist_ok=True)
        write_json(directory / "evaluation.json", result)
        plot = context.inputs["fit"] / TRAINING_PLOT
        if plot.is_file():
            shutil.copy(plot, directory / plot.name)
        write_card(context, directory, result)
    if not result["evaluated"]:
        return result
    depths = result["depths"]
    lengths = {  # {group: {depth: length}}; all depths have the same groups
        grouping: {
            name: {depth: cell[grouping][name]["acceptance_length"] for depth, cell in depths.items()}
            for name in next(iter(depths.values()))[grouping]
        }
        for grouping in ("by_source", "by_category")
    }
    return {
        "evaluated": True,
        "best": result["best"],
        "acceptance_length": result["acceptance_length"],
        "by_depth": {depth: cell["total"]["acceptance_length"] for depth, cell in depths.items()},
        **lengths,
        "different_answers": sum(cell["different_answers"] for cell in depths.values()),
    }


STAGE = Stage(name="eval", version=1, depends_on=("prepare", "fit"), settings=settings, run=run)


class _Evaluation:
    """Measures the candidates, then the best one. Every part is written down as soon as it is known."""

    def __init__(self, context: StageContext, candidates: Sequence[Path]) -> None:
        self.recipe, self.section, self.progress = context.recipe, context.recipe.eval, context.progress
        self.candidates = candidates
        self.held_out = context.inputs["prepare"] / "held_out.jsonl"
        self.parts = context.directory / "parts"
        self.parts.mkdir(exist_ok=True)
        self.meter = AcceptanceMeter(
            AcceptanceSettings(
                target=self.recipe.target.path,
                max_tokens=self.section.max_tokens,
                max_num_seqs=self.section.max_num_seqs,
                dtype=self.recipe.target.dtype,
                device=self.recipe.device,
            )
        )

    def run(self) -> dict[str, Any]:
        recipe, skipped = self.recipe, Skipped()
        workloads = self._workloads(skipped)
        baseline = self._part("baseline", lambda: self._baseline(workloads))
        answers = TargetAnswers.from_dict(baseline)
        turns = answers.turns
        if not turns:
            raise FledgeError("eval: no prompt fits the target's positions; use shorter ones, or eval.enabled=false")
        few = spread(turns, self.section.candidate_prompts)
        tried = {
            candidate.name: self._measure(f"candidate {candidate.name}", candidate, recipe.fit.depth, few)
            for candidate in (self.candidates if len(self.candidates) > 1 else ())
        }
        lengths = {name: measured.total.acceptance_length or 0.0 for name, measured in tried.items()}
        # Among equals the one that was trained longest.
        best = max(self.candidates, key=lambda c: (lengths.get(c.name, 0.0), c.name))
        measured = {depth: self._measure(f"depth {depth}", best, depth, turns) for depth in recipe.eval_depths}
        return {
            "evaluated": True,
            "best": best.name,
            "acceptance_length": measured[recipe.eval_depths[0]].total.acceptance_length,
            "candidates": lengths,
            "trained_depth": recipe.fit.depth,
            "temperature": self.section.temperature,
            "dtype": baseline["dtype"],
            "device": baseline["device"],
            "prompts": sum(len(workload.prompts) for workload in workloads),
            "turns": len(turns),
            "too_long": len(answers.too_long) + len(answers.cut_short),
            "unusable": skipped.total,
            "depths": {
                str(depth): self._figures(depth, each, turns, baseline["dtype"]) for depth, each in measured.items()
            },
        }

    def _workloads(self, skipped: Skipped) -> list[Workload]:
        named = self.section.sources
        sources = [
            (name.replace(".jsonl", ""), Path(path)) for name, path in zip(distinct_names(named), named, strict=True)
        ]
        workloads = []
        for name, path in sources or [("held-out", self.held_out)]:
            prompts = read_source(path, skipped) if named else read_held_out(path)
            if not prompts:
                hint = "" if named else "; raise data.held_out, or name eval.sources, or set eval.enabled=false"
                raise FledgeError(f"eval: {path}: no prompts in it{hint}")
            chosen = tuple(spread(prompts, self.section.max_prompts))
            workloads.append(Workload(name=name, prompts=chosen, source=str(path), licence="that of its source"))
        return workloads

    def _baseline(self, workloads: Sequence[Workload]) -> dict[str, Any]:
        total = sum(prompt.num_turns for workload in workloads for prompt in workload.prompts)
        with self.progress.task("eval: target", total) as advance:
            answers = self.meter.answer(workloads, self.section.temperature, advance)
        return {**answers.to_dict(), "dtype": self.meter.dtype, "device": self.meter.device}

    def _measure(self, what: str, drafter: Path, depth: int, turns: Sequence[TargetTurn]) -> Measurement:
        def work() -> dict[str, Any]:
            self.meter.exchange(drafter, depth)
            with self.progress.task(f"eval: {what}", len(turns)) as advance:
                return self.meter.measure(turns, self.section.temperature, advance).to_dict()

        return Measurement.from_dict(self._part(f"{what} of {drafter.name}", work))

    def _figures(self, depth: int, measured: Measurement, turns: Sequence[TargetTurn], dtype: str) -> dict[str, Any]:
        if measured.different and dtype == "float32":
            # A drafter may change the text only where the target's best two tokens tie.
            clear = self.meter.clear_differences(turns, measured.different, self.section.temperature)
            if clear:
                raise FledgeError(
                    f"eval: at depth {depth}, {len(clear)} of {len(turns)} answers are not the target's own "
                    "although its choices are clear; speculation must not do this: please report it"
                )
        sources = [turn.workload for turn in turns]
        several = len(set(sources)) > 1  # each has categories of its own
        categories = [f"{turn.workload}/{turn.category}" if several else turn.category for turn in turns]
        grouped = {"by_source": measured.grouped(sources), "by_category": measured.grouped(categories)}
        return {
            "total": measured.total.to_dict(),
            **{key: {name: each.to_dict() for name, each in groups.items()} for key, groups in grouped.items()},
            "tokens": measured.tokens,
            "different_answers": len(measured.different),
        }

    def _part(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path = self.parts / f"{name.replace(' ', '-')}.json"
        if read_json(path) is None:
            write_json(path, work())
        # It has gone through JSON either way: a resumed run cannot differ.
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return values


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
