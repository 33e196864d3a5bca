"""`python -m recipes.drift EXPERIMENT --out DIR`: trains, probes, reports; after an interruption it goes on."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fledge.errors import FledgeError
from fledge.progress import Progress
from fledge.report.intervals import Bootstrap
from recipes.drift import report, run
from recipes.drift.experiment import Experiment
from recipes.drift.pooled import pool, read_probes

STAGES = ("train", "probe", "report")


def main(
    experiment: Annotated[Path, typer.Argument(help="The experiment's file, such as recipes/drift/experiment.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Keys of its recipe, as `fledge train` takes them: target.path=... ")
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="Directory for everything.")],
    stage: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(STAGES)}; all of them unless given.")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="Of the experiment's; all of them unless given.")] = None,
    processes: Annotated[
        int, typer.Option(help="That train or probe side by side; on a GPU start NVIDIA's MPS first.", min=1)
    ] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing of progress.")] = False,
) -> None:
    """Train the drafters of an experiment, probe them for drift, pool over seeds, and say what came out."""
    progress = Progress(quiet=quiet)
    try:
        stages = stage or list(STAGES)
        if unknown := set(stages) - set(STAGES):
            raise FledgeError(f"--stage {unknown.pop()}: allowed is {', '.join(STAGES)}")
        loaded = Experiment.load(experiment, overrides or (), variant or ())
        if "train" in stages:
            run.train(loaded, out, processes, progress)
        if "probe" in stages:
            run.probe(loaded, out, processes, progress)
        if "report" in stages:
            outcome = pool(loaded, *read_probes(loaded, out), Bootstrap())
            report.write(out, outcome)
            report.show(out, outcome)
    except FledgeError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    typer.run(main)
