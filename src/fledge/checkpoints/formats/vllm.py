"""The plain layout that vLLM, SGLang, EAGLE, SpecForge and TorchSpec share: one flat config.json.

Their dialects differ in where a field sits (top level or nested in `eagle_config`) and in tensor names. We write
what all of them read: every field at the top level, and the aux ids nested as well, as SGLang wants them.
"""

from collections.abc import Collection
from typing import Any

from fledge.checkpoints.finding import Finding, config_error
from fledge.checkpoints.formats.aux_ids import as_outputs, parse_aux_ids, parse_num_aux
from fledge.checkpoints.formats.names import EAGLE_1, EAGLE_3_MIDLAYER, NameTable
from fledge.checkpoints.formats.shared import (
    AUX_IDS,
    NUM_AUX,
    ParsedConfig,
    architecture_names,
    parse_layer,
    write_layer_fields,
)
from fledge.errors import CheckpointError
from fledge.models.config import Architecture, DrafterConfig
from fledge.models.hf_config import ConfigFields

_FLAGS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")
_READ_NESTED_BY_VLLM = "norm_before_fc"


def parse(fields: ConfigFields, architecture: Architecture, names: Collection[str], dtype: str) -> ParsedConfig:
    """`names` are our tensor names; `dtype` is that of the stored weights."""
    qwen3 = any("Qwen3ForCausalLM" in name for name in architecture_names(fields))
    layer, max_positions, findings = parse_layer(fields, names, qwen3=qwen3)
    vocab_size = fields.integer("vocab_size")
    eagle3 = architecture is Architecture.EAGLE3
    common: dict[str, Any] = {
        "architecture": architecture,
        "layer": layer,
        "num_layers": fields.integer("num_hidden_layers"),
        "vocab_size": vocab_size,
        "max_positions": max_positions,
        "own_embedding": "embed_tokens.weight" in names,
        "fc_bias": ("fusion.fc.bias" if eagle3 else "fc.bias") in names,
        "dtype": dtype,
    }
    if not eagle3:
        hidden = layer.hidden_size
        config = DrafterConfig(**common, draft_vocab_size=vocab_size, target_hidden_size=hidden, own_head=False)
        return ParsedConfig(config=config, findings=findings)

    nested = fields.nested("eagle_config") or ConfigFields({}, f"{fields.where}: eagle_config")
    if not nested.flag("use_aux_hidden_state", True):
        raise nested.error("use_aux_hidden_state", False, "true (EAGLE-3 without aux states is not supported)")
    flags, flag_findings = _parse_flags(fields, nested)
    aux_ids, aux_findings = parse_aux_ids(fields)
    list_counts = qwen3 or AUX_IDS in nested  # which lists vLLM measures
    num_aux, count_findings = parse_num_aux(fields, aux_ids, list_counts=list_counts)
    draft_vocab_size = fields.integer("draft_vocab_size", vocab_size)
    config = DrafterConfig(
        **common,
        **flags,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=fields.integer("target_hidden_size", layer.hidden_size),
        aux_layer_ids=aux_ids,
        num_aux_states=num_aux,
        own_head="lm_head.weight" in names or draft_vocab_size != vocab_size,
    )
    return ParsedConfig(config=config, findings=findings + flag_findings + aux_findings + count_findings)


def _parse_flags(fields: ConfigFields, nested: ConfigFields) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Flags belong to the top level. A nested one is understood, but vLLM reads only one of them there."""
    flags: dict[str, Any] = {}
    findings: list[Finding] = []
    for flag in _FLAGS:
        inner = nested.flag(flag, False) if flag in nested else None
        flags[flag] = fields.flag(flag, inner or False)
        if inner is None:
            continue
        if flag in fields and flags[flag] != inner:
            findings.append(
                config_error(
                    "flag-contradiction",
                    f"eagle_config.{flag}",
                    found=str(inner).lower(),
                    expected=f"{str(flags[flag]).lower()}, as at the top level",
                    advice="remove the wrong one",
                )
            )
        elif flag not in fields and inner and flag != _READ_NESTED_BY_VLLM:
            findings.append(
                config_error(
                    "flag-nested",
                    f"eagle_config.{flag}",
                    found="true",
                    expected=f"{flag} at the top level",
                    advice="vLLM does not read it here, and would run a different drafter",
                    fixed_by_convert=True,
                )
            )
    return flags, tuple(findings)


def name_table(config: DrafterConfig) -> NameTable:
    return EAGLE_1 if config.architecture is Architecture.EAGLE1 else EAGLE_3_MIDLAYER


def write(config: DrafterConfig) -> dict[str, Any]:
    """The inverse of `parse`."""
    if config.architecture is Architecture.EAGLE1:
        if config.layer.qk_norm:
            raise CheckpointError("an EAGLE-1 drafter with q/k norms has no class in vLLM or SGLang; nothing written")
        return {
            "architectures": ["EagleLlamaForCausalLM"],
            **write_layer_fields(config),
            # Not "bias", EAGLE's own name for fc's bias: vLLM takes it for attention biases that are not there.
            "torch_dtype": config.dtype,
        }
    fields: dict[str, Any] = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if config.layer.qk_norm else "LlamaForCausalLMEagle3"],
        **write_layer_fields(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        NUM_AUX: config.num_aux_states,
        **{flag: getattr(config, flag) for flag in _FLAGS},
        "torch_dtype": config.dtype,
    }
    if config.aux_layer_ids is not None:
        fields[AUX_IDS] = list(config.aux_layer_ids)
        if (outputs := as_outputs(config.aux_layer_ids)) is not None:
            fields["eagle_config"] = {"use_aux_hidden_state": True, AUX_IDS: outputs}
    return fields
