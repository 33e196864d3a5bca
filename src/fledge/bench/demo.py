"""What `fledge demo` shows: the same answers with and without drafters, timed beside transformers' `generate`."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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
PROMPTS = (  # what the small model answers well: most sums and questions of fact it does not
    "Write a Python function that counts the vowels in a string.",
    "What does the `len()` function do in Python?",
    "Find the greatest common divisor of 12 and 18.",
    "I would like to book a table for two at an Italian restaurant tonight.",
)


Generate = Callable[[Sequence[int]], tuple[int, ...]]


class Demo:
    """The bundled models, without speculation first: it is what the others are measured against."""

    def __init__(self, prompts: Sequence[str], *, depth: int, max_tokens: int, device: str) -> None:
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
        self.token_ids: dict[str, list[tuple[int, ...]]] = {name: [] for name in self.llms}  # of each prompt
        self.acceptance = {name: AcceptanceStatistics() for name in (TRANSFORMERS, *self.llms)}

    def _ours(self, llm: LLM) -> Generate:
        return lambda prompt: llm.generate([prompt], self.params)[0].outputs[0].token_ids

    def _transformers(self) -> Generate:
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
            for name, llm in self.llms.items():
                console.print(f"[bold]{name}[/bold]")
                for event in llm.stream(ids, self.params):
                    for piece in event.pieces:
                        console.print(Text(piece.text, "green" if piece.drafted else ""), end="", soft_wrap=True)
                    if event.output is not None:
                        self.token_ids[name].append(event.output.outputs[0].token_ids)
                        self.acceptance[name].tally.update(event.output.metrics.acceptance.tally)
                console.print()

    def measure(self, repeats: int) -> dict[str, Any]:
        """What the table shows, as JSON values. All take turns: whatever else the machine does slows all of them."""
        ways = {TRANSFORMERS: self._transformers(), **{name: self._ours(llm) for name, llm in self.llms.items()}}
        seconds: dict[str, list[float]] = {name: [] for name in ways}  # for all prompts, of each repeat
        found = dict(self.token_ids)
        for _ in range(repeats):
            for name, generate in ways.items():
                started = time.perf_counter()
                answers = [generate(prompt) for prompt in self.ids]
                seconds[name].append(time.perf_counter() - started)
                found[name] = found.get(name) or answers

        def ratio(other: str, own: str) -> float:
            return statistics.median(a / b for a, b in zip(seconds[other], seconds[own], strict=True))

        return {
            "device": self.llms[PLAIN].engine.info.device,
            "depth": self.depth,
            "prompts": len(self.prompts),
            "tokens": sum(map(len, found[PLAIN])),
            "identical": all(found[name] == found[PLAIN] for name in self.llms),
            "identical_to_transformers": found[TRANSFORMERS] == found[PLAIN],
            "contenders": {
                name: {
                    "tokens_per_second": sum(map(len, found[name])) / statistics.median(seconds[name]),
                    "speed": ratio(PLAIN, name),
                    "speed_to_transformers": ratio(TRANSFORMERS, name),
                    **self.acceptance[name].to_dict(),
                }
                for name in ways
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
