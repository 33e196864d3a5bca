"""Workloads by name: what comes with the package, its parts and groups, samples and digests."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fledge.errors import ConfigError, FledgeError
from fledge.evaluation.workloads import (
    DATA,
    GROUPS,
    HUB,
    SETS,
    Prompt,
    Workload,
    canonical,
    expand,
    length_bucket,
    load_workload,
    load_workloads,
    workload_names,
)


@pytest.mark.parametrize("name", SETS)
def test_every_packaged_set_is_whole_and_described(name: str) -> None:
    workload = load_workload(name)
    assert workload.name == name
    assert len({prompt.id for prompt in workload.prompts}) == len(workload.prompts) >= 60
    assert all(prompt.messages[-1]["role"] == "user" for prompt in workload.prompts)
    assert all(prompt.category for prompt in workload.prompts)
    described = (DATA / "LICENCES.md").read_text(encoding="utf-8")
    assert f"| {name} | {len(workload.prompts)} |" in described
    assert workload.licence
    assert workload.source


def test_nothing_that_may_not_be_redistributed_is_packaged() -> None:
    sources = " ".join(prompt.id for prompt in load_workload("instructions").prompts)
    for source in ("yelp", "asset", "air_dialogue", "overruling", "timetravel"):
        assert source not in sources


def test_categories_are_those_reports_group_by() -> None:
    assert set(load_workload("humaneval").categories) == {"coding"}
    assert set(load_workload("mt_bench").categories) >= {"coding", "math", "roleplay", "humanities"}
    assert load_workload("gsm8k").prompts[0].sub_category is None
    assert {prompt.sub_category for prompt in load_workload("long_context").prompts} == {"novel", "meeting"}
    assert Counter(prompt.bucket for prompt in load_workload("long_context").prompts) == dict.fromkeys(
        ("2k", "4k", "8k", "16k"), 15
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [("mt-bench", "mt_bench"), ("MT-Bench", "mt_bench"), ("math-500", "math500"), ("HumanEval", "humaneval")],
)
def test_other_spellings(given: str, meant: str) -> None:
    assert load_workload(given) == load_workload(meant)


def test_parts_of_sets() -> None:
    assert len(load_workload("long_context/4k").prompts) == 15
    assert {prompt.bucket for prompt in load_workload("long-context/4k").prompts} == {"4k"}
    assert {prompt.category for prompt in load_workload("mt_bench/coding").prompts} == {"coding"}
    assert load_workload("instructions/question_generation").prompts[0].sub_category == "Question Generation"
    with pytest.raises(ConfigError, match="has no part '3k'"):
        load_workload("long_context/3k")


def test_groups_are_one_workload_or_their_members() -> None:
    assert expand("short") == tuple(name for name in SETS if name != "long_context")
    assert expand("humaneval") == ("humaneval",)
    coding = load_workload("coding")
    assert coding.name == "coding"
    assert len(coding.prompts) == 164 + 10
    assert [one.name for one in load_workloads(["coding", "humaneval"])] == ["humaneval", "mt_bench/coding"]
    for name in GROUPS:
        ids = [prompt.id for prompt in load_workload(name).prompts]
        assert len(set(ids)) == len(ids)


def test_a_sample_is_spread_over_categories_and_follows_the_seed() -> None:
    full = load_workload("mt_bench")
    sample = load_workload("mt_bench", sample=16, seed=1)
    assert set(Counter(prompt.category for prompt in sample.prompts).values()) == {2}
    assert sample == load_workload("mt_bench", sample=16, seed=1)
    assert sample.digest != load_workload("mt_bench", sample=16, seed=2).digest
    assert [prompt.id for prompt in sample.prompts] == [p.id for p in full.prompts if p in sample.prompts]
    assert all(prompt in sample.prompts for prompt in load_workload("mt_bench", sample=7, seed=1).prompts)
    assert load_workload("mt_bench", sample=1000) == full
    lengths = load_workload("long_context", sample=8).prompts
    assert set(Counter((prompt.bucket, prompt.sub_category) for prompt in lengths).values()) == {1}
    with pytest.raises(ConfigError, match="at least 1"):
        load_workload("mt_bench", sample=0)


def test_the_digest_follows_the_content_alone() -> None:
    def workload(text: str, name: str = "x") -> Workload:
        prompt = Prompt(id="1", category="c", messages=({"role": "user", "content": text},))
        return Workload(name=name, prompts=(prompt,), source="here", licence="mine")

    assert workload("a").digest == workload("a", name="y").digest
    assert workload("a").digest != workload("b").digest
    assert len(workload("a").digest) == 64
    other = replace(workload("a"), prompts=(replace(workload("a").prompts[0], category="d"),))
    assert other.digest != workload("a").digest


def test_what_can_be_asked_before_anything_is_answered() -> None:
    def first(*roles: str) -> int:
        messages = tuple({"role": role, "content": "x"} for role in roles)
        return len(Prompt(id="1", category="c", messages=messages).first_messages)

    assert first("user", "user") == 1
    assert first("system", "user", "user") == 2
    assert first("user", "assistant", "user") == 3
    assert first("user", "assistant", "tool", "user") == 3
    assert first("user") == 1


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(1, "128"), (128, "128"), (129, "512"), (2048, "2k"), (20000, "32k"), (40000, "longer")]
)
def test_input_length_buckets(tokens: int, bucket: str) -> None:
    assert length_bucket(tokens) == bucket


def test_unknown_names_are_one_line() -> None:
    for name, message in (
        ("mtbenchh", "Did you mean 'mt_bench'"),
        ("zzzz", "Known names: all,"),
        ("no/such.jsonl", "no such file"),
    ):
        with pytest.raises(FledgeError, match=message) as raised:
            load_workload(name)
        assert "\n" not in str(raised.value)
    assert canonical("no-such") == "no-such"
    assert set(workload_names()) >= {*SETS, "short", "coding", "chat"}
    assert "speed_bench" in HUB


def test_files_of_the_same_name_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.jsonl").write_text(json.dumps({"prompt": "Hm?"}))
    with pytest.raises(ConfigError, match="two workloads are called 'mine'"):
        load_workloads([tmp_path / "a/mine.jsonl", tmp_path / "b/mine.jsonl"])


def test_one_workload_given_twice_is_one(tmp_path: Path) -> None:
    gsm8k = load_workload("gsm8k", sample=2)
    assert load_workloads(["gsm8k", "GSM8K"], sample=2, whole_groups=True) == (gsm8k,)
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(json.dumps({"prompt": "Hm?"}))
    with pytest.raises(ConfigError, match="two workloads are called 'gsm8k'"):
        load_workloads(["gsm8k", path], sample=2, whole_groups=True)


def test_a_group_is_one_workload_or_its_members() -> None:
    assert [one.name for one in load_workloads(["coding"], sample=1)] == list(GROUPS["coding"])
    assert [one.name for one in load_workloads(["coding"], sample=1, whole_groups=True)] == ["coding"]
