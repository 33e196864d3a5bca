"""`fledge eval` as a person runs it: its output, its files, its exit status."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from fledge.evaluation.acceptance import AcceptanceMeter
from fledge.evaluation.baseline import Baseline
from fledge.evaluation.results import read_results
from fledge.models.drafter.variants import EAGLE_3, EAGLE_3_1
from tests.command_line import fledge
from tests.tiny_models import TINY_TARGET, make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

QUESTIONS = ("Hi?", "Why is the sky blue?", "Count to ten.")
BOTH = ("--target", "target", "--drafter", "eagle3", "--drafter", "eagle3.1")
ONE = ("--target", "target", "--drafter", "eagle3.1")
SMALL = ("--depth", "2", "--max-tokens", "8", "--device", "cpu")
MINE = ("--workload", "questions.jsonl")


@pytest.fixture(name="pair", scope="module")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("pair")
    config = replace(TINY_TARGET, vocab_size=VOCAB_SIZE, eos_ids=(VOCAB_SIZE - 1,), max_positions=512)
    target = make_target(config)
    save_target(target, root / "target")
    save_tokenizer(root / "target")
    for name, variant in (("eagle3", EAGLE_3), ("eagle3.1", EAGLE_3_1)):
        save_drafter(make_drafter(variant.config_for(config), target), root / name)
    lines = [json.dumps({"id": f"q{i}", "prompt": text}) for i, text in enumerate(QUESTIONS)]
    (root / "questions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return root


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))


def run_eval(pair: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return fledge("eval", *arguments, cwd=pair)


def test_tables_results_and_a_model_cards_markdown(pair: Path, tmp_path: Path) -> None:
    out, card = tmp_path / "new/results.json", tmp_path / "card.md"
    both = (*MINE, "--workload", "mt_bench/coding")
    done = run_eval(
        pair, *BOTH, *both, *SMALL, "--sample", "2", "--out", str(out), "--markdown", str(card), "--save-baseline"
    )
    assert done.returncode == 0, done.stderr
    baseline = Baseline.read(pair / "eagle3.1")
    assert baseline is not None
    assert [(cell.temperature, cell.depth) for cell in baseline.cells] == [(0.0, 2), (1.0, 2)]
    assert baseline.measured_on == ("questions", "mt_bench/coding")
    assert "Acceptance length" in done.stdout
    assert "mt_bench/coding" in done.stdout
    assert "Lossless: all 12 answers at temperature 0" in done.stdout  # 2 drafters, 2 single and 2 double questions
    assert "eagle3.1 K=2" in done.stderr
    results = read_results(out)
    assert len(results.cells) == 2 * 2 * 2  # drafters, temperatures, workloads
    assert {len(facts["digest"]) for facts in results.settings["workloads"].values()} == {64}
    assert results.provenance["command"].startswith("fledge eval")
    assert "| eagle3.1 | 2 | 1 |" in card.read_text(encoding="utf-8")


def test_one_json_object(pair: Path) -> None:
    done = run_eval(pair, *ONE, *MINE, *SMALL, "--temperature", "0", "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    values = json.loads(done.stdout)
    assert values["status"] == "complete"
    (row,) = values["rows"]
    assert (row["drafter"], row["depth"], row["answers"], row["different"]) == ("eagle3.1", 2, 3, 0)
    assert 1 <= row["by_workload"]["questions"]["value"] <= 3


def test_prompts_that_do_not_fit_are_said(pair: Path) -> None:
    done = run_eval(pair, *ONE, *MINE, "--workload", "long_context/2k", *SMALL, "--temperature", "0", "--sample", "2")
    assert done.returncode == 0, done.stderr
    assert "note: long_context/2k: 2 of 2 prompts do not fit into 512 tokens and were not asked: long-" in done.stderr


def test_ctrl_c_saves_what_was_measured(pair: Path, tmp_path: Path) -> None:
    calls = []

    def interrupt(*arguments: object, **named: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments, **named)

    measure = AcceptanceMeter.measure
    out = tmp_path / "r.json"
    with mock.patch.object(AcceptanceMeter, "measure", interrupt):
        done = run_eval(pair, *BOTH, *MINE, *SMALL, "--out", str(out))
    assert done.returncode == 130
    assert "note: interrupted" in done.stderr
    assert read_results(out).status == "partial"
    assert len(read_results(out).cells) == 1
    with mock.patch.object(AcceptanceMeter, "answer", side_effect=KeyboardInterrupt):
        done = run_eval(pair, *ONE, *MINE, *SMALL, "--out", str(tmp_path / "none.json"))
    assert done.returncode == 130
    assert "before anything was measured" in done.stderr
    assert not (tmp_path / "none.json").exists()


def test_a_broken_drafter_is_status_1_and_the_others_are_shown(pair: Path) -> None:
    (pair / "broken").mkdir(exist_ok=True)
    (pair / "broken/config.json").write_text("{}")
    done = run_eval(pair, *ONE, "--drafter", "broken", *MINE, *SMALL, "--temperature", "0")
    assert done.returncode == 1
    assert "note: broken K=2 T=0: " in done.stderr
    assert "Traceback" not in done.stderr
    assert "eagle3.1" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*ONE, "--workload", "mtbenchh"), "unknown workload 'mtbenchh'"),
        ((*ONE, "--workload", "none.jsonl"), "no such file"),
        ((*ONE, "--depth", "x"), "--depth: found 'x', expected whole numbers"),
        ((*ONE, "--depth", "99"), "depth: found 99, allowed is 1 to 16"),
        ((*ONE, "--temperature", "0,hot"), "--temperature: found '0,hot', expected numbers"),
        (("--drafter", "eagle3"), "--target is missing"),
        (("--target", "target"), "--drafter is missing"),
        ((*ONE, "--out", "."), "--out .: is a directory"),
        ((*ONE, "--device", "tpu", *MINE), "device"),
        (("--target", "target", "--drafter", "nowhere", *MINE), "nowhere: no such directory"),
    ],
)
def test_mistakes_are_one_line_and_status_2(pair: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run_eval(pair, *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_baseline_is_of_chains(pair: Path) -> None:
    done = run_eval(pair, *ONE, *MINE, *SMALL, "--save-baseline", "--speculative-config", '{"tree_width": 2}')
    assert (done.returncode, done.stdout) == (2, "")
    assert "--save-baseline is of chains of greedy drafts; leave out --speculative-config" in done.stderr
    done = run_eval(pair, *ONE, *MINE, *SMALL, "--speculative-config", "tree")
    assert done.returncode == 2
    assert "--speculative-config: expected a JSON object" in done.stderr
