"""HumanEval: how many of a model's greedy answers hold code, how many parse, how many pass the tests.

The tests are those of openai/human-eval (`data/HumanEval.jsonl`, MIT), which is not part of this project.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from recipes.demo import jsonlines
from recipes.demo.answers import Engines
from recipes.demo.data import Encoder
from recipes.demo.execution import all_succeed
from recipes.demo.samples import code_blocks, parses
from recipes.demo.training import default_workers

WORDING = "Complete the following Python function:\n\n```python\n{prompt}```"  # as the workload of `fledge eval` asks


def load(path: Path) -> list[jsonlines.Record]:
    """Tasks of the file, which must have a prompt, an entry point and tests."""
    tasks = list(jsonlines.read(path))
    if not tasks or any(not {"prompt", "entry_point", "test"} <= task.keys() for task in tasks):
        jsonlines.fail(f"{path}: not HumanEval's file: every line has `prompt`, `entry_point` and `test`")
    return tasks


def question(task: jsonlines.Record) -> list[dict[str, str]]:
    """A task as a conversation."""
    return [{"role": "user", "content": WORDING.format(prompt=task["prompt"])}]


def program(task: jsonlines.Record, answer: str) -> str:
    """The answer's code with the task's tests. The imports that the prompt began with are there as in the prompt."""
    before = task["prompt"].partition(f"def {task['entry_point']}")[0]
    code = "\n".join(code_blocks(answer))
    if f"def {task['entry_point']}" not in code:
        before, code = "", task["prompt"] + code  # the body alone
    return f"{before}\n{code}\n{task['test']}\ncheck({task['entry_point']})\n"


def score(tasks: Sequence[jsonlines.Record], answers: Sequence[str], workers: int) -> dict[str, Any]:
    """Counts over all tasks, and the numbers of those passed."""
    held = ["def " in answer for answer in answers]
    parsed = [holds and parses(answer) for holds, answer in zip(held, answers, strict=True)]
    # An answer without a function may be a body; what is neither fails like any other program.
    passed = all_succeed([program(t, a) for t, a in zip(tasks, answers, strict=True)], workers)
    return {
        "tasks": len(tasks),
        "code": sum(held),
        "parses": sum(parsed),
        "passes": sum(passed),
        "passed": [number for number, holds in enumerate(passed) if holds],
    }


def main(
    model: Annotated[Path, typer.Option(help="Hugging Face directory, tokenizer included.")],
    tests: Annotated[Path, typer.Option(help="HumanEval.jsonl of openai/human-eval.")],
    out: Annotated[Path | None, typer.Option(help="Write counts and answers here as JSON.")] = None,
    max_tokens: int = 512,
    device: str = "auto",
    workers: Annotated[int, typer.Option(help="Programs that run at a time.")] = default_workers(),
) -> None:
    """Answer the tasks greedily, run what was answered, and print the counts."""
    if not (model / "config.json").is_file():
        jsonlines.fail(f"{model} holds no config.json")
    tasks, encoder = load(tests), Encoder(model)
    prompts = [encoder.prompt(question(task)) for task in tasks]
    answers = [answer.text for answer in Engines(model, max_tokens, device=device).answer(prompts)]
    counts = score(tasks, answers, workers)
    print(json.dumps(counts))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(counts | {"answers": answers}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
