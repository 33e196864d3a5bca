"""Directories as other projects write them, and the tables that translate tensor names."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.checkpoints.contract import check
from fledge.checkpoints.drafter import convert_drafter, load_drafter, save_drafter
from fledge.checkpoints.formats.dense import DENSE
from fledge.checkpoints.formats.drafter_config import our_name, their_name
from fledge.checkpoints.reading import is_drafter, read_drafter
from fledge.checkpoints.target import save_target
from fledge.checkpoints.weights import stored_shapes
from fledge.errors import CheckpointError
from fledge.models.config import Architecture, DrafterConfig
from fledge.models.drafter.variants import EAGLE_3, build
from tests.checkpoint_fixtures import (
    DRAFT_VOCAB,
    TARGET,
    draft_logits,
    drafter_configs,
    edit_config,
    edit_tensors,
    make_drafter,
)
from tests.drafter_spellings import AUX_IDS, EAGLE31, SPELLINGS, Spelling, llama_fields
from tests.tiny_models import make_target


@pytest.mark.parametrize("config", drafter_configs().values(), ids=drafter_configs())
def test_name_tables_invert(config: DrafterConfig) -> None:
    with torch.device("meta"):
        ours = list(stored_shapes(build(config), DENSE, {}, {}))
    eagle1 = config.architecture is Architecture.EAGLE1
    for midlayer in [False] if eagle1 else [False, True]:
        theirs = [their_name(name, midlayer=midlayer) for name in ours]
        assert [our_name(name, config.architecture) for name in theirs] == ours
        assert len(set(theirs)) == len(ours)


def to_pickle(directory: Path) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def to_shards(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    shards = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(shards.values()):
        save_file({n: tensors[n] for n in tensors if shards[n] == shard}, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


@pytest.mark.filterwarnings("ignore::fledge.errors.CheckpointWarning")
@pytest.mark.parametrize(
    ("name", "repack"),
    [*((name, None) for name in SPELLINGS), ("specforge", to_pickle), ("eagle3-original", to_shards)],
)
def test_spellings(name: str, repack: Callable[[Path], None] | None, tmp_path: Path) -> None:
    spelling, foreign, target = SPELLINGS[name], tmp_path / "foreign", make_target(TARGET)
    expected = draft_logits(spelling.write(foreign), target)
    if repack is not None:
        repack(foreign)
    assert is_drafter(foreign)
    assert {finding.name for finding in check(read_drafter(foreign), TARGET)} == spelling.findings
    loaded = load_drafter(foreign, target)
    assert loaded.config == spelling.config
    assert torch.equal(draft_logits(loaded, target), expected)

    save_target(target, tmp_path / "target")
    _, remaining = convert_drafter(foreign, tmp_path / "out", to="vllm", target=tmp_path / "target")
    assert {finding.name for finding in remaining} == spelling.findings & {"fc-bias", "rope-differs"}
    assert torch.equal(draft_logits(load_drafter(tmp_path / "out", target), target), expected)


def test_a_latent_drafter_has_one_class_and_no_window(tmp_path: Path) -> None:
    save_drafter(SPELLINGS["kimi"].write(tmp_path / "drafter"), tmp_path / "vllm")
    with pytest.raises(CheckpointError, match="latent attention: only"):
        convert_drafter(tmp_path / "vllm", tmp_path / "speculators", to="speculators")
    edit_config(tmp_path / "vllm", layer_types=["sliding_attention"], sliding_window=8)
    with pytest.raises(CheckpointError, match="'sliding_window' is 8, expected none with latent attention"):
        read_drafter(tmp_path / "vllm")
    edit_config(tmp_path / "drafter", architectures=["LlamaForCausalLMEagle3"])
    with pytest.raises(CheckpointError, match="a class with latent attention, as there is a"):
        read_drafter(tmp_path / "drafter")


def test_speculators_as_published(tmp_path: Path) -> None:
    """Published checkpoints leave out what has a default, and store an embedding."""
    config = replace(
        EAGLE_3.config_for(TARGET), own_embedding=True, norm_before_residual=True, draft_vocab_size=DRAFT_VOCAB
    )
    fields = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": llama_fields(head_dim=8),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": "org/llama", "architectures": ["LlamaForCausalLM"]},
        },
    }
    spelling = Spelling(config=config, fields=fields, layer_zero="layers.0.")
    expected = draft_logits(spelling.write(tmp_path / "foreign"), make_target(TARGET))
    checkpoint = read_drafter(tmp_path / "foreign")
    assert checkpoint.format == "speculators"
    assert [finding.name for finding in check(checkpoint, TARGET)] == ["aux-ids-omitted"]
    target = make_target(TARGET)
    with pytest.warns(UserWarning, match="aux-ids-omitted"):
        loaded = load_drafter(tmp_path / "foreign", target)
    assert torch.equal(draft_logits(loaded, target), expected)


def test_tensors_that_follow_from_the_config_are_ignored(tmp_path: Path) -> None:
    config = replace(EAGLE31, num_layers=2)
    drafter = make_drafter(config)
    save_drafter(drafter, tmp_path / "drafter")
    more = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4), "layers.1.hidden_norm.weight": torch.ones(32)}
    edit_tensors(tmp_path / "drafter", lambda tensors: {**tensors, **more})
    assert check(read_drafter(tmp_path / "drafter"), TARGET) == []
    assert load_drafter(tmp_path / "drafter", TARGET).config == config


def test_a_target_is_no_drafter(tmp_path: Path) -> None:
    save_target(make_target(TARGET), tmp_path / "target")
    assert not is_drafter(tmp_path / "target")
    with pytest.raises(CheckpointError, match="not an EAGLE drafter"):
        read_drafter(tmp_path / "target")


def test_top_level_ids_are_inputs_whatever_they_look_like(tmp_path: Path) -> None:
    save_drafter(make_drafter(EAGLE31), tmp_path / "drafter")
    edit_config(tmp_path / "drafter", **{AUX_IDS: [1, 3, 4]}, eagle_config=None)
    assert read_drafter(tmp_path / "drafter").config.aux_layer_ids == (1, 3, 4)
