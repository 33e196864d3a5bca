"""The job that makes the bundled drafters: its prompts, its recipes, and what it brings back."""

import json
import os
import random
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from fledge.checkpoints.source import resolve
from fledge.engine.tokenizer import load_tokenizer
from fledge.training.recipe import Recipe
from recipes.demo import drafter_prompts, drafters, jsonlines


def conversation(*contents: str, system: str | None = None, source: str = "docs-qa/mdn") -> dict[str, object]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    first = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*first, *turns], "source": source}


def test_questions_come_without_answers_and_sometimes_with_a_second_one() -> None:
    rng = random.Random(0)
    asked = drafter_prompts.questions(conversation("a", "b", "c", "d", system="x" * 200), rng)
    assert asked is not None
    assert [m["role"] for m in asked["messages"]] == ["system", "user", "user"]
    assert asked["category"] == "docs-qa"
    assert drafter_prompts.questions({"messages": [], "source": "x"}, rng) is None
    long = [drafter_prompts.questions(conversation(*"abcdefghijklmnop"), rng) for _ in range(50)]
    assert {len(one["messages"]) for one in long if one is not None} == {2, 3, 4, 5}
    single = [drafter_prompts.questions(conversation("a", "b", system="short"), rng) for _ in range(2000)]
    kinds = [tuple(m["role"] for m in one["messages"]) for one in single if one is not None]
    assert 800 < sum("system" in kind for kind in kinds) < 1200
    assert 40 < kinds.count(("user", "user")) < 130


def test_conversations_are_text_as_the_template_writes_it() -> None:
    tokenizer = load_tokenizer(resolve("fledgling"))
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\n<b"},
        {"role": "assistant", "content": "c d"},
    ]
    written = drafter_prompts.rendered(messages)
    assert written == tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer(written, add_special_tokens=True)["input_ids"]  # as `fledge train` reads plain text
    assert ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert ids.count(tokenizer.bos_token_id) == 1


