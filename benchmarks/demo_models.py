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
from fledge.evaluation.workloads import load_workload
from fledge.training.evaluation import Question, Turn, answer_questions, release
from fledge.training.recipe import DataSection, EvalSection, Recipe, TargetSection

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
    recipe = Recipe(
        output="unused",
        target=TargetSection(path=options.target, dtype=options.dtype),
        data=DataSection(sources=("unused",)),
        eval=EvalSection(max_tokens=options.max_tokens, max_num_seqs=32),
        device=options.device,
    )
    questions = _questions(options.sets, options.prompts)
    result: dict[str, Any] = {
        "target": options.target,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "dtype": options.dtype,
        "torch": torch.__version__,
        "max_tokens": options.max_tokens,
        "prompts_of_each_set": options.prompts,
        **speed(questions, recipe, options.drafters, options.depths),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _questions(names: Sequence[str], count: int) -> list[Question]:
    return [
        Question(source=name, category=prompt.category, messages=prompt.messages)
        for name in names
        for prompt in load_workload(name, sample=count).prompts
    ]


def _open(recipe: Recipe, drafter: str | None, depth: int, max_num_seqs: int) -> LLM:
    speculation = None if drafter is None else {"model": drafter, "num_speculative_tokens": depth}
    return LLM(
        recipe.target.path,
        speculative_config=speculation,
        dtype=recipe.target.dtype,
        device=recipe.device,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
    )


def _turns(questions: Sequence[Question], recipe: Recipe) -> tuple[list[Turn], int]:
    llm = _open(recipe, None, 0, recipe.eval.max_num_seqs)
    turns, too_long = answer_questions(llm, questions, recipe)
    del llm
    release()
    return turns, too_long


def speed(questions: Sequence[Question], recipe: Recipe, drafters: Sequence[str], depths: Sequence[int]) -> Any:
    """Seconds with each drafter and depth against none: the mean over the sets of the ratio in each."""
    turns, too_long = _turns(questions, recipe)
    names = ["none", *(f"{drafter} K={depth}" for drafter in drafters for depth in depths)]
    contenders = [_open(recipe, None, 0, 1), *(_open(recipe, d, k, 1) for d in drafters for k in depths)]
    seconds: dict[str, dict[str, float]] = {name: {} for name in names}
    tokens, different = 0, dict.fromkeys(names, 0)
    params = SamplingParams(temperature=0.0, max_tokens=recipe.eval.max_tokens)
    for turn in turns[:1]:
        for llm in contenders:  # the first answer warms caches, and is not counted
            llm.generate([list(turn.prompt)], params)
    for turn in turns:
        for name, llm in zip(names, contenders, strict=True):
            started = time.perf_counter()
            (output,) = llm.generate([list(turn.prompt)], params)
            spent = time.perf_counter() - started
            seconds[name][turn.source] = seconds[name].get(turn.source, 0.0) + spent
            different[name] += output.outputs[0].token_ids != turn.answer
        tokens += len(turn.answer)
    table = Table("", *seconds["none"], "mean", "different answers")
    ratios: dict[str, dict[str, float]] = {}
    for name in names:
        ratios[name] = {s: seconds["none"][s] / seconds[name][s] for s in seconds[name]}
        mean = statistics.mean(ratios[name].values())
        table.add_row(name, *(f"{ratio:.2f}x" for ratio in ratios[name].values()), f"{mean:.2f}x", str(different[name]))
    Console().print(table)
    return {
        "turns": len(turns),
        "too_long": too_long,
        "tokens": tokens,
        "speed": {name: {"mean": statistics.mean(by_set.values()), "sets": by_set} for name, by_set in ratios.items()},
        "different_answers": different,
        "tokens_per_second_without_speculation": tokens / sum(seconds["none"].values()),
    }


if __name__ == "__main__":
    main()
