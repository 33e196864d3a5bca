"""`fledge demo`: the bundled models, with and without speculation."""

import json

import typer
from rich.console import Console

from fledge.cli.command import options
from fledge.errors import ConfigError

INTRODUCTION = (
    "[bold]Fledge[/bold] answers with a small bundled chat model: alone, with its EAGLE-3 drafter, and with its "
    "EAGLE-3.1 drafter. The tokens are the same each time; those that a drafter had proposed are [green]green[/green]."
)


@options("demo")
def demo(
    prompt: list[str] | None = None,
    *,
    depth: int = 3,
    max_tokens: int = 120,
    repeats: int = 3,
    device: str = "auto",
    threads: int | None = None,
    as_json: bool = False,
) -> None:
    """See the bundled models answer with and without speculation.

    Beside them, transformers is timed on the same questions.
    """
    for name, value in (("--max-tokens", max_tokens), ("--repeats", repeats)):
        if value < 1:
            raise ConfigError(f"{name}: found {value}, allowed is 1 or more")

    import torch  # noqa: PLC0415 - torch takes seconds, and --help should not

    from fledge.bench.demo import PLAIN, PROMPTS, Demo, table  # noqa: PLC0415

    if threads is not None:
        torch.set_num_threads(threads)
    console = Console(highlight=False, stderr=as_json)
    it = Demo(prompt or PROMPTS, depth=depth, max_tokens=max_tokens, device=device)  # refuses what cannot be run
    console.print(INTRODUCTION)
    it.stream(console)
    with console.status("timing, beside transformers"):
        figures = it.measure(repeats)
    if as_json:
        print(json.dumps(figures))
    else:
        caption = f"speed: against transformers; by drafting: against {PLAIN}"
        console.print("", *table(figures).to_rich(console.width), caption, sep="\n")
    if figures["identical"]:
        others = ", and from transformers" if figures["identical_to_transformers"] else ""
        console.print(f"Lossless: the same {figures['tokens']} tokens with and without drafters{others}.")
    elif figures["device"] == "cpu":
        console.print("[red]Not lossless: the tokens differ.[/red] This is a bug; please report it.")
        raise typer.Exit(1)
    else:
        console.print("Some tokens differ: in bfloat16 a batch of another size may round a near-tie the other way.")
