"""A drafter of another target, of the same shape: told by its provenance, before it is served at one token a round."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fledge import LLM
from fledge.checkpoints.contract import check
from fledge.checkpoints.drafter import load_drafter, save_drafter
from fledge.checkpoints.reading import read_drafter
from fledge.checkpoints.target import identify_target, save_target
from fledge.errors import CheckpointError, CheckpointWarning
from fledge.models.drafter.variants import EAGLE_3_1
from tests.checkpoint_fixtures import make_drafter
from tests.command_line import fledge
from tests.tiny_models import TINY_TARGET, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

CONFIG = replace(TINY_TARGET, vocab_size=VOCAB_SIZE, max_positions=128)


@pytest.fixture(name="models")
def _models(tmp_path: Path) -> Path:
    """A target, another of its shape, one with another tokenizer, and a drafter of the first."""
    for name, seed in (("mine", 0), ("other", 1), ("foreign", 1)):
        save_target(make_target(CONFIG, seed=seed), tmp_path / name)
        save_tokenizer(tmp_path / name)
    file = tmp_path / "foreign" / "tokenizer.json"
    values = json.loads(file.read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(values))
    provenance = {"target": {"name": "mine", **identify_target(tmp_path / "mine")}}
    drafter = make_drafter(EAGLE_3_1.config_for(CONFIG))
    save_drafter(drafter, tmp_path / "drafter", provenance=provenance)
    return tmp_path


def test_inspect_tells_targets_apart(models: Path) -> None:
    fits = fledge("inspect", "drafter", "--target", "mine", cwd=models)
    assert "OK: 0 errors, 0 warnings" in fits.stdout
    other = fledge("inspect", "drafter", "--target", "other", cwd=models)
    assert other.returncode == 0
    assert "[target-differs]" in other.stdout
    assert "TRAINED FOR ANOTHER TARGET" in other.stdout
    assert "1 warning" in other.stdout
    foreign = fledge("inspect", "drafter", "--target", "foreign", cwd=models)
    assert foreign.returncode == 1
    assert "[tokenizer-differs]" in foreign.stdout


def test_a_tokenizer_written_in_another_way_is_the_same(models: Path) -> None:
    file = models / "mine" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=7))
    assert not check(read_drafter(models / "drafter"), CONFIG, models / "mine")


def test_who_generates_or_serves_is_warned_or_refused(models: Path) -> None:
    speculation = {"model": str(models / "drafter"), "num_speculative_tokens": 2}
    llm = LLM(str(models / "other"))
    with pytest.warns(CheckpointWarning, match="TRAINED FOR ANOTHER TARGET"):
        llm.set_speculation(speculation)
    with pytest.raises(CheckpointError, match="tokenizer-differs"):
        LLM(str(models / "foreign"), speculative_config=speculation)


def test_who_goes_on_training_it_too(models: Path) -> None:
    with pytest.warns(CheckpointWarning, match="target-differs"):
        load_drafter(models / "drafter", CONFIG, target_directory=models / "other")
    sources = ["target.path=foreign", "data.sources=data.jsonl", f"output={models / 'run'}", "vocab.size=null"]
    (models / "data.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    outcome = fledge("train", "tiny", *sources, "drafter.init_from=drafter", cwd=models)
    assert outcome.returncode == 2
    assert "[tokenizer-differs]" in outcome.stderr
