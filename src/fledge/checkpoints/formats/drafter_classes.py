"""Which drafter a directory holds, by its classes and tensors: what is read here, under all its names, and what is not.

A drafter says what it is by `architectures`, and names are many: engines, trainers and EAGLE itself have their own for
the same layers. What is recognised and not built here is refused in one line that says who runs it.
"""

import re
from collections.abc import Collection, Iterable
from typing import Literal

from fledge.checkpoints.finding import Finding, finding
from fledge.errors import CheckpointError
from fledge.models.config import Architecture
from fledge.models.hf_config import ConfigFields

Format = Literal["vllm", "speculators"]

_KNOWN_CLASSES = (  # that vLLM has too
    "EagleLlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",  # these three are the Llama class under other names
    "Eagle3Qwen3vlForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Speculator",  # the speculators format, old and new
    "Eagle3DraftModel",
    "Eagle3DeepseekV2ForCausalLM",  # latent attention; both are the same
    "Eagle3DeepseekV3ForCausalLM",
)
_LATENT_CLASS, LATENT_TENSOR = "Eagle3Deepseek", "self_attn.kv_a_proj_with_mqa"
_MTP_TYPES = ("deepseek_v3", "deepseek_v32")  # whose drafters are MTP layers, for vLLM
_PLAIN_CLASS = "LlamaForCausalLM"  # what EAGLE's own drafters say they are
# Names of the same layers that vLLM does not have: SGLang's EAGLE-1, EAGLE's own for Qwen2, and EAGLE-3 drafters that
# trainers name after the target's family (the layers are what the tensors are).
_FAMILY = "(Llama4|Mistral|Mistral3|Qwen2|Qwen3|Qwen3Mo[eE]|GptOss)"
_OTHER_SPELLINGS = re.compile(
    rf"(Llama|Qwen2)ForCausalLMEagle|Qwen2ForCausalLM|Eagle3{_FAMILY}ForCausalLM|{_FAMILY}ForCausalLMEagle3"
)
# EAGLE-1 drafters whose layers are those of another family: norms, rotations and residuals that EAGLE-1 has not.
_OTHER_LAYERS = re.compile(r"Eagle(Llama4|Mistral|MistralLarge3|Cohere|MiniCPM)ForCausalLM|MistralForCausalLMEagle")
# What is no EAGLE, by its class, `model_type` or `speculators_model_type`, a config field, or a tensor; who runs it.
_OTHER_METHODS = (
    (r"\bp_?eagle", "parallel_drafting", "mask_hidden", "a P-EAGLE drafter, which drafts in parallel", "eagle3"),
    (r"dflash", "dflash_config", None, "a DFlash drafter, which drafts a block by diffusion", "dflash"),
    (r"dspark", "dspark_config", None, "a DSpark drafter, which drafts a block at a time", "dspark"),
    (r"mlp_?speculator", None, None, "an MLP speculator", "mlp_speculator"),
    (r"medusa", "medusa_num_heads", "medusa_head", "Medusa heads", "medusa"),
    (r"mtp|nextn", None, None, "a multi-token-prediction (MTP) layer of its target", "mtp"),
)


def format_of(fields: ConfigFields) -> Format:
    return "speculators" if "speculators_model_type" in fields or "speculators_config" in fields else "vllm"


def architecture_names(fields: ConfigFields) -> list[str]:
    found = fields.values.get("architectures") or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise fields.error("architectures", found, "a list of class names")
    return found


def is_other_spelling(name: str) -> bool:
    return _OTHER_SPELLINGS.fullmatch(name) is not None


def refuse_other_methods(fields: ConfigFields, names: Collection[str]) -> None:
    """Raise for drafters of other methods than EAGLE, whatever their tensors look like."""
    kinds = [str(fields.values.get(field, "")) for field in ("model_type", "speculators_model_type")]
    named = " ".join([*architecture_names(fields), *kinds]).lower()
    for pattern, field, tensor, what, method in _OTHER_METHODS:
        stored = tensor is not None and any(name.startswith(tensor) for name in names)
        if re.search(pattern, named) or fields.values.get(field or "") or stored:
            more = ', "parallel_drafting": true' if method == "eagle3" else ""
            raise CheckpointError(
                f"{fields.where}: {what}: Fledge runs EAGLE drafters only; vLLM runs it "
                f'(--speculative-config \'{{"method": "{method}"{more}, ...}}\')'
            )


def check_class(fields: ConfigFields, names: Collection[str], notes: list[Finding]) -> None:
    """Raise for drafters that are recognised but not built here. `names` are without `model.` in front.

    A class nobody here has met may compute something else than its tensors suggest: that is noted.
    """
    refuse_other_methods(fields, names)
    declared = architecture_names(fields)
    is_latent = any(name.startswith(_LATENT_CLASS) for name in declared)
    if is_latent != any(LATENT_TENSOR in name for name in names):
        wanted, has = ("without", "no") if is_latent else ("with", "a")
        expected = f"a class {wanted} latent attention, as there is {has} {LATENT_TENSOR}"
        raise fields.error("architectures", declared, expected)
    if is_latent and fields.values.get("model_type") in _MTP_TYPES:
        notes.append(finding("mla-model-type", found=fields.text("model_type")))
    if other := next(filter(_OTHER_LAYERS.fullmatch, declared), None):
        raise CheckpointError(
            f"{fields.where}: {other}: EAGLE-1 with layers of the target's family, which Fledge does not support; "
            "vLLM serves it"
        )
    for part, what in ((".experts.", "a mixture-of-experts drafter"), (".sinks", "a drafter with attention sinks")):
        if any(part in name for name in names):
            raise CheckpointError(f"{fields.where}: {what}, which Fledge does not support")
    for name in declared[:1]:
        if name not in (*_KNOWN_CLASSES, _PLAIN_CLASS):
            what = "class-not-in-vllm" if is_other_spelling(name) else "architecture-unknown"
            notes.append(finding(what, found=name))


def architecture_of(fields: ConfigFields, names: Iterable[str]) -> Architecture | None:
    """What a directory holds by its config, or by its tensors, since configs of either may just say LlamaForCausalLM.

    Returns None for what is no drafter. Wants names without `model.` in front.
    """
    declared, known = architecture_names(fields), set(names)
    if format_of(fields) == "speculators" or any("Eagle3" in name for name in declared):
        return Architecture.EAGLE3
    if any("Eagle" in name for name in declared):
        return Architecture.EAGLE1
    if any(name.endswith(".hidden_norm.weight") or name.startswith(("midlayer.", "fc_norm.")) for name in known):
        return Architecture.EAGLE3
    has_fc = any(name.startswith("fc.") and name != "fc.bias" for name in known)  # quantised, it has other names
    if "d2t" in known or "norm.weight" in known:
        return Architecture.EAGLE3 if has_fc else None
    return Architecture.EAGLE1 if has_fc else None
