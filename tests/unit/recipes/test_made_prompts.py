"""Prompts that are made of problems, documents, conversations and code."""

import ast
import random
import re
from pathlib import Path

import pytest

from recipes.demo import code_files, code_prompts, drafter_prompts, jsonlines, made_prompts

PROBLEM = "Tom has 12 apples and 1 pear. In 1999 Tom gave 300 apples to Ann. How many has Tom?"
CODE = '''import re


def word_counts(text, least=2):
    """Count the words of a text that are there often enough."""
    found = {}
    for word in re.findall("[a-z]+", text):
        found[word] = found.get(word, 0) + 1
    return {word: count for word, count in found.items() if count >= least}


class Box:
    def __init__(self):
        self.items = []

    def take_last(self, count):
        taken = self.items[-count:]
        del self.items[-count:]
        return taken
'''


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_problems_keep_their_words_but_not_their_numbers() -> None:
    rng = random.Random(1)
    texts = [made_prompts.changed(PROBLEM, rng) for _ in range(200)]
    shape = re.sub(r"\d+", "#", PROBLEM)
    same = [text for text in texts if re.sub(r"\d+", "#", text) == shape]
    assert 60 < len(same) < 140  # others have other names and things
    assert any("Tom" not in text and "apples" not in text for text in texts)
    assert all("1999" in text and " 1 pear" in text for text in texts)
    assert all(
        re.findall(r"\d+", text)[-1] == "300" or 150 <= int(re.findall(r"\d+", text)[-1]) <= 600 for text in texts
    )
    assert made_prompts.changed(r"Find $x_12$ and \\frac{3}{7}.", rng).startswith("Find $x_12$")


def test_headings_begin_with_the_title() -> None:
    document = "# `map()` function\n\ntext\n\n## Examples\n\n## With two  lists:\n"
    assert made_prompts.headings(document) == ["`map()` function", "With two lists"]
    assert made_prompts.headings("text\n# Title\n") == []
    assert [made_prompts.as_topic(h) for h in ("Naming things", "PEP 8", "`x`")] == ["naming things", "PEP 8", "x"]


def test_every_kind_is_made_and_what_an_evaluation_asks_is_left_out() -> None:
    long = "In this task you are given a sentence. " * 4
    turns = [user("one"), {"role": "assistant", "content": "a"}, user("two"), user("three"), user("four")]
    talks = [
        {"messages": [user(PROBLEM)], "source": "gsm8k-train"},
        {"messages": [{"role": "system", "content": long}, user("An input")], "source": "natural-instructions/x"},
        {"messages": turns, "source": "schema-guided-dialogue"},
        {"messages": [], "source": "gsm8k-train"},
        {"messages": [user("alone")], "source": "natural-instructions/x"},
    ]
    documents = [{"text": "# Kites\n\n## How to fly one\n"}, {"text": "They saw the edge of the forest and went on."}]
    counts = {"topic_count": 20, "page_count": 10, "crossed_count": 4, "problem_copies": 3, "most_turns": 2}
    prompts = list(made_prompts.made(talks, documents, **counts, rng=random.Random(2)))
    kinds = [prompt["category"] for prompt in prompts]
    assert [kinds.count(k) for k in ("topics", "pages", "crossed", "later")] == [20, 10, 4, 1]
    assert 1 <= kinds.count("changed") <= 3
    assert any("the edge of the forest" in str(prompt) for prompt in prompts)
    assert any("How to fly one" in str(prompt) for prompt in prompts)
    (later,) = (prompt for prompt in prompts if prompt["category"] == "later")
    assert later["messages"][0]["content"] in ("two", "three")
    shares = made_prompts.kept_out(
        [{"messages": [user("What, precisely, is a kite of paper?")]}, {"messages": [user(long)]}]
    )
    assert shares({"messages": [user("what precisely is a kite of paper")]})
    assert shares({"messages": [user(f"First. {long}")]})
    assert not shares({"messages": [user("What is a kite of paper and wood?")]})


def test_code_is_asked_for_in_several_ways() -> None:
    rng = random.Random(3)
    texts = [text for _ in range(300) for text in code_prompts.of_file(CODE, rng)]
    assert any("word_counts" in text and "```" not in text for text in texts)
    assert any("take_last(count)" in text or "`take_last`" in text for text in texts)
    assert any(text.startswith("Explain") for text in texts)
    assert not any("__init__" in text for text in texts)
    given = [re.search(r"```python\n(.*?)\n```", text, re.DOTALL) for text in texts]
    beginnings = [found[1] for found in given if found and found[1].startswith("def word_counts")]
    assert any(code.endswith('enough."""') for code in beginnings)  # only signature and docstring
    assert all(not code.startswith(" ") for code in beginnings)
    assert any(len(ast.parse(code).body) == 1 for code in beginnings if "return" in code)
    assert list(code_prompts.of_file("not python (", rng)) == []
    assert len(code_prompts.code_prompts([{"text": CODE}] * 50, 5, rng)) == 5


def test_made_prompts_join_the_others(tmp_path: Path) -> None:
    jsonlines.write(tmp_path / "chat.jsonl", [{"messages": [user("same question")] * 1, "source": "x"}] * 3)
    documents = [{"text": CODE, "source": "code/x"}, {"text": "# Kites\n\n## How to fly one\n", "source": "mdn"}]
    jsonlines.write(tmp_path / "docs.jsonl", documents)
    paths = [tmp_path / "chat.jsonl"], [tmp_path / "docs.jsonl"], tmp_path / "out"
    drafter_prompts.write_prompts(*paths, long_count=0, short_count=0, made_count=40)
    records = list(jsonlines.read(tmp_path / "out"))
    assert len({str(record["messages"]) for record in records}) == len(records)  # none is there twice
    assert {"made-code", "topics", "pages"} <= {record["category"] for record in records}


def test_evaluation_prompts_are_kept_out_plain_or_packed(tmp_path: Path) -> None:
    jsonlines.write(tmp_path / "chat.jsonl", [{"messages": [user("hello")], "source": "x"}])
    jsonlines.write(tmp_path / "docs.jsonl", [{"text": "# Kites\n\n## How to fly one\n", "source": "mdn"}])
    paths = [tmp_path / "chat.jsonl"], [tmp_path / "docs.jsonl"], tmp_path / "out"
    counts = {"long_count": 0, "short_count": 0, "made_count": 40}
    drafter_prompts.write_prompts(*paths, **counts)
    made = [record for record in jsonlines.read(tmp_path / "out") if record["category"] == "topics"]
    asked = next(record for record in made if len(record["messages"][0]["content"]) > 20)
    other = {"prompt": "of another layout"}
    for name in ("sets.jsonl", "sets.jsonl.xz"):
        jsonlines.write(tmp_path / name / name, [other, {"messages": asked["messages"], "id": "1", "category": "a"}])
        drafter_prompts.write_prompts(*paths, **counts, evaluation=tmp_path / name)
        assert code_files.reserved_sequences(tmp_path / name, 3)
        kept = [record["messages"] for record in jsonlines.read(tmp_path / "out")]
        assert kept
        assert asked["messages"] not in kept
    with pytest.raises(SystemExit, match=r"none: no \*\.jsonl and no \*\.jsonl\.xz"):
        drafter_prompts.write_prompts(*paths, **counts, evaluation=tmp_path / "none")
