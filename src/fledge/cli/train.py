"""`fledge train`: from a target and prompts to a drafter."""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fledge.checkpoints.source import bundled_directory
from fledge.errors import FledgeError

if TYPE_CHECKING:
    from fledge.training.pipeline import RunReport
    from fledge.training.recipe import Recipe

INTERRUPTED = 130
GRACE_SECONDS = 5.0


def train(
    recipe: Annotated[
        Path,
        typer.Argument(metavar="RECIPE", help="The recipe, a YAML file. recipes/eagle3.1.yaml explains every key."),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Change the recipe, for example fit.lr=2e-4.")
    ] = None,
    *,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only say what the run would take: tokens, disk, memory, time.")
    ] = False,
    only: Annotated[str | None, typer.Option(metavar="STAGE", help="Run this stage alone.")] = None,
    from_stage: Annotated[str | None, typer.Option("--from", metavar="STAGE", help="Begin with this stage.")] = None,
    until: Annotated[str | None, typer.Option(metavar="STAGE", help="End with this stage.")] = None,
    force: Annotated[
        list[str] | None, typer.Option(metavar="STAGE", help="Run it again even if up to date; may be repeated.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on standard error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Train a drafter for a target, in stages: prepare, regenerate, vocab, capture, fit, eval.

    A stage is skipped if its output is there and matches the recipe. After Ctrl-C,
    a crash or kill -9, the same command goes on where it was.

    With several GPUs: torchrun --nproc-per-node N -m fledge train RECIPE
    """
    first = os.environ.get("RANK", "0") == "0"
    try:
        from fledge.training.recipe import Recipe  # noqa: PLC0415

        loaded = Recipe.load(recipe, overrides or ())
        if plan:
            if first:
                _plan(loaded, as_json=as_json)
            return
        from fledge.progress import Progress  # noqa: PLC0415
        from fledge.training.pipeline import Selection, run_pipeline  # noqa: PLC0415 - torch takes seconds to import

        selection = Selection(only=only, from_stage=from_stage, until=until, force=tuple(force or ()))
        report = run_pipeline(loaded, selection=selection, progress=Progress(quiet=quiet))
    except FledgeError:
        if not first:  # what all processes find wrong, the first one says; torchrun then ends the others
            time.sleep(GRACE_SECONDS)
        raise
    except KeyboardInterrupt as interruption:
        if first:
            print(str(interruption) or "interrupted; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    if first and as_json:
        print(json.dumps(_as_json(report)))
    elif first:
        _print_summary(loaded, report)


def _plan(recipe: "Recipe", *, as_json: bool) -> None:
    from fledge.training.plan import make_plan  # noqa: PLC0415

    plan = make_plan(recipe)
    if as_json:
        print(json.dumps(plan))
    else:
        _print_plan(recipe, plan)


def _print_plan(recipe: "Recipe", plan: dict[str, Any]) -> None:
    """What each stage does and takes, then the memory of `fit`, then what is wrong."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from fledge.training.pipeline import duration  # noqa: PLC0415
    from fledge.training.plan import DECODE_SHARE, FIT_SHARE, gigabytes  # noqa: PLC0415

    console = Console(highlight=False)
    data, fit, capture, probe = plan["data"], plan["fit"], plan["capture"], plan["probe"]
    about = "" if data["exact"] else "about "
    size = f"{data['examples']:,} examples, {data['tokens']:,} tokens"
    seconds = {"regenerate": plan["regenerate"]["seconds"], "capture": capture["seconds"], "fit": fit["seconds"]}
    seconds["eval"] = plan["eval"]["seconds"]
    what = {
        "prepare": f"{about}{size}",
        "regenerate": f"{about}{plan['regenerate']['tokens']:,} tokens" if recipe.regenerate.enabled else "off",
        "vocab": f"{plan['vocab']['size']:,} tokens" if plan["vocab"]["size"] else "the target's whole vocabulary",
        "capture": f"{about}{gigabytes(capture['bytes'])} to disk ({gigabytes(capture['disk_free'])} free)"
        if capture["mode"] == "offline"
        else f"online: nothing on disk (offline would be {gigabytes(capture['bytes_per_token'])} per token)",
        "fit": f"{fit['parameters']:,} parameters; {fit['steps']:,} steps of {recipe.fit.rows} x {recipe.fit.length}, "
        f"{about}{fit['rows']:,} rows an epoch; {fit['flops_total']:.2e} operations",
        "eval": f"at most {plan['eval']['tokens']:,} tokens" if recipe.eval.enabled else "off",
    }
    table = Table(title=f"{recipe.output}")
    for heading in ("stage", "state", "what"):
        table.add_column(heading)
    table.add_column("time, about", justify="right")
    for row in plan["stages"]:
        name = row["stage"]
        waiting = row["state"] != "up to date" and seconds.get(name)
        table.add_row(name, row["state"], what[name], duration(seconds[name]) if waiting else "")
    console.print(table)

    memory = Table(title="Memory of fit on each device, about")
    memory.add_column("part")
    memory.add_column("bytes", justify="right")
    for part, count in fit["memory"].items():
        memory.add_row(part, gigabytes(count))
    memory.add_section()
    memory.add_row("all", gigabytes(fit["memory_total"]))
    memory.add_row("free now", gigabytes(fit["memory_free"]))
    console.print(memory)
    console.print(
        f"Sizes {'are exact: from ' if data['exact'] else 'are estimated from '}{data['how']}. Times assume "
        f"{FIT_SHARE:.0%} of the matrix rate measured here ({probe['flops_per_second'] / 1e12:.3g} TFLOP/s, "
        f"{probe['dtype']}, {plan['device']}) for fit and {DECODE_SHARE:.0%} for generating."
    )
    for warning in plan["warnings"]:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)


def _as_json(report: "RunReport") -> dict[str, Any]:
    return {
        "ran": list(report.ran),
        "drafter": None if report.drafter is None else str(report.drafter),
        "stages": {
            name: {"directory": str(report.directories[name]), "summary": dict(summary)}
            for name, summary in report.summaries.items()
        },
    }


def _print_summary(recipe: "Recipe", report: "RunReport") -> None:
    """Acceptance by source and depth, where the drafter is, and how to serve it."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    console = Console(highlight=False, soft_wrap=True)
    if report.drafter is None:
        done = ", ".join(report.ran) or "nothing was left to do"
        console.print(f"Done: {done}. There is no drafter of this recipe yet: later stages have not run.")
        return
    summary = report.summaries["eval"]
    if summary["evaluated"]:
        groups: dict[str, dict[str, float | None]] = summary["by_source"]
        heading = "source"
        if len(groups) == 1:
            groups, heading = summary["by_category"], "category"
        table = Table(title="Acceptance length (tokens per verification)")
        table.add_column(heading)
        for depth in summary["by_depth"]:
            table.add_column(f"depth {depth}", justify="right")
        for name, lengths in groups.items():
            table.add_row(name, *(_length(lengths.get(depth)) for depth in summary["by_depth"]))
        if len(groups) > 1:
            table.add_section()
            table.add_row("all", *map(_length, summary["by_depth"].values()))
        console.print(table)
    else:
        console.print(f"Not evaluated: {summary['reason']}.")
    method = "eagle" if recipe.drafter.variant == "eagle1" else "eagle3"
    config = json.dumps({"method": method, "model": str(report.drafter), "num_speculative_tokens": recipe.fit.depth})
    console.print(f"The drafter is in {report.drafter} ({summary['best']}; README.md is its model card).")
    console.print("Serve it:", style="bold")
    target, depth = recipe.target.path, recipe.fit.depth
    directory = bundled_directory(target) or target  # vLLM does not know the bundled names
    console.print(f"  vllm serve {directory} --speculative-config '{config}'", markup=False)
    console.print(
        f"  fledge generate --target {target} --drafter {report.drafter} --depth {depth} --chat 'Hello'", markup=False
    )


def _length(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
