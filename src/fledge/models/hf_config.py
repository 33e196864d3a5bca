"""Reading Hugging Face `config.json` files: typed fields, errors that name the file, and what families share."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fledge.errors import CheckpointError
from fledge.files import parse_json
from fledge.layers.config import Activation, ExpertsConfig, LatentConfig, LayerConfig, RopeConfig
from fledge.models.config import DrafterConfig, TargetConfig

_MISSING: Any = object()
MAX_LAYERS, MAX_INTEGER = 1000, 2**31 - 1
DTYPES = ("float32", "float16", "bfloat16")
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
}
_ROPE_FIELDS = {  # of `RopeConfig`, by the types that have them, besides the factor
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
    "longrope": ("short_factor", "long_factor", "attention_factor"),
}


@dataclass(frozen=True)
class ConfigFields:
    """A JSON object read from a file, with getters that check types. `where` begins every error message."""

    values: Mapping[str, Any]
    where: str

    @classmethod
    def from_file(cls, path: Path) -> "ConfigFields":
        try:
            values = parse_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file; a model directory needs a config.json") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: expected a JSON object, found {type(values).__name__}")
        return cls(values, str(path))

    def __contains__(self, field: str) -> bool:
        return self.values.get(field) is not None

    def error(self, field: str, found: object, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: field '{field}' is {found!r}, expected {expected}")

    def layers(self, default: int = _MISSING) -> int:
        """The number of layers: at most `MAX_LAYERS`, for a model is built before its weights are found missing."""
        if (layers := self.integer("num_hidden_layers", default)) > MAX_LAYERS:
            raise self.error("num_hidden_layers", layers, f"at most {MAX_LAYERS}")
        return layers

    def integer(self, field: str, default: int = _MISSING, *, minimum: int = 1) -> int:
        value: int = self._get(field, default, int, f"an integer of at least {minimum}")
        if not minimum <= value <= MAX_INTEGER:
            raise self.error(field, value, f"an integer from {minimum} to {MAX_INTEGER}")
        return value

    def number(self, field: str, default: float = _MISSING) -> float:
        value = float(self._get(field, default, int | float, "a positive number"))
        if not 0 < value < math.inf:
            raise self.error(field, value, "a positive number")
        return value

    def flag(self, field: str, default: bool = _MISSING) -> bool:
        return bool(self._get(field, default, bool, "true or false"))

    def text(self, field: str, default: str = _MISSING) -> str:
        return str(self._get(field, default, str, "a string"))

    def integers(self, field: str) -> tuple[int, ...] | None:
        """A list of integers; one integer counts as a list of one; None when absent."""
        value = self.values.get(field)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in items):
            raise self.error(field, value, "a list of non-negative integers")
        return tuple(items)

    def numbers(self, field: str) -> tuple[float, ...]:
        """A list of positive numbers."""
        value = self._get(field, _MISSING, list, "a list of positive numbers")
        if any(isinstance(one, bool) or not isinstance(one, int | float) or not 0 < one < math.inf for one in value):
            raise self.error(field, value, "a list of positive numbers")
        return tuple(float(one) for one in value)

    def nested(self, field: str) -> "ConfigFields | None":
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(field, value, "a JSON object")
        return ConfigFields(value, f"{self.where}: {field}")

    def _get(self, field: str, default: Any, kind: Any, expected: str) -> Any:
        value = self.values.get(field)
        if value is None and default is _MISSING:
            raise CheckpointError(f"{self.where}: required field '{field}' is missing")
        value = default if value is None else value
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(field, value, expected)
        return value


def read_rope(fields: ConfigFields) -> RopeConfig:
    """Rope settings as transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`) writes them."""
    holders = rope_holders(fields)
    thetas = list(dict.fromkeys(holder.number("rope_theta") for holder in holders if "rope_theta" in holder))
    if len(thetas) > 1:
        raise fields.error("rope_theta", thetas[1], f"one value, but the file also says {thetas[0]}")
    # Beside the other fields in transformers 4, among the rope's in 5.
    partial = "partial_rotary_factor"
    factors = {holder.number(partial) for holder in holders if partial in holder} or {1.0}
    if len(factors) > 1 or max(factors) > 1:
        raise fields.error(partial, sorted(factors), "one number of at most 1")
    rope = RopeConfig(theta=thetas[0] if thetas else 10000.0, partial_factor=factors.pop())
    scaling = holders[1] if len(holders) > 1 else ConfigFields({}, fields.where)
    kind, original = scaling.text("rope_type", scaling.text("type", "default")), "original_max_position_embeddings"
    holder = scaling if original in scaling else fields  # some have it beside the other fields
    values: dict[str, Any] = {}
    match kind:
        case "default" | "mrope":  # of a text, all parts of a position are the same number
            return rope
        case "linear":
            pass
        case "dynamic":
            for field in ("alpha", "max_trained_positions"):
                if field in scaling:
                    raise scaling.error(field, scaling.values[field], "none: engines read it differently")
        case "llama3":
            values = {field: scaling.number(field) for field in ("low_freq_factor", "high_freq_factor")}
            values["original_max_positions"] = holder.integer(original)
        case "yarn":
            said = original if original in holder else "max_position_embeddings"
            values = {"original_max_positions": holder.integer(said), "truncate": scaling.flag("truncate", True)}
            values |= {field: scaling.number(field, getattr(rope, field)) for field in ("beta_fast", "beta_slow")}
            for field in ("attention_factor", "mscale", "mscale_all_dim"):
                if scaling.values.get(field):  # zero stands for none
                    values[field] = scaling.number(field)
        case "longrope" | "su":
            return replace(rope, type="longrope", **_longrope(fields, scaling, holder.integer(original)))
        case _:
            raise fields.error("rope_type", kind, "default, linear, dynamic, llama3, yarn, longrope or mrope")
    return replace(rope, type=kind, factor=scaling.number("factor"), **values)


def _longrope(fields: ConfigFields, scaling: ConfigFields, original: int) -> dict[str, Any]:
    """Which factors count follows from how far the config reaches: keys that are cached stay as they are.

    vLLM goes by its `max_model_len` instead, and so takes the short ones where that lies within the original positions;
    transformers by the length of each text.
    """
    reach = fields.integer("max_position_embeddings") / original
    for other in ("short_mscale", "long_mscale"):
        if other in scaling:
            raise scaling.error(other, scaling.values[other], "none: not supported")
    factor = scaling.number("factor", reach)
    sharper = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return {
        "factor": max(reach, 1.0),
        "original_max_positions": original,
        "attention_factor": scaling.number("attention_factor", sharper),
        "short_factor": scaling.numbers("short_factor"),
        "long_factor": scaling.numbers("long_factor"),
    }


def rope_holders(fields: ConfigFields) -> list[ConfigFields]:
    """The objects of a config that may speak of the rope."""
    holders = (fields, fields.nested("rope_parameters"), fields.nested("rope_scaling"))
    return [holder for holder in holders if holder is not None]


def partial_rotary_of(fields: ConfigFields, *, default: float) -> ConfigFields:
    """The config with the share of each head that rotates, where it does not say."""
    partial = "partial_rotary_factor"
    said = any(partial in holder for holder in rope_holders(fields))
    return fields if said else ConfigFields({**fields.values, partial: default}, fields.where)


def read_layer(
    fields: ConfigFields, *, default_head_dim: int | None = None, partial_rotary: bool = False, **kinds: Any
) -> LayerConfig:
    """The shape of a layer. What a family does without saying so in its config arrives as fields of `LayerConfig`.

    A config that rotates a part of each head only is refused unless the family is `partial_rotary`.
    """
    named = "hidden_activation" if "hidden_activation" in fields else "hidden_act"  # the former is Gemma's
    activation = _ACTIVATIONS.get(spelled := fields.text(named, "silu"))
    if activation is None or (activation != "silu" and "experts" in kinds):
        known = "silu" if "experts" in kinds else "one of " + ", ".join(_ACTIVATIONS)
        raise fields.error(named, spelled, known)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
    if default_head_dim is None:
        default_head_dim = hidden_size // num_heads
        if "head_dim" not in fields and hidden_size % num_heads:
            raise fields.error("num_attention_heads", num_heads, f"a divisor of hidden_size ({hidden_size})")
    head_dim = fields.integer("head_dim", default_head_dim)
    if head_dim % 2:
        raise fields.error("head_dim", head_dim, "an even number")
    rope = read_rope(fields)
    if rope.partial_factor != 1 and not partial_rotary:
        raise fields.error("partial_rotary_factor", rope.partial_factor, "1 (rotary on whole heads)")
    if rope.rotary_dim(head_dim) < 2 or rope.rotary_dim(head_dim) % 2:
        raise fields.error("partial_rotary_factor", rope.partial_factor, f"an even share of head_dim ({head_dim})")
    for named in ("short_factor", "long_factor"):
        if rope.type == "longrope" and len(getattr(rope, named)) != rope.rotary_dim(head_dim) // 2:
            raise fields.error(named, list(getattr(rope, named)), f"{rope.rotary_dim(head_dim) // 2} numbers")
    if (experts := kinds.get("experts")) is not None:
        _check_experts(fields, experts)
    return LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        activation=activation,
        **kinds,
    )


def _check_experts(fields: ConfigFields, experts: ExpertsConfig) -> None:
    """Refuse what a router cannot choose."""
    size, rest = divmod(experts.num_experts, experts.n_group)
    if rest or (size < 2 and experts.n_group > 1):
        raise fields.error("n_group", experts.n_group, f"equal parts of {experts.num_experts} experts, of two or more")
    if experts.topk_group > experts.n_group:
        raise fields.error("topk_group", experts.topk_group, f"at most n_group ({experts.n_group})")
    if experts.num_experts_per_token > (most := size * experts.topk_group):
        raise fields.error("num_experts_per_tok", experts.num_experts_per_token, f"at most {most}, to choose from")


def read_latent_layer(fields: ConfigFields, **kinds: Any) -> LayerConfig:
    """`read_layer` for latent attention, as DeepSeek spells it. What rotates of a head counts as `head_dim`."""
    latent = LatentConfig(
        q_lora_rank=fields.integer("q_lora_rank") if "q_lora_rank" in fields else None,
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
    )
    if latent.qk_rope_head_dim % 2:
        raise fields.error("qk_rope_head_dim", latent.qk_rope_head_dim, "an even number")
    told = ConfigFields({**fields.values, "head_dim": latent.qk_rope_head_dim}, fields.where)
    found = read_layer(told, latent=latent, **kinds)
    if found.num_kv_heads != found.num_heads:
        raise fields.error("num_key_value_heads", found.num_kv_heads, f"num_attention_heads ({found.num_heads})")
    return replace(found, rope=replace(found.rope, interleaved=True))


def read_dtype(fields: ConfigFields) -> str:
    """The dtype of the stored weights: `dtype` in transformers 5, `torch_dtype` before."""
    name = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise fields.error("dtype", name, "one of " + ", ".join(DTYPES))
    return name


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """The inverse of `read_rope`, in the transformers 4 spelling, which every engine of the field reads."""
    fields: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.partial_factor != 1:
        fields["partial_rotary_factor"] = rope.partial_factor
    if rope.type == "default":
        return fields
    scaling = {
        "rope_type": rope.type,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_positions,
        **{field: getattr(rope, field) for field in _ROPE_FIELDS[rope.type]},
    }
    scaling = {field: list(value) if isinstance(value, tuple) else value for field, value in scaling.items()}
    return fields | {"rope_scaling": {field: value for field, value in scaling.items() if value is not None}}


def write_layers(config: TargetConfig | DrafterConfig, model_type: str, *, tied_head: bool) -> dict[str, Any]:
    """The layers of a model, in the spelling of transformers 4, which every engine reads; what families imply is not.

    The inverse of `read_layer`, with the number of layers, tokens and positions.
    """
    layer = config.layer
    return {
        "model_type": model_type,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        **({} if layer.latent is None else asdict(layer.latent)),
        "rms_norm_eps": layer.norm_eps,
        "hidden_act": layer.activation,
        "attention_bias": layer.qkv_bias,
        "mlp_bias": layer.mlp_bias,
        **write_rope(layer.rope),
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": tied_head,
    }
