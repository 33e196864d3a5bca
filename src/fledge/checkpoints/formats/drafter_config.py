"""What config.json says of a drafter, in two formats: read into a `DrafterConfig`, and written. And tensor names.

    vllm          one flat config.json, which vLLM, SGLang, EAGLE, SpecForge and TorchSpec share. Their dialects differ
                  in where a field sits (top level or nested in `eagle_config`) and in tensor names. We write what all
                  of them read: every field at the top level, and the aux ids nested as well, as SGLang wants them.
    speculators   that project's: layer fields apart from drafter fields, and the target named inside

Which target layers a drafter reads goes through two fields and two conventions:

                                      id k means               who writes and reads it
    top level                         the input of block k     vLLM, speculators
    nested in `eagle_config`          the output of block k    SGLang, SpecForge; but some trainers write inputs

The output of block k is the input of block k + 1, so the two differ by one. For nested ids SGLang itself came to
guess: a list that starts with 1 names outputs, because the usual layers counted as outputs start there; any other
list names inputs. We follow it, and warn.

Tensor names of ours are the parameter names of `fledge.models.drafter` before query, key, value and gate, up are
stacked; theirs differ for the first layer and the draft vocabulary (`our_name`, `their_name`).
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from fledge.checkpoints.finding import Finding, finding
from fledge.errors import CheckpointError
from fledge.layers.config import LayerConfig
from fledge.models.config import Architecture, DrafterConfig
from fledge.models.hf_config import ConfigFields, read_latent_layer, read_layer, rope_holders, write_layers

Format = Literal["vllm", "speculators"]

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")  # of EAGLE-3 and 3.1, as all spell them
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
    "Eagle3DeepseekV2ForCausalLM",  # latent attention; both are the same
    "Eagle3DeepseekV3ForCausalLM",
)
_LATENT_CLASS, _LATENT_TENSOR = "Eagle3Deepseek", "self_attn.kv_a_proj_with_mqa"
_PLAIN_CLASS = "LlamaForCausalLM"  # what EAGLE's own drafters say they are
_NUM_AUX = "num_aux_hidden_states"
_DEFAULT_NUM_AUX = 3  # what every engine assumes when a config does not say
_QWEN3_THETA, _LLAMA_THETA = 1_000_000.0, 10_000.0
_LLAMA_MAX_POSITIONS = 2048  # the default of transformers' LlamaConfig, and with it of vLLM
_SPECULATORS_LAYERS = "transformer_layer_config"


def format_of(fields: ConfigFields) -> Format:
    return "speculators" if "speculators_model_type" in fields or "speculators_config" in fields else "vllm"


def architecture_names(fields: ConfigFields) -> list[str]:
    found = fields.values.get("architectures") or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise fields.error("architectures", found, "a list of class names")
    return found


def check_class(fields: ConfigFields, names: Collection[str], notes: list[Finding]) -> None:
    """Raise for drafters that are recognised but not built here. `names` are without `model.` in front.

    A class nobody here has met may compute something else than its tensors suggest: that is noted.
    """
    declared = architecture_names(fields)
    latent_class = any(name.startswith(_LATENT_CLASS) for name in declared)
    if latent_class != any(_LATENT_TENSOR in name for name in names):
        has = "no" if latent_class else "a"
        expected = (
            f"a class {'without' if latent_class else 'with'} latent attention, as there is {has} {_LATENT_TENSOR}"
        )
        raise fields.error("architectures", declared, expected)
    unknown = [name for name in declared if name not in (*_KNOWN_CLASSES, _PLAIN_CLASS)]
    for name in unknown:
        if "Eagle" in name:
            raise fields.error("architectures", name, f"a class that Fledge knows: {', '.join(_KNOWN_CLASSES)}")
    if any(".experts." in name for name in names):
        raise CheckpointError(f"{fields.where}: a mixture-of-experts drafter, which Fledge does not support")
    if "mask_hidden" in names:
        raise CheckpointError(f"{fields.where}: a parallel-drafting (P-EAGLE) drafter, which Fledge does not support")
    if unknown:
        notes.append(finding("architecture-unknown", found=unknown[0]))


def read_config(
    fields: ConfigFields, architecture: Architecture, names: Collection[str], dtype: str, notes: list[Finding]
) -> DrafterConfig:
    """Read a config in either format; what is noticed on the way goes to `notes`.

    `names` are our tensor names; `dtype` is that of the stored weights.
    """
    layers, qwen3 = fields, any("Qwen3ForCausalLM" in name for name in architecture_names(fields))
    nested = fields.nested("eagle_config") or ConfigFields({}, f"{fields.where}: eagle_config")
    is_speculators, eagle3 = format_of(fields) == "speculators", architecture is Architecture.EAGLE3
    if is_speculators:
        layers = _speculators_layers(fields)
        qwen3 = layers.text("model_type", "llama") == "qwen3"
    elif eagle3 and not nested.flag("use_aux_hidden_state", True):
        raise nested.error("use_aux_hidden_state", False, "true (EAGLE-3 without aux states is not supported)")
    layer, max_positions = _read_layer(layers, names, qwen3, notes)
    vocab_size = layers.integer("vocab_size")
    draft_vocab_size, target_hidden_size, aux_ids, num_aux = vocab_size, layer.hidden_size, None, _DEFAULT_NUM_AUX
    flags: dict[str, bool] = {}
    if eagle3:
        draft_vocab_size = fields.integer("draft_vocab_size", vocab_size)
        target_hidden_size = fields.integer("target_hidden_size", layer.hidden_size)
        # vLLM takes the number of aux states from the length of some lists.
        list_counts = qwen3 or (not is_speculators and AUX_IDS in nested)
        aux_ids, num_aux = _read_aux(fields, nested, layers, list_counts, notes)
        flags = _read_flags(fields, nested, notes)
    return DrafterConfig(
        architecture=architecture,
        layer=layer,
        num_layers=layers.layers(1) if is_speculators else fields.layers(),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        max_positions=max_positions,
        target_hidden_size=target_hidden_size,
        aux_layer_ids=aux_ids,
        num_aux_states=num_aux,
        own_embedding="embed_tokens.weight" in names,
        own_head=eagle3 and ("lm_head.weight" in names or draft_vocab_size != vocab_size),
        fc_bias="fc.bias" in names,
        dtype=dtype,
        **flags,
    )


def _speculators_layers(fields: ConfigFields) -> ConfigFields:
    """The layer fields of the speculators format, once all of it is of a kind that we read."""
    if (algorithm := fields.text("speculators_model_type")) != "eagle3":
        raise fields.error("speculators_model_type", algorithm, "'eagle3'")
    layers = fields.nested(_SPECULATORS_LAYERS)
    if layers is None:
        raise CheckpointError(f"{fields.where}: required field '{_SPECULATORS_LAYERS}' is missing")
    if (family := layers.text("model_type", "llama")) not in ("llama", "qwen3"):
        raise layers.error("model_type", family, "llama or qwen3")
    return layers


def read_target_reference(fields: ConfigFields) -> dict[str, Any] | None:
    """The target a drafter was made for: `name_or_path` and `architectures`, as the speculators format names it."""
    holder = fields.nested("speculators_config")
    verifier = holder.nested("verifier") if holder else None
    if verifier is None:
        return None
    name = verifier.text("name_or_path") if "name_or_path" in verifier else None
    return {"name_or_path": name, "architectures": architecture_names(verifier)}


def _read_layer(
    fields: ConfigFields, names: Collection[str], qwen3: bool, notes: list[Finding]
) -> tuple[LayerConfig, int]:
    """Return the layer and the number of positions it was made for.

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
    attention_bias = fields.flag("attention_bias", False)
    biases = {}
    is_latent = any(_LATENT_TENSOR in name for name in names)
    projection = _LATENT_TENSOR if is_latent else "self_attn.q_proj"
    for part, flag, value in (
        (projection, "attention_bias", attention_bias),
        ("self_attn.o_proj", "attention_bias", attention_bias and not qwen3),
        ("mlp.gate_proj", "mlp_bias", fields.flag("mlp_bias", False)),
    ):
        tensor = f"layers.0.{part}.bias"
        biases[part] = tensor in names
        if biases[part] and not value:
            notes.append(finding("bias-flag-off", field=flag, tensor=tensor))
        elif value and not biases[part]:
            notes.append(finding("bias-missing", field=flag, tensor=tensor, fixed_by_convert="o_proj" in part))
    qk_norm = any(name.endswith("self_attn.q_norm.weight") for name in names)
    if qk_norm and not qwen3:
        notes.append(finding("qk-norm-architecture"))
    defaults: dict[str, Any] = {}
    if not any("rope_theta" in holder for holder in rope_holders(fields)):
        defaults["rope_theta"] = _QWEN3_THETA if qwen3 else _LLAMA_THETA
        notes.append(finding("rope-theta-omitted", default=defaults["rope_theta"]))
    if "max_position_embeddings" not in fields:
        defaults["max_position_embeddings"] = _LLAMA_MAX_POSITIONS
        notes.append(finding("max-positions-omitted", default=_LLAMA_MAX_POSITIONS))
    fields = ConfigFields({**fields.values, **defaults}, fields.where)
    layer = (read_latent_layer if is_latent else read_layer)(
        fields,
        qk_norm=qwen3 or qk_norm,
        qkv_bias=biases[projection],
        output_bias=biases["self_attn.o_proj"],
        mlp_bias=biases["mlp.gate_proj"],
    )
    return layer, fields.integer("max_position_embeddings")


