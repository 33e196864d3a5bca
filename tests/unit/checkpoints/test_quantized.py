"""Quantised checkpoints: what is loaded is exactly what the definition of each format makes of the stored tensors."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fledge.checkpoints.contract import describe_target
from fledge.checkpoints.drafter import load_drafter, save_drafter
from fledge.checkpoints.target import describe_quantization, load_target, save_target, target_files
from fledge.engine.config import EngineConfig
from fledge.engine.engine import LLMEngine
from fledge.errors import CheckpointError, ConfigError
from fledge.layers.block import attentions, fuse_input_quantization
from fledge.layers.dense_cache import DenseCache
from fledge.layers.linear import Linear
from fledge.layers.quantized import QuantizedLinear
from tests.broken_checkpoints import EAGLE31
from tests.checkpoint_fixtures import LAYER, TARGET, draft_logits, edit_config, edit_tensors, make_drafter, without
from tests.quantized_checkpoints import FORMATS, mxfp4, quantize_checkpoint
from tests.tiny_models import TARGET_CONFIGS, make_target

# Biases, and widths that groups of 32 divide.
CONFIG = replace(TARGET, num_layers=2, layer=replace(LAYER, intermediate_size=64, qkv_bias=True, output_bias=True))


def _quark(**said: Any) -> dict[str, Any]:
    """A config of Quark's that says this of all linears."""
    config = FORMATS["quark-tensor"].config
    return {**config, "global_quant_config": {**config["global_quant_config"], **said}}


def linears_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: m.weight for name, m in model.named_modules() if isinstance(m, nn.Linear | QuantizedLinear)}


@pytest.fixture(name="target", scope="module")
def _target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dense") / "target"
    save_target(make_target(CONFIG), directory)
    return directory


@pytest.mark.parametrize("name", FORMATS)
def test_a_target_is_what_its_tensors_mean(name: str, target: Path, tmp_path: Path) -> None:
    quantize_checkpoint(target, tmp_path / "stored", tmp_path / "meant", FORMATS[name])
    for dtype in (torch.float32, torch.bfloat16):
        stored, meant = load_target(tmp_path / "stored", dtype=dtype), load_target(tmp_path / "meant", dtype=dtype)
        expected = linears_of(meant)
        for linear, weight in linears_of(stored).items():
            assert torch.equal(weight, expected[linear]), linear
        assert isinstance(stored.layers[0].self_attn.o_proj, QuantizedLinear)
        assert type(stored.lm_head) is type(meant.lm_head)
        x = torch.randn(3, CONFIG.hidden_size, dtype=dtype)
        expected_out = meant.layers[0].self_attn.qkv_proj(FORMATS[name].multiplied(x))
        torch.testing.assert_close(stored.layers[0].self_attn.qkv_proj(x), expected_out)


def test_activations_that_are_rounded_early_are_the_same(target: Path, tmp_path: Path) -> None:
    """By norms and gates, as on a GPU, and only where a product of codes reads them, with a scale for each token."""
    for name in ("ct-fp8-dynamic", "ct-fp8-static", "ct-fp8-channel"):
        quantize_checkpoint(target, tmp_path / name, tmp_path / f"{name}-meant", FORMATS[name])
        model = load_target(tmp_path / name)
        positions = torch.arange(9)[None]
        expected = model(positions, positions, DenseCache(CONFIG.num_layers).extend(positions)).final
        fuse_input_quantization(model)
        layer = model.layers[0]
        quantized = {
            layer.input_layernorm.quantizes_output,
            layer.post_attention_layernorm.quantizes_output,
            layer.mlp.quantizes_intermediate,
        }
        assert quantized == {name == "ct-fp8-dynamic"}
        assert not model.norm.quantizes_output
        found = model(positions, positions, DenseCache(CONFIG.num_layers).extend(positions)).final
        assert torch.equal(found, expected)


def test_scales_of_activations_are_read_where_they_are_used(target: Path, tmp_path: Path) -> None:
    """Of query, key and value, which have the same input, the largest; a plain linear may have one, unread."""
    quantize_checkpoint(
        target, tmp_path / "stored", tmp_path / "meant", FORMATS["ct-fp8-static"], lambda name: "o_proj" in name
    )
    scale = "model.layers.0.self_attn.{}_proj.input_scale"
    more = {scale.format("k"): torch.tensor([0.5]), scale.format("o"): torch.tensor(3.0)}
    edit_tensors(tmp_path / "stored", lambda tensors: tensors | more)
    attention = load_target(tmp_path / "stored").layers[0].self_attn
    assert float(attention.qkv_proj.input_scale) == 0.5
    assert type(attention.o_proj) is Linear


