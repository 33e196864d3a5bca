"""auto-round, as Intel's tool writes it for vLLM and transformers: words of GPTQ or AWQ, as `packing_format` says.

`extra_config` has bits and groups of single linears, by their names, the ends of these, or regular expressions.
"""

import re
from collections.abc import Callable, Mapping

from fledge.checkpoints.formats import awq, gptq
from fledge.checkpoints.formats.dense import WeightFormat
from fledge.checkpoints.formats.quantized import Quantized, Scheme
from fledge.checkpoints.tensors import TensorInfo
from fledge.errors import CheckpointError
from fledge.models.hf_config import ConfigFields

_NAMES = ("auto-round", "auto_round", "intel/auto-round")
_PACKINGS: Mapping[str, Callable[[ConfigFields], Scheme]] = {
    "auto_round:auto_gptq": lambda fields: gptq.read_scheme(fields, zeros_less_one=True),
    "auto_round:auto_awq": awq.read_scheme,
}
_NOT_IN_NAMES = re.compile(r"[*+?^$()\[\]{}|\\]")


def weight_format(quantization: ConfigFields) -> WeightFormat | None:
    if quantization.values.get("quant_method") not in _NAMES:
        return None
    packing = quantization.text("packing_format", "auto_round:auto_gptq")
    if (read_scheme := _PACKINGS.get(packing)) is None:
        raise quantization.error("packing_format", packing, " or ".join(_PACKINGS))
    for field, only in (("data_type", "int"), ("act_bits", 16)):
        if (found := quantization.values.get(field)) not in (None, only):
            raise quantization.error(field, found, f"{only}")
    whole, single = read_scheme(quantization), quantization.nested("extra_config")
    schemes: list[tuple[Callable[[str], bool], Scheme | None]] = []
    for name in () if single is None else sorted(single.values, key=_is_pattern):  # of plain names first
        own = single.nested(name) if single is not None else None
        if own is None:
            raise quantization.error("extra_config", name, "an object for each name")
        is_plain = own.integer("bits", 1) >= 16
        merged = ConfigFields({**quantization.values, **own.values}, own.where)
        schemes.append((_named(name, own.where), None if is_plain else read_scheme(merged)))

    def scheme_of(name: str, _held: Mapping[str, TensorInfo]) -> Scheme | None:
        return next((scheme for is_of, scheme in schemes if is_of(name)), whole)

    return Quantized(name="auto-round", scheme_of=scheme_of)


def _is_pattern(name: str) -> bool:
    return _NOT_IN_NAMES.search(name) is not None


def _named(pattern: str, where: str) -> Callable[[str], bool]:
    if not _is_pattern(pattern):
        return lambda name: f".{name}".endswith(f".{pattern}")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"{where}: no regular expression: {error}") from None
    return lambda name: compiled.search(name) is not None
