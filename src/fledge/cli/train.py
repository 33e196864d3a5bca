"""`fledge train`: trains a drafter for a target."""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fledge.checkpoints.source import bundled_directory
from fledge.cli.command import INTERRUPTED, exit_with, options
from fledge.errors import ConfigError, FledgeError
from fledge.files import write_text
from fledge.progress import Progress

if TYPE_CHECKING:
    from fledge.training.pipeline import RunReport
    from fledge.training.recipe import Recipe

GRACE_SECONDS = 5.0


@options("train")
def train(
    recipe: Path | None = None,
    overrides: list[str] | None = None,
    *,
    init: Path | None = None,
    plan: bool = False,
    print_vllm_command: bool = False,
    only: str | None = None,
    from_stage: str | None = None,
    until: str | None = None,
    force: list[str] | None = None,
    quiet: bool = False,
    as_json: bool = False,
) -> None:
    """Train a drafter for a target, in stages that can be resumed.

    The stages are prepare, regenerate, vocab, capture, fit, eval. One is
    skipped if its output is there and matches the recipe. After Ctrl-C,
    a crash or kill -9, the same command goes on where it was.

    With several GPUs: torchrun --nproc-per-node N -m fledge train RECIPE
    """
    first = os.environ.get("RANK", "0") == "0"
    try:
        from fledge.training.recipe import Recipe, recipe_text  # noqa: PLC0415

        if init is not None:
            if init.exists():
                raise ConfigError(f"--init: {init} already exists; choose another name")
            write_text(init, recipe_text(recipe or Path("eagle3.1")))
            print(f"{init}: set target.path and data.sources in it, then: fledge train {init} --plan", file=sys.stderr)
            return
        if recipe is None:
            raise ConfigError("name a recipe: a file, or eagle3.1; `fledge train --init my.yaml` writes one to change")
        loaded = Recipe.load(recipe, overrides or ())
        if print_vllm_command:
            from fledge.training.stages.vllm import server_command  # noqa: PLC0415

            if first:
                print(server_command(loaded))
            return
        if plan:
            if first:
                _print_plan(loaded, as_json=as_json)
            return
        from fledge.training.pipeline import Pipeline  # noqa: PLC0415 - torch takes seconds to import

        pipeline = Pipeline(loaded, progress=Progress(quiet=quiet))
        report = pipeline.run(only=only, from_stage=from_stage, until=until, force=force or ())
    except FledgeError:
        if not first:  # all processes fail alike: the first one reports it, then torchrun ends the others
            time.sleep(GRACE_SECONDS)
        raise
    except KeyboardInterrupt as interruption:
        message = str(interruption) or "interrupted; the same command goes on from here"
        exit_with(INTERRUPTED, *([message] if first else []))
    if first and as_json:
        stages = {
            name: {"directory": str(state.directory), "summary": state.manifest.summary}
            for name, state in report.states.items()
            if state.manifest is not None
        }
        drafter = None if report.drafter is None else str(report.drafter)
        print(json.dumps({"ran": report.ran, "drafter": drafter, "stages": stages}))
    elif first:
        _print_summary(loaded, report)


def _print_plan(recipe: "Recipe", *, as_json: bool) -> None:
    """Print what each stage does and needs, the memory of `fit`, and warnings."""
    from rich.markdown import Markdown  # noqa: PLC0415

    from fledge.training.plan import make_plan, plan_text  # noqa: PLC0415

    plan, console = make_plan(recipe), Console(highlight=False)
    if as_json:
        print(json.dumps(plan))
        return
    console.print(Markdown(plan_text(recipe, plan)))
    for warning in plan["warnings"]:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)


def _print_summary(recipe: "Recipe", report: "RunReport") -> None:
    """Print acceptance by source and depth, the path of the drafter, and how to serve it."""
    from fledge.report.tables import Table  # noqa: PLC0415

    console = Console(highlight=False, soft_wrap=True)
    evaluated = report.states["eval"].manifest
    if report.drafter is None or evaluated is None:
        done = ", ".join(report.ran) or "nothing was left to do"
        console.print(f"Done: {done}. There is no drafter of this recipe yet: later stages have not run.")
        return
    summary = evaluated.summary
    if summary["evaluated"]:
        heading = "source" if len(summary["by_source"]) > 1 else "category"
        groups: dict[str, dict[str, float | None]] = summary[f"by_{heading}"]
        more = {"all": summary["by_depth"]} if len(groups) > 1 else {}
        rows = [
            [name, *("" if length is None else f"{length:.2f}" for length in lengths.values())]
            for name, lengths in {**groups, **more}.items()
        ]
        header = [heading, *(f"depth {depth}" for depth in summary["by_depth"])]
        console.print(*Table.of("Acceptance length (tokens per verification)", header, rows).to_rich(console.width))
    else:
        console.print(f"Not evaluated: {summary['reason']}.")
    target, depth, drafter = recipe.target.path, recipe.fit.depth, str(report.drafter)
    method = "eagle" if recipe.drafter.variant == "eagle1" else "eagle3"
    config = json.dumps({"method": method, "model": drafter, "num_speculative_tokens": depth})
    directory = bundled_directory(target) or target  # vLLM does not know the bundled names
    console.print(f"The drafter is in {drafter} ({summary['best']}; README.md is its model card).")
    console.print("Serve it:", style="bold")
    console.print(f"  vllm serve {directory} --speculative-config '{config}'", markup=False)
    console.print(f"  fledge serve {target} --speculative-config '{config}'", markup=False)
    console.print("Or try it:", style="bold")
    console.print(f"  fledge generate --target {target} --drafter {drafter} --depth {depth} --chat Hello", markup=False)
