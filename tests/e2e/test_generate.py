"""`fledge generate` as a person runs it: a process, its output, its exit status."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from fledge.models.drafter.variants import EAGLE_3_1
from tests.command_line import fledge
from tests.tiny_models import TINY_TARGET, make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer


@pytest.fixture(name="pair", scope="module")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("pair")
    config = replace(TINY_TARGET, vocab_size=VOCAB_SIZE, eos_ids=(VOCAB_SIZE - 1,))
    target = make_target(config)
    save_target(target, root / "target")
    save_tokenizer(root / "target")
    save_drafter(make_drafter(EAGLE_3_1.config_for(config), target), root / "drafter")
    return root


def generate(pair: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return fledge("generate", *arguments, cwd=pair, stdin=stdin)


PAIR = ("--target", "target", "--drafter", "drafter")


def test_text_then_figures_in_a_process_of_its_own(pair: Path) -> None:
    command = [sys.executable, "-m", "fledge", "generate", *PAIR, "--depth", "2", "--max-tokens", "12", "Hello"]
    done = subprocess.run(command, cwd=pair, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "12 tokens" in done.stderr
    assert "acceptance length" in done.stderr


def test_json_is_one_object_and_the_drafter_changes_no_token(pair: Path) -> None:
    prompts = '{"prompt": "Hello"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n{"prompt_token_ids": [1, 2]}\n'
    (pair / "prompts.jsonl").write_text(prompts, encoding="utf-8")
    reports = []
    for options in (("--target", "target"), (*PAIR, "--depth", "3"), (*PAIR, "--tree")):
        done = generate(pair, *options, "--prompts", "prompts.jsonl", "--json")
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(done.stdout))
    tokens = [[output["token_ids"] for output in report["outputs"]] for report in reports]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(tokens[0]) == 3
    assert reports[0]["total"]["acceptance_length"] is None
    assert len(reports[1]["total"]["rate_by_depth"]) == 3
    assert reports[1]["total"]["tokens"] == sum(map(len, tokens[1]))


def test_prompts_from_standard_input(pair: Path) -> None:
    done = generate(
        pair, "--target", "target", "--prompts", "-", "--max-tokens", "3", "--json", stdin='{"prompt": "x"}'
    )
    assert len(json.loads(done.stdout)["outputs"][0]["token_ids"]) == 3


def test_vllms_speculative_config(pair: Path) -> None:
    config = '{"model": "drafter", "method": "eagle3", "num_speculative_tokens": 2}'
    done = generate(pair, "--target", "target", "--speculative-config", config, "--json", "Hello")
    assert len(json.loads(done.stdout)["total"]["rate_by_depth"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*PAIR, "--depth", "0", "x"), "1 to 16"),
        ((*PAIR, "--depth", "1000", "x"), "1 to 16"),
        (("--target", "target", "--depth", "3", "x"), "need a --drafter"),
        (("--target", "target", "--speculative-config", "{", "x"), "not valid JSON"),
        (("--target", "target", "--speculative-config", '{"modle": "d"}', "x"), "Did you mean 'model'"),
        (("--target", "target", "y" * 300), "the prompt has 300 tokens"),
        (("--target", "target", ""), "the prompt is empty"),
        (("--target", "target"), "give either a prompt or --prompts"),
        (("--target", "target", "--prompts", "missing.jsonl"), "missing.jsonl: cannot be read"),
        (("--target", "target", "--temperature", "-1", "x"), "temperature"),
        (("--target", "target", "--temperature", "nan", "x"), "temperature"),
        (("--target", "target", "--max-tokens", "0", "x"), "max_tokens"),
        (("--target", "nowhere", "x"), "no such directory"),
        (("--target", "drafter", "x"), "is an EAGLE drafter"),
        (("--target", "target", "--drafter", "target", "x"), "target"),
        (("--target", "someone/model", "x"), "hub cannot be reached"),
        (("--target", "target", "--device", "tpu7", "x"), "device"),
    ],
)
def test_mistakes_are_one_line_and_status_2(pair: Path, arguments: tuple[str, ...], message: str) -> None:
    done = generate(pair, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_line_that_is_not_json_is_named(pair: Path) -> None:
    (pair / "bad.jsonl").write_text('{"prompt": "a"}\nnot json\n', encoding="utf-8")
    done = generate(pair, "--target", "target", "--prompts", "bad.jsonl")
    assert done.returncode == 2
    assert "bad.jsonl, line 2: not a JSON value" in done.stderr
