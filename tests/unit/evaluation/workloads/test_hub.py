"""Datasets on the hub, with a hub that is made up: which file is taken, and every failure in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from fledge.errors import FledgeError
from fledge.evaluation.workloads import load_workload

Hub = Callable[..., list[str]]


@pytest.fixture(name="hub")
def _hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """`hub(files)` makes a dataset of these files, each with one MATH-like record. Returns what is downloaded."""
    downloaded: list[str] = []

    def make(*files: str, error: Exception | None = None) -> list[str]:
        def listed(_self: object, _repo: str, *, repo_type: str) -> list[str]:
            assert repo_type == "dataset"
            if error is not None:
                raise error
            return list(files)

        def download(repo: str, name: str, *, repo_type: str) -> str:
            assert repo_type == "dataset"
            if error is not None:
                raise error
            if name not in files:
                raise EntryNotFoundError("404")
            downloaded.append(f"{repo}/{name}")
            path = tmp_path / Path(name).name
            path.write_text(json.dumps({"problem": name}) + "\n", encoding="utf-8")
            return str(path)

        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", listed)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        return downloaded

    return make


def test_a_named_file(hub: Hub) -> None:
    downloaded = hub("README.md", "data/train.jsonl", "data/test.jsonl")
    workload = load_workload("hf:owner/name:data/train.jsonl")
    assert downloaded == ["owner/name/data/train.jsonl"]
    assert workload.name == "owner/name/data/train.jsonl"
    assert workload.source == "hf:owner/name:data/train.jsonl"
    assert workload.prompts[0].messages[0]["content"] == "data/train.jsonl"


def test_the_only_file_or_that_of_the_test_split(hub: Hub) -> None:
    hub("README.md", ".gitattributes", "questions.jsonl")
    assert load_workload("hf:owner/name").prompts[0].messages[0]["content"] == "questions.jsonl"
    hub("train.jsonl", "test.jsonl")
    assert load_workload("hf:owner/name").prompts[0].messages[0]["content"] == "test.jsonl"
    hub("a/train-0.jsonl", "b/train-0.jsonl")
    assert load_workload("hf:owner/name:b/*.jsonl").prompts[0].messages[0]["content"] == "b/train-0.jsonl"


def test_public_names(hub: Hub) -> None:
    downloaded = hub("test.jsonl", "README.md")
    workload = load_workload("math-500", from_hub=True)
    assert downloaded == ["HuggingFaceH4/MATH-500/test.jsonl"]
    assert workload.name == "math500"
    assert len(workload.prompts) == 1
    assert len(load_workload("math500").prompts) == 200


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("hf:owner/name:none.jsonl", None, "has no file 'none.jsonl'"),
        ("hf:owner/name:*.json", None, r"no file matching '\*.json'"),
        ("hf:owner/name", None, r"has 2 such files, name one as hf:OWNER/NAME:FILE: a.jsonl, b.jsonl"),
        ("hf:name", None, "expected hf:OWNER/NAME"),
        ("hf:owner/name", OfflineModeIsEnabled("offline"), "cannot be reached"),
        ("hf:owner/name:a.jsonl", LocalEntryNotFoundError("none"), "cannot be reached"),
        ("hf:owner/name", ConnectionError("no route\nto host"), "fetching it from the hub failed: no route; or give"),
        ("speed_bench", ConnectionError(""), "failed: ConnectionError"),
    ],
)
def test_failures_are_one_line(hub: Hub, source: str, error: Exception | None, message: str) -> None:
    hub("a.jsonl", "b.jsonl", error=error)
    with pytest.raises(FledgeError, match=message) as raised:
        load_workload(source)
    assert "\n" not in str(raised.value)


def test_datasets_that_are_missing(hub: Hub) -> None:
    response = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))
    hub(error=RepositoryNotFoundError("404", response=response))
    with pytest.raises(FledgeError, match="no such dataset on the hub"):
        load_workload("hf:owner/name")
    hub(error=GatedRepoError("403", response=response))
    with pytest.raises(FledgeError, match="gated; accept its terms on its page and set HF_TOKEN"):
        load_workload("hf:owner/name")


def test_groups_are_not_on_the_hub() -> None:
    with pytest.raises(FledgeError, match="on the hub are mt_bench, humaneval, gsm8k, math500, speed_bench"):
        load_workload("docs_qa", from_hub=True)
