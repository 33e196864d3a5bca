"""What a family file declares: names that go both ways, and configs that are read whole or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.checkpoints.target import hf_config, load_target, read_target_config, save_target
from fledge.errors import CheckpointError
from fledge.files import write_json
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields
from fledge.models.target import FAMILIES
from tests.tiny_models import TARGET_CONFIGS, make_target


def read(config: TargetConfig, **changes: Any) -> TargetConfig:
    values = {**hf_config(config, "torch.float32"), **changes}
    return FAMILIES[config.family].config_from_hf(ConfigFields(values, "config.json"))


def test_every_file_of_the_folder_is_a_family() -> None:
    folder = Path(__import__("fledge.models.target").models.target.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "decoder", "family"}
    assert files == set(FAMILIES)
    assert {config.family for config in TARGET_CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", TARGET_CONFIGS)
def test_tensor_names_go_both_ways(name: str) -> None:
    target = make_target(TARGET_CONFIGS[name])
    family = FAMILIES[target.config.family]
    stored = {ours: family.stored_name(ours) for ours in target.state_dict()}
    assert len(set(stored.values())) == len(stored)
    assert all(family.our_name(theirs) == ours for ours, theirs in stored.items())


@pytest.mark.parametrize("name", TARGET_CONFIGS)
def test_what_is_written_is_read(name: str) -> None:
    config = TARGET_CONFIGS[name]
    assert read(config) == config


def test_a_layer_of_a_family_can_differ_from_the_others() -> None:
    dense = [i for i in range(8) if TARGET_CONFIGS["qwen3-moe"].layer_at(i).experts is None]
    assert dense == [3]
    every_second = read(TARGET_CONFIGS["qwen3-moe"], mlp_only_layers=[], decoder_sparse_step=2)
    assert [every_second.layer_at(i).experts is None for i in range(4)] == [True, False, True, False]


@pytest.mark.parametrize("nested", [True, False])
def test_a_partial_rotation_is_honoured_or_refused(nested: bool, tmp_path: Path) -> None:
    """transformers 5 writes it among the rope's parameters, 4 beside the other fields."""
    factor = {"partial_rotary_factor": 0.25}
    changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **factor}} if nested else factor
    values = {**hf_config(TARGET_CONFIGS["phi3"], "torch.float32"), "partial_rotary_factor": None, **changes}
    write_json(tmp_path / "config.json", values)
    assert read_target_config(tmp_path).layer.rope.partial_factor == 0.25
    for name in ("llama2", "qwen3", "olmo2"):
        with pytest.raises(CheckpointError, match=r"partial_rotary_factor.*0\.25"):
            read(TARGET_CONFIGS[name], **changes)
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        read(TARGET_CONFIGS["phi3"], partial_rotary_factor=0.5, rope_parameters={"partial_rotary_factor": 0.25})
    with pytest.raises(CheckpointError, match="head_dim"):
        read(TARGET_CONFIGS["phi3"], partial_rotary_factor=0.4)


@pytest.mark.parametrize("name", TARGET_CONFIGS)
def test_drafters_are_ordinary_whatever_the_target_is(name: str) -> None:
    layer = TARGET_CONFIGS[name].layer.as_drafter
    assert (layer.experts, layer.norm_placement, layer.qk_norm_whole, layer.rope.partial_factor) == (
        None,
        "pre",
        False,
        1.0,
    )
    if TARGET_CONFIGS[name].layer.latent is None:
        assert layer.kv_cache == TARGET_CONFIGS[name].layer.kv_cache
    assert layer.kv_cache.value_dim == layer.head_dim
    assert not layer.rope.interleaved


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method.*greedy or group_limited_greedy"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob.*false"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func.*sigmoid"),
        ("deepseek-v3", {"n_group": 4}, "n_group.*equal groups of the 6 experts"),
        ("deepseek-v3", {"n_group": 6}, "n_group.*equal groups"),
        ("deepseek-v3", {"topk_group": 4}, "topk_group.*at most n_group"),
        ("deepseek-v3", {"num_experts_per_tok": 5}, "num_experts_per_tok.*at most the 4 to choose from"),
        ("deepseek-v3", {"num_key_value_heads": 2}, r"num_key_value_heads.*num_attention_heads \(4\)"),
        ("deepseek-v3", {"qk_rope_head_dim": 3}, "head_dim.*even"),
        ("kimi-k2", {"moe_layer_freq": 2}, "moe_layer_freq.*1"),
    ],
)
def test_deepseek_configs_that_mean_something_else_are_refused(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        read(TARGET_CONFIGS[name], **changes)


def test_fields_of_older_configs_may_be_missing() -> None:
    """Real configs have no head_dim, no rope_interleave, and groups only where experts are chosen by them."""
    missing = {"head_dim": None, "rope_interleave": None, "norm_topk_prob": None, "scoring_func": None}
    assert read(TARGET_CONFIGS["deepseek-v3"], **missing) == TARGET_CONFIGS["deepseek-v3"]
    lite = read(TARGET_CONFIGS["deepseek-v2"], topk_method="greedy", n_group=None, topk_group=None)
    assert lite.layer.experts is not None
    assert lite.layer.experts.n_group == 1


def test_layers_that_predict_several_tokens_are_left_out_and_router_biases_stay_precise(tmp_path: Path) -> None:
    target = make_target(TARGET_CONFIGS["deepseek-v3"])
    save_target(target, tmp_path / "target")
    file = tmp_path / "target" / "model.safetensors"
    tensors = load_file(file)
    more = {name.replace(".7.", ".8."): tensor.clone() for name, tensor in tensors.items() if ".layers.7." in name}
    save_file(tensors | more | {"model.layers.8.eh_proj.weight": torch.ones(32, 64)}, file)
    loaded = load_target(tmp_path / "target", dtype=torch.bfloat16)
    assert len(loaded.layers) == 8
    assert loaded.layers[7].mlp.gate.weight.dtype == torch.bfloat16
    assert torch.equal(loaded.layers[7].mlp.e_score_correction_bias, target.layers[7].mlp.e_score_correction_bias)
