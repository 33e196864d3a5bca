"""What is written is read back, bit for bit, for every variant and both formats."""

import json
from pathlib import Path

import pytest
import torch

from fledge.checkpoints.contract import check
from fledge.checkpoints.drafter import convert_drafter, load_drafter, save_drafter
from fledge.checkpoints.reading import read_drafter
from fledge.errors import CheckpointError
from fledge.models.drafter.base import Drafter
from tests.checkpoint_fixtures import TARGET, draft_logits, drafter_configs, make_drafter
from tests.tiny_models import make_target

CONFIGS = drafter_configs()
# What the speculators format has: EAGLE-3 without latent attention.
EAGLE_3_CONFIGS = [name for name in CONFIGS if "eagle1" not in name and name != "latent"]
HARMLESS = pytest.mark.filterwarnings("ignore::fledge.errors.CheckpointWarning")  # other ropes, biases


def assert_same(one: Drafter, other: Drafter) -> None:
    assert one.config == other.config
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@HARMLESS
@pytest.mark.parametrize("name", CONFIGS)
def test_vllm_layout(name: str, tmp_path: Path) -> None:
    drafter = make_drafter(CONFIGS[name])
    save_drafter(drafter, tmp_path / "one")
    loaded = load_drafter(tmp_path / "one", TARGET)
    assert_same(drafter, loaded)
    save_drafter(loaded, tmp_path / "two")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@HARMLESS
@pytest.mark.parametrize("name", EAGLE_3_CONFIGS)
def test_speculators_format_and_back(name: str, tmp_path: Path) -> None:
    drafter = make_drafter(CONFIGS[name])
    save_drafter(drafter, tmp_path / "vllm")
    convert_drafter(tmp_path / "vllm", tmp_path / "speculators", to="speculators")
    assert read_drafter(tmp_path / "speculators").format == "speculators"
    assert_same(drafter, load_drafter(tmp_path / "speculators", TARGET))
    convert_drafter(tmp_path / "speculators", tmp_path / "back", to="vllm")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "vllm" / file).read_bytes() == (tmp_path / "back" / file).read_bytes()


@HARMLESS
@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if c.dtype == "float32"])
def test_outputs_survive(name: str, tmp_path: Path) -> None:
    target, drafter = make_target(TARGET), make_drafter(CONFIGS[name])
    expected = draft_logits(drafter, target)
    formats = ("vllm", "speculators") if name in EAGLE_3_CONFIGS else ("vllm",)
    for form in formats:
        save_drafter(drafter, tmp_path / form, to=form)  # after share_with: the target's matrices are not written
        loaded = load_drafter(tmp_path / form, target)
        assert not loaded.training
        assert torch.equal(draft_logits(loaded, target), expected)


def test_sound_checkpoints_have_no_findings(tmp_path: Path) -> None:
    for name in (
        "eagle1",
        "eagle3",
        "eagle3.1",
        "reduced-vocabulary",
        "four-aux-layers",
        "two-layers",
        "narrow",
        "window",
        "latent",
    ):
        save_drafter(make_drafter(CONFIGS[name]), tmp_path / name)
        assert check(read_drafter(tmp_path / name), TARGET) == []


def test_dtype_and_device_follow_the_target(tmp_path: Path) -> None:
    save_drafter(make_drafter(CONFIGS["reduced-vocabulary"]), tmp_path / "drafter")
    target = make_target(TARGET).to(torch.bfloat16)
    loaded = load_drafter(tmp_path / "drafter", target)
    assert loaded.embed_tokens is target.embed_tokens
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded.vocabulary is not None
    assert loaded.vocabulary.d2t.dtype == torch.int64


def test_vllm_config_spells_out_what_engines_would_guess(tmp_path: Path) -> None:
    save_drafter(make_drafter(CONFIGS["reduced-vocabulary"]), tmp_path / "drafter")
    fields = json.loads((tmp_path / "drafter" / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "num_aux_hidden_states": 3,
        "target_hidden_size": 32,
        "max_position_embeddings": 128,
        "draft_vocab_size": 24,
        "head_dim": 8,
        "torch_dtype": "float32",
    }
    assert expected.items() <= fields.items()
    assert fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # SGLang counts outputs


def test_speculators_config_names_the_target(tmp_path: Path) -> None:
    target = {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]}
    drafter = make_drafter(CONFIGS["eagle3.1"])
    save_drafter(drafter, tmp_path / "drafter", to="speculators", target=target, num_speculative_tokens=5)
    fields = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert fields["speculators_config"]["verifier"] == {
        "name_or_path": "org/model",
        "architectures": ["LlamaForCausalLM"],
    }
    assert fields["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert read_drafter(tmp_path / "drafter").target == target


def test_provenance_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_drafter(make_drafter(CONFIGS["eagle3"]), tmp_path / "org/drafter", provenance={"recipe": "tiny"})
    convert_drafter("org/drafter", tmp_path / "two", to="speculators")
    provenance = read_drafter(tmp_path / "two").provenance
    assert provenance is not None
    assert provenance["recipe"] == "tiny"
    assert provenance["converted_from"] == "org/drafter"


def test_nothing_is_overwritten_or_left_behind(tmp_path: Path) -> None:
    drafter = make_drafter(CONFIGS["eagle1"])
    with pytest.raises(CheckpointError, match="no EAGLE-1"):
        save_drafter(drafter, tmp_path / "x", to="speculators")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x").mkdir()
    with pytest.raises(CheckpointError, match="already exists"):
        save_drafter(drafter, tmp_path / "x")
    assert list((tmp_path / "x").iterdir()) == []
