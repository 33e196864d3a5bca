"""Whole conversations of the evaluation sets, one prompt at a time, with and without the bundled drafters.

    python benchmarks/demo_models.py --out FILE.json [--device cuda] [--depths 3 4 5]

Unlike `fledge bench offline` it asks every turn, and times an answer from its prompt to its end. Contenders take turns
with every prompt, so that whatever else the machine does slows all of them. Greedy; answers must be the same.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fledge import LLM, SamplingParams
from fledge.checkpoints.source import DRAFTERS, TARGET
from fledge.devices import choose_device
from fledge.evaluation.acceptance import AcceptanceMeter, AcceptanceSettings
from fledge.evaluation.workloads import Workload, load_workload

SETS = ("mt_bench", "humaneval", "gsm8k", "math500", "chat_dialogue", "docs_qa", "instructions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--prompts", type=int, default=8, help="conversations of each set")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--depths", type=int, nargs="+", default=[3, 4, 5])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, as stored on a GPU")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS.values()))
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    settings = AcceptanceSettings(
        target=options.target, dtype=options.dtype, device=options.device, max_tokens=options.max_tokens
    )
    workloads = [load_workload(name, sample=options.prompts) for name in options.sets]
    result: dict[str, Any] = {
        "target": options.target,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "dtype": options.dtype,
        "torch": torch.__version__,
        "max_tokens": options.max_tokens,
        "prompts_of_each_set": options.prompts,
        **speed(workloads, settings, options.drafters, options.depths),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _open(settings: AcceptanceSettings, drafter: str | None, depth: int) -> LLM:
    speculation = None if drafter is None else {"model": drafter, "num_speculative_tokens": depth, "adaptive": False}
    return LLM(
        settings.target,
        speculative_config=speculation,
        dtype=settings.dtype,
        device=settings.device,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )


def speed(
    workloads: Sequence[Workload], settings: AcceptanceSettings, drafters: Sequence[str], depths: Sequence[int]
) -> Any:
    """Seconds with each drafter and depth against none: the mean over the sets of the ratio in each."""
    meter = AcceptanceMeter(settings)
    answers = meter.answer(workloads, temperature=0.0)
    meter.close()
    turns = answers.turns
    names = ["none", *(f"{drafter} K={depth}" for drafter in drafters for depth in depths)]
    contenders = [_open(settings, None, 0), *(_open(settings, d, k) for d in drafters for k in depths)]
    seconds: dict[str, dict[str, float]] = {name: {} for name in names}
    tokens, different = 0, dict.fromkeys(names, 0)
    params = SamplingParams(temperature=0.0, max_tokens=settings.max_tokens)
    for turn in turns[:1]:
        for llm in contenders:  # the first answer warms caches, and is not counted
            llm.generate([list(turn.prompt_token_ids)], params)
    for turn in turns:
        for name, llm in zip(names, contenders, strict=True):
            started = time.perf_counter()
            (output,) = llm.generate([list(turn.prompt_token_ids)], params)
            spent = time.perf_counter() - started
            seconds[name][turn.workload] = seconds[name].get(turn.workload, 0.0) + spent
            different[name] += output.outputs[0].token_ids != turn.answer_token_ids
        tokens += len(turn.answer_token_ids)
    table = Table("", *seconds["none"], "mean", "different answers")
    ratios: dict[str, dict[str, float]] = {}
    for name in names:
        ratios[name] = {s: seconds["none"][s] / seconds[name][s] for s in seconds[name]}
        mean = statistics.mean(ratios[name].values())
        table.add_row(name, *(f"{ratio:.2f}x" for ratio in ratios[name].values()), f"{mean:.2f}x", str(different[name]))
    Console().print(table)
    return {
        "turns": len(turns),
        "too_long": len(answers.too_long) + len(answers.cut_short),
        "tokens": tokens,
        "speed": {name: {"mean": statistics.mean(by_set.values()), "sets": by_set} for name, by_set in ratios.items()},
        "different_answers": different,
        "tokens_per_second_without_speculation": tokens / sum(seconds["none"].values()),
    }


if __name__ == "__main__":
    main()
