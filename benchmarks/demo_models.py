"""The bundled pair over evaluation sets: acceptance length by set, drafter and depth, and speed against no speculation.

    python benchmarks/demo_models.py --eval DIR acceptance --out FILE.json
    python benchmarks/demo_models.py --eval DIR speed --out FILE.json [--device cuda]

DIR holds JSON lines with `messages`. Acceptance is measured in batches; speed one prompt at a time, contenders taking
turns with every prompt, so that whatever else the machine does slows all of them. Greedy; answers must be the same.
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
from fledge.checkpoints.bundled import DRAFTERS, TARGET
from fledge.devices import choose_device
from fledge.training.data.conversations import Skipped
from fledge.training.evaluation import Question, Turn, answer_questions, measure, read_questions, release, spread
from fledge.training.recipe import DataSection, EvalSection, Recipe, TargetSection

SETS = ("mt_bench", "humaneval", "gsm8k", "math500", "chat_dialogue", "docs_qa", "instructions", "long_context")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("acceptance", "speed"))
    parser.add_argument("--eval", type=Path, required=True, help="folder of evaluation sets")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--prompts", type=int, default=24, help="conversations of each set")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--depths", type=int, nargs="+", default=[5, 7, 10])
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
    questions = _questions(options.eval, options.sets, options.prompts)
    work = acceptance if options.what == "acceptance" else speed
    result: dict[str, Any] = {
        "target": options.target,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "dtype": options.dtype,
        "torch": torch.__version__,
        "max_tokens": options.max_tokens,
        "prompts_of_each_set": options.prompts,
        **work(questions, recipe, options.drafters, options.depths),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _questions(folder: Path, names: Sequence[str], count: int) -> list[Question]:
    return [q for name in names for q in spread(read_questions(folder / f"{name}.jsonl", name, Skipped()), count)]


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


def acceptance(questions: Sequence[Question], recipe: Recipe, drafters: Sequence[str], depths: Sequence[int]) -> Any:
    """Acceptance length and rates by depth, for every set, drafter and depth."""
    turns, too_long = _turns(questions, recipe)
    rows: list[dict[str, Any]] = []
    table = Table("drafter", "depth", *dict.fromkeys(turn.source for turn in turns), "mean")
    for drafter in drafters:
        for depth in depths:
            llm = _open(recipe, drafter, depth, recipe.eval.max_num_seqs)
            measured = measure(llm, turns, recipe, depth)
            del llm
            release()
            by_set = {name: figures.to_dict() for name, figures in measured.by_source().items()}
            lengths = [float(figures["acceptance_length"]) for figures in by_set.values()]
            mean = statistics.mean(lengths)
            rows.append({"drafter": drafter, "depth": depth, "mean": mean, "sets": by_set, "tokens": measured.tokens})
            rows[-1]["different_answers"] = len(measured.different)
            table.add_row(drafter, str(depth), *(f"{length:.2f}" for length in lengths), f"{mean:.2f}")
    Console().print(table)
    return {"turns": len(turns), "too_long": too_long, "acceptance": rows}


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
