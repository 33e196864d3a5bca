"""Public sets in the formats they are published in, recognised by their fields."""

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fledge.errors import DataError, FledgeError
from fledge.evaluation.workloads import load_workload
from fledge.evaluation.workloads.formats import PLACEHOLDER


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def texts(path: Path) -> list[list[str]]:
    return [[message["content"] for message in prompt.messages] for prompt in load_workload(path).prompts]


def test_mt_bench(tmp_path: Path) -> None:
    path = write(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]},
        {"question_id": 82, "category": "math", "turns": ["Three?"], "reference": ["3"]},
    )
    workload = load_workload(path)
    assert workload.name == "question"
    assert texts(path) == [["One?", "Two?"], ["Three?"]]
    assert [(prompt.id, prompt.category) for prompt in workload.prompts] == [("81", "writing"), ("82", "math")]
    assert all(message["role"] == "user" for prompt in workload.prompts for message in prompt.messages)


def test_mt_bench_as_the_hub_has_it(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", {"prompt_id": 5, "category": "stem", "prompt": ["One?", "Two?"]})
    assert texts(path) == [["One?", "Two?"]]
    assert load_workload(path).prompts[0].id == "5"


def test_humaneval_becomes_the_packaged_prompt(tmp_path: Path) -> None:
    packaged = load_workload("humaneval").prompts[0]
    code = packaged.messages[0]["content"].removeprefix("Complete the following Python function:\n\n```python\n")
    record = {
        "task_id": "HumanEval/0",
        "prompt": code.removesuffix("```"),
        "entry_point": "has_close_elements",
        "canonical_solution": "    return False\n",
        "test": "assert True",
    }
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(record).encode()))
    (prompt,) = load_workload(path).prompts
    assert prompt == packaged


def test_gsm8k_and_other_questions(tmp_path: Path) -> None:
    path = write(tmp_path / "test.jsonl", {"question": "2 and 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"})
    (prompt,) = load_workload(path).prompts
    assert (prompt.id, prompt.category, texts(path)) == ("test-1", "math", [["2 and 2?"]])
    path = write(tmp_path / "trivia.jsonl", {"question": "Who?", "answer": "She"})
    assert load_workload(path).prompts[0].category == "trivia"


def test_math_500(tmp_path: Path) -> None:
    record = {"problem": "$1+1$?", "solution": "2", "answer": "2", "subject": "Algebra", "level": 1}
    path = write(tmp_path / "test.jsonl", {**record, "unique_id": "test/algebra/1.json"})
    (prompt,) = load_workload(path).prompts
    assert (prompt.id, prompt.category, prompt.sub_category) == ("test/algebra/1.json", "math", "Algebra")


def speed_bench(turns: list[str], number: int) -> dict[str, Any]:
    return {
        "question_id": f"q{number}",
        "category": "coding",
        "sub_category": "python",
        "turns": turns,
        "source": "somewhere",
        "src_id": "1",
        "difficulty": "easy",
        "multiturn": len(turns) > 1,
    }


def test_speed_bench_and_what_its_publisher_left_out(tmp_path: Path) -> None:
    placeholder = f"{PLACEHOLDER} USING SPECDEC_BENCH"
    path = write(tmp_path / "qualitative.jsonl", speed_bench(["a", "b"], 1), speed_bench([placeholder], 2))
    with pytest.warns(UserWarning, match="1 of 2 prompts are left out"):
        workload = load_workload(path)
    (prompt,) = workload.prompts
    assert (prompt.id, prompt.category, prompt.sub_category) == ("q1", "coding", "python")
    assert "1 of 2" in workload.notes[0]
    path = write(tmp_path / "empty.jsonl", speed_bench([placeholder], 1))
    with pytest.raises(DataError, match=r"all 1 prompts; fill them in with NVIDIA's prepare_data\.py"):
        load_workload(path)


