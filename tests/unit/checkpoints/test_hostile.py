"""Directories made to hurt: one line each, at once, and none of their code is run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from fledge.engine.tokenizer import load_tokenizer
from fledge.errors import CheckpointError
from tests.broken_checkpoints import REDUCED
from tests.checkpoint_fixtures import TARGET, edit_config, edit_tensors, make_drafter
from tests.command_line import fledge
from tests.tiny_models import make_target
from tests.tiny_tokenizer import save_tokenizer

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
INDEX = "model.safetensors.index.json"


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_text(text) and None


def _shard(name: object) -> Callable[[Path], None]:
    return _write(INDEX, json.dumps({"weight_map": {"a": name}}))


def _config(**changes: object) -> Callable[[Path], None]:
    return lambda directory: edit_config(directory, **changes)


def _int8(part: str) -> Callable[[Path], None]:
    change = lambda tensors: {name: t.to(torch.int8) if part in name else t for name, t in tensors.items()}  # noqa: E731
    return lambda directory: edit_tensors(directory, change)


MIXTRAL = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
CASES = {
    "deep-config": (_write("config.json", DEEP), "config.json: not valid JSON: nested too deeply"),
    "many-digits": (_write("config.json", '{"hidden_size": ' + "9" * 5000 + "}"), "a number has too many digits"),
    "deep-index": (_write(INDEX, DEEP), "not a weight index"),
    "int8-norm": (_int8("input_layernorm"), "input_layernorm.weight' is int8"),
    "int8": (_int8("q_proj"), "q_proj.weight' is int8"),
    "million-layers": (_config(num_hidden_layers=10**6), "'num_hidden_layers' is 1000000, expected at most 1000"),
    "million-experts": (_config(**MIXTRAL, num_local_experts=10**6), "8000000 layers and experts"),
    "wide": (_config(intermediate_size=2**62), "field 'intermediate_size' is 4611686018427387904"),
    "shard-number": (_shard(5), "shard name 5 is not the plain name"),
    "shard-nul": (_shard("a\0b"), "is not the plain name"),
    "shard-long": (_shard("x" * 300), "is not the plain name"),
    "shard-surrogate": (_shard("\ud800"), "is not the plain name"),
    "shard-lines": (_shard("a\nb"), "is not the plain name"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_target(case: str, tmp_path: Path) -> None:
    spoil, says = CASES[case]
    save_target(make_target(TARGET), tmp_path / "target")
    spoil(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [1]}\n')
    outcome = fledge("generate", "--target", "target", "--prompts", "prompts.jsonl", "--json", cwd=tmp_path)
    assert (outcome.returncode, outcome.stderr.count("\n")) == (2, 1), outcome.stderr
    assert says in outcome.stderr


@pytest.mark.parametrize("case", ["int8-norm", "million-layers", "wide"])
def test_a_drafter(case: str, tmp_path: Path) -> None:
    save_drafter(make_drafter(REDUCED), tmp_path / "drafter")
    (_int8("norm") if case == "int8-norm" else CASES[case][0])(tmp_path / "drafter")
    outcome = fledge("inspect", "drafter", cwd=tmp_path)
    assert (outcome.returncode, outcome.stderr.count("\n")) == (2, 1), outcome.stderr


def test_a_tokenizer_with_code_is_refused_without_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> str:
        raise AssertionError("nobody may be asked")

    save_tokenizer(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["evil.Slow", "evil.Fast"]}, "tokenizer_class": "Slow"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", asked)
    with pytest.raises(CheckpointError, match=r"code of its own \(auto_map\), which Fledge never does") as refused:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refused.value)


def test_code_in_the_working_directory_is_not_imported(tmp_path: Path) -> None:
    save_target(make_target(TARGET), tmp_path / "target")
    marker = "import pathlib; pathlib.Path('was-run').touch()\nraise SystemExit('run')"
    (tmp_path / "target" / "safetensors.py").write_text(marker)
    command = [sys.executable, "-m", "fledge", "inspect", "."]
    done = subprocess.run(command, cwd=tmp_path / "target", capture_output=True, text=True, check=False, env=os.environ)
    assert not (tmp_path / "target" / "was-run").exists()
    assert done.returncode == 0, done.stderr
