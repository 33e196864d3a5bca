"""Conversations that ask for a small function, or for the rest of one."""

import json
import random
import re
import textwrap
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from recipes.demo import jsonlines
from recipes.demo.code_files import reserved_sequences, shares_words
from recipes.demo.completions import INTRODUCTIONS, WORDINGS
from recipes.demo.small_functions.function import Function, function

OVERLAP = 8  # words in a row that no conversation shares with an evaluation prompt
BEGINNINGS = (
    "Return {}.",
    "Return {}.",
    "Find {}.",
    "Get {}.",
    "This function returns {}.",
    "Returns {}.",
    "Give back {}.",
)
EXAMPLE_HEADINGS = ("Examples:", "For example:", "Example:", "Some examples:")
REQUESTS = (
    "Write a Python function `{name}({arguments})` that returns {what}.",
    "Write a Python function that returns {what}. Call it `{name}`.",
    "I need a Python function `{name}` that returns {what}.",
    "Can you write a function `{name}({arguments})` in Python that returns {what}?",
    "Implement `{name}({arguments})`: it returns {what}.",
    "How do I get {what} in Python? Please write a function `{name}`.",
    "Please define a Python function `{name}` with the parameters `{arguments}`. It should return {what}.",
)
ANSWERS = (
    "Here is a function that returns {what}:",
    "`{name}` returns {what}:",
    "You can write it like this:",
    "Here is `{name}`:",
    "This function does it:",
)


def docstring(made: Function, rng: random.Random) -> str:
    """What the function does, with some of its calls as examples."""
    what = made.purpose.removeprefix("return ")
    sentence = textwrap.fill(rng.choice(BEGINNINGS).format(what), rng.choice((72, 88, 100)))
    calls = made.calls[: rng.randint(1, 3)]
    style = rng.random()
    if style < 0.65:
        lines = [line for call, result in calls for line in (f">>> {call}", result)]
    elif style < 0.8:
        lines = [rng.choice(EXAMPLE_HEADINGS), *(f"{call} == {result}" for call, result in calls)]
    elif style < 0.9:
        lines = [rng.choice(EXAMPLE_HEADINGS), *(f"{call} -> {result}" for call, result in calls)]
    else:
        lines = [f"{call} returns {result}" for call, result in calls]
    lines = [*sentence.splitlines(), *([""] if rng.random() < 0.5 else []), *lines]
    opened = '"""' if rng.random() < 0.7 else '""" '
    return textwrap.indent("\n".join([f"{opened}{lines[0]}", *lines[1:], '"""']), "    ")


def conversation(made: Function, rng: random.Random) -> jsonlines.Record:
    """A request to complete the function, or to write it, and the answer."""
    documented = docstring(made, rng)
    names = [n.split(":")[0] for n in re.findall(r"\((.*)\)", made.signature.split(" ->")[0])[0].split(", ") if n]
    fields = {"name": made.name, "arguments": ", ".join(names), "what": made.purpose.removeprefix("return ")}
    if rng.random() < 0.6:
        request = f"{rng.choice(WORDINGS).format(**fields)}\n\n```python\n{made.given(documented)}\n```"
        introduction, code = rng.choice(INTRODUCTIONS).format(**fields), made.code(documented)
    else:
        request = rng.choice(REQUESTS).format(**fields)
        if rng.random() < 0.6:
            request += " For example, `{}` returns `{}`.".format(*made.calls[0])
        introduction = rng.choice(ANSWERS).format(**fields)
        code = made.code(documented if rng.random() < 0.4 else "")
    answer = "\n\n".join([*([introduction] if introduction else []), f"```python\n{code}\n```"])
    messages = [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "source": "small-functions"}


def conversations(count: int, reserved: set[tuple[str, ...]], seed: int) -> list[jsonlines.Record]:
    """Conversations about `count` functions, no two of which do the same; none shares words with what is reserved."""
    rng = random.Random(f"small-functions/{seed}")
    found: dict[str, jsonlines.Record] = {}
    for _ in range(count * 20):
        made = function(rng)
        if made is None or made.purpose in found:
            continue
        record = conversation(made, rng)
        if not any(shares_words(m["content"], reserved, OVERLAP) for m in record["messages"]):
            found[made.purpose] = record
        if len(found) == count:
            break
    return list(found.values())


def main(
    out: Annotated[Path, typer.Option(help="Conversations, .jsonl.xz.")],
    evaluation: Annotated[Path | None, typer.Option(help="Folder of evaluation files to keep out.")] = None,
    count: Annotated[int, typer.Option(help="Functions to make.")] = 12_000,
    seed: int = 1,
) -> None:
    """Make conversations about small functions that were put together from parts and run."""
    if evaluation and not evaluation.is_dir():
        jsonlines.fail(f"{evaluation} is not a folder")
    written = jsonlines.write(out, conversations(count, reserved_sequences(evaluation, OVERLAP), seed))
    Console().print(json.dumps({"functions": written, "mib": round(out.stat().st_size / 2**20, 2)}))


if __name__ == "__main__":
    typer.run(main)
