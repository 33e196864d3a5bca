"""Requests about code, made of source files: whatever a function needs, only the beginning of an answer must be told.

Training's conversations need whole, short functions that stand alone, of which there are few; prompts do not.
"""

import ast
import random
import re
import textwrap
from collections.abc import Iterable, Iterator

from recipes.demo import jsonlines
from recipes.demo.code_functions import NAMED_REQUESTS, REQUESTS, purpose_of
from recipes.demo.completions import WORDINGS

ABOUT = (
    "Explain what this function does.",
    "What does this code do?",
    "Explain this code line by line.",
    "Write a docstring for this function.",
    "Find a bug in this function, if there is one.",
    "Rewrite this function so that it is easier to read.",
    "How could this function be made faster?",
    "Write a test for this function.",
    "Add type annotations to this function.",
    "Add comments to this code.",
    "Show an example of how this function is called.",
    "What can go wrong when this function is called?",
    "Rename the variables of this function so that they say more.",
    "Translate this function into {language}.",
)
GOING_ON = (
    "Go on with this code:",
    "What comes next in this file?",
    "Continue this Python module:",
    "This is the beginning of a module. Write the next function.",
)
LANGUAGES = [
    "C",
    "C++",
    "C#",
    "Go",
    "Haskell",
    "Java",
    "JavaScript",
    "Kotlin",
    "PHP",
    "Ruby",
    "Rust",
    "Scala",
    "Swift",
    "TypeScript",
]
OTHER_LANGUAGE = 0.3  # of requests in words
LONGEST = 1_400  # characters of code in a prompt
OF_A_FILE = 12  # requests, so that no style prevails


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def as_completion(lines: list[str], node: ast.FunctionDef, rng: random.Random) -> str | None:
    """A function's beginning: signature, docstring, and of each third one some lines of its body."""
    first = node.body[0]
    documented = ast.get_docstring(node) is not None and len(node.body) > 1
    end = (first.end_lineno or first.lineno) if documented else first.lineno - 1
    last = node.end_lineno or end
    if end < node.lineno or last - end < 2 or (not documented and "_" not in node.name.strip("_")):
        return None
    if rng.random() < 0.33:
        end += rng.randint(1, (last - end + 1) // 2)
    given = textwrap.dedent("\n".join(lines[node.lineno - 1 : end]))
    return f"{rng.choice(WORDINGS).format(name=node.name)}\n\n{fenced(given)}" if len(given) <= LONGEST else None


def in_words(node: ast.FunctionDef, rng: random.Random) -> str | None:
    """A request by the first sentence of the docstring, or by a name that says something."""
    purpose, name = purpose_of(ast.get_docstring(node) or ""), node.name.strip("_")
    arguments = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
    arguments = [name for name in arguments if name not in ("self", "cls")]
    if purpose is None and ("_" not in name or not arguments):
        return None
    listed = ", ".join(arguments)
    fields = {"name": name, "purpose": purpose, "arguments": listed, "signature": f"{name}({listed})"}
    wordings = NAMED_REQUESTS if purpose is None else REQUESTS if arguments else REQUESTS[:6]
    text = rng.choice(wordings).format(**fields)
    return text.replace("Python", rng.choice(LANGUAGES)) if rng.random() < OTHER_LANGUAGE else text


def of_file(text: str, rng: random.Random) -> Iterator[str]:
    """Requests about some of the functions of a file."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.splitlines()
    if len(lines) > 30:
        start = rng.randrange(len(lines) - 20)
        part = textwrap.dedent("\n".join(lines[start : start + rng.randint(8, 40)]))[:LONGEST]
        yield f"{rng.choice(GOING_ON)}\n\n{fenced(part.strip())}"
    outer = [body for node in tree.body for body in (node.body if isinstance(node, ast.ClassDef) else [node])]
    functions = [node for node in outer if isinstance(node, ast.FunctionDef) and not node.name.startswith("__")]
    for node in rng.sample(functions, min(OF_A_FILE, len(functions))):
        draw, made = rng.random(), None
        if draw < 0.55:
            made = as_completion(lines, node, rng)
        elif draw < 0.8:
            made = in_words(node, rng)
        else:
            code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if 80 < len(code) <= LONGEST:
                asked = rng.choice(ABOUT).format(language=rng.choice(LANGUAGES))
                made = f"{asked}\n\n{fenced(code)}" if rng.random() < 0.7 else f"{fenced(code)}\n\n{asked}"
        if made is not None:
            yield made


def code_prompts(files: Iterable[jsonlines.Record], count: int, rng: random.Random) -> list[jsonlines.Record]:
    """At most so many requests, each for another code, of files with `text`."""
    found = dict[str, str]()
    for record in files:
        for text in of_file(record["text"], rng):
            found.setdefault(re.sub(r"\W+", "", text[-400:]), text)
        if len(found) >= count:
            break
    chosen = list(found.values())[:count]
    return [{"messages": [{"role": "user", "content": text}], "category": "made-code"} for text in chosen]
