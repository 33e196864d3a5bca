"""`fledge drift` as a person runs it: its output, its files, its exit status."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from fledge.drift.probe import Prober
from fledge.models.drafter.variants import EAGLE_3, EAGLE_3_1
from tests.command_line import fledge
from tests.tiny_models import TINY_TARGET, make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

QUESTIONS = ("Hi?", "Why is the sky <b>blue</b>?", "Count to ten.", "What is in a name?")


@pytest.fixture(name="pair", scope="module")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("pair")
    config = replace(TINY_TARGET, vocab_size=VOCAB_SIZE, eos_ids=(VOCAB_SIZE - 1,))
    target = make_target(config)
    save_target(target, root / "target")
    save_tokenizer(root / "target")
    for name, variant in (("eagle3", EAGLE_3), ("eagle3.1", EAGLE_3_1)):
        save_drafter(make_drafter(variant.config_for(config), target), root / name)
    lines = [json.dumps({"id": f"q{i}", "prompt": text}) for i, text in enumerate(QUESTIONS)]
    (root / "questions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return root


BOTH = ("--target", "target", "--drafter", "eagle3", "--drafter", "eagle3.1")
ONE = ("--target", "target", "--drafter", "eagle3.1")
SMALL = ("--workload", "questions.jsonl", "--depth", "3", "--max-tokens", "10", "--device", "cpu")


def drift(pair: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return fledge("drift", *arguments, cwd=pair)


@pytest.mark.usefixtures("_blank_pictures")
def test_a_report_of_two_drafters(pair: Path) -> None:
    perturbations = ("--perturb", "template:llama3", "--perturb", "pad:1k", "--perturb", "temperature:0.8")
    done = drift(pair, *BOTH, *SMALL, *perturbations, "--out", "two")
    assert done.returncode == 0, done.stderr
    assert "EAGLE-3.1" in done.stdout
    assert "acceptance" in done.stdout
    assert "Side by side" in done.stdout
    assert "Report: two/report.html" in done.stdout
    assert "eagle3: 4 of 4" in done.stderr
    page = (pair / "two/report.html").read_text(encoding="utf-8")
    assert "Skipped: 1024 tokens of padding do not fit into 256 tokens" in page
    assert "&lt;b&gt;blue&lt;/b&gt;" in page
    assert "questions, 4 prompts" in page
    assert "<b>blue" not in page
    assert (pair / "two/figures/attention-2.png").is_file()
    values = json.loads((pair / "two/results.json").read_text())
    assert [one["title"] for one in values["verdicts"]] == ["EAGLE-3", "EAGLE-3.1"]
    assert values["suite"]["perturbations"] == ["unperturbed", "template:llama3", "pad:1k:before", "temperature:0.8"]


@pytest.mark.usefixtures("_blank_pictures")
def test_conditions_decide_the_exit_status_and_finished_cells_are_not_run_again(pair: Path) -> None:
    command = (*ONE, *SMALL, "--suite", "none", "--out", "conditions", "--json", "--quiet")
    first = drift(pair, *command, "--fail-if", "al<1", "--fail-if", "recent_attention_last>1")
    assert first.returncode == 0, first.stderr
    printed = json.loads(first.stdout)
    assert printed["violations"] == {"eagle3.1": []}
    assert printed["report"] == "conditions/report.html"
    assert 0 < printed["figures"]["eagle3.1"]["recent_attention_depth_1"] < 1
    assert printed["verdicts"][0]["headline"] == "4 prompts: too few for a verdict"
    with mock.patch.object(Prober, "probe", side_effect=AssertionError("probed again")):
        second = drift(pair, *command, "--fail-if", "al>=1,recent_attention_last>1", "--fail-if", "repetition>=0")
    assert second.returncode == 1
    assert json.loads(second.stdout)["violations"]["eagle3.1"][0].startswith("al>=1 (al is ")
    lines = second.stderr.strip().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("violated by EAGLE-3.1: al>=1 (al is ")


@pytest.mark.usefixtures("_blank_pictures")
def test_an_interrupted_run_goes_on(pair: Path) -> None:
    command = (
        *ONE,
        *SMALL,
        "--perturb",
        "system:short",
        "--perturb",
        "template:plain",
        "--out",
        "interrupted",
        "--quiet",
    )
    original, calls = Prober.probe, []

    def stop_at_the_second(self, *arguments, **named):
        calls.append(arguments[1].name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(self, *arguments, **named)

    with mock.patch.object(Prober, "probe", stop_at_the_second):
        stopped = drift(pair, *command)
    assert stopped.returncode == 130
    assert stopped.stderr.strip() == "interrupted; the same command goes on from here"
    assert not (pair / "interrupted/report.html").exists()
    with mock.patch.object(Prober, "probe", stop_at_the_second):
        done = drift(pair, *command)
    assert done.returncode == 0, done.stderr
    assert calls == ["unperturbed", "system:short", "system:short", "template:plain"]
    assert (pair / "interrupted/report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "target"), "--drafter is missing"),
        (("--drafter", "eagle3"), "--target is missing"),
        (("--target", "nowhere", "--drafter", "eagle3"), "nowhere: no such directory"),
        (("--target", "target", "--drafter", "nowhere"), "nowhere: no such directory"),
        ((*ONE, "--drafter", "eagle3.1"), "each once"),
        ((*ONE, "--workload", "nothing.jsonl"), "no such file"),
        ((*ONE, "--workload", "mixd"), "Did you mean 'mixed'"),
        ((*ONE, "--suite", "quik"), "Did you mean 'quick'"),
        ((*ONE, "--perturb", "template:lama3"), "Did you mean 'llama3'"),
        ((*ONE, "--fail-if", "al_dorp>0.2"), "Did you mean 'al_drop'"),
        ((*ONE, "--fail-if", "al_drop"), "expected a figure, a comparison and a number"),
        ((*ONE, "--suite", "none", "--fail-if", "al_drop>0.2"), "needs perturbations"),
        ((*ONE, "--sample", "0"), "sample"),
        ((*ONE, "--out", "questions.jsonl/x"), "cannot be made"),
        ((*ONE, *SMALL, "--suite", "none", "--device", "tpu7"), "device"),
    ],
)
def test_mistakes_are_one_line_and_status_2(pair: Path, arguments: tuple[str, ...], message: str) -> None:
    done = drift(pair, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert message in line


def test_without_models_the_bundled_ones_are_taken_or_missed(pair: Path) -> None:
    with mock.patch("fledge.checkpoints.source.bundled_directory", lambda name: pair / "nothing" / name):
        done = drift(pair)
    assert done.returncode == 2
    assert re.search(r"error: fledgling: .* no bundled models; name your own", done.stderr)


@pytest.mark.usefixtures("_blank_pictures")
def test_a_condition_on_what_was_not_measured_fails_after_the_report_is_written(pair: Path) -> None:
    done = drift(pair, *ONE, *SMALL, "--perturb", "pad:1k", "--out", "unmeasured", "--fail-if", "al_drop>0.5")
    assert done.returncode == 2
    assert "'al_drop' was not measured" in done.stderr
    assert (pair / "unmeasured/report.html").is_file()


def test_what_is_said_of_vllm(pair: Path) -> None:
    """How to start one for this probe; and what is not there, before anything is loaded."""
    told = drift(pair, *BOTH, "--engine", "vllm", "--print-vllm-command", "--vllm-storage", "/mnt/x", "-tp", "4")
    assert told.returncode == 0, told.stderr
    for part in ("PYTHONPATH=", '"shared_storage_path": "/mnt/x"', '"method": "extract_hidden_states"', "-tp 4"):
        assert part in told.stdout
    for arguments, expected in (
        (("--engine", "vllm", "--vllm-url", "http://127.0.0.1:9"), "no vLLM answers there that is ready; start it as"),
        (("--engine", "vllm", "--vllm-python", "/nowhere/python"), "/nowhere/python"),
        (("--engine", "vlm"), "--engine: unknown engine 'vlm'"),
        (("--vllm-url", "http://127.0.0.1:9"), "are for --engine vllm; add it"),
        (("--tensor-parallel-size", "2"), "is an option of vLLM's: fledge drift --target"),
    ):
        done = drift(pair, *ONE, *SMALL, *arguments, "--suite", "none", "--out", "nothing")
        assert done.returncode == 2
        assert expected in done.stderr
        assert len(done.stderr.splitlines()) == 1