def test_documents_lose_nothing_and_are_often_answers() -> None:
    document = " ".join(f"word{i}" for i in range(8000)) + " <|im_end|>"
    parts = list(drafter_prompts.texts(document, random.Random(3)))
    assert len(parts) == -(-(len(document) + 1) // drafter_prompts.PART)
    assert all(part.startswith("<|begin_of_text|>") for part in parts)
    words = " ".join(parts)
    assert all(f"word{i}" in words for i in range(0, 8000, 501))
    assert "< |im_end|>" in parts[-1]
    kinds = [
        "assistant" in part for _ in range(50) for part in drafter_prompts.texts("some words " * 60, random.Random(_))
    ]
    assert 32 < sum(kinds) < 48
    assert list(drafter_prompts.texts("short", random.Random(0))) == ["<|begin_of_text|>short<|end_of_text|>"]


def test_long_prompts_are_parts_of_long_documents_with_a_task() -> None:
    text = " ".join(str(i) for i in range(6000))
    documents = [{"text": "short"}, {"text": text}]
    prompts = list(drafter_prompts.document_prompts(documents, 200, drafter_prompts.LONG, random.Random(1)))
    sizes = sorted(len(prompt["messages"][0]["content"]) for prompt in prompts)
    assert len(prompts) == 200
    assert sizes[0] >= drafter_prompts.LONG[0]
    assert drafter_prompts.LONG[1] / 2 < sizes[-1] < drafter_prompts.LONG[1] + 100
    assert sizes[100] < 6000  # spread over the logarithm
    assert not list(drafter_prompts.document_prompts(documents[:1], 5, drafter_prompts.LONG, random.Random(1)))


def test_the_file_of_prompts_is_shuffled_and_the_same_each_time(tmp_path: Path) -> None:
    jsonlines.write(tmp_path / "chat.jsonl", [conversation(f"question {i}", "answer") for i in range(50)])
    jsonlines.write(tmp_path / "docs.jsonl", [{"text": "word " * 1000, "source": "mdn"}])
    files = [tmp_path / "chat.jsonl"], [tmp_path / "docs.jsonl"]
    for name in ("one", "two"):
        assert drafter_prompts.write_prompts(*files, tmp_path / name, long_count=6, short_count=4) == 60
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    categories = [record["category"] for record in jsonlines.read(tmp_path / "one")]
    assert "document" in categories[:40]
    assert "docs-qa" in categories[-20:]


def test_its_recipes_are_valid(tmp_path: Path) -> None:
    text = Recipe.load(drafters.RECIPE, drafters.text_settings(tmp_path / "text.jsonl", 90))
    answers = Recipe.load(drafters.RECIPE)
    assert (text.data.loss_on, text.regenerate.enabled, text.fit.max_minutes) == ("all", False, 1.5)
    assert (answers.data.loss_on, answers.regenerate.turns) == ("answers", "all")
    assert text.drafter == answers.drafter  # or the second could not go on from the first
    assert (text.fit.length, text.fit.rows) == (answers.fit.length, answers.fit.rows)  # the same compiled kernels
    job = drafters.Job(tmp_path / "work", tmp_path / "out", [])
    with pytest.raises(SystemExit, match=r"no chat/\*\.jsonl\.xz"):
        drafters.write_data(job, tmp_path / "nothing", job.work / "a", None)
    for name in "ab":
        (job.work / name).touch()
    drafters.write_data(job, tmp_path / "nothing", job.work / "a", job.work / "b")  # what is there is not made
    assert not (job.work / "a").read_text()


def test_the_newest_checkpoint_is_packed_and_the_published_one_after_it(tmp_path: Path) -> None:
    job = drafters.Job(tmp_path / "work", tmp_path / "out", [])
    job.pack()
    assert not list(job.out.iterdir())
    output = job.work / "answers-eagle3"
    for step in (1, 2):
        folder = output / "fit" / "key" / "candidates" / f"step-{step:06}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(str(step))
        job.pack()
        with tarfile.open(job.out / "answers-eagle3.tar") as archive:
            member = archive.extractfile("answers-eagle3/config.json")
            assert member is not None
            assert member.read() == str(step).encode()
    assert job.drafter("answers", "eagle3").name == "step-000002"
    (output / "drafter").mkdir()
    (output / "drafter" / "README.md").write_text("card")
    job.pack()
    with tarfile.open(job.out / "answers-eagle3.tar") as archive:
        assert archive.getnames() == ["answers-eagle3", "answers-eagle3/README.md"]
    with pytest.raises(SystemExit, match=r"no text-eagle3\.1"):
        job.drafter("text", "eagle3.1")


def test_progress_and_failure_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = drafters.Job(tmp_path / "work", tmp_path / "out", [])
    log = job.work / "text-eagle3" / "fit" / "key" / "log.jsonl"
    log.parent.mkdir(parents=True)
    line = {"step": 20, "epoch": 0, "lr": 1e-3, "loss": 5.0, "accuracy_by_depth": [0.5, None]}
    log.write_text(json.dumps({**line, "simulated_acceptance_length": 2.5, "tokens_per_second": 1e5}) + "\n")
    assert job.progress("text-eagle3").startswith("step 20 epoch 0 lr 1.0e-03 loss 5.000 length 2.500 right 0.500")
    with pytest.raises(SystemExit, match=r"(?s)bad failed\nbad\.log: .*no-such-command"):
        job.run({"bad": ["no-such-command"]})
    assert "failed with 2" in capsys.readouterr().out


def test_checkpoints_that_go_while_they_are_looked_at_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").touch()
    monkeypatch.setattr(drafters, "found", lambda *_: [tmp_path / "there", tmp_path / "gone"])
    assert drafters.newest(tmp_path, "*") == tmp_path / "there"
    monkeypatch.setattr(drafters, "found", lambda *_: [tmp_path / "gone"])
    assert drafters.newest(tmp_path, "*") is None
    job = drafters.Job(tmp_path / "work", tmp_path / "out", [])
    job.pack()
    monkeypatch.setattr(drafters, "newest", lambda *_: tmp_path / "gone")
    assert job.progress("text-eagle3") == ""


def test_every_missing_version_of_a_shared_stage_is_linked_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = drafters.Job(tmp_path, tmp_path / "out", [])

    def version(name: str, *files: str) -> Path:
        folder = job.work / "text" / "prepare" / name
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(name)
        return folder

    first, shared = version("one", "manifest.json", "examples/tokens"), job.work / "text-eagle3" / "prepare"
    version("interrupted", "examples/tokens")
    for _ in range(2):
        job.share("text", "text-eagle3")
        assert [path.name for path in shared.iterdir()] == ["one"]
    assert (shared / "one" / "examples" / "tokens").samefile(first / "examples" / "tokens")
    version("two", "manifest.json", "examples/tokens")  # another recipe, in the same outputs
    link, linked = os.link, list[str]()

    def interrupted_at_the_second(source: str, place: str) -> None:
        if linked:
            raise KeyboardInterrupt
        linked.append(place)
        link(source, place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", interrupted_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            job.share("text", "text-eagle3")
    assert not (shared / "two").exists()  # a part of it is not taken for all
    job.share("text", "text-eagle3")
    assert sorted(path.name for path in shared.iterdir()) == ["one", "two"]
    assert (shared / "two" / "examples" / "tokens").read_text() == "two"


SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
FAILS_BESIDE_ONE_THAT_SLEEPS = f"""
import sys, time
from pathlib import Path
if sys.argv[1] == "fail":
    until = time.monotonic() + 20
    while time.monotonic() < until and not Path(sys.argv[2]).read_text():  # until the other one runs
        time.sleep(0.02)
    sys.exit(3)
{SLEEPS}
"""


def has_ended(log: Path) -> bool:
    """Whether the process that wrote its number there is gone."""
    try:
        os.kill(int(log.read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def test_no_process_outlives_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = drafters.Job(tmp_path / "work", tmp_path / "out", [])
    monkeypatch.setattr(drafters, "FLEDGE", (sys.executable, "-c", FAILS_BESIDE_ONE_THAT_SLEEPS))
    monkeypatch.setattr(drafters, "POLL_SECONDS", 0.1)
    with pytest.raises(SystemExit, match="bad failed"):
        job.run({"good": ["sleep"], "bad": ["fail", str(job.work / "good.log")]})
    assert has_ended(job.work / "good.log")
    # Whatever goes wrong in the job itself, once the process runs.
    monkeypatch.setattr(drafters.Job, "pack", lambda _: (job.work / "good.log").read_text() and 1 / 0)
    (job.work / "good.log").unlink()
    with pytest.raises(ZeroDivisionError):
        job.run({"good": ["sleep"]})
    assert has_ended(job.work / "good.log")


def test_sigterm_ends_the_job_and_its_processes(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from recipes.demo import drafters
drafters.FLEDGE = (sys.executable, "-c", {SLEEPS!r})
drafters.Job(Path(sys.argv[1]), Path(sys.argv[1]), []).run({{"one": [], "two": []}})
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
        try:
            deadline = time.monotonic() + 50
            while time.monotonic() < deadline and not all(log.is_file() and log.read_text() for log in logs):
                time.sleep(0.05)
            job.terminate()
            _, said = job.communicate(timeout=20)
        finally:
            job.kill()
    assert "KeyboardInterrupt" in said
    assert all(has_ended(log) for log in logs)
