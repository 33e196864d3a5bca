"""What `fledge demo` shows: the same answers with and without drafters, side by side, and what the difference is.

transformers' `generate`, which most people begin with, is timed on the same prompts.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM

from fledge.checkpoints.source import DRAFTERS, TARGET, resolve
from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.llm import LLM

DRAFTED_STYLE = "green"
PLAIN = "no speculation"
TRANSFORMERS = "transformers"
PROMPTS = (
    "Write a Python function that returns the largest number in a list.",
    "What does the `map()` method of an array do?",
    "Tom has 3 boxes with 12 pencils each. He gives away 9 pencils. How many pencils does he have left?",
    "I would like to book a table for two at an Italian restaurant tonight.",
)


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What is decoded, and how often it is timed."""

    prompts: tuple[str, ...] = PROMPTS
    depth: int = 3
    max_tokens: int = 120
    repeats: int = 3
    device: str = "auto"


@dataclass(kw_only=True)
class DemoContender:
    """One way to decode, and how it did."""

    name: str
    llm: LLM
    token_ids: list[tuple[int, ...]] = field(default_factory=list)  # of each prompt
    acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    seconds: list[float] = field(default_factory=list)  # for all prompts, of each repeat


class TransformersLoop:
    """transformers' own loop on the same weights, greedy."""

    def __init__(self, beside: LLM) -> None:
        weight = beside.engine.runner.models.target.embed_tokens.weight
        model = AutoModelForCausalLM.from_pretrained(resolve(TARGET), dtype=weight.dtype)
        self._model = model.to(weight.device).eval()
        self.token_ids: list[tuple[int, ...]] = []
        self.seconds: list[float] = []

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Answer one prompt after another; keep the tokens, and how long all of them took."""
        started = time.perf_counter()
        self.token_ids = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=self._model.device)
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
            )
            self.token_ids.append(tuple(out[0, len(prompt) :].tolist()))
        self.seconds.append(time.perf_counter() - started)


def load_contenders(settings: DemoSettings) -> list[DemoContender]:
    """No speculation first: it is what the others are measured against."""
    configs: dict[str, Mapping[str, Any] | None] = {PLAIN: None}
    configs |= {name: {"model": m, "num_speculative_tokens": settings.depth} for name, m in DRAFTERS.items()}
    options: dict[str, Any] = {"device": settings.device, "max_num_seqs": 1, "enable_prefix_caching": False}
    return [
        DemoContender(name=name, llm=LLM(TARGET, speculative_config=config, **options))
        for name, config in configs.items()
    ]


def stream_answers(contenders: Sequence[DemoContender], settings: DemoSettings, console: Console) -> bool:
    """Print every answer as it comes. Return whether all contenders gave the same tokens."""
    params = _params(settings)
    for prompt in settings.prompts:
        console.print()
        console.rule(Text(prompt), align="left")
        for contender in contenders:
            console.print(f"[bold]{contender.name}[/bold]")
            for text, drafted in _answer(contender, prompt, params):
                console.print(Text(text, style=DRAFTED_STYLE if drafted else ""), end="", soft_wrap=True)
            console.print()
    return all(contender.token_ids == contenders[0].token_ids for contender in contenders)


def _answer(contender: DemoContender, prompt: str, params: SamplingParams) -> Iterator[tuple[str, bool]]:
    """Yield pieces of text and whether each was drafted; keep the tokens and the acceptance."""
    ids = contender.llm.encode_chat([{"role": "user", "content": prompt}])
    for event in contender.llm.stream(ids, params):
        yield from ((piece.text, piece.drafted) for piece in event.pieces)
        if event.output is not None:
            contender.token_ids.append(event.output.outputs[0].token_ids)
            contender.acceptance = AcceptanceStatistics.merge([contender.acceptance, event.output.metrics.acceptance])


def time_answers(contenders: Sequence[DemoContender], generate: TransformersLoop, settings: DemoSettings) -> None:
    """Contenders take turns, so that whatever else the machine does slows all of them."""
    params = _params(settings)
    llm = contenders[0].llm
    prompts = [llm.encode_chat([{"role": "user", "content": prompt}]) for prompt in settings.prompts]
    for _ in range(settings.repeats):
        generate.answer(prompts, settings.max_tokens)
        for contender in contenders:
            started = time.perf_counter()
            for prompt in prompts:
                contender.llm.generate([prompt], params)
            contender.seconds.append(time.perf_counter() - started)


def _params(settings: DemoSettings) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=settings.max_tokens)


def report(contenders: Sequence[DemoContender], generate: TransformersLoop, settings: DemoSettings) -> dict[str, Any]:
    """Return everything the table shows, as JSON values."""
    baseline = contenders[0]

    def speed(of: DemoContender | TransformersLoop) -> dict[str, float]:
        return {
            "tokens_per_second": sum(map(len, of.token_ids)) / statistics.median(of.seconds),
            "speed": _ratio(baseline.seconds, of.seconds),
            "speed_to_transformers": _ratio(generate.seconds, of.seconds),
        }

    return {
        "device": str(baseline.llm.engine.device),
        "depth": settings.depth,
        "prompts": len(settings.prompts),
        "tokens": sum(map(len, baseline.token_ids)),
        "identical": all(contender.token_ids == baseline.token_ids for contender in contenders),
        "identical_to_transformers": generate.token_ids == baseline.token_ids,
        "contenders": {
            TRANSFORMERS: {**speed(generate), **AcceptanceStatistics().to_dict()},
            **{contender.name: {**speed(contender), **contender.acceptance.to_dict()} for contender in contenders},
        },
    }


def _ratio(others: Sequence[float], own: Sequence[float]) -> float:
    return statistics.median(other / mine for other, mine in zip(others, own, strict=True))


def table(figures: Mapping[str, Any]) -> Table:
    prompts = "1 prompt" if figures["prompts"] == 1 else f"{figures['prompts']} prompts"
    title = f"{prompts}, greedy, one at a time, {figures['depth']} tokens drafted ahead"
    caption = f"speed: against transformers; by drafting: against {PLAIN}"
    out = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    out.add_column("", no_wrap=True)
    for name in ("tokens/s", "speed", "by drafting", "acceptance length", "accepted by depth"):
        out.add_column(name, justify="right")
    for name, values in figures["contenders"].items():
        length = values["acceptance_length"]
        out.add_row(
            name,
            f"{values['tokens_per_second']:.0f}",
            f"{values['speed_to_transformers']:.1f}x",
            "" if name == TRANSFORMERS else f"{values['speed']:.2f}x",
            "" if length is None else f"{length:.2f}",
            "  ".join(f"{rate:.0%}" for rate in values["rate_by_depth"]),
        )
    return out
