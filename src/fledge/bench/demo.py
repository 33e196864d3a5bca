"""What `fledge demo` shows: the same answers with and without drafters, side by side, and what the difference is.

transformers' `generate`, which most people begin with, is timed on the same prompts.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from fledge.checkpoints.source import DRAFTERS, TARGET, resolve
from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.llm import LLM
from fledge.report.tables import Table

PLAIN = "no speculation"
TRANSFORMERS = "transformers"
PROMPTS = (
    "Write a Python function that counts the vowels in a string.",
    "What does the `map()` method of an array do?",
    "Tom has 3 boxes with 12 pencils each. He gives away 9 pencils. How many pencils does he have left?",
    "I would like to book a table for two at an Italian restaurant tonight.",
)


@dataclass(kw_only=True)
class DemoContender:
    """One way to decode, and how it did."""

    name: str
    generate: Callable[[Sequence[int]], tuple[int, ...]]
    token_ids: list[tuple[int, ...]] = field(default_factory=list)  # of each prompt
    acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    seconds: list[float] = field(default_factory=list)  # for all prompts, of each repeat


class Demo:
    """The bundled models, without speculation first: it is what the others are measured against."""

    def __init__(self, prompts: Sequence[str] = PROMPTS, *, depth: int, max_tokens: int, device: str) -> None:
        self.prompts, self.depth = prompts, depth
        self.params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        configs: dict[str, Mapping[str, Any] | None] = {PLAIN: None}
        configs |= {
            name: {"model": model, "num_speculative_tokens": depth, "adaptive": False}
            for name, model in DRAFTERS.items()
        }
        options: dict[str, Any] = {"device": device, "max_num_seqs": 1, "enable_prefix_caching": False}
        self.llms = {name: LLM(TARGET, speculative_config=config, **options) for name, config in configs.items()}
        self.ids = [self.llms[PLAIN].encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
        self.contenders = {name: DemoContender(name=name, generate=self._ours(llm)) for name, llm in self.llms.items()}

    def _ours(self, llm: LLM) -> Callable[[Sequence[int]], tuple[int, ...]]:
        return lambda prompt: llm.generate([prompt], self.params)[0].outputs[0].token_ids

    def _transformers(self) -> Callable[[Sequence[int]], tuple[int, ...]]:
        """transformers' own loop on the same weights, greedy."""
        transformers_logging.disable_progress_bar()
        weight = self.llms[PLAIN].target.embed_tokens.weight
        model = (
            AutoModelForCausalLM.from_pretrained(resolve(TARGET), dtype=weight.dtype, trust_remote_code=False)
            .to(weight.device)
            .eval()
        )
        options = {"max_new_tokens": self.params.max_tokens, "do_sample": False}

        @torch.inference_mode()
        def generate(prompt: Sequence[int]) -> tuple[int, ...]:
            ids = torch.tensor([prompt], device=weight.device)
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            return tuple(out[0, len(prompt) :].tolist())

        return generate

    def stream(self, console: Console) -> None:
        """Print every answer as it comes, what was drafted in green; keep the tokens and the acceptance."""
        for prompt, ids in zip(self.prompts, self.ids, strict=True):
            console.print()
            console.rule(Text(prompt), align="left")
            for name, contender in self.contenders.items():
                console.print(f"[bold]{name}[/bold]")
                for event in self.llms[name].stream(ids, self.params):
                    for piece in event.pieces:
                        console.print(Text(piece.text, "green" if piece.drafted else ""), end="", soft_wrap=True)
                    if event.output is not None:
                        contender.token_ids.append(event.output.outputs[0].token_ids)
                        told = [contender.acceptance, event.output.metrics.acceptance]
                        contender.acceptance = AcceptanceStatistics.merge(told)
                console.print()

    def measure(self, repeats: int) -> dict[str, Any]:
        """Return everything the table shows, as JSON values. Contenders take turns, so that whatever else the machine
        does slows all of them.
        """
        theirs, plain = DemoContender(name=TRANSFORMERS, generate=self._transformers()), self.contenders[PLAIN]
        for _ in range(repeats):
            for one in (theirs, *self.contenders.values()):
                started = time.perf_counter()
                answers = [one.generate(prompt) for prompt in self.ids]
                one.seconds.append(time.perf_counter() - started)
                one.token_ids = one.token_ids or answers

        def ratio(other: DemoContender, own: DemoContender) -> float:
            return statistics.median(a / b for a, b in zip(other.seconds, own.seconds, strict=True))

        return {
            "device": self.llms[PLAIN].engine.info.device,
            "depth": self.depth,
            "prompts": len(self.prompts),
            "tokens": sum(map(len, plain.token_ids)),
            "identical": all(one.token_ids == plain.token_ids for one in self.contenders.values()),
            "identical_to_transformers": theirs.token_ids == plain.token_ids,
            "contenders": {
                one.name: {
                    "tokens_per_second": sum(map(len, one.token_ids)) / statistics.median(one.seconds),
                    "speed": ratio(plain, one),
                    "speed_to_transformers": ratio(theirs, one),
                    **one.acceptance.to_dict(),
                }
                for one in (theirs, *self.contenders.values())
            },
        }


def table(figures: Mapping[str, Any]) -> Table:
    prompts = "1 prompt" if figures["prompts"] == 1 else f"{figures['prompts']} prompts"
    title = f"{prompts}, greedy, one at a time, {figures['depth']} tokens drafted ahead"
    header = ("", "tokens/s", "speed", "by drafting", "acceptance length", "accepted by depth")
    body = [
        [
            name,
            f"{values['tokens_per_second']:.0f}",
            f"{values['speed_to_transformers']:.1f}x",
            "" if name == TRANSFORMERS else f"{values['speed']:.2f}x",
            "" if values["acceptance_length"] is None else f"{values['acceptance_length']:.2f}",
            "  ".join(f"{rate:.0%}" for rate in values["rate_by_depth"]),
        ]
        for name, values in figures["contenders"].items()
    ]
    return Table.of(title, header, body)
