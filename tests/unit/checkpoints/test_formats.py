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
from fledge.models.drafter.variants import EAGLE_1 as EAGLE_1_VARIANT
from fledge.models.drafter.variants import EAGLE_3 as EAGLE_3_VARIANT
from fledge.models.drafter.variants import EAGLE_3_1, build
from tests.checkpoint_fixtures import (
    DRAFT_VOCAB,
    LATENT_LAYER,
    LAYER,
    TARGET,
    draft_logits,
    drafter_configs,
    edit_config,
    edit_tensors,
    make_drafter,
    rename_tensors,
)
from tests.tiny_models import make_target

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE31 = EAGLE_3_1.config_for(TARGET)


@pytest.mark.parametrize("config", drafter_configs().values(), ids=drafter_configs())
def test_name_tables_invert(config: DrafterConfig) -> None:
    with torch.device("meta"):
        ours = list(stored_shapes(build(config), DENSE))
    eagle1 = config.architecture is Architecture.EAGLE1
    for midlayer in [False] if eagle1 else [False, True]:
        theirs = [their_name(name, midlayer=midlayer) for name in ours]
        assert [our_name(name, config.architecture) for name in theirs] == ours
        assert len(set(theirs)) == len(ours)


def write_foreign(
    directory: Path, config: DrafterConfig, fields: dict[str, object], *, layer_zero: str
) -> torch.Tensor:
    """Write a checkpoint as another trainer would; return the logits it must give."""
    drafter = make_drafter(config)
    save_drafter(drafter, directory)
    (directory / "fledge_provenance.json").unlink()
    (directory / "config.json").write_text(json.dumps(fields))
    rename_tensors(directory, lambda name: name.replace("midlayer.", layer_zero))
    return draft_logits(drafter, make_target(TARGET))


