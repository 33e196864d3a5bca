"""NVIDIA's ModelOpt: FP8 with one scale for each matrix and one for its inputs, and NVFP4, whose inputs stay.

Its config is in config.json, or, as older versions write it, alone in hf_quant_config.json (`weights.weight_format`).
"""

from fledge.checkpoints.formats.dense import WeightFormat
from fledge.checkpoints.formats.quantized import Quantized, Scheme, names_of
from fledge.checkpoints.formats.schemes import EightBits, PackedFloats
from fledge.errors import CheckpointError
from fledge.models.hf_config import ConfigFields

_SCHEMES: dict[str, Scheme] = {
    "FP8": EightBits(kind="fp8", block="tensor", activations="tensor"),
    "NVFP4": PackedFloats(group_size=16, codes="weight", whole="weight_scale_2"),
}


def weight_format(quantization: ConfigFields) -> WeightFormat | None:
    if not str(quantization.values.get("quant_method")).startswith("modelopt"):
        return None
    nested = quantization.nested("quantization") or quantization
    if nested.values.get("quant_algo") is None and nested.values.get("kv_cache_quant_algo") is not None:
        return Quantized(name="modelopt", scheme_of=lambda _name, _held: None)  # keys and values alone
    algorithm = nested.text("quant_algo").upper()
    if (scheme := _SCHEMES.get(algorithm)) is None:
        raise CheckpointError(f"{nested.where}: quant_algo {algorithm} is not read here; {' and '.join(_SCHEMES)} are")
    if scheme is _SCHEMES["NVFP4"] and nested.integer("group_size", 16) != 16:
        raise nested.error("group_size", nested.values["group_size"], "16")
    is_dense = names_of(nested, "ignore", "exclude_modules")
    return Quantized(name=f"modelopt {algorithm}", scheme_of=lambda name, _held: None if is_dense(name) else scheme)
