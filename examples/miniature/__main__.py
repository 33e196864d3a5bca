"""`python -m examples.miniature`, or `make demo`."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from examples.miniature.corpus import documentation
from examples.miniature.raising import RECIPE, Recipe, raise_models
from examples.miniature.showing import Show, show
from fledge.errors import FledgeError

INTRODUCTION = (
    "[bold]Fledge, in miniature.[/bold] A target and two drafters are trained on this machine, in about two minutes, "
    "on a few pages of Python's documentation; bundled models will replace them. They know those pages almost by "
    "heart, so more drafts are accepted than with real models. The rest is as it will be: the same tokens with and "
    "without a drafter. Those that a drafter had proposed are [green]green[/green].\n"
)
OWN_PROMPTS = ("The value of the expression", "When a function is called")  # which the pages do not continue


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.miniature", description="Fledge, in miniature.")
    parser.add_argument("--build-dir", type=Path, default=Path("build/miniature"), help="where the models go")
    parser.add_argument("--steps", type=int, help="train each model for this many steps, to try things out")
    parser.add_argument("--max-tokens", type=int, default=Show.max_tokens, help="length of an answer")
    arguments = parser.parse_args(argv)
    recipe = RECIPE
    if arguments.steps is not None:
        if arguments.steps < 5:
            parser.error("--steps: at least 5")
        recipe = replace(
            recipe,
            target=replace(recipe.target, steps=arguments.steps),
            drafter=replace(recipe.drafter, steps=arguments.steps),
        )
    # One thread: these tensors are computed sooner than a second thread is woken, above all on a busy machine.
    torch.set_num_threads(1)
    console = Console(highlight=False)
    console.print(INTRODUCTION)
    try:
        raise_models(arguments.build_dir, recipe, console)
        settings = Show(max_tokens=arguments.max_tokens, prompts=(*_openings(recipe), *OWN_PROMPTS))
        return 0 if show(arguments.build_dir, settings, console) else 1
    except FledgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; models that were not complete are gone", file=sys.stderr)
        return 130


def _openings(recipe: Recipe, count: int = 3, words: int = 5) -> list[str]:
    """The first words of some paragraphs that the models were trained on."""
    paragraphs = documentation(recipe.characters)
    return [" ".join(paragraphs[i * len(paragraphs) // count].split()[:words]) for i in range(count)]


if __name__ == "__main__":
    sys.exit(main())
