"""The plain layout that vLLM, SGLang, EAGLE, SpecForge and TorchSpec share: one flat config.json.

Their dialects differ in where a field sits (top level or nested in `eagle_config`) and in tensor names. We write
what all of them read: every field at the top level, and the aux ids nested as well, as SGLang wants them.
"""

from collections.abc import Collection
from typing import Any

from fledge.checkpoints.finding import Finding, finding
from fledge.checkpoints.formats.aux_ids import AUX_IDS, NUM_AUX, as_outputs
from fledge.checkpoints.formats.names import EAGLE_1, EAGLE_3_MIDLAYER, NameTable
from fledge.checkpoints.formats.shared import FLAGS, ParsedConfig, architecture_names, parse_drafter, write_layer_fields
from fledge.errors import CheckpointError
from fledge.models.config import Architecture, DrafterConfig
from fledge.models.hf_config import ConfigFields

_READ_NESTED_BY_VLLM = "norm_before_fc"


def parse(fields: ConfigFields, architecture: Architecture, names: Collection[str], dtype: str) -> ParsedConfig:
    """`names` are our tensor names; `dtype` is that of the stored weights."""
    qwen3 = any("Qwen3ForCausalLM" in name for name in architecture_names(fields))
    nested = fields.nested("eagle_config") or ConfigFields({}, f"{fields.where}: eagle_config")
    flags: dict[str, bool] = {}
    flag_findings: tuple[Finding, ...] = ()
    if architecture is Architecture.EAGLE3:
        if not nested.flag("use_aux_hidden_state", True):
            raise nested.error("use_aux_hidden_state", False, "true (EAGLE-3 without aux states is not supported)")
        flags, flag_findings = _parse_flags(fields, nested)
    config, findings = parse_drafter(
        fields,
        fields,
        names,
        architecture=architecture,
        num_layers=fields.integer("num_hidden_layers"),
        flags=flags,
        dtype=dtype,
        qwen3=qwen3,
        list_counts=qwen3 or AUX_IDS in nested,  # which lists vLLM measures
    )
    return ParsedConfig(config=config, findings=findings + flag_findings)


def _parse_flags(fields: ConfigFields, nested: ConfigFields) -> tuple[dict[str, bool], tuple[Finding, ...]]:
    """Flags belong to the top level. A nested one is understood, but vLLM reads only one of them there."""
    flags: dict[str, bool] = {}
    findings: list[Finding] = []
    for flag in FLAGS:
        inner = nested.flag(flag, False) if flag in nested else None
        flags[flag] = fields.flag(flag, inner or False)
        if inner is None:
            continue
        if flag in fields and flags[flag] != inner:
            expected = f"{str(flags[flag]).lower()}, as at the top level"
            findings.append(finding("flag-contradiction", f"eagle_config.{flag}", str(inner).lower(), expected))
        elif flag not in fields and inner and flag != _READ_NESTED_BY_VLLM:
            expected = f"{flag} at the top level"
            findings.append(finding("flag-nested", f"eagle_config.{flag}", "true", expected, fixed_by_convert=True))
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
        **{flag: getattr(config, flag) for flag in FLAGS},
        "torch_dtype": config.dtype,
    }
    if config.aux_layer_ids is not None:
        fields[AUX_IDS] = list(config.aux_layer_ids)
        if (outputs := as_outputs(config.aux_layer_ids)) is not None:
            fields["eagle_config"] = {"use_aux_hidden_state": True, AUX_IDS: outputs}
    return fields
