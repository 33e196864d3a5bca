"""gpt-oss's MXFP4: experts in 4-bit floats (E2M1), groups of 32 with a power of two each; the rest is plain.

`stacked_experts` takes the one tensor of all experts of a layer apart. Of each it leaves

    blocks [rows, groups, 16] uint8, the even column in the low half      scales [rows, groups] uint8 (E8M0)
"""

import math
from collections.abc import Mapping

from torch import Tensor

from fledge.checkpoints.formats.dense import StoredLinear, WeightFormat
from fledge.checkpoints.formats.quantized import Quantized, expect_dtypes, names_of
from fledge.checkpoints.formats.schemes import packed_floats
from fledge.checkpoints.tensors import TensorInfo
from fledge.kernels.quantized_linear import QuantizedWeight
from fledge.models.hf_config import ConfigFields

_GROUP, _BYTES = 32, 16


class Mxfp4Experts:
    """A `Scheme`."""

    description = f"4-bit floats (E2M1), groups of {_GROUP}"

    def parameters(self, held: Mapping[str, TensorInfo]) -> int:
        return 2 * math.prod(held["blocks"].shape)

    def shapes(self, linear: StoredLinear) -> dict[str, tuple[int, ...]]:
        groups = linear.columns // _GROUP
        return {"blocks": (linear.rows, groups, _BYTES), "scales": (linear.rows, groups)}

    def read(self, linear: StoredLinear, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        expect_dtypes(linear, blocks="uint8", scales="uint8")
        return packed_floats(tensors["blocks"].flatten(1), tensors["scales"])


def weight_format(quantization: ConfigFields) -> WeightFormat | None:
    if quantization.values.get("quant_method") != "mxfp4":
        return None
    is_dense, scheme = names_of(quantization, "modules_to_not_convert"), Mxfp4Experts()
    return Quantized(name="mxfp4", scheme_of=lambda name, _held: None if is_dense(name) else scheme)
