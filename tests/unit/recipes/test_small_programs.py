"""The small programs do what they say, and the conversations made from them contain only code that parses."""

import ast
import contextlib
import hashlib
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fledge
from recipes.demo import jsonlines
from recipes.demo.small_programs import Program, chat_examples, programs
from recipes.demo.small_programs.conversations import CONSTRAINTS, _base, javascript_examples
from recipes.demo.small_programs.editing import (
    can_rename,
    main_definition,
    renamed,
    without_comments,
    without_docstrings,
    without_hints,
)

PROGRAMS = programs()
EVALUATION = Path(fledge.__file__).parent / "evaluation" / "workloads" / "data"
OVERLAP = 13  # words
JAVASCRIPT_DEFINITION = re.compile(r"^(?:async )?(function|class)\*? (\w+)(?:\((.*)\))? \{$", re.MULTILINE)


def run(source: str, check: str) -> None:
    namespace: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(source, namespace)
        exec(check, namespace)


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", text, flags=re.DOTALL)


def texts(conversation: dict[str, Any]) -> Iterator[str]:
    return (message["content"] for message in conversation["messages"])


def sequences(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return zip(*(words[start:] for start in range(OVERLAP)), strict=False)


def sentences(value: Any) -> Iterator[str]:
    """Every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from sentences(inner)


@pytest.fixture(scope="module")
def conversations() -> list[dict[str, Any]]:
    return chat_examples(seed=3, count=500)


def test_there_are_at_least_150_different_tasks() -> None:
    assert len({program.task for program in PROGRAMS}) == len(PROGRAMS) >= 150


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.task)
def test_every_variant_does_its_task_in_full_and_in_plain_form(program: Program) -> None:
    assert len(program.notes) == len(program.python) - 1
    for source in program.python:
        run(source, program.check)
        plain = without_hints(without_docstrings(without_comments(source)))
        tree = ast.parse(plain)
        assert not any(isinstance(node, ast.arg) and node.annotation for node in ast.walk(tree))
        assert '"""' not in plain
        run(plain, program.check)


def test_a_check_fails_for_a_wrong_program() -> None:
    program = next(program for program in PROGRAMS if program.task == "counts the vowels in a string")
    with pytest.raises(AssertionError):
        run(program.python[0].replace("aeiou", "aeio"), program.check)


def test_variants_agree_on_the_name() -> None:
    for program in PROGRAMS:
        assert len({main_definition(source).name for source in program.python}) == 1


def test_hints_are_cut_with_the_imports_only_they_need() -> None:
    source = "from typing import Any\n\n\ndef f(a: Any, b: int = 3) -> Any:\n    c: int = a + b\n    return c"
    assert without_hints(source) == "def f(a, b=3):\n    c = a + b\n    return c"


def test_renaming_leaves_attributes_and_strings_alone() -> None:
    source = 'def f(items):\n    """Use items."""\n    return items.items("items")'
    assert renamed(source, "items", "x") == 'def f(x):\n    """Use x."""\n    return x.items("items")'
    assert can_rename(source, "items", "x")
    assert not can_rename(source, "items", "list")
    assert not can_rename('def f(n):\n    return f"{n}"', "n", "m")


def test_verbs_get_their_base_form() -> None:
    assert _base("retries another function") == "retry another function"
    assert _base("searches a list") == "search a list"
    assert _base("computes a sum") == "compute a sum"
    assert _base("reads a file and returns its text") == "read a file and return its text"


def test_conversations_depend_on_the_seed_alone(conversations: list[dict[str, Any]]) -> None:
    assert chat_examples(seed=3, count=100) == conversations[:100]
    assert chat_examples(seed=4, count=10) != conversations[:10]


def test_conversations_have_the_form_of_chat_data(conversations: list[dict[str, Any]]) -> None:
    for conversation in conversations:
        roles = [message["role"] for message in conversation["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert all(text.strip() == text != "" for text in texts(conversation))
        assert conversation["source"] == "small-programs"
        assert not any(re.search(r"\{(name|task|base|language|kind)\}", text) for text in texts(conversation))


def test_every_python_block_parses_and_the_blocks_of_a_conversation_run(conversations: list[dict[str, Any]]) -> None:
    count = 0
    for conversation in conversations:
        namespace: dict[str, Any] = {}
        for block in code_blocks("\n".join(texts(conversation)), "python"):
            count += 1
            ast.parse(block)
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(block, namespace)
            promised = re.findall(r"^print\(.*\)  # (.*)$", block, flags=re.MULTILINE)
            assert not promised or output.getvalue().splitlines() == promised
        for name in [name for name in namespace if name.startswith("test_")]:
            with contextlib.redirect_stdout(io.StringIO()):
                namespace[name]()
    assert count > 400


def test_answers_follow_the_constraint(conversations: list[dict[str, Any]]) -> None:
    seen = set()
    for conversation in conversations:
        question, answer = [m["content"] for m in conversation["messages"] if m["role"] != "system"][:2]
        blocks = code_blocks(answer, "python")
        asked = {name for name, phrases in CONSTRAINTS.items() if question.endswith(phrases)}
        seen |= asked
        if not blocks:
            continue
        definition = main_definition(blocks[0])
        if "docstring" in asked:
            assert ast.get_docstring(definition)
        if "hints" in asked and isinstance(definition, ast.FunctionDef) and definition.args.args:
            assert definition.returns is not None or definition.name.startswith("test_")
        if "comments" in asked:
            assert "# " in blocks[0]
        if "errors" in asked:
            assert "raise ValueError" in blocks[0]
        if "only" in asked:
            assert re.fullmatch(r"```python\n.*\n```", answer, flags=re.DOTALL)
        if "test" in asked:
            assert "def test_" in answer
        if "complexity" in asked:
            assert "time complexity" in answer
        named = re.search(r"(?:Call it|called|Name the function) `(\w+)`", question)
        if named:
            assert f"def {named[1]}(" in answer
    assert seen == set(CONSTRAINTS)


def test_questions_are_worded_in_many_ways(conversations: list[dict[str, Any]]) -> None:
    openings = {" ".join(next(iter(c["messages"][-2:]))["content"].split()[:3]) for c in conversations}
    assert len(openings) >= 20


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_javascript_returns_what_python_returns() -> None:
    script, expected = [], []
    for program in PROGRAMS:
        if program.javascript:
            examples = javascript_examples(program)
            calls = "".join(f"results.push({call} ?? null);" for call, _ in examples)
            script.append(f"(() => {{ {program.javascript}\n{calls} }})();")
            expected += [(call, json.loads(result)) for call, result in examples]
    text = "const results = [];\n" + "\n".join(script) + "\nconsole.log(JSON.stringify(results));"
    done = subprocess.run(["node", "-"], input=text, capture_output=True, text=True, timeout=20, check=True)
    found = json.loads(done.stdout)
    assert [(call, value) for (call, _), value in zip(expected, found, strict=True)] == expected


def test_javascript_has_the_names_and_arguments_of_python() -> None:
    written = [(program, program.javascript) for program in PROGRAMS if program.javascript]
    assert len(written) >= 50
    for program, javascript in written:
        definition = main_definition(program.python[0])
        kind, name, arguments = JAVASCRIPT_DEFINITION.findall(javascript)[-1]
        assert name.lower() == definition.name.replace("_", "").lower()
        if isinstance(definition, ast.FunctionDef):
            assert kind == "function"
            assert len(re.findall(r"[^,]+", arguments)) == len(definition.args.args)
        else:
            assert kind == "class"


def test_the_data_is_as_it_was_trained_on(conversations: list[dict[str, Any]]) -> None:
    """The bundled models learnt from these conversations; others would make models that cannot be compared."""
    digest = hashlib.sha256(json.dumps(conversations).encode()).hexdigest()
    assert digest == "652cb35a9470c7ae5d08f25b8508ade13eacd8c81b218daa1560951c9b2e53c5"


def test_nothing_is_shared_with_the_evaluation_data(conversations: list[dict[str, Any]]) -> None:
    ours = {sequence for conversation in conversations for text in texts(conversation) for sequence in sequences(text)}
    for program in PROGRAMS:
        for text in (*program.python, program.check, program.explanation, program.javascript or ""):
            ours.update(sequences(text))
    files = sorted(EVALUATION.glob("*.jsonl.xz"))
    assert len(files) >= 8
    for path in files:
        for text in sentences(list(jsonlines.read(path))):
            shared = ours.intersection(sequences(text))
            assert not shared, (path.name, shared)
