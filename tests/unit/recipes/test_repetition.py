"""What the stages against repetition and for completions do to texts."""

import ast
import random

import pytest
import torch

from recipes.demo.completions import as_completion, completions
from recipes.demo.repetition import in_repetition, loop_tokens, repeated, unlikelihood

LOOP = [90, 91, 92, *[1, 2, 3, 4] * 8]


def test_a_loop_is_repetition_and_a_text_that_goes_on_is_not() -> None:
    assert in_repetition(list(range(100))) == 0.0
    assert in_repetition(LOOP) == pytest.approx(28 / 35)  # all but the beginning and the first time round
    assert in_repetition([]) == 0.0


def test_repeated_marks_the_last_token_of_a_sequence_seen_before() -> None:
    assert [place for place, again in enumerate(repeated([5, 6, 7, 5, 6, 7, 8], size=3)) if again] == [5]


def test_loop_tokens_begin_where_the_loop_does_and_spare_a_phrase_that_returns() -> None:
    places = loop_tokens(LOOP)
    assert places[0] == 10  # four tokens before the first sequence of eight is complete again
    assert places[-1] == len(LOOP) - 1
    phrase = list(range(8))
    assert loop_tokens([*phrase, 50, 51, 52, *phrase, 60, 61]) == []


def test_unlikelihood_pushes_marked_tokens_down() -> None:
    logits = torch.zeros(1, 3, 5, requires_grad=True)
    targets = torch.tensor([[2, -100, 4]])
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none"
    )
    unlikelihood(losses.view(1, 3), targets).backward()
    assert logits.grad is not None
    assert logits.grad[0, 0, 2] > 0  # descent lowers it
    assert logits.grad[0, 2, 4] > 0
    assert logits.grad[0, 1].abs().sum() == 0


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
