"""What is read from disk: compressions, formats, and what is said about bad lines."""

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from fledge.errors import DataError
from fledge.evaluation.conversations import Skipped, parse, read_conversations, refuse_if_empty
from fledge.files import distinct_names, read_json_lines, write_json_lines

LINES = [{"text": "eins"}, {"text": "zwei ü"}]


def test_plain_and_compressed_files_read_alike(tmp_path: Path) -> None:
    data = "\n".join(json.dumps(line, ensure_ascii=False) for line in LINES).encode() + b"\n\n"
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(data))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    for name in ("a.jsonl", "a.jsonl.xz", "a.jsonl.gz"):
        assert list(read_json_lines(tmp_path / name)) == [(1, LINES[0]), (2, LINES[1])]


def test_files_of_the_same_name_are_told_apart() -> None:
    assert distinct_names(["x/a.jsonl", "y/b.jsonl"]) == ["a.jsonl", "b.jsonl"]
    assert distinct_names(["x/a.jsonl", "y/a.jsonl", "b.jsonl"]) == ["x/a.jsonl", "y/a.jsonl", "b.jsonl"]
    assert distinct_names(["1/x/a.jsonl", "2/x/a.jsonl"]) == ["x/a.jsonl (1)", "x/a.jsonl (2)"]


def test_errors_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2: not a JSON value") as caught:
        list(read_json_lines(path))
    assert "\n" not in str(caught.value)
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"line 1: .*not UTF-8"):
        list(read_json_lines(path))
    with pytest.raises(DataError, match="No such file"):
        list(read_json_lines(tmp_path / "absent.jsonl"))
    for name, compress in (("cut.jsonl.xz", lzma.compress), ("cut.jsonl.gz", gzip.compress)):
        lines = "".join(json.dumps({"text": str(i * 7919)}) + "\n" for i in range(5000)).encode()
        (tmp_path / name).write_bytes(compress(lines)[:-40])
        with pytest.raises(DataError, match=f"{name}: damaged after line"):
            list(read_json_lines(tmp_path / name))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_json_lines(path, [{"a": 1}])
    with pytest.raises(TypeError):
        write_json_lines(path, [{"a": 2}, {"a": object()}])
    assert path.read_text() == '{"a":1}\n'


USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [USER, ASSISTANT]}, [USER, ASSISTANT]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ASSISTANT]}, [USER, ASSISTANT]),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
        ),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [USER, ASSISTANT]),
        ({"prompt": "q", "completion": "a"}, [USER, ASSISTANT]),
        ({"prompt": "q", "response": "a"}, [USER, ASSISTANT]),
        ({"prompt": [USER], "completion": [ASSISTANT]}, [USER, ASSISTANT]),
        ({"prompt": "q"}, [USER]),
        ({"instruction": "q", "input": "", "output": "a"}, [USER, ASSISTANT]),
        ({"instruction": "q", "input": "i", "output": "a"}, [{"role": "user", "content": "q\n\ni"}, ASSISTANT]),
    ],
)
def test_formats(record: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert list(parse(record, "file").messages) == messages


def test_categories_and_plain_text() -> None:
    assert parse({"text": "t", "category": "c", "source": "s"}, "file").category == "c"
    assert parse({"text": "t", "source": "s"}, "file").category == "s"
    conversation = parse({"text": "t"}, "file")
    assert (conversation.category, conversation.text, conversation.messages) == ("file", "t", ())


def test_what_a_conversation_asks() -> None:
    conversation = parse({"messages": [USER, ASSISTANT, {"role": "user", "content": " r\n s "}, ASSISTANT]}, "f")
    assert [m["content"] for m in conversation.question()] == ["q", "a", " r\n s "]
    assert conversation.is_answered
    assert conversation.topic == "q"
    assert not parse({"messages": [ASSISTANT, USER]}, "f").is_answered
    assert parse({"messages": [ASSISTANT]}, "f").question() == ()


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (["list"], "expected an object"),
        ({"other": 1}, "expected one of messages"),
        ({"messages": []}, "not empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        ({"messages": [{"role": "user", "content": None}]}, "expected text"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "from 'alien'"),
        ({"text": " "}, "empty"),
        ({"prompt": ""}, "empty"),
        ({"text": "\ud800"}, "no Unicode"),
    ],
)
def test_bad_records_are_counted_and_the_first_is_named(tmp_path: Path, record: Any, reason: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in ({"text": "good"}, record, record)))
    skipped = Skipped()
    assert len(list(read_conversations([path], skipped))) == 1
    assert skipped.total == 2
    assert skipped.first is not None
    assert skipped.first.startswith("data.jsonl, line 2: ")
    assert reason in skipped.first
    refuse_if_empty(1, skipped, [path])
    with pytest.raises(DataError, match=r"nothing to train on; the first of 2 skipped is data\.jsonl, line 2"):
        refuse_if_empty(0, skipped, [path])
