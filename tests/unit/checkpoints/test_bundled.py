"""The models that come with the package: there, small enough, right for each other, and what they say they are."""

import ast
import re

import pytest
from transformers import AutoTokenizer

from fledge import LLM, SamplingParams
from fledge.checkpoints.contract import check, identity_findings
from fledge.checkpoints.reading import read_drafter
from fledge.checkpoints.source import DRAFTERS, NAMES, TARGET, bundled_directory, resolve
from fledge.checkpoints.target import read_target_config
from fledge.models.drafter.variants import name_of

MIB = 2**20


def test_all_are_there_and_small() -> None:
    files = {file: file.stat().st_size for name in NAMES for file in resolve(name).rglob("*") if file.is_file()}
    weights = sum(size for file, size in files.items() if file.suffix == ".safetensors")
    assert weights <= 80 * MIB
    assert sum(files.values()) - weights <= 3 * MIB
    assert max(files.values()) < 16 * MIB


@pytest.mark.parametrize("name", NAMES)
def test_each_has_a_card(name: str) -> None:
    text = (resolve(name) / "README.md").read_text(encoding="utf-8")
    assert text.startswith("---\n")
    assert "license" in text.split("---")[1]
    prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    assert re.findall(r"\{[^}]*\}", prose) == [], "what a template was to fill in"


@pytest.mark.parametrize(("variant", "name"), DRAFTERS.items())
def test_drafters_fit_the_target(variant: str, name: str) -> None:
    checkpoint = read_drafter(resolve(name))
    assert check(checkpoint, read_target_config(resolve(TARGET))) == []
    assert list(identity_findings(checkpoint, resolve(TARGET))) == [], "it was trained for these weights"
    assert name_of(checkpoint.config) == variant


def test_other_names_are_not_bundled() -> None:
    assert bundled_directory("fledgling-eagle4") is None


@pytest.fixture(name="answers", scope="module")
def _answers() -> dict[str, list[tuple[int, ...]]]:
    """Greedy answers to a few questions, alone and with each drafter."""
    questions = [
        "Write a Python function `is_even` that checks whether a number is even.",
        "What is a Kubernetes Pod?",
    ]
    found = {}
    for name in (None, *DRAFTERS.values()):
        config = None if name is None else {"model": name, "num_speculative_tokens": 5}
        llm = LLM(TARGET, speculative_config=config, dtype="float32", device="cpu")
        conversations = [[{"role": "user", "content": question}] for question in questions]
        outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=160))
        found[name or TARGET] = [output.outputs[0].token_ids for output in outputs]
        assert all(output.outputs[0].finish_reason == "stop" for output in outputs), "it stops by itself"
        if name is not None:
            lengths = [output.metrics.acceptance.acceptance_length or 1.0 for output in outputs]
            assert max(lengths) > 1.5, "a trained drafter is right now and then"
    return found


def test_drafters_change_nothing(answers: dict[str, list[tuple[int, ...]]]) -> None:
    assert all(answers[name] == answers[TARGET] for name in DRAFTERS.values())


def test_it_writes_functions_that_parse(answers: dict[str, list[tuple[int, ...]]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve(TARGET))
    text = tokenizer.decode(answers[TARGET][0], skip_special_tokens=True)
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert any(isinstance(node, ast.FunctionDef) for node in ast.parse(code).body)
