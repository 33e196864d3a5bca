"""What the two config formats have in common: the drafter they describe, and what no reader of ours understands."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fledge.checkpoints.finding import Finding, finding
from fledge.checkpoints.formats.aux_ids import DEFAULT_NUM_AUX, parse_aux_ids, parse_num_aux
from fledge.errors import CheckpointError
from fledge.layers.config import LayerConfig
from fledge.models.config import Architecture, DrafterConfig
from fledge.models.hf_config import ConfigFields, read_layer, write_layer

Format = Literal["vllm", "speculators"]

_KNOWN_CLASSES = (
    "EagleLlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",  # these three are the Llama class under other names
    "Eagle3Qwen3vlForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Speculator",  # the speculators format, old and new
    "Eagle3DraftModel",
)
_PLAIN_CLASS = "LlamaForCausalLM"  # what EAGLE's own drafters say they are
FLAGS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")  # of EAGLE-3 and 3.1, as all spell them
_QWEN3_THETA, _LLAMA_THETA = 1_000_000.0, 10_000.0
_LLAMA_MAX_POSITIONS = 2048  # the default of transformers' LlamaConfig, and with it of vLLM


@dataclass(frozen=True, kw_only=True)
class TargetReference:
    """The target a drafter was made for, as the speculators format names it."""

    name_or_path: str | None = None
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ParsedConfig:
    """A foreign config in our vocabulary, with what was noticed on the way."""

    config: DrafterConfig
    findings: tuple[Finding, ...]
    target: TargetReference | None = None


def refuse_unsupported(fields: ConfigFields, names: Collection[str]) -> None:
    """Raise for drafters that are recognised but not built here. `names` are without `model.` in front."""
    declared = architecture_names(fields)
    if "deepseek" in " ".join(declared).lower() or any("kv_a_proj_with_mqa" in name for name in names):
        raise CheckpointError(
            f"{fields.where}: an MLA drafter (DeepSeek or Kimi style attention), which Fledge does not support yet; "
            "vLLM serves it"
        )
    for name in declared:
        if "Eagle" in name and name not in _KNOWN_CLASSES:
            raise fields.error("architectures", name, f"a class that Fledge knows: {', '.join(_KNOWN_CLASSES)}")
    if any(".experts." in name for name in names):
        raise CheckpointError(f"{fields.where}: a mixture-of-experts drafter, which Fledge does not support")
    if "mask_hidden" in names:
        raise CheckpointError(f"{fields.where}: a parallel-drafting (P-EAGLE) drafter, which Fledge does not support")


def architecture_names(fields: ConfigFields) -> tuple[str, ...]:
    found = fields.values.get("architectures") or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise fields.error("architectures", found, "a list of class names")
    return tuple(found)


def architecture_findings(fields: ConfigFields) -> tuple[Finding, ...]:
    """A class nobody here has met may compute something else than its tensors suggest."""
    unknown = [name for name in architecture_names(fields) if name not in (*_KNOWN_CLASSES, _PLAIN_CLASS)]
    expected = "a class that Fledge knows, such as LlamaForCausalLMEagle3"
    return tuple(finding("architecture-unknown", "architectures", name, expected) for name in unknown[:1])


def parse_drafter(
    fields: ConfigFields,
    layer_fields: ConfigFields,
    names: Collection[str],
    *,
    architecture: Architecture,
    num_layers: int,
    flags: Mapping[str, bool],
    dtype: str,
    qwen3: bool,
    list_counts: bool,
) -> tuple[DrafterConfig, tuple[Finding, ...]]:
    """Return the config, with what was noticed. `names` are our tensor names, `flags` the switches of EAGLE-3.

    `list_counts` as in `parse_num_aux`, `qwen3` as in `_parse_layer`.
    """
    layer, max_positions, findings = _parse_layer(layer_fields, names, qwen3=qwen3)
    eagle3 = architecture is Architecture.EAGLE3
    vocab_size = layer_fields.integer("vocab_size")
    draft_vocab_size, target_hidden_size, aux_ids, num_aux = vocab_size, layer.hidden_size, None, DEFAULT_NUM_AUX
    if eagle3:
        draft_vocab_size = fields.integer("draft_vocab_size", vocab_size)
        target_hidden_size = fields.integer("target_hidden_size", layer.hidden_size)
        aux_ids, id_findings = parse_aux_ids(fields)
        num_aux, count_findings = parse_num_aux(layer_fields, aux_ids, list_counts=list_counts)
        findings += id_findings + count_findings
    config = DrafterConfig(
        architecture=architecture,
        layer=layer,
        num_layers=num_layers,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        max_positions=max_positions,
        target_hidden_size=target_hidden_size,
        aux_layer_ids=aux_ids,
        num_aux_states=num_aux,
        own_embedding="embed_tokens.weight" in names,
        own_head=eagle3 and ("lm_head.weight" in names or draft_vocab_size != vocab_size),
        fc_bias=("fusion.fc.bias" if eagle3 else "fc.bias") in names,
        dtype=dtype,
        **flags,
    )
    return config, findings


def _parse_layer(
    fields: ConfigFields, names: Collection[str], *, qwen3: bool
) -> tuple[LayerConfig, int, tuple[Finding, ...]]:
    """Return the layer, the number of positions it was made for, and findings.

    The config says which biases and norms there are; where the tensors say otherwise they are believed, since they
    are what was trained, and the difference is an error that `convert` repairs. `qwen3`: the declared class is
    Qwen3's, which has q/k norms.
    """
    for field in ("logit_scale", "partial_rotary_factor"):
        if fields.values.get(field) not in (None, 1, 1.0):
            raise fields.error(field, fields.values[field], "1")
    types = fields.values.get("layer_types") or []
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        raise fields.error("layer_types", types, "full_attention only (sliding windows are not supported)")
    findings: list[Finding] = []
    attention_bias = fields.flag("attention_bias", False)
    biases = {}
    for part, flag, value in (
        ("self_attn.q_proj", "attention_bias", attention_bias),
        ("self_attn.o_proj", "attention_bias", attention_bias and not qwen3),
        ("mlp.gate_proj", "mlp_bias", fields.flag("mlp_bias", False)),
    ):
        tensor = f"layers.0.{part}.bias"
        biases[part] = tensor in names
        if biases[part] and not value:
            found = f"off, but the checkpoint stores {tensor}"
            findings.append(finding("bias-flag-off", flag, found, "true", fixed_by_convert=True))
        elif value and not biases[part]:
            found, fixable = f"on, but the checkpoint has no {tensor}", "o_proj" in part
            findings.append(finding("bias-missing", flag, found, "the tensor, or false", fixed_by_convert=fixable))
    qk_norm = any(name.endswith("self_attn.q_norm.weight") for name in names)
    if qk_norm and not qwen3:
        found, expected = "a Llama-style class with q_norm and k_norm tensors", "Eagle3Qwen3ForCausalLM"
        findings.append(finding("qk-norm-architecture", "architectures", found, expected, fixed_by_convert=True))
    default_theta = _QWEN3_THETA if qwen3 else _LLAMA_THETA
    if not any("rope_theta" in holder for holder in _rope_holders(fields)):
        expected = "the theta the drafter was trained with"
        findings.append(finding("rope-theta-omitted", "rope_theta", "nothing", expected, default=default_theta))
        fields = ConfigFields({**fields.values, "rope_theta": default_theta}, fields.where)
    if (field := "max_position_embeddings") not in fields:
        expected, default = "the length the drafter was trained for", _LLAMA_MAX_POSITIONS
        findings.append(finding("max-positions-omitted", field, "nothing", expected, default=default))
        fields = ConfigFields({**fields.values, field: default}, fields.where)
    layer = read_layer(
        fields,
        qk_norm=qwen3 or qk_norm,
        qkv_bias=biases["self_attn.q_proj"],
        output_bias=biases["self_attn.o_proj"],
        mlp_bias=biases["mlp.gate_proj"],
    )
    return layer, fields.integer("max_position_embeddings"), tuple(findings)


def _rope_holders(fields: ConfigFields) -> list[ConfigFields]:
    holders = (fields, fields.nested("rope_parameters"), fields.nested("rope_scaling"))
    return [holder for holder in holders if holder is not None]


def write_layer_fields(config: DrafterConfig) -> dict[str, Any]:
    """Return the fields of the layers, in the spelling of transformers 4, which every engine reads."""
    return {
        "model_type": "qwen3" if config.layer.qk_norm else "llama",
        **write_layer(config.layer),
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": False,
    }
