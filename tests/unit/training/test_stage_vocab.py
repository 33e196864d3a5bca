"""vocab: frequency, what must be in it, coverage, and the data it belongs to."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fledge.errors import ConfigError, DataError
from fledge.training.data.examples import TokenStore
from fledge.training.recipe import VocabSection
from fledge.training.stages.fit import VOCAB, choose, covered, read_vocabulary
from fledge.training.stages.regenerate import examples_directory
from tests.unit.training.data.stage_cases import make_recipe, run_stage, save_tiny_target, write_lines
from tests.unit.training.data.templates import make_tokenizer

STOP = make_tokenizer().eos_token_id
FULL = len(make_tokenizer())


@pytest.fixture(name="inputs")
def _inputs(tmp_path: Path) -> dict[str, Path]:
    save_tiny_target(tmp_path / "target")
    write_lines(tmp_path / "data.jsonl", [])
    inputs = {"prepare": tmp_path / "prepare", "regenerate": tmp_path / "regenerate"}
    for directory in inputs.values():
        directory.mkdir()
    with TokenStore.writer(inputs["prepare"] / "examples", FULL) as writer:
        writer.add([90, 90, 90, 7, 7, 8], [False, False, False, True, True, True])
        writer.add([90, 7, 9], [False, True, True])
    return inputs


def run(tmp_path: Path, inputs: dict[str, Path], size: int | None, *, count_prompts: bool = False) -> dict[str, object]:
    recipe = make_recipe(tmp_path / "target", tmp_path / "data.jsonl")
    recipe = replace(recipe, vocab=VocabSection(size=size, count_prompts=count_prompts))
    return run_stage(VOCAB, recipe, tmp_path / "vocab", **inputs)


def test_the_most_frequent_answer_tokens_and_the_stop_token(tmp_path: Path, inputs: dict[str, Path]) -> None:
    summary = run(tmp_path, inputs, 3)
    vocabulary = read_vocabulary(tmp_path / "vocab", FULL)
    assert vocabulary is not None
    assert vocabulary.target_ids.tolist() == [7, 8, STOP]  # 8 and 9 occur once each: the lower id
    assert summary["coverage"] == 4 / 5
    assert summary["size"] == 3
    run(tmp_path, inputs, 3, count_prompts=True)
    vocabulary = read_vocabulary(tmp_path / "vocab", FULL)
    assert vocabulary is not None
    assert vocabulary.target_ids.tolist() == [7, 90, STOP]


def test_no_size_is_the_whole_vocabulary(tmp_path: Path, inputs: dict[str, Path]) -> None:
    for size in (None, FULL, FULL + 10):
        assert run(tmp_path, inputs, size)["coverage"] == 1.0
        assert read_vocabulary(tmp_path / "vocab", FULL) is None


def test_a_vocabulary_is_refused_for_other_data_or_another_target(tmp_path: Path, inputs: dict[str, Path]) -> None:
    # Mistake 9.
    run(tmp_path, inputs, 3)
    digest = TokenStore(examples_directory(inputs)).digest
    assert read_vocabulary(tmp_path / "vocab", FULL, digest) is not None
    with pytest.raises(DataError, match="counted on data"):
        read_vocabulary(tmp_path / "vocab", FULL, "0" * 16)
    with pytest.raises(DataError, match=f"vocabulary of {FULL}"):
        read_vocabulary(tmp_path / "vocab", FULL + 1)
    recipe = make_recipe(tmp_path / "target", tmp_path / "data.jsonl")
    keys = [VOCAB.key(recipe, {"prepare": p, "regenerate": r}) for p, r in (("1", "1"), ("2", "1"), ("1", "2"))]
    assert len(set(keys)) == 3


def test_damage_is_refused(tmp_path: Path, inputs: dict[str, Path]) -> None:
    run(tmp_path, inputs, 3)
    path = tmp_path / "vocab" / "vocab.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "target_ids": [8, 7, STOP]}))
    with pytest.raises(DataError, match="ascending"):
        read_vocabulary(tmp_path / "vocab", FULL)
    path.write_text('{"target_ids"')
    with pytest.raises(DataError, match="damaged"):
        read_vocabulary(tmp_path / "vocab", FULL)


def test_choosing() -> None:
    counts = np.array([5, 0, 3, 3, 9, 0])
    assert choose(counts, 2, []).tolist() == [0, 4]
    assert choose(counts, 3, [1]).tolist() == [0, 1, 4]
    assert choose(counts, 5, [5]).tolist() == [0, 2, 3, 4, 5]
    assert covered(counts, choose(counts, 2, [])) == 14 / 20
    with pytest.raises(ConfigError, match="3 special tokens"):
        choose(counts, 2, [0, 1, 2])


def test_regenerated_examples_come_before_prepared_ones(inputs: dict[str, Path]) -> None:
    assert examples_directory(inputs) == inputs["prepare"] / "examples"
    (inputs["regenerate"] / "examples").mkdir()
    assert examples_directory(inputs) == inputs["regenerate"] / "examples"
