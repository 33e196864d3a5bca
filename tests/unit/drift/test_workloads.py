"""Workloads: what comes with the package, what files hold, and turns that wait for an answer."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fledge.drift.prompts import (
    BUILT_IN,
    DEFAULT,
    ProbePrompt,
    has_open_turns,
    load_probe_workload,
    with_earlier_answers,
)
from fledge.errors import ConfigError, FledgeError, PromptError
from tests.unit.drift.drift_cases import conversation


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_built_in_prompts_are_complete_and_distinct():
    mixed = load_probe_workload(DEFAULT)
    assert mixed.name == DEFAULT
    assert len(mixed.prompts) == 24
    assert len({one.id for one in mixed.prompts}) == 24
    assert set(Counter(one.category for one in mixed.prompts)) == set(BUILT_IN) - {DEFAULT}
    for one in mixed.prompts:
        assert one.messages[-1]["role"] == "user"
        assert not has_open_turns(one)
    several = load_probe_workload("multi-turn")
    assert several.name == "multi-turn"
    assert several.prompts == tuple(one for one in mixed.prompts if one.category == "multi-turn")


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
    found = load_probe_workload(path)
    prompts = found.prompts
    assert found.name == "mine"
    assert [one.id for one in prompts] == ["a", "7", "mine-3", "mine-4", "mine-5"]
    assert [one.category for one in prompts] == ["x", "mine", "mine", "mine", "mine"]
    assert prompts[0].messages == tuple(turns)
    assert prompts[1].messages == prompts[2].messages == tuple(answered)
    assert prompts[3].messages == ({"role": "user", "content": "Hello"},)
    assert (prompts[4].text, prompts[4].messages) == ("Once upon", ())


def test_a_sample_follows_the_seed_and_keeps_the_order(tmp_path):
    path = write(tmp_path / "many.jsonl", *({"id": str(i), "prompt": "Hm?"} for i in range(50)))
    chosen = [int(one.id) for one in load_probe_workload(path, sample=10, seed=1).prompts]
    assert chosen == sorted(chosen)
    assert len(set(chosen)) == 10
    assert chosen == [int(one.id) for one in load_probe_workload(path, sample=10, seed=1).prompts]
    assert chosen != [int(one.id) for one in load_probe_workload(path, sample=10, seed=2).prompts]
    assert len(load_probe_workload(path, sample=99).prompts) == 50


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{broken", "bad.jsonl, line 2: not a JSON value"),
        ('["list"]', "bad.jsonl, record 2: found list, expected an object"),
        ('{"messages": []}', "bad.jsonl, record 2: messages: expected a list that is not empty"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "bad.jsonl, record 2: no user turn to answer"),
        ('{"id": "a", "prompt": "again"}', "bad.jsonl, record 2: id 'a' is also that of record 1"),
        ('{"id": [1], "prompt": "x"}', "bad.jsonl, record 2: 'id' is list"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, complaint):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "a", "prompt": "Hello"}\n' + line + "\n")
    with pytest.raises(FledgeError) as error:
        load_probe_workload(path)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_names_and_files(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown workload 'mths'.*Did you mean 'maths'"):
        load_probe_workload("mths")
    with pytest.raises(ConfigError, match="no such file"):
        load_probe_workload(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="sample: found 0"):
        load_probe_workload(DEFAULT, sample=0)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(FledgeError, match="no prompts in it"):
        load_probe_workload(tmp_path / "empty.jsonl")


def test_packaged_workloads_by_name():
    found = load_probe_workload("mt-bench", sample=5)
    assert found.name == "mt_bench"
    assert len(found.prompts) == 5
    assert all(has_open_turns(one) for one in found.prompts)
    assert len(load_probe_workload("long_context/2k").prompts) == 15
    assert {one.category for one in load_probe_workload("instructions").prompts} == {"instructions"}
    assert len(load_probe_workload("instructions").prompts) < 10  # our own; the public set is natural_instructions
    assert len(load_probe_workload("natural_instructions").prompts) > 100
    with pytest.raises(ConfigError, match="Did you mean 'gsm8k'"):
        load_probe_workload("gsm8kk")


@dataclass
class Answerer:
    """Stands for an engine: a message is a token, and answers say how many there were. Refuses what says 'Bad'."""

    max_model_len: int = 10
    asked: list[list[int]] = field(default_factory=list)

    def encode_chat(self, messages: Any) -> list[int]:
        if any(message["content"] == "Bad?" for message in messages):
            raise PromptError("refused")
        return list(range(len(messages)))

    def generate(self, prompts: Any, params: Any, *, progress: Any = None) -> list[Any]:
        assert {one.temperature for one in params} == {0.0}
        self.asked.append([len(ids) for ids in prompts])
        answers = [SimpleNamespace(text=f"answer {len(ids)}", token_ids=(1,), finish_reason="stop") for ids in prompts]
        return [SimpleNamespace(outputs=[answer]) for answer in answers]


def open_prompt(*turns: str) -> ProbePrompt:
    messages = tuple({"role": "user", "content": text} for text in turns)
    return ProbePrompt(id="open", category="", messages=messages)


def test_open_turns_are_answered_one_after_another():
    several = [
        conversation("Done?", id="done"),
        conversation("a", "b", "c", id="answered"),
        open_prompt("One?", "Two?", "Three?"),
        ProbePrompt(id="text", category="", text="Once upon"),
    ]
    llm = Answerer()
    found = with_earlier_answers(several, llm, max_tokens=2)
    assert [found[i] for i in (0, 1, 3)] == [several[i] for i in (0, 1, 3)]
    assert [message["content"] for message in found[2].messages] == ["One?", "answer 1", "Two?", "answer 3", "Three?"]
    assert llm.asked == [[1], [3]]
    assert [has_open_turns(one) for one in several] == [False, False, True, False]


def test_what_cannot_be_answered_stays_as_it_is():
    crowded = with_earlier_answers([open_prompt("One?", "Two?", "Three?")], Answerer(max_model_len=4), max_tokens=2)
    assert [message["content"] for message in crowded[0].messages] == ["One?", "answer 1", "Two?", "Three?"]
    refused = open_prompt("Bad?", "Two?")
    assert with_earlier_answers([refused], Answerer(), max_tokens=2) == [refused]