def test_a_drafter_is_what_its_tensors_mean(tmp_path: Path) -> None:
    target = make_target(TARGET)
    save_drafter(make_drafter(EAGLE31), tmp_path / "drafter")
    for name in ("ct-fp8-channel", "ct-int4", "awq"):
        stored, meant = tmp_path / name / "stored", tmp_path / name / "meant"
        quantize_checkpoint(tmp_path / "drafter", stored, meant, FORMATS[name])
        drafter = load_drafter(stored, target)
        assert isinstance(drafter.fc, QuantizedLinear)
        torch.testing.assert_close(draft_logits(drafter, target), draft_logits(load_drafter(meant, target), target))


@pytest.mark.parametrize("field", ["layer_quant_config", "layer_type_quant_config"])
def test_quark_says_it_by_layer_and_by_class(field: str, target: Path, tmp_path: Path) -> None:
    """Here of all linears, while what it says of the rest is what none is stored as."""
    form = FORMATS["quark-channel"]
    said = form.config["global_quant_config"]
    kinds = {"layer_quant_config": ("*_proj", "lm_head"), "layer_type_quant_config": ("Linear",)}[field]
    other = _quark()["global_quant_config"] if field == "layer_type_quant_config" else None
    config = {**form.config, "global_quant_config": other, field: dict.fromkeys(kinds, said)}
    quantize_checkpoint(target, tmp_path / "stored", tmp_path / "meant", replace(form, config=config))
    stored, expected = load_target(tmp_path / "stored"), linears_of(load_target(tmp_path / "meant"))
    assert all(torch.equal(weight, expected[name]) for name, weight in linears_of(stored).items())
    assert {one.activations for one in stored.modules() if isinstance(one, QuantizedLinear)} == {"token"}


def test_auto_round_says_bits_by_name(target: Path, tmp_path: Path) -> None:
    """Names before patterns; what is named as plain is stored so."""
    wide, down = FORMATS["auto-round-int8"], "model.layers.1.mlp.down_proj"
    extra = {r".*\.down_proj": {"bits": 4}, down: {"bits": 8}, "mlp.gate_proj": {"bits": 16}}
    form = replace(wide, config={**wide.config, "bits": 8, "extra_config": extra})
    is_plain = lambda name: name.endswith(("gate_proj.weight", "layers.0.mlp.down_proj.weight"))  # noqa: E731
    quantize_checkpoint(target, tmp_path / "stored", tmp_path / "meant", form, is_plain)
    stored, expected = load_target(tmp_path / "stored"), linears_of(load_target(tmp_path / "meant"))
    assert all(torch.equal(weight, expected[name]) for name, weight in linears_of(stored).items())
    assert stored.layers[1].mlp.down_proj.kind == "int8"


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_experts_are_what_their_tensors_mean(name: str, tmp_path: Path) -> None:
    """With a router that is plain without being on a list, and with latents, whose matrix is taken apart."""
    config = replace(TARGET_CONFIGS[name], num_layers=4, layers=TARGET_CONFIGS[name].layers[:4])
    save_target(make_target(config), tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "stored", tmp_path / "meant", FORMATS["ct-fp8-channel"])
    stored, expected = load_target(tmp_path / "stored"), linears_of(load_target(tmp_path / "meant"))
    assert all(torch.equal(weight, expected[name]) for name, weight in linears_of(stored).items())
    mlps = [layer.mlp for layer in stored.layers if hasattr(layer.mlp, "experts")]
    assert all(type(mlp.gate) is Linear for mlp in mlps)
    assert all(isinstance(mlp.experts[0].down_proj, QuantizedLinear) for mlp in mlps)