def _read_aux(
    fields: ConfigFields, nested: ConfigFields, layers: ConfigFields, list_counts: bool, notes: list[Finding]
) -> tuple[tuple[int, ...] | None, int]:
    """Return the ids as block inputs, or None when the config does not say, and how many aux states fc joins."""
    top = fields.integers(AUX_IDS) or None
    inner = nested.integers(AUX_IDS) or nested.integers("layer_ids") or None
    if top is not None and inner is not None and list(inner) not in (list(top), as_outputs(top)):
        notes.append(finding("aux-ids-contradiction", found=list(inner), outputs=as_outputs(top), inputs=list(top)))
    if top is None and inner is not None:
        convention, top = ("outputs", tuple(i + 1 for i in inner)) if inner[0] == 1 else ("inputs", inner)
        notes.append(finding("aux-ids-nested", found=list(inner), convention=convention, inputs=list(top)))
    if top is not None and list(top) != sorted(set(top)):
        notes.append(finding("aux-ids-order", found=list(top)))
    listed = len(top) if top else _DEFAULT_NUM_AUX
    if (declared := next((field for field in (_NUM_AUX, "num_aux_layers") if field in layers), None)) is not None:
        count = layers.integer(declared)
        if top is not None and count != listed:
            notes.append(finding("aux-count", field=declared, found=count, listed=listed))
        return top, count
    if listed != _DEFAULT_NUM_AUX and not list_counts:
        notes.append(finding("aux-count-undeclared", expected=listed, assumed=_DEFAULT_NUM_AUX))
    return top, listed


