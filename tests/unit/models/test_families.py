"""What a family file declares: names that go both ways, and configs that are read whole or refused."""

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.checkpoints.contract import describe_target
from fledge.checkpoints.target import (
    hf_config,
    load_target,
    read_target_config,
    save_target,
    sketch_target_config,
    target_files,
)
from fledge.errors import CheckpointError, CheckpointWarning
from fledge.files import read_json, write_json
from fledge.layers.config import RopeConfig
from fledge.layers.rope import inverse_frequencies
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


@pytest.mark.parametrize("name", TARGET_CONFIGS)
def test_inspect_describes_every_family(name: str, tmp_path: Path) -> None:
    config = TARGET_CONFIGS[name]
    target = make_target(config)
    save_target(target, tmp_path / "target")
    found, reason = sketch_target_config(tmp_path / "target")
    assert (found, reason) == (config, None)
    described = describe_target(found, target_files(tmp_path / "target", config.family), reason)
    assert described["size"]["parameters"] == sum(parameter.numel() for parameter in target.parameters())
    assert described["family"] == config.family
    assert ("train" in described["verbs"]) == (config.logits_softcap is None)
    assert "serve" in described["verbs"]


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
    kinds = (layer.norm_offset, layer.sinks, layer.attention_scale, layer.rope.interleaved, layer.activation)
    assert kinds == (False, False, None, False, "silu")
    assert layer.residual_multiplier == 1
    if TARGET_CONFIGS[name].layer.latent is None:
        assert layer.kv_cache == TARGET_CONFIGS[name].layer.kv_cache
    assert layer.kv_cache.value_dim == layer.head_dim


def test_what_published_gemma_configs_leave_out_is_known(tmp_path: Path) -> None:
    """The text_config of gemma-3-4b-it: transformers 4 fills in the rest by itself."""
    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    inner |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 1024}
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16"}
    write_json(tmp_path / "config.json", {**outer, "eos_token_id": [1, 106], "text_config": inner})
    config = read_target_config(tmp_path)
    assert (config.family, config.dtype, config.eos_ids, config.tied_head) == (
        "gemma3_text",
        "bfloat16",
        (1, 106),
        True,
    )
    assert (config.layer.num_heads, config.layer.num_kv_heads, config.layer.head_dim) == (8, 4, 256)
    assert [config.sliding_window(i) for i in (0, 4, 5, 6, 33)] == [1024, 1024, None, 1024, 1024]
    assert (config.layer_at(5).rope.theta, config.layer_at(5).rope.factor) == (1e6, 8.0)
    assert config.layer_at(6).rope == RopeConfig(theta=10000.0)