def test_gpt_oss_experts_in_mxfp4(tmp_path: Path) -> None:
    config = replace(TARGET_CONFIGS["gpt-oss"], num_layers=2, sliding_windows=(6, None))
    layer = replace(config.layer, intermediate_size=64, experts=replace(config.layer.experts, intermediate_size=64))
    save_target(make_target(replace(config, layer=layer)), tmp_path / "meant")
    shutil.copytree(tmp_path / "meant", tmp_path / "stored")
    packed: dict[str, Tensor] = {}

    def meant(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            parts = [mxfp4(matrix.t().contiguous()) for matrix in tensors[name]]
            blocks = torch.stack([codes for codes, _, _ in parts]).unflatten(-1, (-1, 16))
            packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, torch.stack([one for _, one, _ in parts])
            tensors[name] = torch.stack([matrix.t() for _, _, matrix in parts])
        return tensors

    edit_tensors(tmp_path / "meant", meant)
    edit_tensors(
        tmp_path / "stored",
        lambda tensors: {n: t for n, t in tensors.items() if f"{n}_blocks" not in packed} | packed,
    )
    edit_config(tmp_path / "stored", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})
    stored, expected = load_target(tmp_path / "stored"), linears_of(load_target(tmp_path / "meant"))
    assert all(torch.equal(weight, expected[name]) for name, weight in linears_of(stored).items())
    assert isinstance(stored.layers[0].mlp.experts[0].down_proj, QuantizedLinear)
    assert describe_quantization(tmp_path / "stored") == "mxfp4, 4-bit floats (E2M1), groups of 32"


@pytest.mark.parametrize(
    ("ignore", "dense"),
    [
        (["lm_head", "model.layers.0.mlp.down_proj"], "mlp.down_proj"),
        (["lm_head", r"re:.*layers\.0\.self_attn\..*"], "self_attn.qkv_proj"),
        (["lm_head", "model.layers.0.self_attn.q_proj"], "self_attn.qkv_proj"),  # the others of it are not
    ],
)
def test_ignored_linears_are_plain(ignore: list[str], dense: str, target: Path, tmp_path: Path) -> None:
    form = FORMATS["ct-int4"]
    named = [re.compile(one[3:] if one.startswith("re:") else re.escape(one)) for one in ignore]
    is_plain = lambda name: any(one.match(name) for one in named)  # noqa: E731
    form = replace(form, config={**form.config, "ignore": ignore})
    quantize_checkpoint(target, tmp_path / "stored", tmp_path / "meant", form, is_plain)
    stored, meant = load_target(tmp_path / "stored"), load_target(tmp_path / "meant")
    assert type(stored.layers[0].get_submodule(dense)) is Linear
    assert isinstance(stored.layers[1].get_submodule(dense), QuantizedLinear)
    assert torch.equal(stored.layers[0].get_submodule(dense).weight, meant.layers[0].get_submodule(dense).weight)


def test_an_older_modelopt_config_lies_beside(target: Path, tmp_path: Path) -> None:
    quantize_checkpoint(target, tmp_path / "stored", tmp_path / "meant", FORMATS["modelopt-fp8"])
    edit_config(tmp_path / "stored", quantization_config=None)
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "stored" / "hf_quant_config.json").write_text(json.dumps(beside))
    assert isinstance(load_target(tmp_path / "stored").layers[0].mlp.down_proj, QuantizedLinear)


KV_ONLY = [
    {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"type": "float", "num_bits": 8}},
    {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
]


@pytest.mark.parametrize(
    ("stored", "scales"),
    [
        ({"k_scale": 0.5, "v_scale": 0.25}, (0.5, 0.25)),
        ({"k_proj.k_scale": 0.5, "v_proj.v_scale": 0.25}, (0.5, 0.25)),
        ({"attn.k_scale": 0.5, "attn.v_scale": 0.25, "attn.q_scale": 3.0}, (0.5, 0.25)),
        ({"k_proj.output_scale": 0.5, "v_proj.output_scale": 0.25, "q_proj.output_scale": 3.0}, (0.5, 0.25)),
        ({"kv_scale": 0.5}, (0.5, 0.5)),
        ({"qkv_proj.k_scale": 0.5}, (0.5, 0.5)),
    ],
)
def test_scales_of_keys_and_values(
    stored: dict[str, float], scales: tuple[float, float], target: Path, tmp_path: Path
) -> None:
    """Of the second layer; the first has none. Weights may be quantised or not."""
    shutil.copytree(target, tmp_path / "stored")
    added = {f"model.layers.1.self_attn.{name}": torch.tensor([scale]) for name, scale in stored.items()}
    edit_tensors(tmp_path / "stored", lambda tensors: tensors | added)
    for config in KV_ONLY:
        edit_config(tmp_path / "stored", quantization_config=config)
        found = [one.spec.kv_scales for one in attentions(load_target(tmp_path / "stored"))]
        assert found == [(1.0, 1.0), scales]


