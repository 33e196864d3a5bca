"""AMD's Quark, FP8: a scale for each matrix or row, and activations by token, by tensor or as they are.

A linear is stored as `layer_quant_config` says of its name, else `layer_type_quant_config` of its class, else
`global_quant_config`. Outputs of key and value projections that are quantised mean the cache (`kv_scales`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from fledge.checkpoints.formats.dense import WeightFormat
from fledge.checkpoints.formats.quantized import Quantized, Scheme, matches, names_of
from fledge.checkpoints.formats.schemes import Block, EightBits
from fledge.checkpoints.tensors import TensorInfo
from fledge.errors import CheckpointError
from fledge.kernels.quantized_linear import Activations
from fledge.models.hf_config import ConfigFields

_DTYPE = "fp8_e4m3"
_BLOCKS: Mapping[str, Block] = {"per_tensor": "tensor", "per_channel": "row"}


def weight_format(quantization: ConfigFields) -> WeightFormat | None:
    if quantization.values.get("quant_method") != "quark":
        return None
    by_class, whole = quantization.nested("layer_type_quant_config"), quantization.nested("global_quant_config")
    for_linears = None if by_class is None else by_class.nested("Linear")
    default = None if (chosen := for_linears or whole) is None else _scheme(chosen)
    is_dense = names_of(quantization, "exclude")
    schemes: list[tuple[Callable[[str], bool], Scheme | None]] = []
    by_name = quantization.nested("layer_quant_config")
    for pattern in () if by_name is None else by_name.values:
        own = by_name.nested(pattern) if by_name is not None else None
        if own is None:
            raise quantization.error("layer_quant_config", pattern, "an object for each name")
        schemes.append((_named(pattern, own), _scheme(own)))

    def scheme_of(name: str, _held: Mapping[str, TensorInfo]) -> Scheme | None:
        if is_dense(name):
            return None
        return next((scheme for is_of, scheme in schemes if is_of(name)), default)

    return Quantized(name="quark", scheme_of=scheme_of)


def _named(pattern: str, fields: ConfigFields) -> Callable[[str], bool]:
    return lambda name: matches(pattern, name, fields)


def _scheme(fields: ConfigFields) -> Scheme | None:
    """How linears are stored that a config speaks of; None: plainly."""
    weight, inputs = _tensor(fields, "weight"), _tensor(fields, "input_tensors")
    if weight is None:
        return None
    dtype, scheme = weight.text("dtype"), weight.text("qscheme", "per_tensor")
    if dtype != _DTYPE or scheme not in _BLOCKS or weight.flag("is_dynamic", False):
        described = f"{dtype}, {scheme}"
        raise CheckpointError(
            f"{weight.where}: weights stored as {described} are not read here; {_DTYPE}, per_tensor or per_channel are"
        )
    return EightBits(kind="fp8", block=_BLOCKS[scheme], activations=None if inputs is None else _activations(inputs))


def _activations(inputs: ConfigFields) -> Activations | None:
    """Those of other dtypes stay as they are. Dynamic scales are those of tokens, as in `compressed_tensors`."""
    if inputs.text("dtype") != _DTYPE:
        return None
    if inputs.flag("is_dynamic", False):
        return "token"
    if (scheme := inputs.text("qscheme", "per_tensor")) != "per_tensor":
        raise inputs.error("qscheme", scheme, "per_tensor, where it is static")
    return "tensor"


def _tensor(fields: ConfigFields, name: str) -> ConfigFields | None:
    """What is said of weights or inputs: an object, or a list of one."""
    said: Any = fields.values.get(name)
    if isinstance(said, list):
        if len(said) != 1:
            raise CheckpointError(f"{fields.where}: {name} quantised in {len(said)} steps is not read here")
        return ConfigFields({name: said[0]}, fields.where).nested(name)
    return fields.nested(name)