def test_conversations_as_training_reads_them(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes."}]
    path = write(
        tmp_path / "mine.jsonl",
        {"id": "a", "category": "x", "messages": [*turns, turns[0], turns[1]]},
        {"conversations": [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "No."}]},
        {"prompt": "Three?", "completion": "3"},
        {"instruction": "Add", "input": "1 1", "output": "2"},
        {"messages": turns[:1], "words": 4000},
    )
    assert texts(path) == [["One?", "Yes.", "One?"], ["Two?"], ["Three?"], ["Add\n\n1 1"], ["One?"]]
    prompts = load_workload(path).prompts
    assert [prompt.id for prompt in prompts] == ["a", "mine-2", "mine-3", "mine-4", "mine-5"]
    assert [prompt.category for prompt in prompts] == ["x", *["mine"] * 4]
    assert prompts[4].bucket == "4k"


def test_json_lists(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}]))
    (tmp_path / "object.json").write_text(json.dumps({"version": 1, "data": [{"prompt": "a"}]}))
    write(tmp_path / "lines.json", {"prompt": "a"}, {"prompt": "b"})
    assert texts(tmp_path / "list.json") == texts(tmp_path / "lines.json") == [["a"], ["b"]]
    assert texts(tmp_path / "object.json") == [["a"]]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"turns": []}, "'turns' must be a list of texts"),
        ({"turns": "One?"}, "'turns' must be a list of texts"),
        ({"text": "Once upon"}, "plain text asks nothing"),
        ({"messages": [{"role": "assistant", "content": "Hm."}]}, "no user turn"),
        ({"problem": ""}, "'problem' is missing, empty or no text"),
        ({"nothing": 1}, "expected one of messages"),
        ([1], "found list, expected an object"),
        ({"id": [1], "prompt": "x"}, "'id' is list"),
        ({"prompt": "\ud800"}, "no Unicode text"),
    ],
)
def test_bad_records_are_named(tmp_path: Path, record: Any, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"prompt": "fine"}, record)
    with pytest.raises(FledgeError, match=message) as raised:
        load_workload(path)
    assert "bad.jsonl, record 2" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_repeated_ids_empty_files_and_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "twice.jsonl", {"id": 1, "prompt": "a"}, {"id": "1", "prompt": "b"})
    with pytest.raises(DataError, match="record 2: id '1' is also that of record 1"):
        load_workload(path)
    with pytest.raises(DataError, match="no prompts in it"):
        load_workload(write(tmp_path / "none.jsonl"))
    (tmp_path / "cut.json").write_text('[{"prompt": "a"},')
    with pytest.raises(DataError, match=r"cut\.json, line 1: not a JSON value"):
        load_workload(tmp_path / "cut.json")
    (tmp_path / "word.json").write_text('"text"')
    with pytest.raises(DataError, match="expected a list of prompts"):
        load_workload(tmp_path / "word.json")


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"test\.parquet: parquet needs pyarrow.*pip install pyarrow"):
        load_workload(tmp_path / "test.parquet")


def test_parquet_with_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow is no dependency of ours; this stands in for the few calls that are made of it."""

    class File:
        def __init__(self, path: Path) -> None:
            if path.read_bytes() != b"PAR1":
                raise OSError("no magic bytes")

        def __enter__(self) -> "File":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def iter_batches(self, batch_size: int) -> list[SimpleNamespace]:
            return [SimpleNamespace(to_pylist=lambda: [{"turns": ["a"]}, {"turns": ["b", "c"]}])]

    fake = ModuleType("pyarrow")
    fake.ArrowException, fake.parquet = ValueError, SimpleNamespace(ParquetFile=File)
    monkeypatch.setitem(sys.modules, "pyarrow", fake)
    (tmp_path / "test.parquet").write_bytes(b"PAR1")
    assert texts(tmp_path / "test.parquet") == [["a"], ["b", "c"]]
    (tmp_path / "bad.parquet").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read as parquet: no magic bytes"):
        load_workload(tmp_path / "bad.parquet")