def test_scales_of_each_head_are_no_use_to_an_engine(target: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path / "stored")
    edit_tensors(tmp_path / "stored", lambda t: t | {"model.layers.1.self_attn.k_scale": torch.ones(2)})
    edit_config(tmp_path / "stored", quantization_config=KV_ONLY[0])
    loaded = load_target(tmp_path / "stored")
    LLMEngine(loaded, None, EngineConfig(num_blocks=8))
    with pytest.raises(ConfigError, match="k_scale and v_scale are not one positive number for each layer; use auto"):
        LLMEngine(loaded, None, EngineConfig(num_blocks=8, kv_cache_dtype="fp8"))


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("ct-int4", lambda t: t.pop(f"{DOWN}.weight_scale"), "tensor 'layers.0.mlp.down_proj.weight_scale' is missing"),
        ("ct-int4", lambda t: t.update({f"{DOWN}.g": torch.ones(2)}), f"unexpected tensor '{DOWN}.g'"),
        (
            "fp8-blocks",
            lambda t: t.update({f"{DOWN}.weight_scale_inv": torch.ones(2, 2)}),
            r"has shape \[2, 2\], but config.json makes it \[2, 4\]",
        ),
        (
            "ct-fp8-channel",
            lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"].float().to(torch.float8_e5m2)}),
            "is float8_e5m2 of shape .*, expected float8_e4m3fn",
        ),
        (
            "ct-fp8-static",
            lambda t: t.pop(f"{DOWN}.input_scale"),
            "tensor 'layers.0.mlp.down_proj.input_scale' is missing",
        ),
        (
            "modelopt-fp8",
            lambda t: t.update({f"{DOWN}.input_scale": torch.tensor(-1.0)}),
            r"down_proj.input_scale' is float32 of shape \[\], expected a positive number",
        ),
        ("gptq", lambda t: t.update({f"{DOWN}.g_idx": torch.zeros(64, dtype=torch.int32)}), "expected groups of 16"),
        (
            "ct-fp8-channel",
            lambda t: t[f"{DOWN}.weight"].view(torch.uint8)[0].fill_(0x7F),
            "has 64 values that are not finite",
        ),
    ],
)
def test_what_does_not_fit_is_named(name: str, change: Any, says: str, target: Path, tmp_path: Path) -> None:
    quantize_checkpoint(target, tmp_path / "stored", tmp_path / "meant", FORMATS[name])
    edit_tensors(tmp_path / "stored", lambda tensors: (change(tensors), tensors)[1])
    with pytest.raises(CheckpointError, match=says):
        load_target(tmp_path / "stored")


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "gptq", "bits": 3}, "field 'bits' is 3, expected 4 or 8"),
        ({"quant_method": "awq", "version": "gemv"}, "field 'version' is 'gemv', expected gemm"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo W4A8_AWQ is not read here"),
        (
            {**FORMATS["auto-round"].config, "packing_format": "auto_round:llm_compressor"},
            "field 'packing_format' is .*, expected auto_round:auto_gptq or auto_round:auto_awq",
        ),
        ({**FORMATS["auto-round"].config, "bits": 2}, "field 'bits' is 2, expected 4 or 8"),
        ({**FORMATS["auto-round"].config, "data_type": "mx_fp"}, "field 'data_type' is 'mx_fp', expected int"),
        ({**FORMATS["auto-round"].config, "extra_config": {"*": {"bits": 8}}}, "no regular expression"),
        (_quark(weight={"dtype": "fp4", "qscheme": "per_group"}), "weights stored as fp4, per_group are not read here"),
        (_quark(weight=[{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]), "weight quantised in 2 steps is not read here"),
        (
            _quark(input_tensors={"dtype": "fp8_e4m3", "qscheme": "per_channel"}),
            "field 'qscheme' is 'per_channel', expected per_tensor",
        ),
        ({"quant_method": "compressed-tensors"}, "'config_groups' is missing"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": None}},
            "field 'group_0' is None, expected a JSON object",
        ),
        (
            {**FORMATS["ct-int4"].config, "format": "marlin-24"},
            "weights stored as marlin-24, 4-bit int, group are not read here",
        ),
        ({**FORMATS["ct-int4"].config, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({**FORMATS["ct-int4"].config, "ignore": ["re:["]}, "is no regular expression"),
    ],
)
def test_what_is_not_read_is_named(quantization: object, says: str, target: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path / "target")
    edit_config(tmp_path / "target", quantization_config=quantization)
    edit_tensors(tmp_path / "target", lambda t: {n.replace("down_proj.weight", "down_proj.q"): x for n, x in t.items()})
    with pytest.raises(CheckpointError, match=says) as caught:
        load_target(tmp_path / "target")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3"])
def test_the_correction_of_a_router_is_no_part_of_it(name: str, tmp_path: Path) -> None:
    """Files have it under the router's name; `inspect` took the two for a linear in codes."""
    config = replace(TARGET_CONFIGS[name], num_layers=4, layers=TARGET_CONFIGS[name].layers[:4])
    save_target(make_target(config), tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "stored", tmp_path / "meant", FORMATS["ct-int8-packed"])
    weights = describe_target(config, target_files(tmp_path / "stored", config.family))["weights"]
    assert "gate" in weights["dense"]
    assert list(weights["kinds"]) == ["8-bit integers, one scale per row"]
    assert describe_quantization(tmp_path / "stored") == "compressed-tensors, 8-bit integers, one scale per row"


def test_inspect_names_what_is_missing(target: Path, tmp_path: Path) -> None:
    quantize_checkpoint(target, tmp_path / "stored", tmp_path / "meant", FORMATS["ct-int4"])
    edit_tensors(tmp_path / "stored", without(f"{DOWN}.weight_packed"))
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_packed' is missing"):
        describe_target(CONFIG, target_files(tmp_path / "stored", CONFIG.family))


def test_biases_that_add_nothing_are_left_in_the_file(target: Path, tmp_path: Path) -> None:
    """AutoGPTQ gave every linear one: Qwen's published GPTQ checkpoints have them."""
    quantize_checkpoint(target, tmp_path / "stored", tmp_path / "meant", FORMATS["gptq"])
    biases = {f"{DOWN}.bias": torch.zeros(CONFIG.hidden_size, dtype=torch.float16)}
    edit_tensors(tmp_path / "stored", lambda tensors: tensors | biases)
    stored, expected = load_target(tmp_path / "stored"), linears_of(load_target(tmp_path / "meant"))
    assert all(torch.equal(weight, expected[name]) for name, weight in linears_of(stored).items())
    biases[f"{DOWN}.bias"][1] = 1
    edit_tensors(tmp_path / "stored", lambda tensors: tensors | biases)
    with pytest.raises(CheckpointError, match=r"unexpected tensor '.*down_proj\.bias'"):
        load_target(tmp_path / "stored")


def test_inspect_says_what_is_in_fewer_bits(target: Path, tmp_path: Path) -> None:
    quantize_checkpoint(target, tmp_path / "stored", tmp_path / "meant", FORMATS["ct-int4-zeros"])
    said = {name: describe_target(CONFIG, target_files(tmp_path / name, CONFIG.family)) for name in ("stored", "meant")}
    assert said["meant"]["weights"] is None
    assert said["stored"]["weights"] == {
        "format": "compressed-tensors",
        "kinds": {"4-bit integers, groups of 16, zero points": 7 * CONFIG.num_layers},
        "dense": ["embed_tokens", "lm_head"],
    }
    quantize_checkpoint(target, tmp_path / "dynamic", tmp_path / "again", FORMATS["ct-fp8-dynamic"])
    kinds = describe_target(CONFIG, target_files(tmp_path / "dynamic", CONFIG.family))["weights"]["kinds"]
    assert list(kinds) == ["8-bit floats (E4M3), one scale per row, activations in 8 bits by token"]
    assert said["stored"]["size"]["parameters"] == said["meant"]["size"]["parameters"]
    assert said["stored"]["size"]["bytes"] < said["meant"]["size"]["bytes"]
