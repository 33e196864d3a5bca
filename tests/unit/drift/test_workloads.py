"""Workloads: what comes with the package, what files hold, and turns that wait for an answer."""

import json
from collections import Counter
from pathlib import Path

import pytest

from fledge.drift.workloads import BUILT_IN, DEFAULT, has_open_turns, load_workload, with_answers
from fledge.errors import ConfigError, FledgeError
from tests.unit.drift.drift_cases import conversation


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_built_in_prompts_are_complete_and_distinct():
    mixed = load_workload(DEFAULT)
    assert len(mixed.conversations) == 24
    assert len({one.id for one in mixed.conversations}) == 24
    assert set(Counter(one.category for one in mixed.conversations)) == set(BUILT_IN) - {DEFAULT}
    for one in mixed.conversations:
        assert one.messages[-1]["role"] == "user"
        assert not has_open_turns(one)
    assert load_workload("multi-turn").conversations == tuple(
        one for one in mixed.conversations if one.category == "multi-turn"
    )


def test_files_in_every_shape(tmp_path):
    turns = [{"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"}]
    answered = [turns[0], {"role": "assistant", "content": "Yes."}, turns[1]]
    path = write(
        tmp_path / "mine.jsonl",
        {"id": "a", "category": "x", "messages": turns},
        {"id": 7, "messages": turns, "full_messages": answered},
        {"messages": [*answered, {"role": "assistant", "content": "cut off"}]},
        {"prompt": "Hello"},
        {"text": "Once upon"},
    )
    found = load_workload(path)
    assert found.name == "mine"
    assert [one.id for one in found.conversations] == ["a", "7", "mine-3", "mine-4", "mine-5"]
    assert [one.category for one in found.conversations] == ["x", "mine", "mine", "mine", "mine"]
    assert found.conversations[0].messages == tuple(turns)
    assert found.conversations[1].messages == found.conversations[2].messages == tuple(answered)
    assert found.conversations[3].messages == ({"role": "user", "content": "Hello"},)
    assert found.conversations[4].text == "Once upon"
    assert found.conversations[4].messages is None


def test_a_sample_follows_the_seed_and_keeps_the_order(tmp_path):
    path = write(tmp_path / "many.jsonl", *({"id": str(i), "prompt": "Hm?"} for i in range(50)))
    chosen = [int(one.id) for one in load_workload(path, sample=10, seed=1).conversations]
    assert chosen == sorted(chosen)
    assert len(set(chosen)) == 10
    assert chosen == [int(one.id) for one in load_workload(path, sample=10, seed=1).conversations]
    assert chosen != [int(one.id) for one in load_workload(path, sample=10, seed=2).conversations]
    assert len(load_workload(path, sample=99).conversations) == 50


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{broken", "bad.jsonl, line 2: not a JSON value"),
        ('["list"]', "bad.jsonl, line 2: found list, expected an object"),
        ('{"messages": []}', "bad.jsonl, line 2: messages: expected a list that is not empty"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "bad.jsonl, line 2: no user turn to answer"),
        ('{"id": "a", "prompt": "again"}', "bad.jsonl, line 2: id 'a' is also that of line 1"),
        ('{"id": [1], "prompt": "x"}', "bad.jsonl, line 2: 'id' is list"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, complaint):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "a", "prompt": "Hello"}\n' + line + "\n")
    with pytest.raises(FledgeError) as error:
        load_workload(path)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_names_and_files(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown workload 'mths'.*Did you mean 'maths'"):
        load_workload("mths")
    with pytest.raises(ConfigError, match="no such file"):
        load_workload(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="sample: found 0"):
        load_workload(DEFAULT, sample=0)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(FledgeError, match="no conversations"):
        load_workload(tmp_path / "empty.jsonl")


def test_packaged_workloads_by_name():
    found = load_workload("mt-bench", sample=5)
    assert found.name == "mt_bench"
    assert len(found.conversations) == 5
    assert all(has_open_turns(one) for one in found.conversations)
    assert len(load_workload("long_context/2k").conversations) == 15
    assert {one.category for one in load_workload("instructions").conversations} == {"instructions"}
    assert len(load_workload("instructions").conversations) < 10  # its own; the packaged one is natural_instructions
    assert len(load_workload("natural_instructions").conversations) > 100
    with pytest.raises(ConfigError, match="Did you mean 'gsm8k'"):
        load_workload("gsm8kk")


def test_open_turns_are_answered_one_after_another():
    turns = [{"role": "user", "content": text} for text in ("One?", "Two?", "Three?")]
    several = [
        conversation("Done?", id="done"),
        conversation("a", "b", "c", id="answered"),
        type(conversation("x"))(id="open", messages=tuple(turns)),
    ]
    asked = []

    def answer(conversations):
        asked.append(conversations)
        return [f"answer {len(messages)}" for messages in conversations]

    found = with_answers(several, answer)
    assert found[:2] == several[:2]
    assert [message["content"] for message in found[2].messages] == ["One?", "answer 1", "Two?", "answer 3", "Three?"]
    assert [[len(messages) for messages in call] for call in asked] == [[1], [3]]
    assert [has_open_turns(one) for one in several] == [False, False, True]


SHARED = Path(__file__).parents[4] / "shared" / "data" / "eval"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the evaluation files are not here")
def test_the_evaluation_files_load():
    sizes = {path.stem: load_workload(path) for path in sorted(SHARED.glob("*.jsonl"))}
    assert {name: len(found.conversations) for name, found in sizes.items()}["mt_bench"] == 80
    assert all(has_open_turns(one) for one in sizes["mt_bench"].conversations)
    assert not any(has_open_turns(one) for one in sizes["chat_dialogue"].conversations)  # it brings its answers
