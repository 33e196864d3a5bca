"""GPTQ, as AutoGPTQ and GPTQModel write it: words of 32 bits along the inputs, with and without act-order.

qweight [columns / n, rows] int32    n values of a row in a word, the first lowest
qzeros  [groups, rows / n] int32     one less than they mean, in `checkpoint_format` gptq; gptq_v2 has them as they are
scales  [groups, rows]
g_idx   [columns]                    the group of each column: with act-order they are not in turn
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fledge.checkpoints.formats.dense import StoredLinear, WeightFormat
from fledge.checkpoints.formats.quantized import Quantized, expect_dtypes, names_of, read_group_size, refusal
from fledge.checkpoints.formats.schemes import SCALE_DTYPES, ceil_div, integer_weight, unpack_words
from fledge.checkpoints.tensors import TensorInfo
from fledge.kernels.quantized_linear import QuantizedWeight
from fledge.models.hf_config import ConfigFields


@dataclass(frozen=True, kw_only=True)
class Gptq:
    """A `Scheme`."""

    bits: Literal[4, 8]
    group_size: int | None  # None: a row
    zeros_less_one: bool

    @property
    def description(self) -> str:
        where = "one scale per row" if self.group_size is None else f"groups of {self.group_size}"
        return f"{self.bits}-bit integers, {where}"

    def parameters(self, held: Mapping[str, TensorInfo]) -> int:
        return math.prod(held["qweight"].shape) * (32 // self.bits)

    def shapes(self, linear: StoredLinear) -> dict[str, tuple[int, ...]]:
        per_word = 32 // self.bits
        groups = ceil_div(linear.columns, self.group_size or linear.columns)
        shapes: dict[str, tuple[int, ...]] = {
            "qweight": (ceil_div(linear.columns, per_word), linear.rows),
            "qzeros": (groups, ceil_div(linear.rows, per_word)),
            "scales": (groups, linear.rows),
        }
        return shapes | ({"g_idx": (linear.columns,)} if "g_idx" in linear.held else {})

    def read(self, linear: StoredLinear, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        expect_dtypes(linear, qweight="int32", qzeros="int32", scales=SCALE_DTYPES)
        if linear.columns % 2:
            raise refusal(linear, "qweight", "an even number of columns")
        zeros = unpack_words(tensors["qzeros"], self.bits, dim=1)[:, : linear.rows]
        if self.zeros_less_one:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        try:
            return integer_weight(
                unpack_words(tensors["qweight"], self.bits, dim=0)[: linear.columns].t(),
                tensors["scales"].t(),
                zeros.t(),
                bits=self.bits,
                group_size=self.group_size or linear.columns,
                groups=tensors.get("g_idx"),
            )
        except ValueError as error:
            raise refusal(linear, "g_idx", str(error)) from None


def read_scheme(fields: ConfigFields, *, zeros_less_one: bool) -> Gptq:
    """The bits and groups that a config says."""
    if (bits := fields.integer("bits")) not in (4, 8):
        raise fields.error("bits", bits, "4 or 8")
    return Gptq(bits=4 if bits == 4 else 8, group_size=read_group_size(fields, -1), zeros_less_one=zeros_less_one)


def weight_format(quantization: ConfigFields) -> WeightFormat | None:
    if quantization.values.get("quant_method") not in ("gptq", "gptqmodel"):
        return None
    if (stored := quantization.text("checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
        raise quantization.error("checkpoint_format", stored, "gptq or gptq_v2")
    scheme = read_scheme(quantization, zeros_less_one=stored == "gptq")
    is_dense = names_of(quantization, "modules_to_not_convert")
    return Quantized(name="gptq", scheme_of=lambda name, _held: None if is_dense(name) else scheme)
