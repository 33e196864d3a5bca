"""Weights in 16 bits or more that become eight as they are loaded, `--quantization fp8`; activations stay."""

import re
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from fledge.checkpoints.formats.dense import DENSE, Placement, StoredLinear
from fledge.errors import ConfigError
from fledge.kernels.quantize_rows import quantize_rows
from fledge.kernels.quantized_linear import QuantizedWeight
from fledge.layers.linear import Linear
from fledge.layers.quantized import QuantizedLinear

# The linears that may be in fewer bits: of layers, and not the routers of experts.
QUANTIZABLE = re.compile(r"(.*\.)?layers\.\d+\.(.*\.)?(?!\w*gate$)[^.]+")
_AS_MATRIX = ".kv_b_proj"  # latent attention reads it other than by a product


class Fp8AtLoad:
    """A `WeightFormat`: stored plainly, and E4M3 with a scale for each row in memory."""

    name = "fp8"

    def stored_shapes(self, linear: StoredLinear) -> Mapping[str, tuple[int, ...]]:
        return DENSE.stored_shapes(linear)

    def linear(
        self, empty: Linear, parts: Sequence[tuple[StoredLinear, Mapping[str, Tensor]]], placement: Placement
    ) -> nn.Module:
        filled = DENSE.linear(empty, parts, placement)
        name = parts[0][0].name
        if not QUANTIZABLE.fullmatch(name) or _AS_MATRIX in name:
            return filled
        rows, size = quantize_rows(empty.weight.detach()), empty.in_features
        weight = QuantizedWeight(kind="fp8", columns=size, group_size=size, codes=rows.codes, scales=rows.scales)
        return QuantizedLinear(weight, None if empty.bias is None else empty.bias.detach(), placement.dtype)


def check_spelling(asked: str, name: str, where: str) -> None:
    """Raise unless `asked`, in vLLM's spelling, is the format of this name: "gptq_marlin" is gptq too."""
    own = name.partition(" ")[0]  # of "modelopt NVFP4"
    if asked != own and not asked.startswith(f"{own}_"):
        raise ConfigError(f"quantization: found '{asked}', but the weights of {where} are {own}; leave it out")
