"""compressed-tensors, as llm-compressor writes it and vLLM and transformers read it: a scheme by group of linears.

Activations are quantised where weights are in FP8 with a scale for each row or matrix, and they are in FP8 too; others
are not, whatever a group says of them. Nor do keys and values follow `kv_cache_scheme`: that is the engine's
`kv_cache_dtype`.
"""

from collections.abc import Callable
from typing import Any, Literal

from fledge.checkpoints.formats.dense import WeightFormat
from fledge.checkpoints.formats.quantized import Quantized, Scheme, matches, names_of
from fledge.checkpoints.formats.schemes import Block, EightBits, PackedFloats, PackedIntegers
from fledge.errors import CheckpointError
from fledge.kernels.quantized_linear import Activations
from fledge.models.hf_config import ConfigFields

METHOD = "compressed-tensors"
_NAIVE = ("float-quantized", "int-quantized", "naive-quantized")
_LINEARS = ("Linear", "LinearBase")  # classes that a group may name: then it has all linears


def weight_format(quantization: ConfigFields) -> WeightFormat | None:
    if quantization.values.get("quant_method") != METHOD:
        return None
    for field in ("sparsity_config", "transform_config"):
        nested = quantization.nested(field)
        kind = nested.values.get("format", "something") if nested is not None and nested.values else "dense"
        if kind != "dense":
            raise CheckpointError(f"{quantization.where}: {field} ({kind}) is not read here")
    groups = quantization.nested("config_groups")
    if groups is None or not groups.values:
        if quantization.nested("kv_cache_scheme") is None:
            raise CheckpointError(f"{quantization.where}: required field 'config_groups' is missing")
        groups = ConfigFields({}, quantization.where)  # keys and values alone
    schemes: list[tuple[Callable[[str], bool], Scheme | None]] = [(names_of(quantization, "ignore"), None)]
    for name in groups.values:
        group = groups.nested(name)
        if group is None:
            raise groups.error(name, None, "a JSON object")
        schemes.append((_targets(group), _scheme(group, group.text("format", quantization.text("format", "")))))
    return Quantized(
        name=METHOD, scheme_of=lambda name, _held: next((scheme for is_of, scheme in schemes if is_of(name)), None)
    )


def _targets(group: ConfigFields) -> Callable[[str], bool]:
    targets: Any = group.values.get("targets")
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
        raise group.error("targets", targets, "a list of names")
    return lambda name: any(one in _LINEARS or matches(one, name, group) for one in targets)


def _scheme(group: ConfigFields, form: str) -> Scheme:
    weights = group.nested("weights")
    if weights is None:
        raise CheckpointError(f"{group.where}: required field 'weights' is missing")
    bits, kind, strategy = weights.integer("num_bits"), weights.text("type", "int"), weights.text("strategy", "tensor")
    symmetric = weights.flag("symmetric", True)
    if form == "nvfp4-pack-quantized":
        return PackedFloats(group_size=16, whole="weight_global_scale", divides=True)
    if form == "mxfp4-pack-quantized":
        return PackedFloats(group_size=32)
    if form == "mxfp8-quantized":
        return EightBits(kind="fp8", block=(1, 32))
    if form == "pack-quantized" and kind == "int" and bits in (4, 8) and strategy in ("group", "channel"):
        width: Literal[4, 8] = 4 if bits == 4 else 8
        size = weights.integer("group_size") if strategy == "group" else None
        ordered = weights.values.get("actorder") in ("group", True)
        return PackedIntegers(bits=width, group_size=size, symmetric=symmetric, ordered=ordered)
    if form in _NAIVE and bits <= 8 and (kind == "int" or (bits == 8 and symmetric)):
        zero = None if symmetric else "weight_zero_point"
        if kind == "int":
            return EightBits(kind="int8", block=_block(weights, strategy), zero=zero)
        block = _block(weights, strategy)
        return EightBits(kind="fp8", block=block, activations=_activations(group) if isinstance(block, str) else None)
    described = f"{form or 'no format'}, {bits}-bit {kind}, {strategy}"
    raise CheckpointError(f"{group.where}: weights stored as {described} are not read here")


def _activations(group: ConfigFields) -> Activations | None:
    """Dynamic scales are those of tokens, also where a group has one for all of a pass: none may depend on the others.

    vLLM does the same.
    """
    inputs = group.nested("input_activations")
    if inputs is None or inputs.text("type", "int") != "float" or inputs.integer("num_bits") != 8:
        return None
    if inputs.text("strategy", "tensor") not in ("token", "tensor"):
        return None
    match inputs.values.get("dynamic", False):
        case True:
            return "token"
        case False:
            return "tensor"
        case _:
            return None


def _block(weights: ConfigFields, strategy: str) -> Block:
    match strategy:
        case "tensor":
            return "tensor"
        case "channel":
            return "row"
        case "group":
            return 1, weights.integer("group_size")
        case "block":
            shape = weights.integers("block_structure") or ()
            if len(shape) == 2 and min(shape) > 0:
                return shape[0], shape[1]
            raise weights.error("block_structure", weights.values.get("block_structure"), "two numbers")
        case _:
            raise weights.error("strategy", strategy, "tensor, channel, group or block")
