"""The format of the speculators project: layer fields apart from drafter fields, and the target named inside."""

from collections.abc import Collection
from typing import Any

from fledge.checkpoints.finding import finding
from fledge.checkpoints.formats.aux_ids import AUX_IDS, NUM_AUX
from fledge.checkpoints.formats.names import EAGLE_3, NameTable
from fledge.checkpoints.formats.shared import FLAGS, ParsedConfig, TargetReference, parse_drafter, write_layer_fields
from fledge.errors import CheckpointError
from fledge.models.config import Architecture, DrafterConfig
from fledge.models.hf_config import ConfigFields

_ALGORITHM = "eagle3"
_LAYERS = "transformer_layer_config"
_TRUE_BY_DEFAULT = "norm_before_residual"


def recognises(fields: ConfigFields) -> bool:
    return "speculators_model_type" in fields or "speculators_config" in fields


def parse(fields: ConfigFields, names: Collection[str], dtype: str) -> ParsedConfig:
    """`names` are our tensor names; `dtype` is that of the stored weights."""
    algorithm = fields.text("speculators_model_type")
    if algorithm != _ALGORITHM:
        raise fields.error("speculators_model_type", algorithm, f"'{_ALGORITHM}'")
    inner = fields.nested(_LAYERS)
    if inner is None:
        raise CheckpointError(f"{fields.where}: required field '{_LAYERS}' is missing")
    family = inner.text("model_type", "llama")
    if family not in ("llama", "qwen3"):
        raise inner.error("model_type", family, "llama or qwen3")
    config, findings = parse_drafter(
        fields,
        inner,
        names,
        architecture=Architecture.EAGLE3,
        num_layers=inner.integer("num_hidden_layers", 1),
        flags={flag: fields.flag(flag, flag == _TRUE_BY_DEFAULT) for flag in FLAGS},
        dtype=dtype,
        qwen3=family == "qwen3",
        list_counts=family == "qwen3",
    )
    if _TRUE_BY_DEFAULT not in fields:
        findings += (finding("norm-before-residual-omitted", _TRUE_BY_DEFAULT, "nothing", "true or false"),)
    return ParsedConfig(config=config, findings=findings, target=_parse_verifier(fields))


def _parse_verifier(fields: ConfigFields) -> TargetReference | None:
    holder = fields.nested("speculators_config")
    verifier = holder.nested("verifier") if holder else None
    if verifier is None:
        return None
    name = verifier.text("name_or_path") if "name_or_path" in verifier else None
    architectures = verifier.values.get("architectures") or []
    if not isinstance(architectures, list):
        raise verifier.error("architectures", architectures, "a list of class names")
    return TargetReference(name_or_path=name, architectures=tuple(map(str, architectures)))


def name_table(config: DrafterConfig) -> NameTable:
    if config.architecture is Architecture.EAGLE1:
        raise CheckpointError("the speculators format has no EAGLE-1 that vLLM reads; write it with --to vllm")
    return EAGLE_3


def write(config: DrafterConfig, target: TargetReference | None, num_speculative_tokens: int) -> dict[str, Any]:
    """The inverse of `parse`."""
    target = target or TargetReference()
    fields: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": _ALGORITHM,
        # vLLM copies nothing but this object to the drafter's config, so what speculators has no field for goes here.
        _LAYERS: {**write_layer_fields(config), NUM_AUX: config.num_aux_states, "torch_dtype": config.dtype},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **{flag: getattr(config, flag) for flag in FLAGS},
        "speculators_config": {
            "algorithm": _ALGORITHM,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}],
            "verifier": {"name_or_path": target.name_or_path, "architectures": list(target.architectures)},
        },
        "torch_dtype": config.dtype,
    }
    if config.aux_layer_ids is not None:
        fields[AUX_IDS] = list(config.aux_layer_ids)
    return fields
