"""AWQ, as AutoAWQ writes it for its GEMM kernels: words of 32 bits along the outputs, in an order made for them.

qweight [columns, rows / 8] int32    eight rows' values of a column in a word: rows 0 2 4 6 1 3 5 7, the first lowest
qzeros  [groups, rows / 8] int32     in the same order
scales  [groups, rows]
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fledge.checkpoints.formats.dense import StoredLinear, WeightFormat
from fledge.checkpoints.formats.quantized import Quantized, expect_dtypes, names_of, read_group_size
from fledge.checkpoints.formats.schemes import SCALE_DTYPES, ceil_div, integer_weight, unpack_words
from fledge.checkpoints.tensors import TensorInfo
from fledge.kernels.quantized_linear import QuantizedWeight
from fledge.models.hf_config import ConfigFields

_BITS, _PER_WORD = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of rows 0, 1, 2, ...


@dataclass(frozen=True, kw_only=True)
class Awq:
    """A `Scheme`."""

    group_size: int | None  # None: a row

    @property
    def description(self) -> str:
        where = "one scale per row" if self.group_size is None else f"groups of {self.group_size}"
        return f"4-bit integers, {where}, zero points"

    def parameters(self, held: Mapping[str, TensorInfo]) -> int:
        return math.prod(held["qweight"].shape) * _PER_WORD

    def shapes(self, linear: StoredLinear) -> dict[str, tuple[int, ...]]:
        groups, words = ceil_div(linear.columns, self.group_size or linear.columns), linear.rows // _PER_WORD
        return {"qweight": (linear.columns, words), "qzeros": (groups, words), "scales": (groups, linear.rows)}

    def read(self, linear: StoredLinear, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        expect_dtypes(linear, qweight="int32", qzeros="int32", scales=SCALE_DTYPES)
        return integer_weight(
            _rows_in_order(tensors["qweight"]),
            tensors["scales"].t(),
            _rows_in_order(tensors["qzeros"]),
            bits=_BITS,
            group_size=self.group_size or linear.columns,
        )


def _rows_in_order(words: Tensor) -> Tensor:
    """[n, rows / 8] words -> [rows, n] integers."""
    values = unpack_words(words, _BITS, dim=1)
    return values.view(len(words), -1, _PER_WORD)[..., list(_PLACES)].flatten(1).t()


def read_scheme(fields: ConfigFields) -> Awq:
    """The bits and groups that a config says."""
    if (bits := fields.integer("bits", _BITS)) != _BITS:
        raise fields.error("bits", bits, f"{_BITS}")
    return Awq(group_size=read_group_size(fields, 128))


def weight_format(quantization: ConfigFields) -> WeightFormat | None:
    if quantization.values.get("quant_method") != "awq":
        return None
    if (version := quantization.text("version", "gemm").lower()) != "gemm":
        raise quantization.error("version", version, "gemm")
    spelled = {"bits": quantization.values.get("w_bit"), "group_size": quantization.values.get("q_group_size")}
    scheme = read_scheme(ConfigFields({**spelled, **quantization.values}, quantization.where))
    is_dense = names_of(quantization, "modules_to_not_convert")
    return Quantized(name="awq", scheme_of=lambda name, _held: None if is_dense(name) else scheme)