def _read_flags(fields: ConfigFields, nested: ConfigFields, notes: list[Finding]) -> dict[str, bool]:
    """Flags belong to the top level. A nested one is understood, but vLLM reads only `norm_before_fc` there."""
    if format_of(fields) == "speculators":
        if "norm_before_residual" not in fields:
            notes.append(finding("norm-before-residual-omitted"))
        return {flag: fields.flag(flag, flag == "norm_before_residual") for flag in FLAGS}
    flags: dict[str, bool] = {}
    for flag in FLAGS:
        inner = nested.flag(flag, False)
        flags[flag] = fields.flag(flag, inner)
        if flag in nested and flag in fields and flags[flag] != inner:
            found, top = str(inner).lower(), str(flags[flag]).lower()
            notes.append(finding("flag-contradiction", flag=flag, found=found, top=top))
        elif flag not in fields and inner and flag != "norm_before_fc":
            notes.append(finding("flag-nested", flag=flag))
    return flags


def as_outputs(inputs: Sequence[int]) -> list[int] | None:
    """Aux layers as block outputs; None when one of them is the embedding, which is no block's output."""
    return None if 0 in inputs else [i - 1 for i in inputs]


def write_config(
    config: DrafterConfig, to: Format, target: Mapping[str, Any] | None = None, num_speculative_tokens: int = 3
) -> dict[str, Any]:
    """The inverse of `read_config`."""
    eagle1 = config.architecture is Architecture.EAGLE1
    if eagle1 and to == "speculators":
        raise CheckpointError("the speculators format has no EAGLE-1 that vLLM reads; write it with --to vllm")
    if eagle1 and config.layer.qk_norm:
        raise CheckpointError("an EAGLE-1 drafter with q/k norms has no class in vLLM or SGLang; nothing written")
    latent = config.layer.latent is not None
    if latent and (eagle1 or to == "speculators"):
        raise CheckpointError("latent attention: only an EAGLE-3 drafter has a class, and --to vllm; nothing written")
    family = "deepseek_v3" if latent else "qwen3" if config.layer.qk_norm else "llama"
    layers = write_layers(config, family, tied_head=False)
    if eagle1:
        # Not "bias", EAGLE's own name for fc's bias: vLLM takes it for attention biases that are not there.
        return {"architectures": ["EagleLlamaForCausalLM"], **layers, "torch_dtype": config.dtype}
    fields: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **{flag: getattr(config, flag) for flag in FLAGS},
        "torch_dtype": config.dtype,
    }
    if config.aux_layer_ids is not None:
        fields[AUX_IDS] = list(config.aux_layer_ids)
    if to == "vllm":
        if config.aux_layer_ids is not None and (outputs := as_outputs(config.aux_layer_ids)) is not None:
            fields["eagle_config"] = {"use_aux_hidden_state": True, AUX_IDS: outputs}
        name = "Eagle3Qwen3ForCausalLM" if config.layer.qk_norm else "LlamaForCausalLMEagle3"
        name = "Eagle3DeepseekV2ForCausalLM" if latent else name
        return {"architectures": [name], **layers, _NUM_AUX: config.num_aux_states, **fields}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        # vLLM copies nothing but this object to the drafter's config, so what speculators has no field for goes here.
        _SPECULATORS_LAYERS: {**layers, _NUM_AUX: config.num_aux_states, "torch_dtype": config.dtype},
        **fields,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}],
            "verifier": target or {"name_or_path": None, "architectures": []},
        },
    }


D2T = "vocabulary.d2t"  # ours; theirs is "d2t"
T2D = "t2d"  # follows from d2t; kept for other readers, checked by us


def our_name(name: str, architecture: Architecture) -> str:
    """The name that a stored tensor has here, before joining, whichever way its first layer is called."""
    if architecture is Architecture.EAGLE1:
        return name
    return D2T if name == "d2t" else re.sub(r"^midlayer\.", "layers.0.", name)


def their_name(name: str, *, midlayer: bool) -> str:
    """The inverse. `midlayer`: as EAGLE, SGLang, SpecForge and TorchSpec call layer 0; SGLang reads nothing else."""
    return "d2t" if name == D2T else re.sub(r"^layers\.0\.", "midlayer.", name) if midlayer else name


# Never weights of ours: rope frequencies follow from the config; vLLM creates, and never reads, a `hidden_norm` in
# layers after the first.
IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq|layers\.[1-9]\d*\.hidden_norm\.weight")


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
    if "d2t" in known or "norm.weight" in known:
        return Architecture.EAGLE3 if "fc.weight" in known else None
    return Architecture.EAGLE1 if "fc.weight" in known else None
