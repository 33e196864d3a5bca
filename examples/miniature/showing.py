"""Shows what drafters do: the same prompts with and without them, side by side, and what the difference comes to."""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.miniature.raising import TARGET, VARIANTS
from fledge import LLM, SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics


@dataclass(frozen=True, kw_only=True)
class Show:
    """What is decoded, and how often it is timed."""

    depth: int = 5  # between the fastest for EAGLE-3 (4) and for EAGLE-3.1 (8): see docs/log.md
    max_tokens: int = 80
    prompts: tuple[str, ...] = ()
    repeats: int = 3


@dataclass(kw_only=True)
class Contender:
    """One way to decode, and how it did."""

    name: str
    llm: LLM
    token_ids: list[tuple[int, ...]] = field(default_factory=list)  # of each prompt
    acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    seconds: list[float] = field(default_factory=list)  # for all prompts, of each repeat


def show(directory: Path, settings: Show, console: Console) -> bool:
    """Stream the answers, time them, print a table. Return whether all contenders gave the same tokens."""
    contenders = load(directory, settings.depth)
    params = SamplingParams(temperature=0.0, max_tokens=settings.max_tokens, ignore_eos=True)
    for prompt in settings.prompts:
        console.print()
        console.rule(Text(prompt), align="left")
        for contender in contenders:
            console.print(f"[bold]{contender.name}[/bold]")
            _stream(contender, prompt, params, console)
    identical = all(contender.token_ids == contenders[0].token_ids for contender in contenders)
    with console.status("timing"):
        _time(contenders, settings, params)
    console.print()
    console.print(_table(contenders, settings))
    if identical:
        total = sum(map(len, contenders[0].token_ids))
        console.print(f"Lossless: the same {total} tokens with and without drafters.")
    else:
        console.print("[red]Not lossless: the tokens differ.[/red] This is a bug; please report it.")
    return identical


def load(directory: Path, depth: int) -> list[Contender]:
    contenders = [Contender(name="no speculation", llm=LLM(directory / TARGET, device="cpu"))]
    for name, variant in VARIANTS.items():
        config = {"model": str(directory / name), "num_speculative_tokens": depth}
        llm = LLM(directory / TARGET, speculative_config=config, device="cpu")
        contenders.append(Contender(name=variant.name, llm=llm))
    return contenders


def _stream(contender: Contender, prompt: str, params: SamplingParams, console: Console) -> None:
    for event in contender.llm.stream(prompt, params):
        for piece in event.pieces:
            console.print(Text(piece.text, style="green" if piece.drafted else ""), end="", soft_wrap=True)
        if event.output is not None:
            contender.token_ids.append(event.output.outputs[0].token_ids)
            contender.acceptance = AcceptanceStatistics.merge([contender.acceptance, event.output.metrics.acceptance])
    console.print()


def _time(contenders: list[Contender], settings: Show, params: SamplingParams) -> None:
    """Contenders take turns, so that whatever else the machine does slows all of them."""
    for _ in range(settings.repeats):
        for contender in contenders:
            start = time.perf_counter()
            for prompt in settings.prompts:
                contender.llm.generate(prompt, params)
            contender.seconds.append(time.perf_counter() - start)


def _table(contenders: list[Contender], settings: Show) -> Table:
    title = f"{len(settings.prompts)} prompts, greedy, one at a time, {settings.depth} tokens drafted ahead, on the CPU"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("speed", justify="right")
    table.add_column("acceptance length", justify="right")
    table.add_column("accepted by depth", justify="right")
    baseline = contenders[0]
    for contender in contenders:
        ratio = statistics.median(b / s for b, s in zip(baseline.seconds, contender.seconds, strict=True))
        length = contender.acceptance.acceptance_length
        rates = "  ".join(f"{rate:.0%}" for rate in contender.acceptance.rate_by_depth)
        table.add_row(contender.name, f"{ratio:.2f}x", "" if length is None else f"{length:.2f}", rates)
    return table
