"""Requests to complete a function."""

import ast
import random

import pytest

from recipes.demo.completions import as_completion, completions


def exchange(question: str, code: str) -> dict[str, object]:
    answer = f"Here it is:\n\n```python\n{code}\n```"
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
        "source": "code/x",
    }


WITH_DOCSTRING = 'import math\n\n\ndef area(r):\n    """Return the area."""\n    return math.pi * r * r'
WITHOUT = "def double(x):\n    return 2 * x"


@pytest.mark.parametrize("code", [WITH_DOCSTRING, WITHOUT])
def test_a_completion_gives_signature_and_docstring_and_answers_with_the_whole_function(code: str) -> None:
    record = as_completion(exchange("Write a Python function that doubles a number.", code), random.Random(1))
    assert record is not None
    user, assistant = (message["content"] for message in record["messages"])
    given, whole = (text.split("```python\n")[1].split("\n```")[0] for text in (user, assistant))
    assert whole.startswith(given)
    assert given.endswith('"""')
    assert "return" not in given
    assert ast.get_docstring(ast.parse(whole).body[-1]) in ("Return the area.", "Doubles a number.")


@pytest.mark.parametrize("code", ["x = 1", "def broken(:\n    pass", "class A:\n    pass"])
def test_answers_that_are_no_function_have_no_completion(code: str) -> None:
    assert as_completion(exchange("Write a Python function that does it.", code), random.Random(1)) is None


def test_completions_take_about_their_share() -> None:
    records = [exchange("Write a Python function that doubles a number.", WITHOUT)] * 200
    assert 60 <= len(completions(records, 0.4, random.Random(3))) <= 100
