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
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fledge.checkpoints.finding import Finding, finding
from fledge.checkpoints.formats.drafter_classes import (
    LATENT_TENSOR,
    Format,
    architecture_names,
    format_of,
    is_other_spelling,
)
from fledge.errors import CheckpointError
from fledge.layers.config import LayerConfig
from fledge.models.config import Architecture, DrafterConfig
from fledge.models.hf_config import ConfigFields, read_latent_layer, read_layer, rope_holders, write_layers
from fledge.models.target.family import window_fields

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")  # of EAGLE-3 and 3.1, as all spell them
_Q_NORM = "layers.0.self_attn.q_norm.weight"
# Of ModelOpt's `eagle_config`, what EAGLE-3's frame has and has not.
_FRAME = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
_NUM_AUX = "num_aux_hidden_states"
_DEFAULT_NUM_AUX = 3  # what every engine assumes when a config does not say
_QWEN3_THETA, _LLAMA_THETA = 1_000_000.0, 10_000.0
_LLAMA_MAX_POSITIONS = 2048  # the default of transformers' LlamaConfig, and with it of vLLM
_SPECULATORS_LAYERS = "transformer_layer_config"


def read_config(
    fields: ConfigFields, architecture: Architecture, names: Collection[str], dtype: str, notes: list[Finding]
) -> DrafterConfig:
    """Read a config in either format; what is noticed on the way goes to `notes`.

    `names` are our tensor names; `dtype` is that of the stored weights.
    """
    declared = architecture_names(fields)
    layers, qwen3 = fields, any("Qwen3ForCausalLM" in name for name in declared)
    if any(map(is_other_spelling, declared)):  # `convert` writes the class that fits
        qwen3 = _Q_NORM in names
    nested = fields.nested("eagle_config") or ConfigFields({}, f"{fields.where}: eagle_config")
    is_speculators, eagle3 = format_of(fields) == "speculators", architecture is Architecture.EAGLE3
    if is_speculators:
        layers = _speculators_layers(fields)
        qwen3 = layers.text("model_type", "llama") == "qwen3"
    elif eagle3 and not nested.flag("use_aux_hidden_state", True):
        raise nested.error("use_aux_hidden_state", False, "true (EAGLE-3 without aux states is not supported)")
    for field, usual in _FRAME.items():
        if nested.flag(field, usual) != usual:
            raise nested.error(field, not usual, f"{str(usual).lower()} (another frame than EAGLE's)")
    layer, max_positions = _read_layer(layers, names, qwen3, notes)
    num_layers = layers.layers(1) if is_speculators else fields.layers()
    windows = _read_windows(layers, num_layers, notes)
    if layer.latent is not None and windows:
        raise layers.error("sliding_window", layers.values["sliding_window"], "none with latent attention")
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
        num_layers=num_layers,
        sliding_windows=windows,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        max_positions=max_positions,
        target_hidden_size=target_hidden_size,
        aux_layer_ids=aux_ids,
        num_aux_states=num_aux,
        own_embedding="embed_tokens.weight" in names,
        own_head=eagle3 and (any(n.startswith("lm_head.") for n in names) or draft_vocab_size != vocab_size),
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
    if fields.values.get("logit_scale") not in (None, 1, 1.0):
        raise fields.error("logit_scale", fields.values["logit_scale"], "1")
    attention_bias = fields.flag("attention_bias", False)
    qwen2 = any(name.startswith("Qwen2ForCausalLM") for name in architecture_names(fields))  # whose biases are implied
    biases = {}
    is_latent = any(LATENT_TENSOR in name for name in names)
    projection = LATENT_TENSOR if is_latent else "self_attn.q_proj"
    for part, flag, value in (
        (projection, "attention_bias", attention_bias or qwen2),
        ("self_attn.o_proj", "attention_bias", attention_bias and not qwen3 and not qwen2),
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
        partial_rotary=True,
        qk_norm=qwen3 or qk_norm,
        qkv_bias=biases[projection],
        output_bias=biases["self_attn.o_proj"],
        mlp_bias=biases["mlp.gate_proj"],
    )
    if layer.activation != "silu":
        notes.append(finding("activation-not-silu", found=layer.activation))
    return layer, fields.integer("max_position_embeddings")


def _read_windows(fields: ConfigFields, num_layers: int, notes: list[Finding]) -> tuple[int | None, ...]:
    """The sliding window of each layer: those that `layer_types` names, or all with Qwen's `use_sliding_window`.

    A list that was copied from the target is longer than the drafter; engines read its beginning.
    """
    types, on = fields.values.get("layer_types"), fields.flag("use_sliding_window", False)
    if types is None:
        if "sliding_window" in fields and "use_sliding_window" not in fields:
            notes.append(finding("sliding-window-off", found=fields.integer("sliding_window")))
        first = fields.integer("max_window_layers", 0, minimum=0)
        types = ["sliding_attention" if on and i >= first else "full_attention" for i in range(num_layers)]
    if not isinstance(types, list) or len(types) < num_layers:
        raise fields.error("layer_types", types, f"a list of {num_layers} names, one for each layer")
    if unknown := set(map(str, types[:num_layers])) - {"sliding_attention", "full_attention"}:
        raise fields.error("layer_types", sorted(unknown), "sliding_attention or full_attention")
    if "sliding_attention" not in types[:num_layers]:
        return ()
    if not fields.flag("use_sliding_window", True):
        raise fields.error("use_sliding_window", False, "true, as layer_types has sliding_attention")
    window = fields.integer("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types[:num_layers])


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
    # Not deepseek_v3, whose layers the class has: vLLM takes such a drafter for an MTP layer of its target.
    family = "kimi_k2" if latent else "qwen3" if config.layer.qk_norm else "llama"
    layers = write_layers(config, family, tied_head=False) | window_fields(config)
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
