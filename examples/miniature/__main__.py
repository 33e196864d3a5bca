"""`python -m examples.miniature`, or `make demo`."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from examples.miniature.corpus import documentation
from examples.miniature.raising import RECIPE, Recipe, raise_models
from examples.miniature.showing import Show, show
from fledge.errors import FledgeError

INTRODUCTION = (
    "[bold]Fledge, in miniature.[/bold] These models are trained on this machine, in about two minutes, on a few pages "
    "of Python's documentation. They know those pages and nothing else; bundled models will replace them. What they "
    "show is real: the same text with and without a drafter, and how much faster with one. Tokens that a drafter had "
    "proposed are [green]green[/green].\n"
)
OWN_PROMPTS = ("The value of the expression", "When a function is called")  # which the pages do not continue


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.miniature", description="Fledge, in miniature.")
    parser.add_argument("--build-dir", type=Path, default=Path("build/miniature"), help="where the models go")
    parser.add_argument("--steps", type=int, help="train each model for this many steps, to try things out")
    parser.add_argument("--max-tokens", type=int, default=Show.max_tokens, help="length of an answer")
    arguments = parser.parse_args()
    recipe = RECIPE
    if arguments.steps is not None:
        if arguments.steps < 5:
            parser.error("--steps: at least 5")
        recipe = replace(
            recipe,
            target=replace(recipe.target, steps=arguments.steps),
            drafter=replace(recipe.drafter, steps=arguments.steps),
        )
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
