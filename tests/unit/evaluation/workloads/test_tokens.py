"""Prompts as token ids, and the cache of them: keyed by all that they follow from, never trusted blindly."""

import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from fledge.errors import PromptError
from fledge.evaluation import workloads
from fledge.evaluation.workloads import Prompt, Workload, tokenised, with_token_ids
from fledge.files import cache_directory
from tests.tiny_tokenizer import CHAT_TEMPLATE, save_tokenizer


def workload(*questions: str) -> Workload:
    prompts = tuple(
        Prompt(id=str(i), category="c", messages=({"role": "user", "content": text}, {"role": "user", "content": "2?"}))
        for i, text in enumerate(questions)
    )
    return Workload(name="mine", prompts=prompts, source="here", licence="mine")


@pytest.fixture(name="target")
def _target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    save_tokenizer(tmp_path / "target")
    return tmp_path / "target"


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "tokens").iterdir())


def test_the_first_turn_through_the_template(target: Path, tmp_path: Path) -> None:
    ids = tokenised(workload("Hi", "Why?"), target, tmp_path / "cache")
    assert [len(one) for one in ids] == [len("<user>Hi\n<assistant>"), len("<user>Why?\n<assistant>")]


def test_the_second_time_nothing_is_tokenised(target: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = tokenised(workload("Hi", "Why?"), target, cache)
    with mock.patch.object(workloads, "load_tokenizer", side_effect=AssertionError("tokenised again")):
        assert tokenised(workload("Hi", "Why?"), target, cache) == first
        with pytest.raises(AssertionError):
            tokenised(workload("Ho", "Why?"), target, cache)
    assert [path.suffix for path in kept(cache)] == [".json"]  # and nothing half-written beside it


def test_another_template_or_tokenizer_is_another_entry(target: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = tokenised(workload("Hi"), target, cache)
    save_tokenizer(target, chat_template="!" + CHAT_TEMPLATE)
    second = tokenised(workload("Hi"), target, cache)
    assert len(second[0]) == len(first[0]) + 1
    assert len(kept(cache)) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "text"])
def test_a_damaged_cache_is_made_anew(target: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    first = tokenised(workload("Hi", "Why?"), target, cache)
    (path,) = kept(cache)
    whole = path.read_bytes()
    if damage == "other":  # a valid file of another workload
        tokenised(workload("x"), target, tmp_path / "else")
        (other,) = kept(tmp_path / "else")
        path.write_bytes(other.read_bytes())
    else:
        path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "text": b"not JSON"}[damage])
    assert tokenised(workload("Hi", "Why?"), target, cache) == first
    with mock.patch.object(workloads, "load_tokenizer", side_effect=AssertionError("not mended")):
        tokenised(workload("Hi", "Why?"), target, cache)


def test_a_cache_that_cannot_be_written_is_none(target: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert tokenised(workload("Hi"), target, tmp_path / "file") == tokenised(workload("Hi"), target, tmp_path / "cache")


def test_a_write_that_fails_leaves_nothing(target: Path, tmp_path: Path) -> None:
    with mock.patch("pathlib.Path.write_text", side_effect=OSError("disk full")):
        tokenised(workload("Hi"), target, tmp_path / "cache")
    assert kept(tmp_path / "cache") == []


def test_a_target_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="has no tokenizer"):
        tokenised(workload("Hi"), tmp_path, tmp_path / "cache")


def test_samples_have_entries_of_their_own(target: Path, tmp_path: Path) -> None:
    full = workload("Hi", "Why?")
    part = replace(full, prompts=full.prompts[:1])
    assert tokenised(part, target, tmp_path / "cache") == tokenised(full, target, tmp_path / "cache")[:1]
    assert len(kept(tmp_path / "cache")) == 2


def test_where_the_cache_is(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, {"FLEDGE_CACHE": str(tmp_path / "own"), "XDG_CACHE_HOME": "/x"}):
        assert cache_directory() == tmp_path / "own"
    with mock.patch.dict(os.environ, {"FLEDGE_CACHE": "", "XDG_CACHE_HOME": str(tmp_path)}):
        assert cache_directory() == tmp_path / "fledge"
    with mock.patch.dict(os.environ, {"FLEDGE_CACHE": "", "XDG_CACHE_HOME": "", "HOME": str(tmp_path)}):
        assert cache_directory() == tmp_path / ".cache/fledge"


def test_first_turns_get_their_ids_but_where_answers_are_given(target: Path, tmp_path: Path) -> None:
    plain = workload("Hi")
    answered = Prompt(
        id="answered",
        category="c",
        messages=tuple({"role": role, "content": "x"} for role in ("user", "assistant", "user")),
    )
    both = replace(plain, prompts=(*plain.prompts, answered))
    found = with_token_ids(both, target, tmp_path / "cache")
    assert found.prompts[0].token_ids == tokenised(plain, target, tmp_path / "cache")[0]
    assert found.prompts[1] == answered  # the target writes its own first answer
    assert found.digest == both.digest