def test_a_latent_drafter_as_kimi_spells_it(tmp_path: Path) -> None:
    """model_type kimi_k2 and the class of vLLM; no head_dim, and layer 0 under its number."""
    latent = {"q_lora_rank": 10, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    fields = llama_fields(**latent, num_key_value_heads=4, model_type="kimi_k2", draft_vocab_size=64)
    fields |= {"fc_norm": True, "norm_output": True, AUX_IDS: [2, 4, 5]}
    config = replace(EAGLE31, layer=LATENT_LAYER)
    kimi = {**fields, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    expected = write_foreign(tmp_path / "drafter", config, kimi, layer_zero="layers.0.")
    target = make_target(TARGET)
    loaded = load_drafter(tmp_path / "drafter", target)
    assert loaded.config == config
    assert torch.equal(draft_logits(loaded, target), expected)
    with pytest.raises(CheckpointError, match="latent attention: only"):
        save_drafter(loaded, tmp_path / "speculators", to="speculators")
    write_foreign(
        tmp_path / "llama", config, {**fields, "architectures": ["LlamaForCausalLMEagle3"]}, layer_zero="layers.0."
    )
    with pytest.raises(CheckpointError, match="a class with latent attention, as there is a"):
        load_drafter(tmp_path / "llama", target)


def llama_fields(**more: object) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "use_cache": True,
        **more,
    }


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


FOREIGN = {
    # yuhuili/EAGLE-LLaMA3-Instruct-8B: says LlamaForCausalLM, stores its own embedding
    "eagle1-original": (
        replace(EAGLE_1_VARIANT.config_for(TARGET), own_embedding=True),
        llama_fields(architectures=["LlamaForCausalLM"]),
        "layers.0.",
        set(),
    ),
    # older EAGLE-1 heads have a bias on fc
    "eagle1-bias": (
        replace(EAGLE_1_VARIANT.config_for(TARGET), own_embedding=True, fc_bias=True),
        llama_fields(architectures=["LlamaForCausalLM"], bias=True),
        "layers.0.",
        {"fc-bias"},
    ),
    # yuhuili/EAGLE3-*: says LlamaForCausalLM, midlayer, reduced vocabulary, no aux ids
    "eagle3-original": (
        replace(EAGLE_3_VARIANT.config_for(TARGET), draft_vocab_size=DRAFT_VOCAB),
        llama_fields(architectures=["LlamaForCausalLM"], draft_vocab_size=DRAFT_VOCAB),
        "midlayer.",
        {"aux-ids-omitted"},
    ),
    # the smallest 3.1 config that vLLM runs
    "vllm-minimal": (
        EAGLE31,
        llama_fields(architectures=["Eagle3LlamaForCausalLM"], fc_norm=True, norm_output=True),
        "layers.0.",
        {"aux-ids-omitted"},
    ),
    "vllm-top-level-ids": (
        replace(EAGLE31, aux_layer_ids=(1, 4, 7)),
        llama_fields(architectures=["LlamaForCausalLMEagle3"], fc_norm=True, norm_output=True, **{AUX_IDS: [1, 4, 7]}),
        "layers.0.",
        set(),
    ),
    # SpecForge and SGLang: nested ids that count outputs, when they begin with 1
    "specforge": (
        EAGLE31,
        llama_fields(
            architectures=["LlamaForCausalLMEagle3"],
            fc_norm=True,
            norm_output=True,
            eagle_config={"use_aux_hidden_state": True, AUX_IDS: [1, 3, 4]},
        ),
        "midlayer.",
        {"aux-ids-nested"},
    ),
    # nested ids that count inputs, as TorchSpec's newer drafters have them
    "nested-inputs": (
        EAGLE31,
        llama_fields(
            architectures=["LlamaForCausalLMEagle3"],
            fc_norm=True,
            norm_output=True,
            eagle_config={AUX_IDS: [2, 4, 5]},
        ),
        "midlayer.",
        {"aux-ids-nested"},
    ),
    "norm-before-fc-nested": (
        replace(EAGLE_3_VARIANT.config_for(TARGET), norm_before_fc=True),
        llama_fields(
            architectures=["LlamaForCausalLMEagle3"], eagle_config={"norm_before_fc": True}, **{AUX_IDS: [2, 4, 5]}
        ),
        "midlayer.",
        set(),
    ),
    # transformers 5 spellings
    "rope-parameters": (
        EAGLE31,
        llama_fields(
            architectures=["LlamaForCausalLMEagle3"],
            fc_norm=True,
            norm_output=True,
            dtype="float32",
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
            **{AUX_IDS: [2, 4, 5]},
        ),
        "midlayer.",
        set(),
    ),
    "qwen3": (
        replace(EAGLE31, layer=replace(LAYER, qk_norm=True)),
        llama_fields(
            architectures=["Eagle3Qwen3ForCausalLM"],
            fc_norm=True,
            norm_output=True,
            head_dim=8,
            **{AUX_IDS: [2, 4, 5]},
        ),
        "layers.0.",
        set(),
    ),
}


@pytest.mark.filterwarnings("ignore::fledge.errors.CheckpointWarning")
@pytest.mark.parametrize("repack", [None, to_pickle, to_shards], ids=["safetensors", "pickle", "shards"])
@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_layouts(name: str, repack: Callable[[Path], None] | None, tmp_path: Path) -> None:
    config, fields, layer_zero, findings = FOREIGN[name]
    expected = write_foreign(tmp_path / "foreign", config, fields, layer_zero=layer_zero)
    if repack is not None:
        repack(tmp_path / "foreign")
    assert is_drafter(tmp_path / "foreign")
    checkpoint = read_drafter(tmp_path / "foreign")
    assert {finding.name for finding in check(checkpoint, TARGET)} == findings
    target = make_target(TARGET)
    loaded = load_drafter(tmp_path / "foreign", target)
    assert loaded.config == config
    assert torch.equal(draft_logits(loaded, target), expected)

    save_target(target, tmp_path / "target")
    _, remaining = convert_drafter(tmp_path / "foreign", tmp_path / "out", to="vllm", target=tmp_path / "target")
    assert {finding.name for finding in remaining} <= {"fc-bias"}
    assert torch.equal(draft_logits(load_drafter(tmp_path / "out", target), target), expected)


def test_speculators_as_published(tmp_path: Path) -> None:
    """Published checkpoints leave out what has a default, and store an embedding."""
    config = replace(
        EAGLE_3_VARIANT.config_for(TARGET), own_embedding=True, norm_before_residual=True, draft_vocab_size=DRAFT_VOCAB
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
    expected = write_foreign(tmp_path / "foreign", config, fields, layer_zero="layers.0.")
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