def test_what_published_llama4_configs_leave_out_is_known() -> None:
    """Scout has experts everywhere; Maverick in every second layer, and no norms after rotation."""
    shape = {"model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48}
    shape |= {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16}
    shape |= {"vocab_size": 202048, "max_position_embeddings": 10485760, "attn_temperature_tuning": 4}
    scout = FAMILIES["llama4_text"].config_from_hf(ConfigFields({**shape, "no_rope_layers": []}, "config.json"))
    assert [scout.sliding_window(i) for i in range(4)] == [8192, 8192, 8192, None]
    assert [scout.layer_at(i).rope.partial_factor for i in (2, 3)] == [1, 0]
    assert [scout.layer_at(i).temperature is None for i in (2, 3)] == [True, False]
    assert (scout.layer.rope.theta, scout.layer.intermediate_size, scout.layer.rotated_norm) == (500000.0, 16384, True)
    assert all(scout.layer_at(i).experts is not None for i in range(48))
    changes = {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attn_temperature_tuning": False}
    maverick = FAMILIES["llama4_text"].config_from_hf(ConfigFields({**shape, **changes}, "config.json"))
    assert [maverick.layer_at(i).experts is None for i in range(4)] == [True, False, True, False]
    assert (maverick.layer.rotated_norm, maverick.layer_at(3).temperature) == (False, None)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mixtral", {"num_experts_per_tok": 7}),
        ("glm4-moe", {"n_group": 3}),
        ("glm4-moe", {"n_group": 8}),
        ("glm4-moe", {"topk_group": 5}),
        ("glm4-moe", {"num_experts_per_tok": 5}),
        ("deepseek-v2", {"topk_method": "noaux_tc"}),
        ("deepseek-v2", {"norm_topk_prob": True}),
        ("deepseek-v2", {"n_group": 4}),
        ("deepseek-v3", {"scoring_func": "softmax"}),
        ("deepseek-v3", {"num_key_value_heads": 2}),
        ("deepseek-v3", {"qk_rope_head_dim": 3}),
        ("kimi-k2", {"moe_layer_freq": 2}),
        ("minimax-m2", {"attn_type_list": [0, 1]}),
        ("minimax-m2", {"scoring_func": "softmax"}),
        ("minimax-m2", {"use_qk_norm": False}),
        ("glm4-moe-lite", {"mlp_layer_types": ["dense"]}),
        ("gemma3", {"attn_logit_softcapping": 50.0}),
        ("gemma3", {"layer_types": ["sliding_attention"]}),
        ("gpt-oss", {"swiglu_alpha": 1.0}),
        ("llama4", {"no_rope_layers": [1, 0]}),
        ("llama4", {"layer_types": ["full_attention"] * 8}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
        ("granite", {"logits_scaling": 0}),
        ("ernie4.5-moe", {"use_bias": True}),
        ("ernie4.5-moe", {"moe_norm_min": 0.1}),
        ("gemma2", {"use_bidirectional_attention": True}),
        ("olmoe", {"clip_qkv": 8.0}),
    ],
)
def test_a_field_that_makes_no_sense_is_named(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"field '{next(iter(changes))}'"):
        read(TARGET_CONFIGS[name], **changes)


def test_a_flat_wrapper_and_one_of_another_class(tmp_path: Path) -> None:
    """Qwen2.5-VL as it was published: the fields of the language model beside those of the whole."""
    target = make_target(TARGET_CONFIGS["qwen2-window"])
    save_target(target, tmp_path / "target")
    file, config = tmp_path / "target" / "model.safetensors", tmp_path / "target" / "config.json"
    save_file({**load_file(file), "visual.merger.mlp.0.weight": torch.ones(3)}, file)
    changes = {"model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    changes |= {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"depth": 1}}
    write_json(config, {**(read_json(config) or {}), **changes})
    with warnings.catch_warnings(action="error"):
        assert load_target(tmp_path / "target").config == target.config
    write_json(config, {**(read_json(config) or {}), "architectures": ["LlamaForCausalLM"]})
    with pytest.warns(CheckpointWarning, match="LlamaForCausalLM"):
        load_target(tmp_path / "target")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model_type": "qwen3_next"}, "recurrent state.*vLLM serves it"),
        ({"model_type": "minimax_m1"}, "recurrent state.*vLLM serves it"),
        ({"model_type": "no_such_type"}, "not a supported target.*vLLM may serve it"),
        ({"model_type": "new_hybrid", "layer_types": ["linear_attention", "full_attention"]}, "vLLM serves it"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", values)
    with pytest.raises(CheckpointError, match=says) as caught:
        read_target_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_layers_that_predict_further_tokens_are_left_in_the_file(tmp_path: Path) -> None:
    target = make_target(TARGET_CONFIGS["glm4-moe"])
    save_target(target, tmp_path / "target")
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    save_file({**tensors, "model.layers.8.eh_proj.weight": torch.ones(3)}, tmp_path / "target" / "model.safetensors")
    config = tmp_path / "target" / "config.json"
    with pytest.raises(CheckpointError, match=r"unexpected tensor 'model\.layers\.8"):
        load_target(tmp_path / "target")
    write_json(config, {**(read_json(config) or {}), "num_nextn_predict_layers": 1})
    assert load_target(tmp_path / "target").config == target.config


def test_a_bias_that_chooses_between_experts_stays_in_float32(tmp_path: Path) -> None:
    save_target(make_target(TARGET_CONFIGS["glm4-moe"]), tmp_path / "target")
    mlp = load_target(tmp_path / "target", dtype=torch.bfloat16).get_submodule("layers.2.mlp")
    assert mlp.e_score_correction_bias.dtype == torch.float32
    assert mlp.gate.weight.dtype == torch.bfloat16


def test_transformers_5_counts_experts_by_another_name() -> None:
    for name in ("qwen3-moe", "qwen2-moe"):
        assert read(TARGET_CONFIGS[name], num_experts=None, num_local_experts=6) == TARGET_CONFIGS[name]
    with pytest.raises(CheckpointError, match="required field 'num_experts' is missing"):
        read(TARGET_CONFIGS["qwen3-moe"], num_experts=None)


def test_a_dtype_that_no_config_says_is_that_of_the_files(tmp_path: Path) -> None:
    """gpt-oss as it was published; in float32 it would be twice as large, and as slow."""
    save_target(make_target(TARGET_CONFIGS["gpt-oss"]).to(torch.bfloat16), tmp_path / "target")
    config = tmp_path / "target" / "config.json"
    write_json(config, {**(read_json(config) or {}), "torch_dtype": None})
    assert load_target(tmp_path / "target").lm_head.weight.dtype == torch.bfloat16
    (tmp_path / "target" / "model.safetensors").unlink()
    assert read_target_config(tmp_path / "target").dtype == "float32"


def test_the_original_positions_may_lie_beside_the_other_fields() -> None:
    """transformers 5 looks there too, before it takes all positions for the original ones."""
    for name in ("qwen3-yarn", "llama3-tied"):
        config = TARGET_CONFIGS[name]
        rope = dict(hf_config(config, "torch.float32")["rope_scaling"])  # type: ignore[call-overload]
        moved = {"original_max_position_embeddings": rope.pop("original_max_position_embeddings")}
        assert read(config, rope_scaling=rope, **moved) == config
    assert read(TARGET_CONFIGS["qwen3-yarn"], rope_scaling={"type": "yarn", "factor": 4.0}).layer.rope == RopeConfig(
        type="yarn", factor=4.0, original_max_positions=256
    )


def test_longrope() -> None:
    """As Phi-3.5 and Phi-4-mini say it: the original positions at top level, no factor, and an older name."""
    config, base = TARGET_CONFIGS["phi4-mini"], {"rope_scaling": None, "original_max_position_embeddings": 64}
    rope: dict[str, Any] = {"type": "su", "short_factor": [1.0, 1.1], "long_factor": [1.5, 3]}
    found = read(config, **{**base, "rope_scaling": rope}).layer.rope
    assert (found.type, found.factor, found.original_max_positions) == ("longrope", 4.0, 64)
    assert found.attention_factor == pytest.approx((1 + math.log(4) / math.log(64)) ** 0.5)
    assert torch.allclose(inverse_frequencies(found, 8)[0], torch.tensor([1 / 1.5, 0.01 / 3]))
    short = read(config, **{**base, "rope_scaling": rope, "original_max_position_embeddings": 256}).layer.rope
    assert torch.allclose(inverse_frequencies(short, 8)[0], torch.tensor([1.0, 0.01 / 1.1]))
    assert inverse_frequencies(short, 8)[1] == 1.0
    for name, wrong in (("long_factor", [1.0]), ("short_factor", [1.0, -2.0]), ("long_mscale", 1.2)):
        with pytest.raises(CheckpointError, match=f"field '{name}'"):
            read(config, **{**base, "rope_scaling": {**rope, name: wrong}})
    assert config.layer.as_drafter.rope == RopeConfig()


def test_what_published_configs_of_other_families_say() -> None:
    """MiniMax-M2 counts dimensions that rotate, Ministral 3 and OLMo 3 as transformers 5 writes them, GLM-4.7-Flash."""
    minimax = read(TARGET_CONFIGS["minimax-m2"], rotary_dim=4, partial_rotary_factor=None, attn_type_list=[1] * 8)
    assert minimax == TARGET_CONFIGS["minimax-m2"]
    config = TARGET_CONFIGS["olmo3"]
    yarn = {"rope_theta": 500000.0, **hf_config(config, "torch.float32")["rope_scaling"]}
    by_type = {"full_attention": yarn, "sliding_attention": {"rope_theta": 500000.0, "rope_type": "default"}}
    assert read(config, rope_parameters=by_type, rope_theta=None, rope_scaling=None) == config
    by_type["sliding_attention"] = {"rope_theta": 7000.0, "rope_type": "default"}
    with pytest.raises(CheckpointError, match="field 'sliding_attention'"):
        read(config, rope_parameters=by_type, rope_theta=None, rope_scaling=None)
    kinds = ["dense", *["sparse"] * 7]
    lite = TARGET_CONFIGS["glm4-moe-lite"]
    assert read(lite, first_k_dense_replace=None, mlp_layer_types=kinds) == lite


@pytest.mark.parametrize("kind", ["yarn", "longrope", "linear"])
def test_layers_that_do_not_rotate_know_of_no_scaling(kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    config = read(TARGET_CONFIGS["smollm3"], rope_scaling={**scaling, **factors})
    frequencies, magnitude = inverse_frequencies(config.layer_at(3).rope, config.layer.head_dim)
    assert (len(frequencies), magnitude) == (0, 1.0)
    make_target(config)


def test_what_published_configs_of_granite_smollm3_ernie_and_exaone_say(tmp_path: Path) -> None:
    """Fields by the names in which they were published, and layers that predict further tokens left in the file."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 40, "max_position_embeddings": 256}

    def published(family: str, **values: Any) -> TargetConfig:
        return FAMILIES[family].config_from_hf(ConfigFields({"model_type": family, **shape, **values}, "config.json"))

    scales = {"embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "logits_scaling": 16.0}
    granite = published("granite", **scales, residual_multiplier=0.22, rope_theta=1e7, tie_word_embeddings=True)
    assert (granite.embedding_scale, granite.logits_scaling, granite.layer.residual_multiplier) == (12.0, 16.0, 0.22)
    assert (granite.layer.attention_scale, granite.layer.rope.theta) == (0.0078125, 1e7)
    smollm3 = published("smollm3", no_rope_layer_interval=4, sliding_window=None, rope_theta=5e6)
    assert [smollm3.layer_at(i).rope.partial_factor for i in range(8)] == [1, 1, 1, 0] * 2
    assert smollm3.tied_head
    counts = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20, "moe_layer_end_index": -1}
    ernie = published("ernie4_5_moe", **counts, moe_layer_start_index=2, rms_norm_eps=1e-5)
    assert [ernie.layer_at(i).experts is None for i in range(8)] == [True] * 2 + [False] * 6
    assert (ernie.layer.experts.shared_size, ernie.layer.rope.theta) == (40, 500000.0)  # type: ignore[union-attr]
    hybrid = published("exaone4", sliding_window=6, sliding_window_pattern="LLLG", rope_theta=1e6)
    assert hybrid.sliding_windows == (6, 6, 6, None) * 2
    assert [hybrid.layer_at(i).rope.partial_factor for i in range(4)] == [1, 1, 1, 0]
    save_target(make_target(TARGET_CONFIGS["ernie4.5-moe"]), tmp_path / "target")
    file = tmp_path / "target" / "model.safetensors"
    tensors = load_file(file)
    assert tensors["model.layers.1.mlp.moe_statics.e_score_correction_bias"].shape == (1, 6)
    save_file({**tensors, "model.mtp_linear_proj.0.weight": torch.ones(3)}, file)
    assert load_target(tmp_path / "target").config == TARGET_CONFIGS["ernie4.5-moe"]


@pytest.mark.filterwarnings("error::fledge.errors.CheckpointWarning")
def test_the_wrapper_of_kimi_k25(tmp_path: Path) -> None:
    """Quantised or not it has one level of names and of fields more; so have others whose language model is known."""
    target = make_target(TARGET_CONFIGS["kimi-k2"])
    save_target(target, tmp_path / "target")
    file, config = tmp_path / "target" / "model.safetensors", tmp_path / "target" / "config.json"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, "vision_tower.patch_embed.proj.weight": torch.ones(3), "mm_projector.x": torch.ones(1)}, file)
    inner = read_json(config) or {}
    inner["architectures"] = ["DeepseekV3ForCausalLM"]
    outer = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "vision_config": {}}
    for text in (inner, {name: value for name, value in inner.items() if name != "architectures"}):
        write_json(config, {**outer, "text_config": text})
        assert load_target(tmp_path / "target").config == target.config


def test_fields_of_older_configs_may_be_missing() -> None:
    """Real configs have no head_dim, no rope_interleave, and groups only where experts are chosen by them."""
    missing = {"head_dim": None, "rope_interleave": None, "norm_topk_prob": None, "scoring_func": None}
    assert read(TARGET_CONFIGS["deepseek-v3"], **missing) == TARGET_CONFIGS["deepseek-v3"]
    rope = read(TARGET_CONFIGS["gpt-oss"], rope_scaling=None, rope_theta=150000.0).layer.rope
    assert (rope.type, rope.factor, rope.theta) == ("yarn", 32.0, 150000.0)
    plain = replace(TARGET_CONFIGS["gpt-oss"], layer=replace(TARGET_CONFIGS["gpt-oss"].layer, rope=RopeConfig()))
    assert read(plain) == plain
    lite = read(TARGET_CONFIGS["deepseek-v2"], topk_method="greedy", n_group=None, topk_group=None)
    assert lite.layer.experts is not None
    assert lite.layer.experts.n_group == 1
