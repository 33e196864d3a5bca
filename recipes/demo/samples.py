"""Shows what a tuned model says: greedy and sampled answers to fixed prompts, with a few plain measures."""

import ast
import json
import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.demo import jsonlines

PROMPTS: tuple[tuple[str, list[dict[str, str]]], ...] = (
    ("chat", [{"role": "user", "content": "Hello! What can you help me with?"}]),
    ("chat", [{"role": "user", "content": "Give me three tips for learning to cook."}]),
    ("docs", [{"role": "user", "content": "What does the `Array.prototype.map()` method do in JavaScript?"}]),
    ("docs", [{"role": "user", "content": "What is a Pod in Kubernetes?"}]),
    ("docs", [{"role": "user", "content": "How do I list all files in a folder with `ls`, including hidden ones?"}]),
    (
        "code",
        [{"role": "user", "content": "Write a Python function `fibonacci` that returns the n-th Fibonacci number."}],
    ),
    ("code", [{"role": "user", "content": "Write a Python function that checks whether a string is a palindrome."}]),
    (
        "code",
        [{"role": "user", "content": "Write a Python function that counts how often each word occurs in a text."}],
    ),
    ("story", [{"role": "user", "content": "Write a short story about a lighthouse keeper and a storm."}]),
    (
        "maths",
        [{"role": "user", "content": "Tom has 3 boxes with 12 pencils each and gives 7 away. How many are left?"}],
    ),
    (
        "maths",
        [
            {"role": "system", "content": "Solve the problem step by step."},
            {"role": "user", "content": "Solve for x: 3x + 7 = 22."},
        ],
    ),
    (
        "dialogue",
        [
            {"role": "system", "content": "You are a friendly booking assistant."},
            {"role": "user", "content": "I would like to book a table at an Italian restaurant."},
            {"role": "assistant", "content": "Sure. Which city are you in, and for what time?"},
            {"role": "user", "content": "In San Jose, tomorrow at 7 pm, for two people."},
        ],
    ),
)


def code_blocks(text: str) -> list[str]:
    """Fenced blocks, an unclosed last one included; the whole text when there is none."""
    return re.findall(r"```(?:python|py)?\n(.*?)(?:```|\Z)", text, flags=re.DOTALL) or [text]


def parses(text: str) -> bool:
    try:
        for part in code_blocks(text):
            ast.parse(part)
    except (SyntaxError, ValueError):
        return False
    return True


def repetition(ids: list[int], size: int = 4) -> float:
    """Share of `size`-token sequences that occurred before in the same answer; a loop comes near 1."""
    windows = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return 1 - len(set(windows)) / len(windows) if windows else 0.0


@torch.inference_mode()
def answers(model: Any, tokenizer: Any, max_new_tokens: int, sampled: bool) -> list[dict[str, Any]]:
    """Answer every prompt in one left-padded batch."""
    texts = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for _, m in PROMPTS]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False, padding_side="left")
    batch = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
    settings = {"do_sample": True, "temperature": 0.7, "top_p": 0.9} if sampled else {"do_sample": False}
    if not sampled:
        settings |= {"temperature": None, "top_p": None}
    produced = model.generate(**batch, max_new_tokens=max_new_tokens, **settings)[:, batch["input_ids"].size(1) :]
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    results = []
    for (kind, messages), row in zip(PROMPTS, produced.tolist(), strict=True):
        length = next((i for i, token in enumerate(row) if token in ends), None)
        ids = row if length is None else row[:length]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        results.append(
            {
                "kind": kind,
                "mode": "sampled" if sampled else "greedy",
                "prompt": messages[-1]["content"],
                "answer": text,
                "tokens": len(ids),
                "stopped": length is not None,
                "repetition": round(repetition(ids), 3),
                "parses": parses(text) if kind == "code" else None,
            }
        )
    return results


def main(
    model: Annotated[Path, typer.Option(help="Hugging Face directory, tokenizer included.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer directory, if it lies elsewhere.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the answers here as JSON, and as text beside it.")] = None,
    max_new_tokens: int = 256,
    device: str = "auto",
    seed: int = 1,
) -> None:
    """Answer the fixed prompts, greedily and sampled."""
    if not (model / "config.json").is_file():
        jsonlines.fail(f"{model} holds no config.json")
    chosen = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    words = AutoTokenizer.from_pretrained(tokenizer or model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16 if chosen != "cpu" else torch.float32)
    network = network.to(chosen).eval()
    torch.manual_seed(seed)
    results = [r for sampled in (False, True) for r in answers(network, words, max_new_tokens, sampled)]

    console = Console()
    text = "\n\n".join(f"=== {r['kind']}, {r['mode']}: {r['prompt']}\n{r['answer']}" for r in results)
    console.print(text, markup=False, highlight=False)
    table = Table("kind", "mode", "tokens", "stopped", "repetition", "parses")
    for r in results:
        parsed = "" if r["parses"] is None else str(r["parses"])
        table.add_row(r["kind"], r["mode"], str(r["tokens"]), str(r["stopped"]), f"{r['repetition']:.2f}", parsed)
    console.print(table)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        out.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
