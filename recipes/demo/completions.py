"""Requests to complete a function, made of conversations whose answer is one: signature and docstring are given."""

import ast
import random
import re

from recipes.demo import jsonlines

WORDINGS = (
    "Complete this function.",
    "Finish this Python function:",
    "Please complete the function below.",
    "Fill in the body of this function:",
    "Here is the beginning of a function. Write the rest of it.",
    "Implement the function that this docstring describes:",
    "Can you finish this function for me?",
    "Complete the code:",
    "Write the body of `{name}`:",
    "This function is not finished. Complete it.",
)
INTRODUCTIONS = ("", "", "", "Here is the complete function:", "Here is `{name}`, completed:", "The whole function:")
_FENCED = re.compile(r"```(?:python|py)\n(.*?)\n```", re.DOTALL)
_PURPOSE = re.compile(r"\bthat (.+?)[.?!]?$")


def as_completion(record: jsonlines.Record, rng: random.Random) -> jsonlines.Record | None:
    """Return the first exchange of a conversation worded as a completion; None where its answer is no function."""
    messages = [m for m in record["messages"] if m["role"] != "system"]
    if len(messages) < 2 or (found := _FENCED.search(messages[1]["content"])) is None:
        return None
    try:
        tree = ast.parse(found[1])
    except (SyntaxError, ValueError):
        return None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if not functions or functions[-1] is not tree.body[-1]:
        return None
    function, lines = functions[-1], found[1].splitlines()
    first = function.body[0]
    if ast.get_docstring(function) is not None and len(function.body) > 1:
        end = first.end_lineno or first.lineno
    else:
        purpose = _PURPOSE.search(messages[0]["content"].splitlines()[0])
        if purpose is None or '"' in purpose[1] or first.lineno == function.lineno:
            return None
        indent = " " * first.col_offset
        lines.insert(first.lineno - 1, f'{indent}"""{purpose[1][0].upper()}{purpose[1][1:]}."""')
        end = first.lineno
    given, whole = "\n".join(lines[:end]), "\n".join(lines)
    wording = rng.choice(WORDINGS).format(name=function.name)
    introduction = rng.choice(INTRODUCTIONS).format(name=function.name)
    answer = f"```python\n{whole}\n```"
    return {
        "messages": [
            {"role": "user", "content": f"{wording}\n\n```python\n{given}\n```"},
            {"role": "assistant", "content": f"{introduction}\n\n{answer}" if introduction else answer},
        ],
        "source": record["source"],
    }


def completions(records: list[jsonlines.Record], share: float, rng: random.Random) -> list[jsonlines.Record]:
    """Completions of about `share` of the records, where their answers allow it."""
    drawn = (as_completion(record, rng) for record in records if rng.random() < share)
    return [record for record in drawn if record is not None]
