"""Deliberately broken drafter checkpoints, one for each trap.

`python -m tests.broken_checkpoints DIR` writes them all, with the target they are to be checked against in
DIR/target, for trying `fledge inspect` and `fledge convert` by hand.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from fledge.layers.config import RopeConfig
from fledge.models.config import DrafterConfig
from fledge.models.drafter.variants import EAGLE_1, EAGLE_3, EAGLE_3_1
from tests.checkpoint_fixtures import (
    DRAFT_VOCAB,
    LATENT_LAYER,
    LAYER,
    TARGET,
    edit_config,
    edit_tensors,
    make_drafter,
    rename_tensors,
    without,
)
from tests.tiny_models import make_target

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE31 = EAGLE_3_1.config_for(TARGET)
REDUCED = replace(EAGLE31, draft_vocab_size=DRAFT_VOCAB)
FOUR_AUX = replace(EAGLE31, aux_layer_ids=(1, 2, 4, 6), num_aux_states=4)


@dataclass(frozen=True, kw_only=True)
class Trap:
    """A sound checkpoint of `config`, broken by `spoil`, and what must be said about it."""

    name: str
    spoil: Callable[[Path], None]
    says: str  # part of the line a user gets
    finding: str | None = None  # None: the directory cannot be read at all
    config: DrafterConfig = EAGLE31
    to: str = "vllm"
    fixed_by_convert: bool = False
    warning: bool = False

    def write(self, directory: Path) -> None:
        save_drafter(make_drafter(self.config), directory, to="vllm" if self.to == "vllm" else "speculators")
        self.spoil(directory)


def _config(**changes: object) -> Callable[[Path], None]:
    return lambda directory: edit_config(directory, **changes)


def _tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    return lambda directory: edit_tensors(directory, change)


def _published_medusa(directory: Path) -> None:
    edit_config(directory, medusa_num_heads=2)
    (directory / "model.safetensors").rename(directory / "medusa_lm_head.pt")


def _d2t(change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return _tensors(lambda tensors: {**tensors, "d2t": change(tensors["d2t"])})


def _nest(*flags: str) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        fields = json.loads((directory / "config.json").read_text())
        nested = {**fields["eagle_config"], **{flag: fields[flag] for flag in flags}}
        edit_config(directory, eagle_config=nested, **dict.fromkeys(flags))

    return spoil


def _layer_config(**changes: object) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        fields = json.loads((directory / "config.json").read_text())
        edit_config(directory, transformer_layer_config={**fields["transformer_layer_config"], **changes})

    return spoil


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        (directory / name).write_bytes(content)

    return spoil


def _remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def _truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _pickle(content: bytes) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        (directory / "pytorch_model.bin").write_bytes(content)

    return spoil


def _swap_two_draft_ids(d2t: Tensor) -> Tensor:
    target_ids = d2t + torch.arange(len(d2t))
    target_ids[[0, 1]] = target_ids[[1, 0]]
    return target_ids - torch.arange(len(d2t))


def _flip_t2d(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "t2d": ~tensors["t2d"]}


def _poison(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors["midlayer.mlp.up_proj.weight"][0, 0] = torch.nan
    return tensors


def _half(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "norm.weight": tensors["norm.weight"].half()}


# Directories that cannot be read.
UNREADABLE = (
    Trap(name="no-config", spoil=_remove("config.json"), says="no such file; a model directory needs a config.json"),
    Trap(name="config-not-json", spoil=_write("config.json", b"{oops"), says="not valid JSON"),
    Trap(name="config-not-an-object", spoil=_write("config.json", b"[1]"), says="expected a JSON object"),
    Trap(name="config-not-text", spoil=_write("config.json", b"\xff\xfe\x00"), says="not valid JSON"),
    Trap(name="size-is-text", spoil=_config(hidden_size="32"), says="field 'hidden_size' is '32'"),
    Trap(name="size-is-missing", spoil=_config(vocab_size=None), says="required field 'vocab_size' is missing"),
    Trap(name="flag-is-text", spoil=_config(fc_norm="yes"), says="field 'fc_norm' is 'yes', expected true or false"),
    Trap(name="aux-ids-are-text", spoil=_config(**{AUX_IDS: ["2"]}), says=f"field '{AUX_IDS}' is ['2']"),
    Trap(name="negative-aux-id", spoil=_config(**{AUX_IDS: [-1, 2, 3]}), says=f"field '{AUX_IDS}' is [-1, 2, 3]"),
    Trap(name="architectures-is-text", spoil=_config(architectures="x"), says="expected a list of class names"),
    Trap(name="no-weights", spoil=_remove("model.safetensors"), says="this directory holds no weights"),
    Trap(name="truncated-weights", spoil=_truncate, says="truncated or corrupt safetensors file"),
    Trap(name="corrupt-weights", spoil=_write("model.safetensors", b"\x00" * 64), says="truncated or corrupt"),
    Trap(name="corrupt-pickle", spoil=_pickle(b"\x80\x04junk"), says="truncated, corrupt or unsafe pickle file"),
    Trap(
        name="missing-shard",
        spoil=_write("model.safetensors.index.json", b'{"weight_map": {"fc.weight": "model-2.safetensors"}}'),
        says="the download is incomplete",
    ),
    Trap(
        name="two-spellings",
        spoil=_tensors(lambda tensors: {**tensors, "model.norm.weight": tensors["norm.weight"].clone()}),
        says="two spellings of the same",
    ),
    Trap(
        name="latent-class",
        spoil=_config(architectures=["Eagle3DeepseekV2ForCausalLM"]),
        says="a class without latent attention, as there is no self_attn.kv_a_proj_with_mqa",
    ),
    Trap(
        name="unknown-class",
        spoil=_config(architectures=["EagleCohereForCausalLM"]),
        says="EagleCohereForCausalLM: EAGLE-1 with layers of the target's family",
    ),
    Trap(
        name="mixture-of-experts",
        spoil=_tensors(lambda t: {**t, "midlayer.mlp.experts.0.up_proj.weight": torch.ones(1)}),
        says="mixture-of-experts",
    ),
    Trap(
        name="quantised",
        spoil=_config(quantization_config={"quant_method": "hqq", "bits": 4}),
        says="weights quantised with hqq (4 bits), which Fledge does not read; docs/quantised.md lists what it does",
    ),
    Trap(
        name="quantised-tensors",
        spoil=_tensors(lambda tensors: {n: t.to(torch.int8) for n, t in tensors.items()}),
        says="is int8, and config.json has no quantization_config that says how to read it; only unquantised",
    ),
    Trap(
        name="parallel-drafting",
        spoil=_tensors(lambda t: {**t, "mask_hidden": torch.ones(1)}),
        says="a P-EAGLE drafter, which drafts in parallel: Fledge runs EAGLE drafters only; vLLM runs it",
    ),
    Trap(name="parallel-by-its-class", spoil=_config(architectures=["PeagleLlamaForCausalLM"]), says="P-EAGLE"),
    Trap(name="dflash", spoil=_config(architectures=["DFlashDraftModel"]), says='"method": "dflash"'),
    Trap(name="dspark", spoil=_config(architectures=["Qwen3DSparkModel"]), says='"method": "dspark"'),
    Trap(name="mtp", spoil=_config(architectures=["DeepSeekMTPModel"]), says="multi-token-prediction"),
    Trap(
        name="medusa",
        spoil=_tensors(lambda t: {"medusa_head.0.0.linear.weight": t["fc.weight"].clone()}),
        says="Medusa heads",
    ),
    Trap(
        name="medusa-as-published",  # its heads in a file of their own
        spoil=_published_medusa,
        says="Medusa heads",
    ),
    Trap(name="mlp-speculator", spoil=_config(model_type="mlp_speculator"), says='"method": "mlp_speculator"'),
    Trap(
        name="eagle1-of-mistral-large",
        spoil=_config(architectures=["EagleMistralLarge3ForCausalLM"]),
        says="EAGLE-1 with layers of the target's family",
    ),
    Trap(
        name="attention-sinks",
        spoil=_tensors(lambda t: {**t, "midlayer.self_attn.sinks": torch.ones(4)}),
        says="attention sinks",
    ),
    Trap(
        name="no-aux-states",
        spoil=_config(eagle_config={"use_aux_hidden_state": False}),
        says="field 'use_aux_hidden_state' is False",
    ),
    Trap(name="window-missing", spoil=_config(layer_types=["sliding_attention"]), says="'sliding_window' is missing"),
    Trap(
        name="window-contradiction",
        spoil=_config(layer_types=["sliding_attention"], sliding_window=8, use_sliding_window=False),
        says="field 'use_sliding_window' is False",
    ),
    Trap(name="chunked-attention", spoil=_config(layer_types=["chunked_attention"]), says="sliding_attention or full"),
    Trap(name="too-few-layer-types", spoil=_config(layer_types=[]), says="one for each layer"),
    Trap(
        name="another-frame",
        spoil=_config(eagle_config={"use_mtp_layernorm": True}),
        says="field 'use_mtp_layernorm' is True",
    ),
    Trap(
        name="dynamic-rope-of-another-kind",
        spoil=_config(rope_scaling={"rope_type": "dynamic", "alpha": 1000.0}),
        says="field 'alpha' is 1000.0",
    ),
    Trap(name="unknown-activation", spoil=_config(hidden_act="relu2"), says="field 'hidden_act' is 'relu2'"),
    Trap(name="unknown-rope", spoil=_config(rope_scaling={"rope_type": "proportional"}), says="field 'rope_type'"),
    Trap(
        name="speculators-other-algorithm",
        to="speculators",
        spoil=_config(speculators_model_type="dflash"),
        says="a DFlash drafter",
    ),
    Trap(
        name="speculators-without-layers",
        to="speculators",
        spoil=_config(transformer_layer_config=None),
        says="required field 'transformer_layer_config' is missing",
    ),
    Trap(
        name="speculators-unknown-layers",
        to="speculators",
        spoil=_layer_config(model_type="mamba"),
        says="field 'model_type' is 'mamba'",
    ),
)

# What vLLM lets pass silently, and what it refuses with a message that says little.
ERRORS = (
    Trap(
        name="fc-norm-tensors-missing",
        spoil=_tensors(without("fc_norm.")),
        says="fc_norm.0.weight: found no such tensor (and 2 more like it)",
        finding="fc-norm-missing",
    ),
    Trap(
        name="fc-norm-flag-off",
        spoil=_config(fc_norm=False),
        says="fc_norm.0.weight: found a tensor (and 2 more like it), expected none",
        finding="fc-norm-flag-off",
    ),
    Trap(
        name="fc-norm-flag-nested",
        spoil=_nest("fc_norm"),
        says="eagle_config.fc_norm: found true, expected fc_norm at the top level",
        finding="flag-nested",
        fixed_by_convert=True,
    ),
    Trap(
        name="norm-output-nested",
        spoil=_nest("norm_output"),
        says="eagle_config.norm_output",
        finding="flag-nested",
        fixed_by_convert=True,
    ),
    Trap(
        name="flag-contradiction",
        spoil=_config(eagle_config={"norm_before_fc": True}),
        says="eagle_config.norm_before_fc: found true, expected false, as at the top level",
        finding="flag-contradiction",
    ),
    Trap(
        name="input-norm-missing",
        config=replace(EAGLE31, norm_before_fc=True),
        spoil=_tensors(without("input_norm.")),
        says="input_norm.weight: found no such tensor",
        finding="input-norm-missing",
    ),
    Trap(
        name="input-norm-flag-off",
        config=replace(EAGLE31, norm_before_fc=True),
        spoil=_config(norm_before_fc=False),
        says="vLLM would silently skip the norm",
        finding="input-norm-flag-off",
    ),
    Trap(
        name="d2t-missing",
        config=REDUCED,
        spoil=_tensors(without("d2t")),
        says="d2t: found no such tensor, expected one of shape [24]",
        finding="d2t-missing",
    ),
    Trap(
        name="lm-head-missing",
        config=REDUCED,
        spoil=_tensors(without("lm_head.")),
        says="lm_head.weight: found no such tensor, expected one of shape [24, 32]",
        finding="lm-head-missing",
    ),
    Trap(
        name="norm-missing",
        spoil=_tensors(without("midlayer.hidden_norm.")),
        says="midlayer.hidden_norm.weight: found no such tensor",
        finding="tensor-missing",
    ),
    Trap(
        name="k-proj-missing",
        spoil=_tensors(without("midlayer.self_attn.k_proj.")),
        says="midlayer.self_attn.k_proj.weight: found no such tensor",
        finding="tensor-missing",
    ),
    Trap(
        name="unknown-tensor",
        spoil=_tensors(lambda tensors: {**tensors, "extra.weight": torch.ones(2)}),
        says="extra.weight: found a tensor, expected none",
        finding="tensor-unexpected",
    ),
    Trap(
        name="eagle1-with-a-head",
        config=EAGLE_1.config_for(TARGET),
        spoil=_tensors(lambda tensors: {**tensors, "lm_head.weight": torch.ones(64, 32)}),
        says="lm_head.weight: found a tensor, expected none",
        finding="tensor-unexpected",
    ),
    Trap(
        name="model-prefix",
        spoil=lambda directory: rename_tensors(directory, lambda name: f"model.{name}"),
        says="tensor names that begin with 'model.'",
        finding="model-prefix",
        fixed_by_convert=True,
    ),
    Trap(
        name="fc-width",
        spoil=_config(target_hidden_size=16),
        says="fc.weight: found shape [32, 96], expected shape [32, 48]",
        finding="fc-width",
    ),
    Trap(
        name="head-rows", spoil=_config(draft_vocab_size=32), says="lm_head.weight: found shape", finding="head-shape"
    ),
    Trap(
        name="embedding-rows",
        config=replace(EAGLE31, own_embedding=True),
        spoil=_tensors(lambda tensors: {**tensors, "embed_tokens.weight": torch.ones(60, 32)}),
        says="embed_tokens.weight: found shape [60, 32], expected shape [64, 32]",
        finding="embedding-shape",
    ),
    Trap(name="head-count", spoil=_config(num_attention_heads=8), says="self_attn.o_proj", finding="tensor-shape"),
    Trap(name="head-dim", spoil=_config(head_dim=16), says="expected shape", finding="tensor-shape"),
    Trap(
        name="layer-count-of-the-target",
        spoil=_config(num_hidden_layers=8),
        says="layers.1.input_layernorm.weight: found no such tensor",
        finding="tensor-missing",
    ),
    Trap(
        name="narrow-without-embedding",
        config=replace(EAGLE31, layer=replace(LAYER, hidden_size=16, num_heads=2, num_kv_heads=1), own_embedding=True),
        spoil=_tensors(without("embed_tokens.")),
        says="no embed_tokens tensor",
        finding="shared-embedding-width",
    ),
    Trap(
        name="narrow-without-head",
        config=replace(EAGLE31, layer=replace(LAYER, hidden_size=16, num_heads=2, num_kv_heads=1), own_embedding=True),
        spoil=_tensors(without("lm_head.")),
        says="no lm_head tensor",
        finding="shared-head-width",
    ),
    Trap(
        name="aux-ids-unsorted",
        spoil=_config(**{AUX_IDS: [5, 4, 2]}, eagle_config=None),
        says="vLLM sorts them silently",
        finding="aux-ids-order",
    ),
    Trap(
        name="aux-ids-contradiction",
        spoil=_config(eagle_config={AUX_IDS: [0, 1, 6]}),
        says="vLLM reads the top level and SGLang the nested list",
        finding="aux-ids-contradiction",
    ),
    Trap(
        name="aux-ids-out-of-range",
        config=replace(EAGLE31, aux_layer_ids=(2, 16, 29)),
        spoil=_config(),
        says="the target has 8 layers",
        finding="aux-ids-out-of-range",
    ),
    Trap(
        name="aux-count-wrong",
        config=FOUR_AUX,
        spoil=_config(num_aux_hidden_states=3),
        says="num_aux_hidden_states: found 3, expected 4",
        finding="aux-count",
    ),
    Trap(
        name="aux-ids-needed",
        config=FOUR_AUX,
        spoil=_config(**{AUX_IDS: None}, eagle_config=None),
        says="expected 4 ids",
        finding="aux-ids-required",
    ),
    Trap(
        name="d2t-out-of-range",
        config=REDUCED,
        spoil=_d2t(lambda d2t: d2t + 100),
        says="the map belongs to another vocabulary",
        finding="d2t-out-of-range",
    ),
    Trap(
        name="d2t-not-injective",
        config=REDUCED,
        spoil=_d2t(lambda d2t: -torch.arange(len(d2t))),
        says="24 draft ids for 1 target ids",
        finding="d2t-not-injective",
    ),
    Trap(
        name="d2t-holds-target-ids",
        config=REDUCED,
        spoil=_d2t(lambda d2t: d2t + torch.arange(len(d2t))),
        says="expected offsets",
        finding="d2t-absolute",
    ),
    Trap(name="d2t-floats", config=REDUCED, spoil=_d2t(Tensor.float), says="expected int64", finding="d2t-dtype"),
    Trap(name="d2t-short", config=REDUCED, spoil=_d2t(lambda d2t: d2t[:20].clone()), says="[20]", finding="d2t-shape"),
    Trap(name="t2d-mismatch", config=REDUCED, spoil=_tensors(_flip_t2d), says="rebuild", finding="t2d-mismatch"),
    Trap(
        name="d2t-without-reduction",
        spoil=_tensors(lambda tensors: {**tensors, "d2t": torch.arange(64)}),
        says="although draft_vocab_size is vocab_size",
        finding="d2t-without-reduction",
    ),
    Trap(
        name="not-finite",
        spoil=_tensors(_poison),
        says="midlayer.mlp.up_proj.weight: found NaN or infinity",
        finding="weights-not-finite",
    ),
    Trap(
        name="bias-flag-off",
        config=replace(EAGLE31, layer=replace(LAYER, qkv_bias=True, output_bias=True)),
        spoil=_config(attention_bias=False),
        says="attention_bias: found off, but the checkpoint stores layers.0.self_attn.q_proj.bias",
        finding="bias-flag-off",
        fixed_by_convert=True,
    ),
    Trap(
        name="bias-missing",
        spoil=_config(attention_bias=True),
        says="attention_bias: found on, but the checkpoint has no layers.0.self_attn.q_proj.bias",
        finding="bias-missing",
    ),
    Trap(
        name="output-bias-missing",
        config=replace(EAGLE31, layer=replace(LAYER, qkv_bias=True, output_bias=True)),
        spoil=_tensors(without("midlayer.self_attn.o_proj.bias")),
        says="attention_bias: found on, but the checkpoint has no layers.0.self_attn.o_proj.bias",
        finding="bias-missing",
        fixed_by_convert=True,
    ),
    Trap(
        name="qk-norm-in-a-llama-class",
        config=replace(EAGLE31, layer=replace(LAYER, qk_norm=True)),
        spoil=_config(architectures=["LlamaForCausalLMEagle3"]),
        says="expected Eagle3Qwen3ForCausalLM",
        finding="qk-norm-architecture",
        fixed_by_convert=True,
    ),
    Trap(
        name="other-vocabulary",
        config=replace(EAGLE31, vocab_size=48, draft_vocab_size=48),
        spoil=_config(),
        says="vocab_size: found 48, expected 64, the target's",
        finding="vocabulary-size",
    ),
    Trap(
        name="other-hidden-size",
        config=replace(EAGLE31, target_hidden_size=64, own_embedding=True),
        spoil=_config(),
        says="target_hidden_size: found 64, expected 32, the target's hidden size",
        finding="target-hidden-size",
    ),
    Trap(
        name="eagle1-of-another-width",
        config=replace(
            EAGLE_1.config_for(TARGET), layer=replace(LAYER, hidden_size=64), target_hidden_size=64, own_embedding=True
        ),
        spoil=_config(),
        says="hidden_size: found 64, expected 32",
        finding="target-hidden-size",
    ),
)

# Works, but somebody should know.
WARNINGS = (
    Trap(
        name="aux-count-undeclared",
        config=FOUR_AUX,
        spoil=_config(num_aux_hidden_states=None, eagle_config=None),
        says="vLLM assumes 3",
        finding="aux-count-undeclared",
        fixed_by_convert=True,
        warning=True,
    ),
    Trap(
        name="aux-count-undeclared-in-speculators",
        config=FOUR_AUX,
        to="speculators",
        spoil=_layer_config(num_aux_hidden_states=None),
        says="vLLM assumes 3",
        finding="aux-count-undeclared",
        fixed_by_convert=True,
        warning=True,
    ),
    Trap(
        name="identity-d2t",
        spoil=_tensors(lambda tensors: {**tensors, "d2t": torch.zeros(64, dtype=torch.int64)}),
        says="vLLM refuses it",
        finding="d2t-identity",
        fixed_by_convert=True,
        warning=True,
    ),
    Trap(
        name="sglang-eagle1-class",
        config=EAGLE_1.config_for(TARGET),
        spoil=_config(architectures=["LlamaForCausalLMEagle"]),
        says="vLLM does not know the name",
        finding="class-not-in-vllm",
        fixed_by_convert=True,
        warning=True,
    ),
    Trap(
        name="window-off",
        spoil=_config(sliding_window=8),
        says="read as full attention, as vLLM reads it",
        finding="sliding-window-off",
        warning=True,
    ),
    Trap(
        name="gelu",
        config=replace(EAGLE31, layer=replace(LAYER, activation="gelu")),
        spoil=_config(),
        says="hidden_act: found gelu, expected silu",
        finding="activation-not-silu",
        warning=True,
    ),
    Trap(
        name="aux-ids-omitted",
        spoil=_config(**{AUX_IDS: None}, eagle_config=None),
        says="inputs [2, 4, 5] (outputs [1, 3, 4])",
        finding="aux-ids-omitted",
        warning=True,
    ),
    Trap(
        name="aux-ids-off-by-one",
        config=replace(EAGLE31, aux_layer_ids=(1, 3, 4)),
        spoil=_config(),
        says="the usual layers counted as outputs",
        finding="aux-ids-look-like-outputs",
        warning=True,
    ),
    Trap(
        name="aux-ids-shifted-twice",
        config=replace(EAGLE31, aux_layer_ids=(3, 5, 6)),
        spoil=_config(),
        says="one above the usual layers",
        finding="aux-ids-shifted-twice",
        warning=True,
    ),
    Trap(
        name="aux-ids-nested",
        spoil=_nest(AUX_IDS),
        says="read as block inputs, so [2, 4, 5]",
        finding="aux-ids-nested",
        warning=True,
    ),
    Trap(
        name="short-max-positions",
        config=replace(EAGLE31, max_positions=32),
        spoil=_config(),
        says="max_position_embeddings: found 32, expected 128",
        finding="max-positions-short",
        warning=True,
    ),
    Trap(
        name="max-positions-omitted",
        spoil=_config(max_position_embeddings=None),
        says="2048 is used",
        finding="max-positions-omitted",
        warning=True,
    ),
    Trap(
        name="other-rope",
        config=replace(EAGLE31, layer=replace(LAYER, rope=RopeConfig(theta=500000.0))),
        spoil=_config(),
        says="found theta 500000.0, expected theta 10000.0",
        finding="rope-differs",
        warning=True,
    ),
    Trap(
        name="rope-theta-omitted",
        spoil=_config(rope_theta=None),
        says="10000 is used",
        finding="rope-theta-omitted",
        warning=True,
    ),
    Trap(
        name="norm-before-residual-omitted",
        to="speculators",
        config=replace(EAGLE31, norm_before_residual=True),
        spoil=_config(norm_before_residual=None),
        says="read as true, as vLLM does",
        finding="norm-before-residual-omitted",
        warning=True,
    ),
    Trap(
        name="made-for-another-target",
        to="speculators",
        spoil=lambda directory: edit_config(
            directory, speculators_config={"verifier": {"name_or_path": "org/q", "architectures": ["Qwen3ForCausalLM"]}}
        ),
        says="made for org/q",
        finding="verifier-differs",
        warning=True,
    ),
    Trap(
        name="d2t-all-zero",
        config=REDUCED,
        spoil=_tensors(lambda t: {**t, "d2t": torch.zeros_like(t["d2t"]), "t2d": torch.arange(64) < DRAFT_VOCAB}),
        says="it may never have been filled in",
        finding="d2t-all-zero",
        warning=True,
    ),
    Trap(
        name="d2t-not-sorted",
        config=REDUCED,
        spoil=_d2t(_swap_two_draft_ids),
        says="target ids out of order",
        finding="d2t-not-sorted",
        warning=True,
    ),
    Trap(
        name="fc-bias",
        config=replace(EAGLE_3.config_for(TARGET), fc_bias=True),
        spoil=_config(),
        says="vLLM drops it without a word",
        finding="fc-bias",
        warning=True,
    ),
    Trap(
        name="mla-model-type",
        config=replace(EAGLE31, layer=LATENT_LAYER),
        spoil=_config(model_type="deepseek_v3"),
        says="model_type: found deepseek_v3, expected kimi_k2",
        finding="mla-model-type",
        fixed_by_convert=True,
        warning=True,
    ),
    Trap(
        name="architecture-unknown",
        spoil=_config(architectures=["PhoenixForCausalLM"]),
        says="architectures: found PhoenixForCausalLM, expected a class that Fledge knows",
        finding="architecture-unknown",
        warning=True,
    ),
    Trap(
        name="dtype-differs",
        spoil=_config(torch_dtype="bfloat16"),
        says="torch_dtype: found bfloat16, expected float32",
        finding="dtype-differs",
        warning=True,
    ),
    Trap(name="mixed-dtypes", spoil=_tensors(_half), says="norm.weight", finding="mixed-dtypes", warning=True),
)

TRAPS = UNREADABLE + ERRORS + WARNINGS


def main(root: Path) -> None:
    save_target(make_target(TARGET), root / "target")
    for trap in TRAPS:
        trap.write(root / trap.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
